"""GGUF blocks against the gguf package, bit for bit in both directions."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from paceline.models import quant
from paceline.models.quant import BLOCK, BLOCK_BYTES, Quantized, quantize

KINDS = {name: GGMLQuantizationType[name.upper()] for name in BLOCK_BYTES}
Q8_0 = GGMLQuantizationType.Q8_0


def theirs(kind: GGMLQuantizationType, blocks: torch.Tensor) -> torch.Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.quants.dequantize(blocks.flatten(1).numpy(), kind))


def random_blocks(format: str, rows: int, blocks: int, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, blocks, BLOCK_BYTES[format]), generator=random).to(torch.uint8)


def assert_same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    """The sign of zero counts; a NaN is a NaN."""
    assert torch.equal(a.isnan(), b.isnan())
    assert torch.equal(a.nan_to_num(nan=0.0).view(torch.int32), b.nan_to_num(nan=0.0).view(torch.int32))


def test_sizes_are_those_of_the_package() -> None:
    assert {name: GGML_QUANT_SIZES[kind] for name, kind in KINDS.items()} == {
        name: (BLOCK, size) for name, size in BLOCK_BYTES.items()
    }


@pytest.mark.parametrize("format", BLOCK_BYTES)
def test_dequantizing_any_bytes_is_exact(format: str) -> None:
    blocks = random_blocks(format, 600, 70)
    matrix = Quantized(format=format, blocks=blocks)
    assert matrix.shape == (600, 70 * 32)
    found, expected = matrix.dequantize(), theirs(KINDS[format], blocks)
    assert found.shape == matrix.shape
    assert found.is_contiguous()
    assert_same_bits(found, expected)


@pytest.mark.parametrize("format", BLOCK_BYTES)
def test_every_code_and_every_scale(format: str) -> None:
    """All 65,536 scales (subnormal, infinite and NaN among them) by all codes, in Q4_1 with as many minima."""
    width = 32 if format == "q8_0" else 16
    codes = torch.arange(256).to(torch.uint8).view(1, -1, width).expand(65536, -1, -1)
    scales = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.uint8).view(65536, 1, 2)
    scales = scales.expand(-1, codes.shape[1], -1)
    minima = [scales ^ torch.tensor([0x5A, 0x80], dtype=torch.uint8)] if format == "q4_1" else []
    blocks = torch.cat([scales, *minima, codes], dim=2)
    found, expected = Quantized(format=format, blocks=blocks).dequantize(), theirs(KINDS[format], blocks)
    assert_same_bits(found, expected)


def test_rows_of_a_larger_matrix() -> None:
    blocks = random_blocks("q4_1", 50, 3, seed=1)
    whole = Quantized(format="q4_1", blocks=blocks).dequantize()
    rows = torch.tensor([49, 0, 7, 7])
    some = Quantized(format="q4_1", blocks=blocks[rows]).dequantize()
    strided = Quantized(format="q4_1", blocks=blocks[1::2, 1:]).dequantize()
    assert_same_bits(some, whole[rows])
    assert_same_bits(strided, whole[1::2, 32:])


def assert_quantized_alike(weight: torch.Tensor) -> None:
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.quants.quantize(weight.float().numpy(), Q8_0))
    found = quantize(weight)
    assert (found.format, found.shape) == ("q8_0", tuple(weight.shape))
    assert torch.equal(found.blocks.flatten(1), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantizing_gives_the_packages_bytes(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(700, 576, generator=random) * torch.logspace(-6, 3, 700)[:, None]
    weight[::50, :64] = 0
    weight[1::50, :64] = -weight[1::50, :64].abs()
    assert_quantized_alike(weight.to(dtype))
    assert_quantized_alike(weight.to(dtype).t()[:544].t())


def test_halves_are_rounded_away_from_zero() -> None:
    steps = torch.arange(-15, 17, dtype=torch.float32) / 2
    steps[0] = 127.0  # d is 1: the codes are the rounded steps themselves
    weight = torch.stack((steps, -steps))
    assert_quantized_alike(weight)
    codes = quantize(weight).blocks[:, 0, 2:].view(torch.int8)
    assert codes[0, 1:7].tolist() == [-7, -7, -6, -6, -5, -5]
    assert codes[0].tolist() == (-codes[1]).tolist()


def test_numbers_next_to_halves() -> None:
    """Where a sloppier rounding, or a product with 1 / 127, would show."""
    largest = torch.rand(2000, 1, generator=torch.Generator().manual_seed(5)) + 0.5
    halves = (torch.arange(0, 127) + 0.5) * (largest / 127)
    near = torch.stack([halves, halves.nextafter(torch.tensor(1e9)), -halves.nextafter(torch.tensor(0.0))], dim=2)
    blocks = torch.cat((near.reshape(2000, -1), halves[:, :4]), dim=1).unflatten(1, (35, 11))
    weight = torch.cat((largest[:, None].expand(-1, 35, -1), blocks, torch.zeros(2000, 35, 20)), dim=2).flatten(1)
    assert_quantized_alike(weight)


def test_quantized_weights_are_near_and_stay_when_quantized_again() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(3))
    found = quantize(weight)
    largest = weight.unflatten(1, (-1, 32)).abs().amax(dim=2, keepdim=True)
    error = (found.dequantize() - weight).unflatten(1, (-1, 32)).abs()
    assert (error <= largest * (0.5 / 127 + 2**-11)).all()
    assert error.max() > 0
    again = quantize(found.dequantize())
    assert torch.equal(again.dequantize(), found.dequantize())


def test_numbers_too_small_for_a_scale_become_zero() -> None:
    weight = torch.full((2, 32), 1e-42)
    weight[1] = -1e-38
    assert quantize(weight).blocks.max() == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 8.33e6])
def test_what_the_scales_cannot_hold_is_refused(value: float) -> None:
    weight = torch.ones(3, 64)
    weight[2, 40] = 8.3e6
    assert quantize(weight).dequantize().isfinite().all()
    weight[2, 40] = value
    with pytest.raises(ValueError, match=r"holds (nan|inf|8.33e\+06), and Q8_0 holds numbers up to 8.31901e\+06"):
        quantize(weight)


def test_rows_that_are_no_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of 40 weights cannot be cut into Q8_0's blocks of 32"):
        quantize(torch.ones(3, 40))


@pytest.mark.parametrize("slab", [1, 100, 1000])
def test_slabs_do_not_show(slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(37, 96, generator=torch.Generator().manual_seed(4))
    whole = quantize(weight)
    monkeypatch.setattr(quant, "SLAB", slab)
    assert torch.equal(quantize(weight).blocks, whole.blocks)
    blocks = random_blocks("q4_0", 37, 3)
    with_slabs = Quantized(format="q4_0", blocks=blocks).dequantize()
    monkeypatch.undo()
    assert_same_bits(with_slabs, Quantized(format="q4_0", blocks=blocks).dequantize())
