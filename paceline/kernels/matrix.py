"""Weight matrices as `rows.c` reads them: in panels of 16 outputs, whatever the format. Knows no model.

Packing moves bytes and changes none: a float keeps its bits, a GGUF block its scale and its integers.

Shapes: O outputs, I inputs, P panels of 16 outputs, B = I / 32 blocks.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

PANEL = 16
BLOCK = 32
FORMATS = ("float32", "bfloat16", "float16", "q8_0", "q4_0", "q4_1")
"""In the order of the enumeration in rows.c."""
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HEADERS = {"q8_0": 1, "q4_0": 1, "q4_1": 2}
"""How many float16 numbers lead a block: its scale and, for q4_1, its least value."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Matrix:
    """A [outputs, inputs] matrix, packed. `data` is [P, bytes of a panel], the last panel filled up with zeros.

    `int8_inputs`: what a matrix in blocks multiplies is rounded to int8 first (`rounded`), which is faster.
    """

    format: str
    outputs: int
    inputs: int
    data: torch.Tensor
    int8_inputs: bool = False

    @property
    def rounds(self) -> bool:
        """Whether what it multiplies is rounded: where its weights are floats, so are its inputs."""
        return self.int8_inputs and self.format not in FLOATS

    @staticmethod
    def fits(inputs: int) -> bool:
        """Whether rows of this length can be packed."""
        return inputs % BLOCK == 0

    @staticmethod
    def pack(weight_OI: torch.Tensor) -> Matrix:
        """From float32, bfloat16 or float16, with rows of a multiple of 32."""
        format = next(name for name, dtype in FLOATS.items() if dtype == weight_OI.dtype)
        outputs, inputs = weight_OI.shape
        assert Matrix.fits(inputs), inputs
        panels_PLI = _panels(weight_OI)
        if format == "bfloat16":  # words hold two inputs each
            packed = panels_PLI.unflatten(2, (-1, 2)).transpose(1, 2)
        else:
            packed = panels_PLI.transpose(1, 2)
        return Matrix(format=format, outputs=outputs, inputs=inputs, data=_bytes(packed))

    @staticmethod
    def pack_blocks(format: str, blocks_OBb: torch.Tensor) -> Matrix:
        """From GGUF blocks, [O, B, bytes of a block] as a file has them."""
        outputs, blocks = blocks_OBb.shape[:2]
        panels_PLBb = _panels(blocks_OBb)
        headers, numbers = panels_PLBb.split((2 * HEADERS[format], panels_PLBb.shape[-1] - 2 * HEADERS[format]), dim=-1)
        header_PBx = headers.unflatten(-1, (-1, 2)).permute(0, 2, 3, 1, 4).flatten(2)
        if format != "q8_0":
            # A file's byte holds inputs j and j + 16; a word here holds four inputs in its low nibbles and the
            # four after them in its high ones, so that sums run along the inputs.
            nibbles = torch.cat((numbers & 15, numbers >> 4), dim=-1).unflatten(-1, (-1, 2, 4))
            numbers = (nibbles[..., 0, :] | nibbles[..., 1, :] << 4).flatten(-2)
        words_PBx = numbers.unflatten(-1, (-1, 4)).permute(0, 2, 3, 1, 4).flatten(2)
        data = torch.cat((header_PBx, words_PBx), dim=-1)
        return Matrix(format=format, outputs=outputs, inputs=blocks * BLOCK, data=data.flatten(1).contiguous())

    def unpack(self, panels: Sequence[int] | slice = slice(None)) -> torch.Tensor:
        """[O, I] in float32, exactly, or the rows of some panels."""
        data = self.data[panels]
        if self.format in FLOATS:
            width = 2 if self.format == "bfloat16" else 1
            words = data.view(FLOATS[self.format]).view(data.shape[0], -1, PANEL, width)
            weight_OI = words.transpose(1, 2).reshape(data.shape[0] * PANEL, self.inputs).float()
        else:
            weight_OI = self._dequantized(data)
        return weight_OI[: self.outputs] if isinstance(panels, slice) else weight_OI

    def rows(self, indices_N: torch.Tensor) -> torch.Tensor:
        """[N, I] in float32: these rows of the matrix."""
        rows_NLI = self.unpack((indices_N // PANEL).tolist()).unflatten(0, (-1, PANEL))
        return rows_NLI[torch.arange(len(indices_N)), indices_N % PANEL]

    def _dequantized(self, data: torch.Tensor) -> torch.Tensor:
        blocks = data.view(data.shape[0], self.inputs // BLOCK, -1)
        header, words = blocks.split((32 * HEADERS[self.format], blocks.shape[-1] - 32 * HEADERS[self.format]), dim=-1)
        # [P, B, headers, 16] and [P, B, words, 16, 4]
        numbers = header.view(torch.float16).unflatten(-1, (-1, PANEL)).float()
        words = words.unflatten(-1, (-1, PANEL, 4))
        if self.format == "q8_0":
            integers = words.view(torch.int8)
        else:
            integers = torch.stack((words & 15, words >> 4), dim=3).flatten(2, 3)
        integers = integers.permute(0, 3, 1, 2, 4).flatten(3).float()
        scales = numbers.permute(0, 3, 1, 2)
        if self.format == "q8_0":
            weights = integers * scales
        elif self.format == "q4_0":
            weights = (integers - 8) * scales
        else:
            weights = integers * scales[..., :1] + scales[..., 1:]
        return weights.flatten(2).flatten(0, 1)


def in_large_pages(size: int) -> torch.Tensor:
    """[size] bytes, in pages of megabytes where the system has them: of small ones a pass reads tens of thousands, and
    their addresses push all others out of the processor's tables."""
    large = 2 << 20
    held = mmap.mmap(-1, size + large)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system built without them
            held.madvise(mmap.MADV_HUGEPAGE)
    bytes_B = torch.frombuffer(held, dtype=torch.uint8)
    begin = -bytes_B.data_ptr() % large
    return bytes_B[begin : begin + size]


def rounded(x_NI: torch.Tensor) -> torch.Tensor:
    """[N, I] as the kernels round it to int8: each block of 32 inputs of a row is integers from -127 to 127, to even,
    times a scale, which is its largest size over 127."""
    x_NBk = x_NI.unflatten(-1, (-1, BLOCK))
    most_NB1 = x_NBk.abs().amax(dim=-1, keepdim=True)
    inverse_NB1 = torch.where(most_NB1 > 2.0**-120, 127 / most_NB1, 0)
    return ((x_NBk * inverse_NB1).round() * (most_NB1 / 127)).flatten(-2)


def _panels(rows_O: torch.Tensor) -> torch.Tensor:
    """[O, ...] -> [P, 16, ...], with rows of zeros at the end."""
    missing = -rows_O.shape[0] % PANEL
    padding = (0, 0) * (rows_O.dim() - 1) + (0, missing)
    return (F.pad(rows_O, padding) if missing else rows_O).unflatten(0, (-1, PANEL))


def _bytes(packed: torch.Tensor) -> torch.Tensor:
    return packed.contiguous().view(torch.uint8).flatten(1)
