"""Several proposers, each asked where those before it have nothing to propose.

Which of them drafts is decided by what was committed alone, before anything is sampled, so it cannot bias the output.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.proposers.base import Proposer, Prospect, Request
from paceline.sampling.draft import Draft


class FirstOf:
    """The hidden states they need are those of the one that needs any."""

    def __init__(self, *proposers: Proposer) -> None:
        self.proposers = proposers
        needs = [proposer.features for proposer in proposers if proposer.features]
        assert len(needs) <= 1, needs
        self.features: tuple[int, ...] = needs[0] if needs else ()

    def begin(self, slot: int) -> None:
        for proposer in self.proposers:
            proposer.begin(slot)

    def prospects(self, requests: Sequence[Request]) -> list[Prospect | None]:
        of_each = [proposer.prospects(requests) for proposer in self.proposers]
        return [next((ahead for ahead in found if ahead), None) for found in zip(*of_each, strict=True)]

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        drafts = [Draft() for _ in requests]
        for proposer in self.proposers:
            left = [n for n, draft in enumerate(drafts) if not draft.tokens]
            if left:
                found = proposer.propose([requests[n] for n in left])
                for n, draft in zip(left, found, strict=True):
                    drafts[n] = draft
        return drafts

    def observe(self, slot: int, tokens: Sequence[int], features_TFH: torch.Tensor | None = None) -> None:
        for proposer in self.proposers:
            proposer.observe(slot, tokens, features_TFH)
