"""Weights as GGUF blocks: what the bytes of Q8_0, Q4_0 and Q4_1 mean, and how a matrix becomes Q8_0.

This is the readable side, in plain torch, that the kernels are tested against; it knows no file and no kernel.

A block is 32 weights of one row: a float16 scale d, in Q4_1 a float16 minimum m, then the codes q. Q8_0 has signed
bytes, w = d q. The others have 16 bytes whose low halves are the first 16 codes and whose high halves are the last:
w = d (q - 8) in Q4_0, w = d q + m in Q4_1.

Shapes: O outputs, I inputs, R rows of a slab, B = I / 32 blocks of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

BLOCK = 32
BLOCK_BYTES = {"q8_0": 34, "q4_0": 18, "q4_1": 20}
SLAB = 1 << 17
"""Weights converted at once: as float32 they are 0.5 MB, what a core's own cache holds."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Quantized:
    """A [O, I] matrix as GGUF blocks of 32 weights along I."""

    format: str
    """A key of BLOCK_BYTES."""
    blocks: torch.Tensor
    """uint8 [O, I / 32, bytes of a block], exactly as a GGUF file has them."""

    def __post_init__(self) -> None:
        assert self.blocks.dtype == torch.uint8
        assert self.blocks.dim() == 3
        assert self.blocks.shape[2] == BLOCK_BYTES[self.format]

    @property
    def shape(self) -> tuple[int, int]:
        rows, blocks, _ = self.blocks.shape
        return rows, blocks * BLOCK

    def dequantize(self) -> torch.Tensor:
        """[O, I] float32, each weight exactly what the format says it is."""
        weight_OI = torch.empty(self.shape, dtype=torch.float32, device=self.blocks.device)
        for rows in _slabs(*self.shape):
            weight_OI[rows] = _weights(self.format, self.blocks[rows]).flatten(1)
        return weight_OI


def quantize(weight_OI: torch.Tensor) -> Quantized:
    """Q8_0 by the rule of GGUF's reference: d = max |w| / 127, q = w / d rounded, halves away from zero.

    Codes come from d before it is rounded to float16. ValueError where the blocks cannot hold the matrix.
    """
    outputs, inputs = weight_OI.shape
    if inputs % BLOCK:
        raise ValueError(
            f"rows of {inputs} weights cannot be cut into Q8_0's blocks of {BLOCK}: keep this matrix as it is"
        )
    shape = (outputs, inputs // BLOCK, BLOCK_BYTES["q8_0"])
    blocks = torch.empty(shape, dtype=torch.uint8, device=weight_OI.device)
    for rows in _slabs(outputs, inputs):
        w_RB32 = weight_OI[rows].float().unflatten(1, (-1, BLOCK))
        scale_RB1 = w_RB32.abs().amax(dim=2, keepdim=True) / 127
        half_RB1 = scale_RB1.half()
        if not half_RB1.isfinite().all():
            raise ValueError(
                f"a matrix holds {w_RB32.abs().max().item():g}, and Q8_0 holds numbers up to {127 * 65504:g} (its "
                "scales are float16): load the model without quantize, or from an undamaged file"
            )
        inverse_RB1 = 1 / scale_RB1
        inverse_RB1[inverse_RB1.isinf()] = 0  # a block of zeros, or of numbers too small for float16
        size_RB32 = (w_RB32 * inverse_RB1).abs()
        whole_RB32 = size_RB32.floor()
        codes_RB32 = w_RB32.sign() * (whole_RB32 + (2 * (size_RB32 - whole_RB32)).floor())
        blocks[rows, :, :2] = half_RB1.view(torch.uint8)
        blocks[rows, :, 2:] = codes_RB32.to(torch.int8).view(torch.uint8)
    return Quantized(format="q8_0", blocks=blocks)


def _weights(format: str, blocks: torch.Tensor) -> torch.Tensor:
    """[R, B, 32] float32 from [R, B, bytes of a block]."""
    scale_RB1 = _float(blocks[..., 0:2])
    if format == "q8_0":
        return scale_RB1 * blocks[..., 2:].view(torch.int8).float()
    pairs_RB16 = blocks[..., -BLOCK // 2 :]
    codes_RB32 = torch.cat((pairs_RB16 & 0xF, pairs_RB16 >> 4), dim=-1).float()
    if format == "q4_0":
        return scale_RB1 * (codes_RB32 - 8)
    return scale_RB1 * codes_RB32 + _float(blocks[..., 2:4])


def _float(halves: torch.Tensor) -> torch.Tensor:
    return halves.contiguous().view(torch.float16).float()


def _slabs(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, SLAB // columns)
    return (slice(begin, begin + step) for begin in range(0, rows, step))
