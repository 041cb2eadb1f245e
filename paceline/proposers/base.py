"""What every proposer implements. It sees committed tokens, a sampler and, where it asks for them, the target's hidden
states at these tokens; it never sees the target's model.

A proposer serves the sequences of one run, told apart by their slots. It may always propose fewer tokens than asked
for, none included, as long as it decides so before the tokens in question are sampled: dropping a sampled token
because of what it is would bias the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

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


@dataclass(frozen=True)
class Prospect:
    """What a draft would be, told before it is drafted and from committed tokens alone."""

    kind: str
    """Drafts of a kind are accepted about alike."""
    by_model: bool = False
    """A model drafts, which takes time; otherwise it takes none worth counting."""
    unread: int = 0
    """Tokens that the model would have to read first, beyond those of every round."""
    most: int | None = None
    """Tokens that it can draft at all, where that is a fixed number."""


class Proposer(Protocol):
    @property
    def features(self) -> tuple[int, ...]:
        """Hidden states that every pass of the target shall capture, by the indices of `LanguageModel`; () for none."""
        ...

    def begin(self, slot: int) -> None:
        """A new sequence enters this slot; whatever the slot held before is gone."""
        ...

    def prospects(self, requests: Sequence[Request]) -> list[Prospect | None]:
        """What `propose` would do for each; None where it would draft nothing. Changes nothing that shows."""
        ...

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        """A draft for each request, its `probs` the distributions its tokens were drawn from."""
        ...

    def observe(self, slot: int, tokens: Sequence[int], features_TFH: torch.Tensor | None = None) -> None:
        """A round ended: `tokens` are all committed tokens now. Forget everything drafted that is not among them.

        `features_TFH`: the hidden states that were asked for, at the T committed tokens that this pass of the target
        read for the first time. They follow those of the rounds before; the last token of all has none yet.
        """
        ...


def best_chances(logits_CD: torch.Tensor) -> list[float]:
    """[C] how probable the most probable token of each row is: about the chance that a token drawn there is kept."""
    chances: list[float] = logits_CD.softmax(-1).amax(-1).tolist()
    return chances


class NoProposer:
    """Plain decoding: never proposes anything."""

    features: tuple[int, ...] = ()

    def begin(self, slot: int) -> None:
        pass

    def prospects(self, requests: Sequence[Request]) -> list[Prospect | None]:
        return [None for _ in requests]

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        return [Draft() for _ in requests]

    def observe(self, slot: int, tokens: Sequence[int], features_TFH: torch.Tensor | None = None) -> None:
        pass
