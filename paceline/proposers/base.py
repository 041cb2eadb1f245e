"""What every proposer implements. It sees committed tokens and a sampler; it never sees the target's model.

A proposer serves the sequences of one run, told apart by their slots. It may always propose fewer tokens than asked
for, none included, as long as it decides so before the tokens in question are sampled: dropping a sampled token
because of what it is would bias the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.sampling.draft import Draft
from paceline.sampling.sampler import Sampler


@dataclass(frozen=True, kw_only=True)
class Request:
    """One sequence that wants tokens proposed."""

    slot: int
    tokens: Sequence[int]
    """All committed tokens, prompt and output. Their number is the anchor of this round's random numbers."""
    k: int
    """Propose at most this many, 1 at least."""
    sampler: Sampler


class Proposer(Protocol):
    def begin(self, slot: int) -> None:
        """A new sequence enters this slot; whatever the slot held before is gone."""
        ...

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        """A draft for each request, its `probs` the distributions its tokens were drawn from."""
        ...

    def observe(self, slot: int, tokens: Sequence[int]) -> None:
        """A round ended: `tokens` are all committed tokens now. Forget everything drafted that is not among them."""
        ...


class NoProposer:
    """Plain decoding: never proposes anything."""

    def begin(self, slot: int) -> None:
        pass

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        return [Draft() for _ in requests]

    def observe(self, slot: int, tokens: Sequence[int]) -> None:
        pass
