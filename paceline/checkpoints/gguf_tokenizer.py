"""Tokenizers out of GGUF metadata: the parts of a `Tokenizer`, built as llama.cpp's converter wrote them down.

Byte-level BPE with the pre-tokenizer its name stands for, and SentencePiece from its scores. The metadata may come from
anywhere: whatever does not fit together ends in a ValueError that names the entry. Reads no file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from paceline.checkpoints.tokenizer import MAX_VOCABULARY, refusal

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


def parts_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
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
    with refusal("tokenizer.ggml.tokens and merges do not make a BPE vocabulary"):
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
