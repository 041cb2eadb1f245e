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

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

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
    """The random numbers of one completion: `sample` tells the n completions of a prompt apart.

    One thread at a time may ask: the generator is kept, since making one takes several times as long as a number.
    """

    seed: int
    sample: int = 0
    _generator: np.random.Philox = field(init=False, repr=False, compare=False)
    _state: dict[str, Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        key = np.array([self.seed % 2**64, self.sample], dtype=np.uint64)
        object.__setattr__(self, "_generator", np.random.Philox(key=key))
        object.__setattr__(self, "_state", self._generator.state)

    def uniforms(self, purpose: Purpose, position: int, anchor: int, count: int) -> npt.NDArray[np.float64]:
        """`count` numbers in [0, 1), on a grid of 2^-53."""
        return (self.seek(purpose, position, anchor).random_raw(count) >> np.uint64(11)) * 2.0**-53

    def uniform(self, purpose: Purpose, position: int, anchor: int) -> float:
        """The first of them."""
        return (self.seek(purpose, position, anchor).random_raw() >> 11) * 2.0**-53

    def seek(self, purpose: Purpose, position: int, anchor: int) -> np.random.Philox:
        """The generator, about to give the numbers of this address."""
        self._state["state"]["counter"][1:] = (purpose, position, anchor)
        self._generator.state = self._state  # type: ignore[assignment]
        return self._generator
