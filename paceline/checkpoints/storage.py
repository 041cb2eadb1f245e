"""What the weights of a checkpoint are held as in memory, decided from its headers alone, and what to tell of it.

Knows names of formats and sizes of matrices; no file, no architecture, no bytes. Imports no torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from gguf.constants import GGML_QUANT_SIZES

from paceline.checkpoints.gguf_file import BLOCKS

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""What a model can run in, with the bytes of one number."""
BLOCK_SIZES = {name: GGML_QUANT_SIZES[kind] for kind, name in BLOCKS.items()}
"""(weights, bytes) of a block in the formats that a CPU multiplies as they are."""
BLOCK, _ = BLOCK_SIZES["q8_0"]


class Matrix(NamedTuple):
    stored: str
    """Our name for its format on disk; the file's own for blocks that have to be dequantized."""
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Weights in memory. Vectors (norms, biases) are float32."""

    matrices: dict[str, int]
    """Bytes by format."""
    vectors: int
    """Bytes."""
    notes: list[str]


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What the weights shall be held as: what the caller asks for, and what the device can do."""

    dtype: str
    quantize: str | None
    packed: bool
    """Each matrix may have a format of its own. So on a CPU; elsewhere a model runs in one type."""

    def storage(self, matrices: Sequence[Matrix], numbers: int) -> Storage:
        """`numbers`: how many the model has in all, vectors included."""
        if self.dtype == "auto" and not self.packed:
            return replace(self, dtype=exact(matrix.stored for matrix in matrices)).storage(matrices, numbers)
        sizes: Counter[str] = Counter()
        deeds: dict[str, Counter[str]] = {}
        for matrix in matrices:
            size, format = math.prod(matrix.shape), self._format(matrix)
            block, block_bytes = BLOCK_SIZES.get(format) or (1, DTYPES[format])
            sizes[format] += size // block * block_bytes
            numbers -= size
            if deed := self._deed(matrix, format):
                stored = matrix.stored.upper() if matrix.stored in BLOCK_SIZES else matrix.stored
                deeds.setdefault(deed, Counter())[stored] += 1
        notes = []
        for deed, counts in deeds.items():
            named = ", ".join(f"{count} {stored}" for stored, count in counts.most_common())
            notes.append(f"{named} {'matrix' if counts.total() == 1 else 'matrices'} {deed}.")
        return Storage(matrices=dict(sizes), vectors=numbers * DTYPES["float32"], notes=notes)

    def _format(self, matrix: Matrix) -> str:
        stored = matrix.stored
        if self.packed and not _is_cut_into_blocks(matrix):
            return "float32"
        if self.quantize and stored not in BLOCK_SIZES:
            return self.quantize
        if self.dtype != "auto":
            return self.dtype
        return stored if stored in DTYPES or stored in BLOCK_SIZES else "float32"

    def _deed(self, matrix: Matrix, format: str) -> str | None:
        """What happens to such a matrix, for people; None where it stays as it is and nobody would ask."""
        stored = matrix.stored
        if stored in BLOCK_SIZES and format == stored:
            return "kept as the file's blocks" + ("; quantizing again would gain nothing" if self.quantize else "")
        if format == self.quantize:
            return f"quantized to {format.upper()}, which approximates the checkpoint; 'lossless' means: against this"
        if stored in ("float64", *DTYPES):
            wanted = self.quantize or (stored if self.dtype == "auto" else self.dtype)
            if wanted in ("float64", format):
                return None if format == stored else f"converted to {format}"
            return f"held as {format}: other formats take rows of a multiple of {BLOCK} weights"
        if format != "float32":
            return f"dequantized exactly to float32, then rounded to {format}"
        could = self.packed and self.dtype == "auto"
        return "dequantized exactly to float32" + (" (quantize='q8_0' takes less memory, and rounds)" * could)


def _is_cut_into_blocks(matrix: Matrix) -> bool:
    """As all GGUF blocks and the kernels' own floats other than float32 need it."""
    return matrix.shape[-1] % BLOCK == 0


def exact(formats: Iterable[str]) -> str:
    """The type that holds the numbers of all these exactly."""
    kinds = set(formats)
    kind = kinds.pop() if len(kinds) == 1 else "float32"
    return kind if kind in DTYPES else "float32"
