"""Rotary position embedding: every kind of scaling we know, and the angles of positions kept for the next pass.

Shapes: N tokens of a pass, P positions, Q query heads, D head size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from paceline.models.config import Rope

Rotation = tuple[torch.Tensor, torch.Tensor]
"""cos and sin of every token's angles, [N, 1, D] each; the first half of sin is negated (see `rotate`)."""


def rotate(x_NQD: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Turn each pair (x[d], x[d + D/2]) by its angle: the second term swaps the halves, its sign is in sin."""
    cos_N1D, sin_N1D = rotation
    return torch.addcmul(x_NQD * cos_N1D, x_NQD.roll(x_NQD.shape[-1] // 2, dims=-1), sin_N1D)


BLOCK = 256
"""Positions whose angles are computed together."""


class Table:
    """cos and sin of all positions up to the longest sequence so far. It grows, and what is there never changes."""

    def __init__(self, rope: Rope, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._rope, self._head_dim = rope, head_dim
        empty = torch.empty(0, 1, head_dim, dtype=dtype, device=device)
        self._angles: Rotation = (empty, empty)

    def upto(self, stop: int) -> Rotation:
        """Of the positions 0..stop - 1, and maybe more."""
        if stop > len(self._angles[0]):
            self._grow(stop)
        return self._angles

    def at(self, spans: Sequence[tuple[int, int]]) -> Rotation:
        """Of the positions start..stop - 1 of each span, one span behind the other."""
        cos_P1D, sin_P1D = self.upto(max(stop for _, stop in spans))
        if len(spans) == 1:
            ((start, stop),) = spans
            return cos_P1D[start:stop], sin_P1D[start:stop]
        cos, sin = ([whole[start:stop] for start, stop in spans] for whole in (cos_P1D, sin_P1D))
        return torch.cat(cos), torch.cat(sin)

    # Kept for later passes, some of which may want gradients: never inference tensors, wherever they are first asked.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _grow(self, longest: int) -> None:
        """By whole blocks, always the same ones: torch's powers may round differently at the end of a tensor."""
        cos, sin = ([whole] for whole in self._angles)
        for begin in range(len(cos[0]), max(longest, 2 * len(cos[0])), BLOCK):
            positions_N = torch.arange(begin, begin + BLOCK, dtype=torch.float32, device=cos[0].device)
            for parts, part in zip(
                (cos, sin), rotation(self._rope, self._head_dim, positions_N, cos[0].dtype), strict=True
            ):
                parts.append(part)
        self._angles = torch.cat(cos), torch.cat(sin)


@functools.lru_cache(maxsize=64)
def table(rope: Rope, head_dim: int, dtype: torch.dtype, device: torch.device) -> Table:
    return Table(rope, head_dim, dtype, device)


def rotation(rope: Rope, head_dim: int, positions_N: torch.Tensor, dtype: torch.dtype) -> Rotation:
    if rope.kind == "dynamic" and rope.factors is None:
        angles_ND, scale = positions_N[:, None] * _dynamic_frequencies(rope, head_dim, positions_N), 1.0
    else:
        frequencies_D, scale = _frequencies(rope, head_dim)
        angles_ND = positions_N[:, None] * frequencies_D.to(positions_N.device)
    cos, sin = angles_ND.cos(), angles_ND.sin()
    cos_N1D, sin_N1D = torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]
    if scale != 1.0:
        cos_N1D, sin_N1D = cos_N1D * scale, sin_N1D * scale
    return cos_N1D.to(dtype), sin_N1D.to(dtype)


def _dynamic_frequencies(rope: Rope, head_dim: int, positions_N: torch.Tensor) -> torch.Tensor:
    """NTK scaling whose base grows once a sequence is longer than the original context: [N, D/2].

    transformers takes the base from the longest position of the pass, so beyond the original context its numbers
    depend on how a text was cut into passes. Here each token takes the base of a sequence that ends with it. That is
    transformers' result within the original context and for text decoded one token at a time, and it depends on the
    position alone: scoring a draft, truncating and prefilling in chunks all give the same keys.
    """
    assert rope.original_context is not None
    lengths_N = (positions_N + 1).clamp(min=rope.original_context)
    stretch_N = rope.factor * lengths_N / rope.original_context - (rope.factor - 1)
    bases_N = rope.theta * stretch_N ** (head_dim / (head_dim - 2))
    exponents_D = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions_N.device) / head_dim
    return 1.0 / bases_N[:, None] ** exponents_D


def _frequencies(rope: Rope, head_dim: int) -> tuple[torch.Tensor, float]:
    """Radians per position of each pair, [D/2], and what cos and sin are multiplied by."""
    powers_D = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    plain_D = 1.0 / powers_D
    if rope.factors is not None:
        if len(rope.factors) != head_dim // 2:
            raise ValueError(
                f"{len(rope.factors)} rope factors for heads of size {head_dim}, which need {head_dim // 2}: "
                "is the checkpoint damaged?"
            )
        return plain_D / torch.tensor(rope.factors, dtype=torch.float32, device="cpu"), 1.0
    if rope.kind == "default":
        return plain_D, 1.0
    if rope.kind == "linear":
        return plain_D / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain_D), 1.0
    assert rope.kind == "yarn"
    return _yarn(rope, powers_D, head_dim), _yarn_scale(rope)


def _llama3(rope: Rope, plain_D: torch.Tensor) -> torch.Tensor:
    """Waves that fit the original context often stay, those that hardly do are stretched, with a ramp between."""
    assert rope.original_context is not None
    turns_D = rope.original_context * plain_D / (2 * math.pi)
    kept_D = (turns_D - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept_D = kept_D.clamp(0.0, 1.0)
    return plain_D * (kept_D + (1 - kept_D) / rope.factor)


def _yarn(rope: Rope, powers_D: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Pairs turning more than `beta_fast` times in the original context stay, fewer than `beta_slow` are stretched."""
    context = rope.original_context
    assert context is not None

    def pair_turning(times: float) -> float:
        return head_dim * math.log(context / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    pairs_D = torch.arange(head_dim // 2, dtype=torch.float32)
    stretched_D = ((pairs_D - low) / ((high - low) or 0.001)).clamp(0.0, 1.0)
    return stretched_D / (rope.factor * powers_D) + (1 - stretched_D) / powers_D


def _yarn_scale(rope: Rope) -> float:
    def gain(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return gain(rope.mscale) / gain(rope.mscale_all_dim)
    return gain(1.0)
