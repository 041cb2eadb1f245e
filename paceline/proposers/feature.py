"""Drafting from the target's hidden states, with a layer of its own (models/feature.py).

A slot's cache holds positions that were read with the target's hidden states, then those of the present draft, which
went on with the draft's own; the latter never outlive a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline.models.feature import FeatureDraft
from paceline.models.interface import Chunk
from paceline.proposers.base import Prospect, Request, best_chances
from paceline.sampling.distribution import Among, Distribution, Floats, on_host
from paceline.sampling.draft import Draft

FEW = 16
"""Positions that the next draft may read on its way; more are those of a prompt, and are read at once."""


@dataclass
class _Slot:
    read: int = 0
    """Positions that the cache holds with the target's hidden states."""
    unread: list[torch.Tensor] = field(default_factory=list)
    """The target's hidden states of the positions behind them, [T, F, H] each."""


@dataclass
class _Drafting:
    """One request while its draft grows."""

    request: Request
    k: int
    history: list[int]
    """Committed tokens, and what has been drafted behind them."""
    probs: list[Distribution] = field(default_factory=list)
    chance: float = 1.0
    """That all of it will be kept, as far as the draft can tell."""


class FeatureProposer:
    """Drafts with `model` for `slots` sequences of at most `capacity` tokens each. `among`: the draft vocabulary.

    A draft ends before a token with which the chance that all of it is kept would fall below `p_min`. That is decided
    by the draft's own logits ahead of the token, before it is drawn, so it is exact under every rule.
    """

    def __init__(
        self, model: FeatureDraft, among: Among | None, *, slots: int, capacity: int, p_min: float = 0.0
    ) -> None:
        self.model, self.among, self.features, self.p_min = model, among, model.features, p_min
        self._cache = model.new_cache(slots, min(capacity, model.config.context))
        self._slots = [_Slot() for _ in range(slots)]

    def begin(self, slot: int) -> None:
        self._slots[slot] = _Slot()
        self._cache.truncate(slot, 0)

    def observe(self, slot: int, tokens: Sequence[int], features_TFH: torch.Tensor | None = None) -> None:
        assert features_TFH is not None
        held = self._slots[slot]
        self._cache.truncate(slot, held.read)
        held.unread.append(features_TFH)
        if len(features_TFH) > FEW:
            self._read(slot, tokens)

    def prospects(self, requests: Sequence[Request]) -> list[Prospect | None]:
        return [
            Prospect("draft", by_model=True, unread=len(r.tokens) - self._slots[r.slot].read)
            if len(r.tokens) < self._cache.capacity + 2
            else None
            for r in requests
        ]

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        # The last token that is drafted is never read: k tokens fill k - 1 positions behind the committed ones.
        growing = [_Drafting(r, min(r.k, self._cache.capacity - len(r.tokens) + 2), list(r.tokens)) for r in requests]
        drafting = [g for g in growing if g.k > 0]
        if drafting:
            chunks, given = self._take(drafting)
            while True:
                logits_CD, hidden_CH = self.model(chunks, given, self._cache)
                chances = best_chances(logits_CD) if self.p_min else [1.0] * len(drafting)
                grown = [self._grow(*each) for each in zip(drafting, chances, on_host(logits_CD), strict=True)]
                if not (going_on := [n for n, g in enumerate(drafting) if grown[n] and len(g.probs) < g.k]):
                    break
                given = hidden_CH if len(going_on) == len(drafting) else hidden_CH[going_on]
                drafting = [drafting[n] for n in going_on]
                chunks = [Chunk(g.request.slot, g.history[-1:]) for g in drafting]
        return [Draft(tuple(g.history[len(g.request.tokens) :]), tuple(g.probs)) for g in growing]

    def _read(self, slot: int, tokens: Sequence[int]) -> None:
        """Into the cache, all positions but the last, which is left for a draft to begin from."""
        held = self._slots[slot]
        features_TFH = torch.cat(held.unread)
        end = held.read + len(features_TFH) - 1
        chunk = Chunk(slot, tokens[held.read + 1 : end + 1])
        self.model([chunk], features_TFH[:-1], self._cache)
        held.read, held.unread = end, [features_TFH[-1:]]

    def _take(self, drafting: Sequence[_Drafting]) -> tuple[list[Chunk], torch.Tensor]:
        """What the first step of each draft reads: all that was committed since the last one."""
        chunks, features = [], []
        for g in drafting:
            held = self._slots[g.request.slot]
            # Behind position t stands the token t + 1, so the last position that can be read is the last but one.
            chunks.append(Chunk(g.request.slot, g.request.tokens[held.read + 1 :]))
            features += held.unread
            assert len(chunks[-1].tokens) == sum(map(len, held.unread))
            held.read, held.unread = len(g.request.tokens) - 1, []
        return chunks, features[0] if len(features) == 1 else torch.cat(features)

    def _grow(self, g: _Drafting, chance: float, logits_D: Floats) -> bool:
        """Draw one token more, unless the draft ends here."""
        g.chance *= chance
        if g.chance < self.p_min:
            return False
        sampler, anchor, position = g.request.sampler, len(g.request.tokens), len(g.history)
        q = sampler.distribution(logits_D, g.history, among=self.among)
        g.probs.append(q)
        g.history.append(sampler.propose(q, position, anchor))
        return True
