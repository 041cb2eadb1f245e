"""What a proposer hands over: tokens, and the distributions they were really drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.sampling.distribution import Distribution


@dataclass(frozen=True, eq=False)
class Draft:
    """K tokens in a row; `probs[i]`, over the target's vocabulary, is the q that `tokens[i]` was drawn from."""

    tokens: tuple[int, ...] = ()
    probs: tuple[Distribution, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.probs) == len(self.tokens), (len(self.probs), self.tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    @staticmethod
    def certain(tokens: Sequence[int], vocab_size: int) -> Draft:
        """Tokens proposed without chance."""
        one = np.ones(1, np.float32)
        return Draft(tuple(tokens), tuple(Distribution(vocab_size, one, np.array([token])) for token in tokens))
