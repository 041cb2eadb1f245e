"""Products with packed weights: right to rounding, and for each row the same bits whatever rows come with it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import paceline.kernels as kernels
from paceline.kernels.matrix import FLOATS, FORMATS, HEADERS, Matrix, rounded
from paceline.models.quant import BLOCK, BLOCK_BYTES, Quantized

compiled = pytest.mark.skipif(not kernels.available(), reason="no compiler")
INT8 = " int8"
"""Behind a format: what its matrix multiplies is rounded."""
all_formats = pytest.mark.parametrize("format", [*FORMATS, *(format + INT8 for format in HEADERS)])
both_threads = pytest.mark.parametrize("threads", [1, 2])
MANY_ROWS = (*range(1, 21), 40, 64, 95, 96, 97, 130, 200)
"""All sizes of a tile and of a few tiles, and more rows than are multiplied at once."""


@pytest.fixture(autouse=True)
def one_thread_again() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


def inputs_of(rows: int, inputs: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(100 + seed))


def packed(format: str, outputs: int, inputs: int, seed: int = 0) -> tuple[Matrix, torch.Tensor, torch.Tensor]:
    """A matrix, its weights in float64, and the sizes of what is summed for each weight (Q4_0 and Q4_1 sum two
    things, which may nearly cancel)."""
    if format.endswith(INT8):
        matrix, weight_OI, summed_OI = packed(format.removesuffix(INT8), outputs, inputs, seed)
        return replace(matrix, int8_inputs=True), weight_OI, summed_OI
    random = torch.Generator().manual_seed(seed)
    if format in FLOATS:
        weight_OI = torch.randn(outputs, inputs, generator=random).to(FLOATS[format])
        return Matrix.pack(weight_OI), weight_OI.double(), weight_OI.double().abs()
    blocks = torch.randint(0, 256, (outputs, inputs // BLOCK, BLOCK_BYTES[format]), generator=random).to(torch.uint8)
    size = 0.01 if format == "q8_0" else 0.2
    headers = size * torch.randn(*blocks.shape[:2], HEADERS[format], generator=random)
    blocks[..., : 2 * HEADERS[format]] = headers.half().view(torch.uint8)
    weight_OI = Quantized(format=format, blocks=blocks).dequantize().double()
    offsets_OB = {"q8_0": 0 * headers[..., 0], "q4_0": 8 * headers[..., 0], "q4_1": headers[..., -1]}[format].double()
    offsets_OI = offsets_OB.repeat_interleave(BLOCK, dim=1)
    summed_OI = (weight_OI + offsets_OI if format == "q4_0" else weight_OI - offsets_OI).abs() + offsets_OI.abs()
    return Matrix.pack_blocks(format, blocks), weight_OI, summed_OI


def seen(x_NI: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """What a matrix makes of its inputs before it multiplies them."""
    return rounded(x_NI) if matrix.int8_inputs else x_NI


def check(y_NO: torch.Tensor, x_NI: torch.Tensor, weight_OI: torch.Tensor, summed_OI: torch.Tensor) -> None:
    """Float32 sums of up to a thousand terms err by a few roundings of what is summed (5.5 were seen)."""
    assert y_NO.dtype == torch.float32
    exact_NO = x_NI.double() @ weight_OI.T
    allowed_NO = 12 * 2.0**-24 * (x_NI.double().abs() @ summed_OI.T)
    assert y_NO.shape == exact_NO.shape
    assert ((y_NO.double() - exact_NO).abs() <= allowed_NO).all()


@all_formats
@both_threads
@pytest.mark.parametrize(("outputs", "inputs"), [(5, 32), (16, 96), (150, 160), (83, 1056)])
def test_products_are_those_of_float64(format: str, threads: int, outputs: int, inputs: int) -> None:
    torch.set_num_threads(threads)
    matrix, weight_OI, summed_OI = packed(format, outputs, inputs)
    for rows in MANY_ROWS:
        x_NI = inputs_of(rows, inputs, seed=rows)
        check(kernels.product(x_NI, matrix), seen(x_NI, matrix), weight_OI, summed_OI)


@all_formats
def test_a_bias_is_added_once(format: str) -> None:
    matrix, weight_OI, summed_OI = packed(format, 83, 96, seed=1)
    bias_O = 20 * torch.randn(83, generator=torch.Generator().manual_seed(3))
    for rows in (1, 2, 6, 7, 64, 130):
        x_NI = inputs_of(rows, 96)
        # As one more input that is 1.
        x_NI1 = torch.cat((seen(x_NI, matrix), torch.ones(rows, 1)), dim=1)
        weight_OI1 = torch.cat((weight_OI, bias_O[:, None].double()), dim=1)
        summed_OI1 = torch.cat((summed_OI, bias_O[:, None].double().abs()), dim=1)
        check(kernels.product(x_NI, matrix, bias_O), x_NI1, weight_OI1, summed_OI1)


@all_formats
@pytest.mark.parametrize("scale", [1e-30, 1e-4, 1e4, 1e25])
def test_inputs_may_be_large_or_small(format: str, scale: float) -> None:
    matrix, weight_OI, summed_OI = packed(format, 33, 160, seed=2)
    for rows in (1, 4, 20):
        x_NI = scale * inputs_of(rows, 160)
        check(kernels.product(x_NI, matrix), seen(x_NI, matrix), weight_OI, summed_OI)


@all_formats
def test_the_twin_agrees(format: str) -> None:
    matrix, weight_OI, summed_OI = packed(format, 47, 160)
    x_NI = inputs_of(9, 160)
    check(kernels.product_twin(x_NI, matrix), seen(x_NI, matrix), weight_OI, summed_OI)
    bias_O = torch.randn(47, generator=torch.Generator().manual_seed(1))
    found = kernels.product(x_NI, matrix, bias_O)
    assert (found - kernels.product_twin(x_NI, matrix, bias_O)).abs().max() < 1e-6 * summed_OI.sum(dim=1).max()


def test_int8_is_within_half_a_step_of_the_largest_of_a_block() -> None:
    x_NI = inputs_of(50, 160)
    x_NI[3] = 0
    x_NI[4, 32:64] = 127 * torch.arange(-16, 16) / 16  # halves of a step: to even
    x_NI[5, :32] = -3e38
    found_NBk, x_NBk = (each.unflatten(1, (-1, BLOCK)).double() for each in (rounded(x_NI), x_NI))
    most_NB1 = x_NBk.abs().amax(dim=-1, keepdim=True)
    assert ((found_NBk - x_NBk).abs() <= most_NB1 / 254 * (1 + 1e-6)).all()
    assert not found_NBk[3].any()
    assert not rounded(torch.full((1, 32), 1e-40)).any(), "127 divided by that is infinite"
    integers_k = (found_NBk / most_NB1 * 127)[4, 1].round()
    assert integers_k.tolist() == [round(127 * k / 16) for k in range(-16, 16)]


@compiled
@pytest.mark.parametrize("format", HEADERS)
def test_integers_of_the_largest_size_do_not_overflow(format: str) -> None:
    """Sums of products are kept in 16 bits for a while."""
    blocks = torch.full((16, 3, BLOCK_BYTES[format]), 0x80 if format == "q8_0" else 0xFF, dtype=torch.uint8)
    blocks[8:, :, 2 * HEADERS[format] :] = 0x7F if format == "q8_0" else 0x00
    blocks[..., : 2 * HEADERS[format]] = torch.ones(HEADERS[format]).half().view(torch.uint8)
    matrix = replace(Matrix.pack_blocks(format, blocks), int8_inputs=True)
    for sign in (1.0, -1.0):
        x_NI = sign * torch.full((3, 96), 5.0)
        expected = kernels.product_twin(x_NI, matrix)
        torch.testing.assert_close(kernels.product(x_NI, matrix), expected, rtol=1e-6, atol=1e-4)


# Row invariance


@compiled
@all_formats
@pytest.mark.parametrize("bias", [False, True])
def test_a_row_has_the_same_bits_whatever_rows_come_with_it(format: str, bias: bool) -> None:
    """Also whatever the number of threads, and wherever among the rows it is."""
    matrix, _, _ = packed(format, 150, 160)  # panels enough for the widest tiles, and a rest
    bias_O = torch.randn(150, generator=torch.Generator().manual_seed(1)) if bias else None
    x_NI = inputs_of(max(MANY_ROWS), 160)
    alone_NO = torch.cat([kernels.product(x_I[None], matrix, bias_O) for x_I in x_NI])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for rows in MANY_ROWS:
            first = 0 if threads == 1 else len(x_NI) - rows
            found_NO = kernels.product(x_NI[first : first + rows], matrix, bias_O)
            assert torch.equal(found_NO, alone_NO[first : first + rows]), (threads, rows)


@compiled
@all_formats
@pytest.mark.parametrize("outputs", [1, 16, 63, 64, 80])
def test_a_column_has_the_same_bits_whatever_columns_come_with_it(format: str, outputs: int) -> None:
    """Tensor parallelism and fused products may cut a matrix by its outputs."""
    random = torch.Generator().manual_seed(6)
    x_NI = inputs_of(20, 96)
    format, int8, _ = format.partition(INT8)
    if format in FLOATS:
        weight_OI = torch.randn(150, 96, generator=random).to(FLOATS[format])
        whole, part = Matrix.pack(weight_OI), Matrix.pack(weight_OI[:outputs])
    else:
        blocks = torch.randint(0, 256, (150, 3, BLOCK_BYTES[format]), generator=random).to(torch.uint8)
        blocks[..., 1 : 2 * HEADERS[format] : 2] = 0x21  # scales and minima near 0.01
        whole, part = Matrix.pack_blocks(format, blocks), Matrix.pack_blocks(format, blocks[:outputs])
        whole, part = (replace(matrix, int8_inputs=bool(int8)) for matrix in (whole, part))
    for rows in (1, 3, 8, 20):
        found, expected = (kernels.product(x_NI[:rows], matrix) for matrix in (part, whole))
        assert torch.equal(found, expected[:, :outputs]), rows


@compiled
@all_formats
@both_threads
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_row(format: str, threads: int, value: float) -> None:
    torch.set_num_threads(threads)
    matrix, _, _ = packed(format, 83, 160)
    for rows in (2, 5, 6, 9, 14, 40, 97):
        clean_NI = inputs_of(rows, 160)
        expected_NO = kernels.product(clean_NI, matrix)
        for row, column in ((0, 0), (rows // 2, 77), (rows - 1, 159)):
            dirty_NI = clean_NI.clone()
            dirty_NI[row, column] = value
            found_NO = kernels.product(dirty_NI, matrix)
            assert not found_NO[row].isfinite().any()
            others = torch.arange(rows) != row
            assert torch.equal(found_NO[others], expected_NO[others])


# As an operation of torch


@all_formats
def test_inference_mode_changes_nothing(format: str) -> None:
    matrix, _, _ = packed(format, 40, 96)
    x_NI = inputs_of(5, 96)
    expected = kernels.product(x_NI, matrix)
    with torch.inference_mode():
        assert torch.equal(kernels.product(x_NI, matrix), expected)
        inside, _, _ = packed(format, 40, 96)
        assert torch.equal(kernels.product(x_NI.clone(), inside), expected)
    with torch.no_grad():
        assert torch.equal(kernels.product(x_NI, inside), expected)


@all_formats
def test_it_is_a_well_behaved_operation_of_torch(format: str) -> None:
    """Its schema is true (it changes no argument), and fake tensors get the shape and type real ones have."""
    matrix, _, _ = packed(format, 40, 96)
    for rows, bias_O in ((1, None), (7, torch.ones(40))):
        arguments = (inputs_of(rows, 96), matrix.data, bias_O, matrix.format, 40, matrix.int8_inputs)
        torch.library.opcheck(
            torch.ops.paceline.product.default, arguments, test_utils=("test_schema", "test_faketensor")
        )


def test_fake_tensors_have_the_shape() -> None:
    matrix, _, _ = packed("q8_0", 40, 96)
    with FakeTensorMode() as mode:
        data = mode.from_tensor(matrix.data)
        fake = torch.ops.paceline.product(torch.empty(7, 96), data, None, "q8_0", 40, False)
    assert (tuple(fake.shape), fake.dtype, fake.device.type) == ((7, 40), torch.float32, "cpu")


def test_it_can_be_part_of_a_compiled_graph() -> None:
    matrix, _, _ = packed("bfloat16", 40, 96)

    def twice_and_one(x_NI: torch.Tensor) -> torch.Tensor:
        return 2 * torch.ops.paceline.product(x_NI, matrix.data, None, "bfloat16", 40, False) + 1

    graph = torch.compile(twice_and_one, backend="aot_eager", fullgraph=True)
    for rows in (1, 5, 40):
        x_NI = inputs_of(rows, 96)
        assert torch.equal(graph(x_NI), twice_and_one(x_NI))


@all_formats
def test_no_rows_give_no_rows(format: str) -> None:
    matrix, _, _ = packed(format, 40, 96)
    assert kernels.product(torch.empty(0, 96), matrix).shape == (0, 40)


@compiled
def test_threads_of_python_do_not_disturb_each_other() -> None:
    """Calls leave the interpreter's lock, so they really run at once."""
    made = [packed(format, 150, 160 + 32 * i) for i, format in enumerate(FORMATS)]
    inputs = [inputs_of(100, matrix.inputs) for matrix, _, _ in made]
    expected = [kernels.product(x_NI, matrix) for x_NI, (matrix, _, _) in zip(inputs, made, strict=True)]

    def work(i: int) -> bool:
        which = i % len(made)
        return torch.equal(kernels.product(inputs[which], made[which][0]), expected[which])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(120)))


def python(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("rows", [1, 7, 100])
def test_inputs_may_be_a_view(rows: int) -> None:
    """Its contiguous copy has to live until the product is there."""
    matrix, weight_OI, summed_OI = packed("float32", 40, 96)
    x_IN = inputs_of(96, 2 * rows)
    x_NI = x_IN.T[::2]
    check(kernels.product(x_NI, matrix), x_NI, weight_OI, summed_OI)


SWITCHED_OFF = """
import torch, paceline.kernels as kernels
weight = torch.arange(320.0).view(10, 32)
x = torch.arange(96.0).view(3, 32)
matrix = kernels.Matrix.pack(weight)
assert not kernels.available()
assert torch.equal(kernels.product(x, matrix, torch.ones(10)), x @ weight.T + 1)
assert torch.equal(kernels.product(x, matrix), kernels.product_twin(x, matrix))
print(kernels.notice())
"""


def test_without_kernels_torch_does_it_and_a_line_says_so() -> None:
    done = python(SWITCHED_OFF, PACELINE_KERNELS="0")
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout == (
        "Running on torch's own CPU kernels, which are slower: PACELINE_KERNELS=0 switches the CPU kernels off.\n"
    )


@pytest.mark.parametrize("shape", [(1, 64), (5, 576), (3, 2, 32), (0, 64)])
def test_the_norm_is_torchs(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape) * 7, torch.randn(shape[-1])
    found = kernels.norm(x, weight, 1e-5)
    assert found.shape == x.shape
    torch.testing.assert_close(found, torch.nn.functional.rms_norm(x, shape[-1:], weight, 1e-5))
    strided = torch.randn((*shape[:-1], 2 * shape[-1]))[..., ::2]
    torch.testing.assert_close(
        kernels.norm(strided, weight, 1e-5), torch.nn.functional.rms_norm(strided, shape[-1:], weight, 1e-5)
    )
