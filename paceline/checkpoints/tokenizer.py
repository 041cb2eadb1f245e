"""Tokenizers: text to token ids and back, from a Hugging Face folder, a GGUF file's metadata, or transformers.

All of them end in one Rust tokenizer of the `tokenizers` library; this module only builds it, exactly as the model's
publisher meant it, and asks it. Imports neither torch nor transformers: only a folder without tokenizer.json is
converted by transformers, and pays for its import. Knows nothing of models or weights.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

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
        return cls(**_from_metadata(metadata))

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
        with _refusal("the text cannot be tokenized"):
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Bytes that are no UTF-8 become U+FFFD; ids without a token contribute nothing."""
        with _refusal("ids must be integers of at least 0"):
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
def _refusal(what: str) -> Iterator[None]:
    """The `tokenizers` library raises plain `Exception`, and its panics arrive as a `BaseException` of their own."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ValueError(f"{what}: {error}") from error
        raise


# Hugging Face folders


def _from_tokenizer_json(folder: Path) -> dict[str, Any]:
    with _refusal(f"{folder / 'tokenizer.json'} is not a tokenizer"):
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


# GGUF

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
"""Values of `tokenizer.ggml.token_type`."""


@dataclass(frozen=True, kw_only=True)
class _Split:
    """What `tokenizer.ggml.pre` stands for: how text is cut before byte-level BPE, each pattern in turn.

    `whole`: a piece that is a token is taken as it is, whatever the merges say. `bos`: BOS is added unless the file
    says otherwise. `nfc`: the publisher's tokenizer normalises first (GGUF has no field for it).
    """

    patterns: tuple[str, ...]
    whole: bool = False
    bos: bool = False
    nfc: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_PUNCTUATION = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_GPT4O = rf"{_CASED % (_CONTRACTIONS + '?', _CONTRACTIONS + '?')}|\p{{N}}{{1,3}}|{_PUNCTUATION}"
_TEKKEN = rf"{_CASED % ('', '')}|\p{{N}}|{_PUNCTUATION}"
_CJK = "[一-龥぀-ゟ゠-ヿ]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_DEEPSEEK_LETTERS = (
    # with escapes for those characters that a careless editor would normalise into others
    "\\s?["
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-"
    "\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳ"
    "Ꙁ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
    "]+"
)

_SPLITS: dict[str, _Split] = (
    dict.fromkeys(("gpt-2", "phi-2", "mellum", "exaone4", "trillion", "jais"), _Split(patterns=(_GPT2,)))
    | dict.fromkeys(("mpt", "olmo"), _Split(patterns=(_GPT2,), nfc=True))
    | dict.fromkeys(
        ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"), _Split(patterns=(r"\p{N}", _GPT2))
    )
    | {"command-r": _Split(patterns=(r"\p{N}", _GPT2), nfc=True)}
    | dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "midm-2.0", "lfm2"),
        _Split(patterns=(_LLAMA3,), whole=True, bos=True),
    )
    | dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _Split(patterns=(_LLAMA3,)))
    | {"glm4": _Split(patterns=(_LLAMA3,), whole=True)}
    | dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _Split(patterns=(_QWEN2,), nfc=True))
    | dict.fromkeys(("megrez", "hunyuan"), _Split(patterns=(_QWEN2,)))
    | {"qwen35": _Split(patterns=(_QWEN35,), nfc=True)}
    | {"tekken": _Split(patterns=(_TEKKEN,), whole=True, bos=True)}
    | dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _Split(patterns=(_GPT4O,)))
    | dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _Split(patterns=(r"\p{N}{1,3}", _CJK, _DEEPSEEK3)))
    | {
        "deepseek-llm": _Split(
            patterns=(
                r"[\r\n]",
                _DEEPSEEK_LETTERS,
                r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
                r"\s+$",
                "[一-龥ࠀ-一가-퟿]+",
                r"\p{N}",
            )
        ),
        "deepseek-coder": _Split(patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    }
)


def _from_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    tokens = _array(metadata, "tokens", str)
    if len(tokens) > MAX_VOCABULARY:
        raise ValueError(f"tokenizer.ggml.tokens has {len(tokens)} entries, more than {MAX_VOCABULARY}")
    types = [_NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in metadata:
        types = _array(metadata, "token_type", int, len(tokens))
    vocab = _vocab(tokens, types)
    kind = metadata.get("tokenizer.ggml.model")
    notes: tuple[str, ...] = ()
    if kind == "gpt2":
        backend, add_bos, notes = _byte_level(metadata, types, vocab)
    elif kind == "llama":
        backend, add_bos = _sentencepiece(metadata, tokens, types, vocab), True
    else:
        raise ValueError(
            f"tokenizer.ggml.model {kind!r} is not one we build; gpt2 (byte-level BPE) and llama (SentencePiece) are. "
            "Give the model as a Hugging Face folder instead"
        )

    roles = {
        name: _id(metadata, f"{key}_token_id", vocab, tokens)
        for name, key in {
            "bos_token": "bos",
            "eos_token": "eos",
            "unk_token": "unknown",
            "sep_token": "seperator",  # GGUF's own spelling
            "pad_token": "padding",
            "mask_token": "mask",
        }.items()
    }
    turns = [_id(metadata, f"{key}_token_id", vocab, tokens) for key in ("eot", "eom")]
    ends = {id for id in (roles["eos_token"], *turns) if id is not None}
    special = ends | {id for id in (roles["bos_token"],) if id is not None}
    # SentencePiece finds user-defined tokens after its normalization (Gemma's runs of spaces), the others before it.
    normalized = kind == "llama" and not _flag(metadata, "add_space_prefix", True)
    backend.add_tokens(
        [
            AddedToken(
                token,
                normalized=normalized and type == _USER_DEFINED and id not in special,
                special=id in special or type in (_CONTROL, _UNKNOWN),
            )
            for id, (token, type) in enumerate(zip(tokens, types, strict=True))
            if id in special or (type in (_CONTROL, _UNKNOWN, _USER_DEFINED) and token in vocab)
        ]
    )
    backend.post_processor = _frame(
        bos=roles["bos_token"] if _flag(metadata, "add_bos_token", add_bos) else None,
        eos=roles["eos_token"] if _flag(metadata, "add_eos_token", False) else None,
    )
    for role in ("bos", "eos"):
        if metadata.get(f"tokenizer.ggml.add_{role}_token") and roles[f"{role}_token"] is None:
            raise ValueError(f"tokenizer.ggml.add_{role}_token is true, and tokenizer.ggml.{role}_token_id is missing")
    named = {name: tokens[id] for name, id in roles.items() if id is not None}
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ValueError(f"tokenizer.chat_template must be a string, not {type(template).__name__}")
    return {"backend": backend, "named": named, "chat_template": template, "end_ids": ends, "notes": notes}


def _vocab(tokens: Sequence[str], types: Sequence[int]) -> dict[str, int]:
    """Ids by token. The filler `[PADn]` that converters put where a model has more rows than tokens is no token."""
    filler = re.compile(r"\[PAD\d+\]")
    vocab: dict[str, int] = {}
    for id, token in enumerate(tokens):
        if not token or token == f"[PAD{id}]" or (types[id] == _UNUSED and filler.fullmatch(token)):
            continue
        if token in vocab:
            raise ValueError(f"tokenizer.ggml.tokens has {token!r} twice, as {vocab[token]} and {id}")
        vocab[token] = id
    return vocab


def _byte_level(
    metadata: Mapping[str, Any], types: Sequence[int], vocab: dict[str, int]
) -> tuple[tokenizers.Tokenizer, bool, tuple[str, ...]]:
    pre = metadata.get("tokenizer.ggml.pre")
    notes: tuple[str, ...] = ()
    if pre in (None, "", "default"):
        split = _SPLITS["gpt-2"]
        notes = (
            "this GGUF file does not say how its tokenizer cuts text into words (tokenizer.ggml.pre is "
            f"{pre or 'missing'}); GPT-2's way is used, and prompts may be tokenized otherwise than "
            "in training",
        )
    elif isinstance(pre, str) and pre in _SPLITS:
        split = _SPLITS[pre]
    else:
        raise ValueError(
            f"tokenizer.ggml.pre {pre!r} is not known, and a guess would tokenize prompts wrongly; give the model as "
            f"a Hugging Face folder instead. Known: {', '.join(sorted(_SPLITS))}"
        )
    # A vocabulary of single bytes has nothing to merge.
    words = any(len(token) > 1 and types[id] == _NORMAL for token, id in vocab.items())
    merges = []
    for index, merge in enumerate(_array(metadata, "merges", str) if words else []):
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab:
            raise ValueError(f"tokenizer.ggml.merges[{index}] {merge!r} is not two tokens with a space between")
        merges.append((left, right))
    backend = _bpe(vocab, merges, ignore_merges=split.whole)
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend, split.bos, notes


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], vocab: dict[str, int]
) -> tokenizers.Tokenizer:
    """BPE as SentencePiece does it: of all neighbours that make a token, the best-scored pair is merged first."""
    scores = _array(metadata, "scores", float, len(tokens))
    score = {token: scores[id] for token, id in vocab.items() if types[id] == _NORMAL}
    merges = [
        (left, right)
        for token in score
        for cut in range(1, len(token))
        if (left := token[:cut]) in score and (right := token[cut:]) in score
    ]
    # Of equals SentencePiece takes the leftmost, so that a run of spaces grows from its left: longest left part first.
    merges.sort(key=lambda pair: (-score[pair[0] + pair[1]], -len(pair[0]), -len(pair[1])))
    unknown = _id(metadata, "unknown_token_id", vocab, tokens)
    backend = _bpe(
        vocab,
        merges,
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    prefix = _flag(metadata, "add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    with _refusal("tokenizer.ggml.tokens and merges do not make a BPE vocabulary"):
        return tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))


def _frame(*, bos: int | None, eos: int | None) -> Any:
    """The post-processor that puts BOS and EOS around a text. Its own names for them, as theirs may hold its syntax."""
    ids = {"BOS": bos, "EOS": eos}
    special = [(name, id) for name, id in ids.items() if id is not None]
    single = [name for name in ("BOS", "$A", "EOS") if ids.get(name, 0) is not None]
    return processors.TemplateProcessing(single=single, special_tokens=special)


def _array(metadata: Mapping[str, Any], name: str, kind: type, length: int | None = None) -> list[Any]:
    """`tokenizer.ggml.<name>` as a list of `kind`, of `length` where one is given."""
    key = f"tokenizer.ggml.{name}"
    values = metadata.get(key)
    if not values:
        raise ValueError(f"{key} is missing or empty; convert the model again")
    if not isinstance(values, list) or not set(map(type, values)) <= {kind}:
        raise ValueError(f"{key} must be a list of {kind.__name__}")
    if length is not None and len(values) != length:
        raise ValueError(f"{key} has {len(values)} entries for {length} tokens")
    return values


def _id(metadata: Mapping[str, Any], name: str, vocab: Mapping[str, int], tokens: Sequence[str]) -> int | None:
    id = metadata.get(f"tokenizer.ggml.{name}")
    if id is None:
        return None
    if isinstance(id, bool) or not isinstance(id, int) or not 0 <= id < len(tokens) or tokens[id] not in vocab:
        raise ValueError(f"tokenizer.ggml.{name} {id!r} is no token; there are {len(tokens)}")
    return id


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise ValueError(f"tokenizer.ggml.{name} must be true or false, not {value!r}")
    return value
