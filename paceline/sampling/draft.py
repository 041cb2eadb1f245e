"""What a proposer hands over: tokens, and the distributions they were really drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Draft:
    """K tokens in a row. `probs` [K, V] over the target's vocabulary: row i is the q that tokens[i] was drawn from."""

    tokens: tuple[int, ...]
    probs: torch.Tensor

    def __post_init__(self) -> None:
        assert self.probs.shape[0] == len(self.tokens), (self.probs.shape, self.tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    @staticmethod
    def empty() -> Draft:
        """Nothing proposed: the round is plain decoding."""
        return Draft((), torch.zeros(0, 0))

    @staticmethod
    def certain(tokens: Sequence[int], vocab_size: int, device: torch.device) -> Draft:
        """Tokens proposed without chance: each q is one-hot."""
        probs_KV = torch.zeros(len(tokens), vocab_size, device=device)
        probs_KV[torch.arange(len(tokens)), list(tokens)] = 1
        return Draft(tuple(tokens), probs_KV)
