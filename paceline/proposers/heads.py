"""Drafting with heads on the target (models/heads.py): all tokens of a draft from one hidden state.

The q of a draft is the product of the heads' distributions, and each token is really drawn from its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.models.heads import Heads
from paceline.proposers.base import Prospect, Request, best_chances
from paceline.sampling.distribution import Among, Distribution, on_host
from paceline.sampling.draft import Draft


class HeadsProposer:
    """Drafts with `model`, as many tokens as it has heads at most. `among`: the draft vocabulary; `p_min` as for
    `FeatureProposer`."""

    def __init__(self, model: Heads, among: Among | None, *, p_min: float = 0.0) -> None:
        self.model, self.among, self.features, self.p_min = model, among, model.features, p_min
        self._last: dict[int, torch.Tensor] = {}

    def begin(self, slot: int) -> None:
        self._last.pop(slot, None)

    def observe(self, slot: int, tokens: Sequence[int], features_TFH: torch.Tensor | None = None) -> None:
        assert features_TFH is not None
        self._last[slot] = features_TFH[-1, 0]

    def prospects(self, requests: Sequence[Request]) -> list[Prospect | None]:
        return [Prospect("heads", by_model=True, most=len(self.model.layers)) for _ in requests]

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        most = min(max(r.k for r in requests), len(self.model.layers))
        logits_NKD = self.model(torch.stack([self._last[r.slot] for r in requests]), most)
        return [self._draft(r, logits_KD) for r, logits_KD in zip(requests, logits_NKD, strict=True)]

    def _draft(self, request: Request, logits_KD: torch.Tensor) -> Draft:
        history, probs, chance = list(request.tokens), list[Distribution](), 1.0
        logits_KD = logits_KD[: request.k]
        chances = best_chances(logits_KD) if self.p_min else [1.0] * len(logits_KD)
        for of_best, logits_D in zip(chances, on_host(logits_KD), strict=True):
            chance *= of_best
            if chance < self.p_min:
                break
            q = request.sampler.distribution(logits_D, history, among=self.among)
            probs.append(q)
            history.append(request.sampler.propose(q, len(history), len(request.tokens)))
        return Draft(tuple(history[len(request.tokens) :]), tuple(probs))
