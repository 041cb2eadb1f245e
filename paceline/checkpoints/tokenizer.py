"""Tokenizers: text to token ids and back, from a Hugging Face folder, a GGUF file's metadata, or transformers.

All of them end in one Rust tokenizer of the `tokenizers` library; this module only builds it, exactly as the model's
publisher meant it, and asks it. Imports neither torch nor transformers: only a folder without tokenizer.json is
converted by transformers, and pays for its import. Knows nothing of models or weights.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from paceline.checkpoints.chat import Message, render
from paceline.checkpoints.detokenizer import Detokenizer, Vocabulary, read_spelling

MAX_VOCABULARY = 1 << 22
"""More ids than any tokenizer has; a file that claims more is damaged or hostile."""

TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Tokens with a role, by the names that configurations and chat templates use."""


class Tokenizer:
    """Text to token ids and back, as transformers does it for the same files.

    `named` are the tokens with a role (`TOKEN_NAMES`), `end_ids` those that the tokenizer's own files say end a
    generation, `notes` what a person should know about how it was built.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        named: Mapping[str, str],
        chat_template: str | None = None,
        end_ids: Iterable[int] = (),
        notes: tuple[str, ...] = (),
    ) -> None:
        self._backend = backend
        self._named = dict(named)
        self._spelling = read_spelling(json.loads(backend.decoder.__getstate__()) if backend.decoder else None)
        self.chat_template = chat_template
        self.bos_id = self._named_id("bos_token")
        self.eos_id = self._named_id("eos_token")
        self.end_ids = frozenset(end_ids) | ({self.eos_id} if self.eos_id is not None else set())
        self.notes = notes
        backend.no_truncation()
        backend.no_padding()

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """From tokenizer.json and the files beside it; without one, transformers converts what the folder has."""
        folder = Path(path)
        if (folder / "tokenizer.json").is_file():
            return cls(**_from_tokenizer_json(folder))
        if any((folder / name).is_file() for name in ("tokenizer.model", "spiece.model", "vocab.json")):
            return cls.from_transformers(_convert(folder))
        raise ValueError(
            f"{folder} has no tokenizer: neither tokenizer.json nor tokenizer.model is there; "
            "copy them from the model the weights were trained from"
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From the `tokenizer.*` entries of a GGUF file, as plain Python values."""
        from paceline.checkpoints.gguf_tokenizer import parts_of

        return cls(**parts_of(metadata))

    @classmethod
    def from_transformers(cls, tokenizer: Any) -> Tokenizer:
        """From a fast tokenizer of transformers, already in memory."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise ValueError(
                f"{type(tokenizer).__name__} is not a fast tokenizer; load it with AutoTokenizer.from_pretrained(...), "
                "or convert it with transformers.convert_slow_tokenizer and wrap it in PreTrainedTokenizerFast"
            )
        named = {name: getattr(tokenizer, name, None) for name in TOKEN_NAMES}
        template = getattr(tokenizer, "chat_template", None)
        return cls(
            copy.deepcopy(backend),
            named={name: str(token) for name, token in named.items() if token is not None},
            chat_template=template.get("default") if isinstance(template, dict) else template,
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`; special tokens written out in it are recognised."""
        with refusal("the text cannot be tokenized"):
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Bytes that are no UTF-8 become U+FFFD; ids without a token contribute nothing."""
        with refusal("ids must be integers of at least 0"):
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def detokenizer(self, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True) -> Detokenizer:
        """Decodes what is generated after `prompt_ids`, token by token."""
        return Detokenizer(self._vocabulary, prompt_ids, skip_special_tokens=skip_special_tokens)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id with a token; a model may have more rows."""
        return len(self._vocabulary.tokens)

    def tokens(self) -> list[tuple[bool, bytes]]:
        """(special, bytes) of every id, in order; an id without a token is (False, b"")."""
        return self._vocabulary.tokens

    def token_bytes(self, id: int) -> bytes:
        """What this token contributes to text; nothing for an id without a token, as in `decode`."""
        if id < 0:
            raise ValueError(f"token id {id} is negative")
        tokens = self._vocabulary.tokens
        return tokens[id][1] if id < len(tokens) else b""

    def is_special(self, id: int) -> bool:
        tokens = self._vocabulary.tokens
        return 0 <= id < len(tokens) and tokens[id][0]

    def token_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary writes it ("<|im_end|>"), None if there is none."""
        return self._backend.token_to_id(token)

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The prompt that the model's chat template makes of `messages`."""
        if self.chat_template is None:
            raise ValueError(
                "this tokenizer has no chat template, so the model was probably not tuned for chat; "
                "send a plain prompt, or put a chat_template.jinja into the model's folder"
            )
        return render(
            self.chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            special_tokens=self._named,
        )

    def encode_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """The ids of `render_chat`; the template itself writes the BOS token where the model wants one."""
        prompt = self.render_chat(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(prompt, add_special_tokens=False)

    def turn_end_id(self) -> int | None:
        """The special token that the chat template puts behind what the assistant said, with at most blanks around it.

        Words behind it would show that it only opens a longer ending, and that it may stand elsewhere in an answer.
        """
        said = "Paceline"
        chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": said}]
        try:
            _, found, behind = self.render_chat(chat, add_generation_prompt=False).rpartition(said)
        except ValueError:
            return None
        end = None
        for id in self.encode(behind if found else "", add_special_tokens=False):
            if self.is_special(id):
                if end is not None:
                    break
                end = id
            elif self.token_bytes(id).strip():
                return None
        return end

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        added = self._backend.get_added_tokens_decoder()
        ids = self._backend.get_vocab(with_added_tokens=True)
        size = max(max(ids.values(), default=-1), max(added, default=-1)) + 1
        if size > MAX_VOCABULARY:
            raise ValueError(
                f"the tokenizer has an id {size - 1}, and no tokenizer has {MAX_VOCABULARY}; its file is damaged"
            )
        tokens = [(False, b"")] * size
        byte_ids = []
        for token, id in ids.items():
            data, is_byte = self._spelling.spell(token)
            tokens[id] = (False, data)
            if is_byte:
                byte_ids.append(id)
        for id, special in added.items():
            tokens[id] = (special.special, self._spelling.spell(special.content)[0])
        return Vocabulary(self._spelling, tokens, frozenset(byte_ids), self._first_text)

    def _first_text(self, id: int) -> str:
        return self._spelling.first_text(self._backend.id_to_token(id) or "")

    def _named_id(self, name: str) -> int | None:
        return self._backend.token_to_id(self._named[name]) if name in self._named else None


def eos_ids(tokenizer: Tokenizer, config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> frozenset[int]:
    """Every token that ends a generation: what the configurations and the tokenizer's files name, and the token with
    which the chat template ends the assistant's turn. Ids beyond the vocabulary cannot be generated and are left out.
    """
    ids = set(tokenizer.end_ids)
    for source, values in (("config", config), ("generation_config", generation_config)):
        named = values.get("eos_token_id")
        listed = named if isinstance(named, (list, tuple)) else [] if named is None else [named]
        for id in listed:
            if isinstance(id, bool) or not isinstance(id, int) or id < 0:
                raise ValueError(
                    f"{source} eos_token_id must be a token id or a list of them, at least 0, not {named!r}"
                )
            ids.add(id)
    turn_end = tokenizer.turn_end_id()
    if turn_end is not None:
        ids.add(turn_end)
    return frozenset(id for id in ids if id < tokenizer.vocab_size)


@contextmanager
def refusal(what: str) -> Iterator[None]:
    """The `tokenizers` library raises plain `Exception`, and its panics arrive as a `BaseException` of their own."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ValueError(f"{what}: {error}") from error
        raise


# Hugging Face folders


def _from_tokenizer_json(folder: Path) -> dict[str, Any]:
    with refusal(f"{folder / 'tokenizer.json'} is not a tokenizer"):
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        backend.encode("")
    config = _read_json(folder / "tokenizer_config.json")
    roles = dict(config)
    if "added_tokens_decoder" not in config:
        roles.update(_read_json(folder / "special_tokens_map.json"))
    named = {name: _content(name, roles[name]) for name in TOKEN_NAMES if roles.get(name) is not None}
    extra = roles.get("extra_special_tokens") or roles.get("additional_special_tokens") or []
    extra = list(extra.values()) if isinstance(extra, Mapping) else extra
    if not isinstance(extra, list):
        raise ValueError(f"{folder}: extra_special_tokens must be a list or a mapping, not {type(extra).__name__}")

    declared = config.get("added_tokens_decoder") or {}
    if not isinstance(declared, Mapping):
        raise ValueError(f"{folder}: added_tokens_decoder must be a mapping, not {type(declared).__name__}")
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    wanted = [_added_token(token) for _, token in sorted(declared.items(), key=lambda item: _token_id(item[0]))]
    backend.add_tokens([token for token in wanted if known.get(token.content) != token])
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    special = [*named.values(), *(_content("extra_special_tokens", token) for token in extra)]
    backend.add_special_tokens([token for token in dict.fromkeys(special) if token not in known])
    return {"backend": backend, "named": named, "chat_template": _chat_template(folder, config)}


def _convert(folder: Path) -> Any:
    from transformers import AutoTokenizer  # seconds to import, and only this needs it

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever its converters raise
        raise ValueError(
            f"transformers could not convert the tokenizer in {folder}: {error}; save it once with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...), which writes a tokenizer.json"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(values).__name__}")
    return values


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """A file of its own goes before tokenizer_config.json, as in transformers; of several templates, "default"."""
    if (folder / "chat_template.jinja").is_file():
        return _read_text(folder / "chat_template.jinja")
    template = config.get("chat_template")
    if template is None:
        template = _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, Mapping)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ValueError(f"{folder}: chat_template must be a string, not {type(template).__name__}")
    return template


def _content(name: str, token: Any) -> str:
    content = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(content, str):
        raise ValueError(f"{name} must be a string or an object with a string 'content', not {token!r}")
    return content


def _added_token(token: Any) -> AddedToken:
    content = _content("added_tokens_decoder", token)
    if not isinstance(token, Mapping):
        return AddedToken(content)
    flags = {name: token.get(name, False) for name in ("lstrip", "rstrip", "single_word", "special")}
    flags["normalized"] = token.get("normalized", not flags["special"])
    return AddedToken(content, **{name: bool(flag) for name, flag in flags.items()})


def _token_id(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"added_tokens_decoder has {text!r} where a token id belongs")
    return int(text)
