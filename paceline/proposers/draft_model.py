"""A second language model that drafts: the paper's own proposer (arXiv 2302.01318, Algorithm 2).

It keeps a cache of its own, behind the same slots as the target's, and reads what the target committed since it last
drafted: after a full acceptance that is its own last token and the bonus token, both of which it has never processed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline.models.interface import Chunk, LanguageModel
from paceline.proposers.base import Prospect, Request, best_chances
from paceline.proposers.vocabulary import Vocabulary
from paceline.sampling.distribution import Distribution, on_host
from paceline.sampling.draft import Draft

READ_CHUNK = 512
"""Tokens of a long prompt that the draft reads in one pass."""


@dataclass
class _Slot:
    """What a slot's cache holds: the target's tokens, and how many of the draft's positions they fill up to each."""

    tokens: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    committed: int = 0
    """Tokens that are known to be committed; those behind them were drafted, or read since."""

    def append(self, token: int, width: int) -> None:
        self.tokens.append(token)
        self.ends.append((self.ends[-1] if self.ends else 0) + width)

    def cut(self, length: int) -> int:
        """Keep the first `length` tokens, which are committed; returns the positions they fill."""
        del self.tokens[length:], self.ends[length:]
        self.committed = length
        return self.ends[-1] if self.ends else 0


@dataclass
class _Drafting:
    """One request while its draft grows."""

    request: Request
    k: int
    unread: list[int]
    """The draft's own ids that its cache does not hold yet."""
    history: list[int]
    """Committed tokens, and what has been drafted behind them."""
    probs: list[Distribution] = field(default_factory=list)
    chance: float = 1.0
    """That all of it will be kept, as far as the draft can tell."""
    ended: bool = False

    @property
    def tokens(self) -> list[int]:
        return self.history[len(self.request.tokens) :]


class DraftModelProposer:
    """Drafts with `model` for `slots` sequences of at most `capacity` target tokens each.

    A sequence longer than the draft's own context gets no draft, and shorter drafts close to that limit. A draft ends
    before a token with which the chance that all of it is kept would fall below `p_min`; that is decided by the logits
    ahead of the token, before it is drawn.
    """

    features: tuple[int, ...] = ()

    def __init__(
        self, model: LanguageModel, vocabulary: Vocabulary, *, slots: int, capacity: int, p_min: float = 0.0
    ) -> None:
        self.model, self.vocabulary, self.p_min = model, vocabulary, p_min
        # Respelled tokens may take several of the draft's positions each.
        room = capacity if vocabulary.identical else 2 * capacity
        self._cache = model.new_cache(slots, min(model.context, room))
        self._slots = [_Slot() for _ in range(slots)]

    def begin(self, slot: int) -> None:
        self._cache.truncate(slot, self._slots[slot].cut(0))

    def observe(self, slot: int, tokens: Sequence[int], features_TFH: torch.Tensor | None = None) -> None:
        held = self._slots[slot]
        # The last committed token is read anew, so that there is always something to predict from.
        most = min(len(held.tokens), len(tokens) - 1)
        stands = min(held.committed, most)
        while stands < most and held.tokens[stands] == tokens[stands]:
            stands += 1
        self._cache.truncate(slot, held.cut(stands))

    def prospects(self, requests: Sequence[Request]) -> list[Prospect | None]:
        ahead: list[Prospect | None] = []
        for request in requests:
            unread = len(request.tokens) - len(self._slots[request.slot].tokens)
            room = self._cache.capacity - self._cache.length(request.slot) - unread
            ahead.append(Prospect("draft", by_model=True, unread=unread) if room >= 0 else None)
        return ahead

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        growing = [self._read(request) for request in requests]
        step = 0
        while active := [g for g in growing if g.k > step and not g.ended]:
            scores = self.model([Chunk(g.request.slot, g.unread) for g in active], self._cache)
            for g, logits_1D in zip(active, scores.logits, strict=True):
                self._grow(g, logits_1D)
            step += 1
        return [Draft(tuple(g.tokens), tuple(g.probs)) for g in growing]

    def _read(self, request: Request) -> _Drafting:
        """Read what was committed since the last draft, all but the last chunk of it; decide how far to draft."""
        slot, held = request.slot, self._slots[request.slot]
        committed = request.tokens[len(held.tokens) :]
        spelled = [self.vocabulary.spell(token) for token in committed]
        unread = [i for spelling in spelled for i in spelling]
        # The last drafted token is never processed: k tokens fill k - 1 positions.
        k = min(request.k, self._cache.capacity - self._cache.length(slot) - len(unread) + 1)
        if k < 1:
            return _Drafting(request, 0, [], [])
        for token, spelling in zip(committed, spelled, strict=True):
            held.append(token, len(spelling))
        while len(unread) > READ_CHUNK:
            self.model([Chunk(slot, unread[:READ_CHUNK], outputs=0)], self._cache)
            unread = unread[READ_CHUNK:]
        return _Drafting(request, k, unread, list(request.tokens))

    def _grow(self, g: _Drafting, logits_1D: torch.Tensor) -> None:
        sampler, anchor, position = g.request.sampler, len(g.request.tokens), len(g.history)
        if position > anchor:
            self._slots[g.request.slot].append(g.history[-1], 1)
        if self.p_min:
            g.chance *= best_chances(logits_1D)[0]
            g.ended = g.chance < self.p_min
            if g.ended:
                return
        q = sampler.distribution(self.vocabulary.to_target(on_host(logits_1D)[0]), g.history)
        token = sampler.propose(q, position, anchor)
        g.probs.append(q)
        g.history.append(token)
        g.unread = list(self.vocabulary.spell(token))
