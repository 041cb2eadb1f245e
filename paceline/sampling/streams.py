"""Random numbers with addresses: each is a function of where it is used, none is consumed from a shared sequence.

Results therefore depend neither on the batch, nor on threads, nor on what else ran. The generator is numpy's
Philox-4x64-10, counter-based: key = (seed, sample), counter = (block, purpose, position, anchor).

Why an anchor. Under a ratio rule (`token`, `block`) a round that starts after n committed tokens may decide about
position n + 3 and then commit only two tokens, so a later round comes back to n + 3. Block verification has by then
conditioned on the numbers used there: using them again would bias the output. The anchor n, which grows with every
round, makes each round's numbers new. Coupled verification wants the opposite, the same numbers whenever a position
is visited, and takes anchor 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt


class Purpose(IntEnum):
    """What a number decides. Proposal, acceptance and recovery must be independent, so each has its own numbers."""

    PROPOSE = 0
    ACCEPT = 1
    NEXT = 2
    """The recovered or bonus token that ends a round."""
    COUPLE = 3
    """The noise that draft and target share under coupled verification, and under no other rule."""


@dataclass(frozen=True)
class Stream:
    """The random numbers of one completion: `sample` tells the n completions of a prompt apart."""

    seed: int
    sample: int = 0

    def uniforms(self, purpose: Purpose, position: int, anchor: int, count: int) -> npt.NDArray[np.float64]:
        """`count` numbers in [0, 1), on a grid of 2^-53."""
        generator = np.random.Philox(
            key=np.array([self.seed % 2**64, self.sample], dtype=np.uint64),
            counter=np.array([0, purpose, position, anchor], dtype=np.uint64),
        )
        return (generator.random_raw(count) >> np.uint64(11)) * 2.0**-53

    def uniform(self, purpose: Purpose, position: int, anchor: int) -> float:
        return float(self.uniforms(purpose, position, anchor, 1)[0])
