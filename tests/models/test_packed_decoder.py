"""The packed decoder against the plain one, and each position against itself in other company, bit for bit."""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf.constants import GGMLQuantizationType

import paceline.kernels as kernels
from paceline.models.cache import KVCache
from paceline.models.config import Layer, ModelConfig, Rope
from paceline.models.decoder import ACTIVATIONS, Decoder
from paceline.models.interface import Chunk, Scores
from paceline.models.quant import BLOCK, BLOCK_BYTES, Quantized

pytestmark = pytest.mark.skipif(not kernels.available(), reason="no compiler")

FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FORMATS = (*FLOATS, *BLOCK_BYTES)
INT8 = " int8"
"""Behind a format: activations are rounded."""
MIXED = "mixed"
MIX = ("q4_1", "q8_0", "bfloat16", "q4_0", "q8_0", "q4_1", "float32", "q4_0")
"""Of one matrix after the other, so that those which multiply the same inputs take them in different ways."""
INT8_FORMATS = tuple(format + INT8 for format in BLOCK_BYTES)
PLAIN = ModelConfig(
    architecture="test",
    vocab_size=101,
    hidden_size=64,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    layers=(Layer(rope=Rope()),) * 3,
    context=256,
)


def windows(*sizes: int | None) -> tuple[Layer, ...]:
    return tuple(Layer(window=size, rope=Rope()) for size in sizes)


def rope(**scaling: Any) -> tuple[Layer, ...]:
    return (Layer(rope=Rope(**scaling)),) * 2


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one-key-head": {"num_kv_heads": 1},
    "every-head-its-key": {"num_kv_heads": 4},
    "six-heads-over-two": {"num_heads": 6},
    "biases": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "qkv-bias-alone": {"qkv_bias": True},
    "qk-norm": {"qk_norm": True},
    "post-norms": {"post_norms": True},
    "post-norms-biases": {"post_norms": True, "output_bias": True, "mlp_bias": True},
    "gelu": {"activation": "gelu"},
    "gelu-tanh": {"activation": "gelu_tanh"},
    "windows-within-a-span": {"layers": windows(1, 9, None)},
    "windows-at-the-border-of-spans": {"layers": windows(31, 32, 33)},
    "windows-over-spans": {"layers": windows(40, 64, None)},
    "layers-without-rope": {"layers": (Layer(rope=Rope()), Layer(), Layer(window=20))},
    "linear": {"layers": rope(kind="linear", factor=3.0)},
    "dynamic": {"layers": rope(kind="dynamic", factor=2.0, original_context=40)},
    "llama3": {"layers": rope(kind="llama3", factor=8.0, original_context=32)},
    "yarn": {"layers": rope(kind="yarn", factor=4.0, original_context=16)},
    "factors": {"layers": rope(factors=(1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0))},
    "attention-softcap": {"attention_softcap": 2.0},
    "logit-softcap": {"logit_softcap": 3.0},
    "scales": {"embedding_scale": 8.0, "query_scale": 0.4},
    "tied": {"tied": True},
    "eps": {"norm_eps": 0.3, "qk_norm": True, "post_norms": True},
    "heads-of-8": {"head_dim": 8},
    "heads-of-24": {"head_dim": 24, "num_heads": 8},
    "heads-of-64": {"head_dim": 64, "hidden_size": 32, "intermediate_size": 32},
    "heads-of-80": {"head_dim": 80, "num_heads": 2, "num_kv_heads": 1, "qk_norm": True},
    "heads-of-128": {"head_dim": 128, "num_heads": 2, "hidden_size": 160, "intermediate_size": 224},
    "all-of-gemma": {
        "layers": (*windows(9, 9), Layer(rope=Rope(theta=1e6, kind="linear", factor=4.0)), *windows(9)),
        "head_dim": 32,
        "activation": "gelu_tanh",
        "tied": True,
        "qk_norm": True,
        "post_norms": True,
        "query_scale": 24**-0.5,
        "embedding_scale": 8.0,
        "attention_softcap": 5.0,
        "logit_softcap": 6.0,
    },
}
UNPACKED = {
    "hidden-48": {"hidden_size": 48},
    "wide-80": {"intermediate_size": 80},
    "heads-of-12": {"head_dim": 12},
    "heads-of-20": {"head_dim": 20, "num_heads": 8},
}
"""Sizes that the kernels cannot take everywhere."""


@pytest.fixture(autouse=True)
def one_thread_again() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 101, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def weights(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Random ones, large enough that the logits are not flat."""
    random = torch.Generator().manual_seed(config.num_parameters)
    with torch.device("meta"):
        parameters = dict(Decoder(config).named_parameters())
    made = {}
    for name, parameter in parameters.items():
        noise = torch.randn(parameter.shape, generator=random)
        if "norm" in name:
            made[name] = 1 + 0.3 * noise
        elif name.endswith("bias"):
            made[name] = 0.5 * noise
        else:
            made[name] = noise * (0.5 if "embedding" in name else 1.3 * parameter.shape[1] ** -0.5)
    return made


def quantized(weight_OI: torch.Tensor, format: str) -> Quantized:
    made = gguf.quants.quantize(weight_OI.numpy(), GGMLQuantizationType[format.upper()])
    return Quantized(format=format, blocks=torch.from_numpy(made).unflatten(1, (-1, BLOCK_BYTES[format])))


@functools.lru_cache(maxsize=8)
def pair(case: str, format: str = "float32") -> tuple[Decoder, Decoder]:
    """The packed decoder, and torch's with the same weights in float32."""
    config = replace(PLAIN, **{**CASES, **UNPACKED}[case])
    tensors: dict[str, torch.Tensor | Quantized] = {}
    cycle = itertools.cycle(MIX if format == MIXED else [format])
    for name, tensor in weights(config).items():
        if tensor.dim() == 1:
            tensors[name] = tensor
        elif (each := next(cycle)) in FLOATS:
            tensors[name] = tensor.to(FLOATS[each])
        else:
            tensors[name] = quantized(tensor, each)
    packed = Decoder.from_tensors(config, tensors.items(), dtype=None, packed=True)
    return packed, Decoder.from_tensors(config, tensors.items(), dtype=torch.float32)


def assert_near(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], limit: float = 1e-5) -> None:
    """Apart by at most `limit` of the largest number there is."""
    assert [tensor.shape for tensor in found] == [tensor.shape for tensor in expected]
    assert {tensor.dtype for tensor in found} == {torch.float32}
    a, b = (torch.cat([tensor.flatten() for tensor in tensors]) for tensors in (found, expected))
    assert (a - b).abs().max() <= limit * b.abs().max()


# Parity


def passes(decoder: Decoder) -> list[Scores]:
    """What a batch does in a while: prompts beyond two spans, ragged chunks, drafts, rewinding, slots in any order."""
    cache = decoder.new_cache(slots=5, capacity=140)
    last = decoder.config.num_layers
    everything = range(last + 1)
    a, b, c, d = tokens(140, 1), tokens(140, 2), tokens(140, 3), tokens(140, 4)
    made = [
        decoder([Chunk(0, a[:70], 3), Chunk(3, b[:33], 33), Chunk(1, c[:5], 0), Chunk(4, d[:1])], cache, everything),
        decoder([Chunk(4, d[1:2]), Chunk(0, a[70:71]), Chunk(3, b[33:34]), Chunk(1, c[5:6])], cache, everything),
        decoder([Chunk(1, c[6:11], 5), Chunk(4, d[2:32], 2), Chunk(0, a[71:88], 17)], cache, (1, last)),
        decoder([Chunk(3, b[34:35])], cache),
        # Two chunks of one slot, another between them; the second crosses a border of spans.
        decoder([Chunk(3, b[35:60], 1), Chunk(4, d[32:34], 2), Chunk(3, b[60:69], 9)], cache, (last, 0)),
    ]
    for slot, length in ((0, 63), (3, 32), (1, 0)):
        cache.truncate(slot, length)
    e = tokens(140, 5)
    made += [
        decoder([Chunk(1, e[:64], 64), Chunk(0, a[63:69], 6), Chunk(3, e[:7], 2), Chunk(2, e[:2])], cache, everything),
        decoder([Chunk(slot, e[70:72], 2) for slot in range(5)], cache, (last - 1,)),
        decoder([Chunk(0, a[71:140], 1)], cache),
    ]
    assert [cache.length(slot) for slot in range(5)] == [140, 66, 4, 41, 36]
    return made


def assert_same_passes(packed: Decoder, plain: Decoder) -> None:
    for found, expected in zip(passes(packed), passes(plain), strict=True):
        assert_near(found.logits, expected.logits)
        assert_near([torch.tensor(0.0), *found.features], [torch.tensor(0.0), *expected.features])
    logits_V = expected.logits[0][-1]
    assert logits_V.max() - logits_V.min() > 1, "a flat model would hide faults"


@pytest.mark.parametrize(
    ("case", "threads"),
    [*((case, 1) for case in CASES), *((case, 2) for case in ("biases", "all-of-gemma", "heads-of-128"))],
)
def test_logits_and_features_are_those_of_the_plain_decoder(case: str, threads: int) -> None:
    torch.set_num_threads(threads)
    packed, plain = pair(case)
    assert (packed._native is not None) == kernels.can_attend(packed.config.head_dim)
    assert plain._native is None
    assert_same_passes(packed, plain)


@pytest.mark.parametrize("case", ["biases", "all-of-gemma"])
@pytest.mark.parametrize("format", [*FORMATS, MIXED])
def test_every_format_means_its_weights(case: str, format: str) -> None:
    packed, plain = pair(case, format)
    assert packed._native is not None
    assert_same_passes(packed, plain)


@pytest.mark.parametrize("case", ["biases", "all-of-gemma"])
@pytest.mark.parametrize("format", [*BLOCK_BYTES, MIXED])
def test_layers_with_int8_activations_are_made_of_such_products(case: str, format: str) -> None:
    """A sum that is another by 1e-7 may be rounded to another integer, and then much is (up to 0.025 of the largest was
    seen): hence the wide limit."""
    layers, products = (pair.__wrapped__(case, format)[0] for _ in range(2))
    plain = [scores.logits for scores in passes(layers)]
    matrices = 7 * layers.config.num_layers + 1 + (not layers.config.tied)
    changed = layers.set_int8_activations()
    assert changed == products.set_int8_activations()
    assert changed < matrices if format == MIXED else changed == matrices
    products.__dict__["_native"] = None
    for found, expected, unrounded in zip(passes(layers), passes(products), plain, strict=True):
        assert_near(found.logits, expected.logits, limit=0.05)
        assert any((a != b).any() for a, b in zip(found.logits, unrounded, strict=True))


@pytest.mark.parametrize("case", UNPACKED)
def test_what_the_kernels_cannot_take_is_left_to_torch(case: str) -> None:
    packed, plain = pair(case)
    assert packed._native is None
    assert_same_passes(packed, plain)


def test_where_nothing_fits_torch_does_it_all() -> None:
    config = replace(PLAIN, hidden_size=48, intermediate_size=80, head_dim=12)
    tensors = weights(config)
    packed, plain = (
        Decoder.from_tensors(config, tensors.items(), dtype=torch.float32, packed=p) for p in (True, False)
    )
    for found, expected in zip(passes(packed), passes(plain), strict=True):
        assert all(map(torch.equal, found.logits, expected.logits))
        assert all(map(torch.equal, found.features, expected.features))


@pytest.mark.parametrize("case", ["plain", "wide-80", "hidden-48"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_matrices_are_stored_as_the_type_asked_for(case: str, dtype: torch.dtype) -> None:
    """Also those the kernels cannot take: what is computed must not depend on that."""
    config = replace(PLAIN, **{**CASES, **UNPACKED}[case])
    tensors = weights(config)
    rounded = {name: tensor.to(dtype) if tensor.dim() == 2 else tensor for name, tensor in tensors.items()}
    packed = Decoder.from_tensors(config, tensors.items(), dtype=dtype, packed=True)
    plain = Decoder.from_tensors(config, rounded.items(), dtype=torch.float32)
    assert packed.dtype == packed.new_cache(1, 4).keys[0].dtype == torch.float32
    assert_same_passes(packed, plain)


@pytest.mark.parametrize("case", ["all-of-gemma", "layers-without-rope"])
def test_a_cut_runs_the_layers_it_names(case: str) -> None:
    packed, plain = pair(case)
    for layers in ([2], [2, 0], [1, 1, 2], range(packed.config.num_layers)):
        cut = packed.cut(layers)
        assert cut._native is not None
        assert_same_passes(cut, plain.cut(layers))
    whole, everything = passes(packed), passes(cut)
    for found, expected in zip(everything, whole, strict=True):
        assert all(map(torch.equal, found.logits, expected.logits))
    matrix = packed.cut([2]).get_submodule("layers.0.mlp.up").packed
    assert matrix is packed.get_submodule("layers.2.mlp.up").packed, "nothing is copied"


def test_inference_mode_may_begin_and_end_anywhere() -> None:
    packed, _ = pair("all-of-gemma")
    ids = tokens(60)
    expected = packed([Chunk(0, ids, 60)], packed.new_cache(1, 60)).logits[0]
    with torch.inference_mode():
        cache = packed.new_cache(1, 60)
        first = packed([Chunk(0, ids[:40], 40)], cache).logits[0]
    second = packed([Chunk(0, ids[40:], 20)], cache).logits[0]
    assert not second.requires_grad
    assert torch.equal(torch.cat((first, second)), expected)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_activations_are_torchs_over_the_whole_range(activation: Any) -> None:
    """A layer that is x + activation(z), z being its normed input, and x too small to matter."""
    size, two = 32, PLAIN.layers[:2]
    config = replace(PLAIN, layers=two, hidden_size=size, intermediate_size=size, activation=activation, mlp_bias=True)
    random = torch.Generator().manual_seed(1)
    tensors = weights(config)
    rows_VH = torch.randn(config.vocab_size, size, generator=random)
    rows_VH[0], rows_VH[1, 0] = 0, 1e4
    tensors["embedding.weight"] = 1e-6 * rows_VH
    tensors["layers.0.attention.output.weight"].zero_()
    tensors["layers.0.mlp_norm.weight"] = torch.logspace(-3, 5, size)
    for name, weight_OI, bias in (("gate", torch.eye(size), 0.0), ("up", torch.zeros(size, size), 1.0)):
        tensors[f"layers.0.mlp.{name}.weight"], tensors[f"layers.0.mlp.{name}.bias"] = (
            weight_OI,
            torch.full((size,), bias),
        )
    tensors["layers.0.mlp.down.weight"], tensors["layers.0.mlp.down.bias"] = torch.eye(size), torch.zeros(size)
    config = replace(config, norm_eps=1e-20)
    packed = Decoder.from_tensors(config, tensors.items(), dtype=None, packed=True)
    assert packed._native is not None
    everything = Chunk(0, range(config.vocab_size), 0)
    found = packed([everything], packed.new_cache(1, config.vocab_size), [1]).features[0][:, 0].double()
    x_VH = tensors["embedding.weight"].double()
    squares_V1 = x_VH.square().mean(dim=1, keepdim=True)
    z_VH = x_VH / (squares_V1 + config.norm_eps).sqrt() * tensors["layers.0.mlp_norm.weight"].double()
    assert z_VH.abs().max() > 1e5
    expected = x_VH + ACTIVATIONS[activation](z_VH)
    assert ((found - expected).abs() <= 4e-7 * (z_VH.abs() + x_VH.abs()) + 1e-12).all()


# Row invariance

INVARIANT = {
    "plain": {},
    "no-rope-windows-biases": {
        "layers": (Layer(rope=Rope()), Layer(window=20), Layer(window=33, rope=Rope())),
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "activation": "gelu",
        "num_kv_heads": 1,
    },
    "all-of-gemma": CASES["all-of-gemma"],
    "odd-sizes": {"head_dim": 48, "hidden_size": 160, "intermediate_size": 224, "vocab_size": 173},
}
LENGTH = 100


@functools.lru_cache(maxsize=4)
def invariant(case: str, format: str) -> Decoder:
    config = replace(PLAIN, **INVARIANT[case])
    tensors: dict[str, torch.Tensor | Quantized] = {}
    format, int8, _ = format.partition(INT8)
    for name, tensor in weights(config).items():
        tensors[name] = quantized(tensor, format) if tensor.dim() == 2 and format in BLOCK_BYTES else tensor
    decoder = Decoder.from_tensors(config, tensors.items(), dtype=FLOATS.get(format), packed=True)
    if int8:
        assert decoder.set_int8_activations() > 0
    return decoder


class Line:
    """One sequence in a slot of a cache, and what was computed for each of its positions."""

    def __init__(self, decoder: Decoder, cache: KVCache, slot: int, ids: Sequence[int]) -> None:
        self.decoder, self.cache, self.slot, self.ids = decoder, cache, slot, ids
        self.clear()

    def clear(self) -> None:
        self.cache.truncate(self.slot, 0)
        self.logits: list[torch.Tensor] = []
        self.features: list[torch.Tensor] = []

    def chunk(self, count: int) -> Chunk:
        begin = self.cache.length(self.slot)
        part = self.ids[begin : begin + count]
        return Chunk(self.slot, part, len(part))

    def read(self, count: int, before: Sequence[Chunk] = (), behind: Sequence[Chunk] = ()) -> None:
        every = range(self.decoder.config.num_layers + 1)
        scores = self.decoder([*before, self.chunk(count), *behind], self.cache, every)
        self.logits.append(scores.logits[len(before)])
        self.features.append(scores.features[len(before)])

    def run(self, count: int) -> None:
        while self.cache.length(self.slot) < len(self.ids):
            self.read(count)

    def bits(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.cat(self.logits), torch.cat(self.features)


def assert_same_bits(line: Line, alone: tuple[torch.Tensor, torch.Tensor], what: object) -> None:
    for found, expected in zip(line.bits(), alone, strict=True):
        assert found.shape == expected.shape, what
        different = (found != expected).flatten(1).any(dim=1).nonzero().flatten().tolist()
        assert not different, f"{what}: positions {different[:5]} differ, of {len(different)}"


def alone_bits(case: str, format: str) -> tuple[Line, tuple[torch.Tensor, torch.Tensor]]:
    """An empty line, and what its text gives token by token."""
    decoder = invariant(case, format)
    assert decoder._native is not None
    line = Line(decoder, decoder.new_cache(1, LENGTH + 20), 0, tokens(LENGTH))
    line.run(1)
    alone = line.bits()
    assert alone[0].isfinite().all()
    return line, alone


@pytest.mark.parametrize(
    ("case", "format"),
    [
        *(("all-of-gemma", format) for format in (*FORMATS, *INT8_FORMATS)),
        *((case, format) for case in INVARIANT for format in ("float32", "q4_0") if case != "all-of-gemma"),
    ],
)
def test_a_position_has_the_same_bits_in_chunks_of_any_size(case: str, format: str) -> None:
    line, alone = alone_bits(case, format)
    for count in (*range(2, 17), 24, 37, 63, LENGTH):
        line.clear()
        line.run(count)
        assert_same_bits(line, alone, count)


@pytest.mark.parametrize(
    ("case", "format", "threads"),
    [
        *(("all-of-gemma", format, 2) for format in (*FORMATS, *INT8_FORMATS)),
        *((case, format, 1) for case in INVARIANT for format in ("bfloat16", "q8_0")),
        ("no-rope-windows-biases", "q4_1", 2),
    ],
)
def test_a_position_has_the_same_bits_among_drafts_and_beside_others(case: str, format: str, threads: int) -> None:
    line, alone = alone_bits(case, format)
    decoder = line.decoder
    torch.set_num_threads(threads)

    # 1. A prompt in one pass, then drafts of which some are rejected.
    line.clear()
    line.read(63)
    for count, kept in ((5, 1), (5, 5), (3, 2), (17, 9), (1, 1), (6, 6), (13, 13)):
        length = line.cache.length(0)
        decoder([Chunk(0, tokens(count, seed=count), count)], line.cache)
        line.cache.truncate(0, length)
        line.read(count)
        line.cache.truncate(0, length + kept)
        for seen in (line.logits, line.features):
            seen[-1] = seen[-1][:kept]
    assert line.cache.length(0) == LENGTH
    assert_same_bits(line, alone, "drafts")

    # 2. Two chunks of one pass, and everything at once.
    for parts in ((45, 55), (LENGTH,)):
        line.clear()
        ends = [sum(parts[: i + 1]) for i in range(len(parts))]
        chunks = [Chunk(0, line.ids[end - part : end], part) for end, part in zip(ends, parts, strict=True)]
        scores = decoder(chunks, line.cache, range(len(decoder.layers) + 1))
        line.logits, line.features = scores.logits, scores.features
        assert_same_bits(line, alone, parts)

    # 3. Beside others.
    beside = Line(decoder, decoder.new_cache(6, LENGTH), 3, line.ids)
    for count, others in ((40, (1, 7, 30)), (1, (1, 1, 2)), (5, (5, 64, 3)), (17, (1,)), (37, (2, 2, 2, 2, 2))):
        slots = (5, 0, 1, 2, 4)[: len(others)]
        chunks = [Chunk(slot, tokens(n, seed=n)) for slot, n in zip(slots, others, strict=True)]
        beside.read(count, before=chunks[::2], behind=chunks[1::2])
    assert_same_bits(beside, alone, "beside others")


@pytest.mark.parametrize("format", ["float32", "q8_0"])
def test_a_vocabulary_that_torch_cuts_for_its_threads(format: str) -> None:
    """The softcap of the logits is torch's, over all rows at once."""
    config = replace(PLAIN, vocab_size=5003, logit_softcap=2.0, layers=PLAIN.layers[:1])
    tensors = {
        name: quantized(tensor, format) if tensor.dim() == 2 and format in BLOCK_BYTES else tensor
        for name, tensor in weights(config).items()
    }
    decoder = Decoder.from_tensors(config, tensors.items(), dtype=None, packed=True)
    ids, cache = tokens(40), decoder.new_cache(1, 40)
    alone = torch.cat([decoder([Chunk(0, [token])], cache).logits[0] for token in ids])
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for count in (2, 3, 5, 7, 16, 40):
            cache.truncate(0, 0)
            parts = [
                decoder([Chunk(0, ids[i : i + count], len(ids[i : i + count]))], cache) for i in range(0, 40, count)
            ]
            assert torch.equal(torch.cat([part.logits[0] for part in parts]), alone), (threads, count)


@pytest.mark.parametrize("kind", ["default", "dynamic", "yarn"])
def test_rotations_do_not_depend_on_how_a_text_was_cut(kind: Any) -> None:
    """Angles are remembered, so each cut of the text has a rope that nobody had before (in float32 it is the same)."""
    bits = []
    for theta, count in ((1e4, 1), (1e4 + 1e-9, 270), (1e4 + 2e-9, 90), (1e4 + 3e-9, 257)):
        scaling = Rope(kind=kind, theta=theta, factor=2.0, original_context=40)
        config = replace(PLAIN, layers=(Layer(rope=scaling),), context=600)
        decoder = Decoder.from_tensors(config, weights(config).items(), dtype=None, packed=True)
        line = Line(decoder, decoder.new_cache(1, 270), 0, tokens(270))
        line.run(count)
        bits.append(line.bits())
        assert_same_bits(line, bits[0], count)


# The cache


@pytest.mark.parametrize("case", ["plain", "all-of-gemma", "windows-at-the-border-of-spans"])
def test_what_lies_beyond_a_length_is_never_read(case: str) -> None:
    packed, _ = pair(case)
    ids = tokens(80)
    clean, dirty = packed.new_cache(2, 90), packed.new_cache(2, 90)
    for tensor in (*clean.keys, *clean.values):
        tensor.zero_()
    for tensor in (*dirty.keys, *dirty.values):
        tensor.fill_(torch.nan)
    done = 0
    for count in (1, 30, 1, 1, 5, 20, 1, 21):
        chunk = Chunk(1, ids[done : done + count], count)
        done += count
        found, expected = (packed([chunk], cache).logits[0] for cache in (dirty, clean))
        assert expected.isfinite().all()
        assert torch.equal(found, expected)
    assert done == clean.length(1) == 80
    assert all(tensor[0].isnan().all() and tensor[1, :, 80:].isnan().all() for tensor in (*dirty.keys, *dirty.values))


def test_windows_hide_what_lies_before_them() -> None:
    """Positions outside every window may hold anything at all."""
    config = replace(PLAIN, layers=windows(9, 33))
    decoder = Decoder.from_tensors(config, weights(config).items(), dtype=None, packed=True)
    ids, results = tokens(80), []
    for garbage in (False, True):
        cache = decoder.new_cache(1, 80)
        decoder([Chunk(0, ids[:60], 0)], cache)
        if garbage:
            for layer, window in ((0, 9), (1, 33)):
                cache.keys[layer][:, :, : 61 - window] = torch.nan
                cache.values[layer][:, :, : 61 - window] = torch.nan
        results.append(decoder([Chunk(0, ids[60:], 20)], cache).logits[0])
    assert torch.equal(*results)
    cache.truncate(0, 60)
    cache.keys[0][:, :, 61 - 9] = torch.nan
    seen = decoder([Chunk(0, ids[60:62], 2)], cache).logits[0]
    assert seen[0].isnan().all(), "the oldest position inside is seen"


@pytest.mark.parametrize("threads", [1, 2])
def test_keys_and_values_are_where_torch_puts_them(threads: int) -> None:
    """So a cache means the same to both, and they can take turns."""
    torch.set_num_threads(threads)
    packed, plain = pair("all-of-gemma")
    ids = tokens(70)
    ours, theirs = packed.new_cache(3, 80), plain.new_cache(3, 80)
    for count in (50, 3, 1):
        begin = ours.length(2)
        for decoder, cache in ((packed, ours), (plain, theirs)):
            decoder([Chunk(2, ids[begin : begin + count], 0), Chunk(0, ids[:count])], cache)
    for found, expected in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
        for slot, length in ((2, 54), (0, 54)):
            assert_near([t[slot, :, :length] for t in found], [t[slot, :, :length] for t in expected])
    expected_OV = packed([Chunk(2, ids[54:], 16)], ours).logits[0]
    ours.truncate(2, 54)
    assert_near([plain([Chunk(2, ids[54:], 16)], ours).logits[0]], [expected_OV])


@pytest.mark.skipif(not (kernels.available() and kernels.can_halve()), reason="no float16 in this processor")
@pytest.mark.parametrize(("case", "threads"), [("plain", 1), ("all-of-gemma", 2), ("heads-of-80", 1)])
def test_a_cache_of_float16_holds_the_same_rounded_and_keeps_the_bits_of_a_row(case: str, threads: int) -> None:
    packed, _ = pair(case)
    half = packed.cut(range(packed.config.num_layers))
    half.set_cache_dtype(torch.float16)
    full, rounded = (Line(decoder, decoder.new_cache(1, LENGTH), 0, tokens(LENGTH)) for decoder in (packed, half))
    for line in (full, rounded):
        line.run(1)
    alone = rounded.bits()
    # What the first layer writes depends on no cache.
    for halves, floats in ((rounded.cache.keys, full.cache.keys), (rounded.cache.values, full.cache.values)):
        assert halves[0].dtype == torch.float16
        assert torch.equal(halves[0], floats[0].half())
    assert_near(rounded.logits, full.logits, limit=1e-2)
    assert not torch.equal(torch.cat(rounded.logits), torch.cat(full.logits))
    torch.set_num_threads(threads)
    for count in (2, 5, 16, 17, LENGTH):
        rounded.clear()
        rounded.run(count)
        assert_same_bits(rounded, alone, count)


def at_its_end(tensor: torch.Tensor) -> torch.Tensor:
    """A copy behind which nothing can be read: touching it ends the process."""
    size = tensor.numel() * tensor.element_size()
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    behind = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + pages
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(behind), mmap.PAGESIZE, 0) == 0
    whole = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=pages - size)
    return whole.view(tensor.shape).copy_(tensor)


def read_to_the_end() -> None:
    """Products, rows and passes whose arguments end where readable memory does."""
    for format in (*FORMATS, *INT8_FORMATS):
        decoder = invariant("odd-sizes", format)
        for owner in (decoder.embedding, decoder.head, decoder.layers[0].mlp.up):  # type: ignore[union-attr]
            matrix = owner.packed  # type: ignore[union-attr]
            assert isinstance(matrix, kernels.Matrix)
            matrix = replace(matrix, data=at_its_end(matrix.data))
            for rows in (1, 5, 8, 20):
                x_NI, bias_O = at_its_end(torch.ones(rows, matrix.inputs)), at_its_end(torch.ones(matrix.outputs))
                kernels.product(x_NI, matrix, bias_O)
            kernels.rows(matrix, at_its_end(torch.tensor([0, matrix.outputs - 1])))
    for dtype in (torch.float32, torch.float16) if kernels.can_halve() else (torch.float32,):
        for case in ("all-of-gemma", "one-key-head"):
            decoder = pair(case)[0]
            decoder.set_cache_dtype(dtype)
            for counts in ([1] * 45, (5,) * 9, (45,), (33, 12)):
                cache = decoder.new_cache(1, 45)
                cache.keys = [at_its_end(keys.zero_()) for keys in cache.keys]
                cache.values = [at_its_end(values.zero_()) for values in cache.values]
                for count in counts:
                    decoder([Chunk(0, tokens(count), count)], cache)
                assert cache.length(0) == 45
    print("the end")
    sys.stdout.flush()
    os._exit(0)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mprotect of this C library")
def test_nothing_is_read_behind_its_end() -> None:
    script = f"from {__name__} import read_to_the_end; read_to_the_end()"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "the end\n"), done.stderr[-500:]


@pytest.mark.parametrize("case", CASES)
def test_weights_lie_one_behind_the_other(case: str) -> None:
    decoder = pair(case)[0]
    packed = [getattr(part, "packed", None) for part in decoder.modules()]
    held = sorted((m.data for m in packed if isinstance(m, kernels.Matrix)), key=lambda data: data.data_ptr())
    assert held
    assert held[0].data_ptr() % (2 << 20) == 0
    for one, following in itertools.pairwise(held):
        assert following.data_ptr() == one.data_ptr() + -(-one.numel() // 64) * 64


def test_large_matrices_get_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = pair("plain", "q4_1")[0]
    monkeypatch.setattr("paceline.models.decoder.GATHERED", 1)
    alone = pair.__wrapped__("plain", "q4_1")[0]
    chunk = Chunk(0, [1, 2, 3], 3)
    logits, expected = (d([chunk], d.new_cache(1, 4)).logits[0] for d in (alone, whole))
    assert torch.equal(logits, expected)


def test_blocks_are_kept_as_they_come() -> None:
    packed, _ = pair("plain", "q4_1")
    matrix = packed.get_submodule("layers.1.mlp.down").packed
    assert isinstance(matrix, kernels.Matrix)
    assert (matrix.format, matrix.data.numel()) == ("q4_1", 64 * 96 // BLOCK * BLOCK_BYTES["q4_1"])
