"""Packing moves bytes and changes none: what comes back is what the format says was put in, to the sign of zero."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType

import paceline.kernels as kernels
from paceline.kernels.matrix import BLOCK, FLOATS, FORMATS, HEADERS, PANEL, Matrix
from paceline.models.quant import BLOCK_BYTES, Quantized

all_formats = pytest.mark.parametrize("format", FORMATS)
floats = pytest.mark.parametrize("format", FLOATS)
quantized = pytest.mark.parametrize("format", HEADERS)
shapes = pytest.mark.parametrize(("outputs", "inputs"), [(1, 32), (15, 96), (16, 64), (17, 32), (50, 160)])


def assert_same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    """The sign of zero counts."""
    assert a.dtype == b.dtype == torch.float32
    assert a.shape == b.shape
    assert torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def random_floats(format: str, outputs: int, inputs: int, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(outputs, inputs, generator=random).to(FLOATS[format])


def random_blocks(format: str, outputs: int, inputs: int, seed: int = 0) -> torch.Tensor:
    """Any codes, with finite scales of both signs, subnormal ones among them."""
    random = torch.Generator().manual_seed(seed)
    shape = (outputs, inputs // BLOCK, BLOCK_BYTES[format])
    blocks = torch.randint(0, 256, shape, generator=random).to(torch.uint8)
    headers = torch.randn(*shape[:2], HEADERS[format], generator=random) * torch.logspace(1, -7, outputs)[:, None, None]
    blocks[..., : 2 * HEADERS[format]] = headers.half().view(torch.uint8)
    return blocks


def packed(format: str, outputs: int, inputs: int, seed: int = 0) -> tuple[Matrix, torch.Tensor]:
    """A matrix and what it holds, [outputs, inputs] in float32."""
    if format in FLOATS:
        weight_OI = random_floats(format, outputs, inputs, seed)
        return Matrix.pack(weight_OI), weight_OI.float()
    blocks = random_blocks(format, outputs, inputs, seed)
    return Matrix.pack_blocks(format, blocks), Quantized(format=format, blocks=blocks).dequantize()


@all_formats
@shapes
def test_unpacking_gives_back_every_bit(format: str, outputs: int, inputs: int) -> None:
    matrix, weight_OI = packed(format, outputs, inputs)
    assert (matrix.format, matrix.outputs, matrix.inputs) == (format, outputs, inputs)
    assert_same_bits(matrix.unpack(), weight_OI)
    assert weight_OI.unique().numel() > 8, "too uniform to show a swap"


@quantized
@shapes
def test_blocks_mean_what_the_gguf_package_says(format: str, outputs: int, inputs: int) -> None:
    blocks = random_blocks(format, outputs, inputs, seed=1)
    kind = GGMLQuantizationType[format.upper()]
    expected = torch.from_numpy(gguf.quants.dequantize(blocks.flatten(1).numpy(), kind))
    assert_same_bits(Matrix.pack_blocks(format, blocks).unpack(), expected)


@pytest.mark.parametrize("format", ["bfloat16", "float16"])
def test_every_number_of_sixteen_bits_survives(format: str) -> None:
    """Subnormals, both zeros and the infinities; a NaN stays one."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(FLOATS[format]).view(256, 256)
    matrix = Matrix.pack(numbers)
    found, expected = matrix.unpack(), numbers.float()
    assert torch.equal(found.isnan(), expected.isnan())
    assert_same_bits(found.nan_to_num(nan=1.0), expected.nan_to_num(nan=1.0))
    assert torch.equal(
        matrix.data.view(torch.int16).sort().values, numbers.view(torch.int16).view(16, -1).sort().values
    )


def test_float32_keeps_subnormals_and_the_sign_of_zero() -> None:
    weight = torch.zeros(5, 32)
    weight[0], weight[1, ::2], weight[2], weight[3, 7] = -0.0, 1e-45, -1e-40, torch.finfo(torch.float32).max
    assert_same_bits(Matrix.pack(weight).unpack(), weight)


@quantized
def test_every_code_at_every_place(format: str) -> None:
    outputs = 256 if format == "q8_0" else 16
    codes = torch.arange(256).to(torch.uint8)
    if format != "q8_0":
        codes = torch.arange(16).to(torch.uint8) * 17
    blocks = torch.empty(outputs, 2, BLOCK_BYTES[format], dtype=torch.uint8)
    header = 2 * HEADERS[format]
    blocks[..., :header] = torch.tensor([0.5, -3.0][: HEADERS[format]]).half().view(torch.uint8)
    width = blocks.shape[-1] - header
    places = torch.arange(width)
    blocks[..., header:] = codes[(torch.arange(outputs)[:, None] + places) % outputs][:, None]
    expected = Quantized(format=format, blocks=blocks).dequantize()
    assert all(column.unique().numel() == outputs for column in expected.T)
    assert_same_bits(Matrix.pack_blocks(format, blocks).unpack(), expected)


@all_formats
def test_rows_are_those_asked_for_also_repeated(format: str) -> None:
    matrix, weight_OI = packed(format, 50, 96)
    ids = torch.tensor([49, 0, 7, 7, 16, 15, 7, 49, 31])
    assert_same_bits(matrix.rows(ids), weight_OI[ids])
    assert_same_bits(matrix.rows(torch.tensor([48])), weight_OI[48:49])


@pytest.mark.skipif(not kernels.available(), reason="no compiler")
@all_formats
def test_the_compiled_rows_are_the_same_numbers(format: str) -> None:
    """Here the sign of zero is left open: it would cost Q4_0 an operation."""
    matrix, weight_OI = packed(format, 50, 160, seed=2)
    ids = torch.tensor([49, 0, 7, 7, 16, 15, 7, 49, 31])
    assert torch.equal(kernels.rows(matrix, ids), weight_OI[ids])
    everything = torch.arange(50).flip(0)
    assert torch.equal(kernels.rows(matrix, everything), matrix.rows(everything))


@pytest.mark.skipif(not kernels.available(), reason="no compiler")
@pytest.mark.parametrize("format", ["bfloat16", "float16"])
def test_the_compiled_rows_keep_every_number_of_sixteen_bits(format: str) -> None:
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(FLOATS[format]).view(256, 256)
    found, expected = kernels.rows(Matrix.pack(numbers), torch.arange(256)), numbers.float()
    assert torch.equal(found.isnan(), expected.isnan())
    assert_same_bits(found.nan_to_num(nan=1.0), expected.nan_to_num(nan=1.0))


@all_formats
def test_panels_can_be_unpacked_alone(format: str) -> None:
    matrix, weight_OI = packed(format, 50, 64, seed=3)
    assert_same_bits(matrix.unpack(slice(1, 3)), weight_OI[PANEL : 3 * PANEL])
    last = matrix.unpack([3, 0])
    assert last.shape == (2 * PANEL, 64)
    assert_same_bits(last[:2], weight_OI[48:])
    assert_same_bits(last[PANEL:], weight_OI[:PANEL])


@floats
def test_a_view_is_packed_as_what_it_shows(format: str) -> None:
    whole = random_floats(format, 96, 40)
    assert_same_bits(Matrix.pack(whole.T[5:22]).unpack(), whole.T[5:22].float())


@quantized
def test_blocks_of_a_larger_tensor_are_packed_as_what_they_show(format: str) -> None:
    blocks = random_blocks(format, 40, 160)
    part = Quantized(format=format, blocks=blocks[3::2, 1:4])
    assert_same_bits(Matrix.pack_blocks(format, part.blocks).unpack(), part.dequantize())


@all_formats
def test_a_packed_matrix_is_as_large_as_its_weights_and_its_own(format: str) -> None:
    """No more than the rows that fill up the last panel are added."""
    matrix, weight_OI = packed(format, 33, 64)
    bits = BLOCK_BYTES[format] * 8 / BLOCK if format in BLOCK_BYTES else FLOATS[format].itemsize * 8
    assert matrix.data.dtype == torch.uint8
    assert matrix.data.numel() == 48 * 64 * bits / 8
    assert matrix.data.is_contiguous()
    same = random_floats(format, 33, 64) if format in FLOATS else random_blocks(format, 33, 64)
    again = Matrix.pack(same) if format in FLOATS else Matrix.pack_blocks(format, same)
    same.zero_()
    assert_same_bits(again.unpack(), weight_OI)


def test_which_rows_fit() -> None:
    assert [inputs for inputs in range(1, 100) if Matrix.fits(inputs)] == [32, 64, 96]


@quantized
def test_blocks_the_package_made_of_a_matrix(format: str) -> None:
    weight = random_floats("float32", 20, 64, seed=5).numpy()
    kind = GGMLQuantizationType[format.upper()]
    made = np.ascontiguousarray(gguf.quants.quantize(weight, kind))
    blocks = torch.from_numpy(made).unflatten(1, (-1, BLOCK_BYTES[format]))
    expected = torch.from_numpy(gguf.quants.dequantize(made, kind))
    assert (expected - torch.from_numpy(weight)).abs().max() < 0.5
    assert_same_bits(Matrix.pack_blocks(format, blocks).unpack(), expected)
