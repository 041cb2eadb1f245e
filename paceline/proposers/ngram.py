"""Prompt lookup: what followed the longest earlier occurrence of the present suffix, over prompt and output.

Costs no model and no training; pays where the output repeats its prompt or itself (code, summaries, extraction).
Its tokens are proposed without chance, so each q is one-hot.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline.proposers.base import Request
from paceline.sampling.draft import Draft


@dataclass
class _Index:
    """Where each n-gram of a slot's tokens ends, in order."""

    indexed: int = 0
    ends: defaultdict[tuple[int, ...], list[int]] = field(default_factory=lambda: defaultdict(list))


class NgramProposer:
    """Looks up the last `shortest` tokens and takes the occurrence that agrees furthest back, the latest among equals.

    `vocab_size` is the target's; at most `candidates` occurrences are compared, the latest ones.
    """

    features: tuple[int, ...] = ()

    def __init__(self, vocab_size: int, *, shortest: int = 3, longest: int = 16, candidates: int = 64) -> None:
        self.vocab_size = vocab_size
        self.shortest, self.longest, self.candidates = shortest, longest, candidates
        self._indices: dict[int, _Index] = {}

    def begin(self, slot: int) -> None:
        self._indices[slot] = _Index()

    def observe(self, slot: int, tokens: Sequence[int], features_TFH: torch.Tensor | None = None) -> None:
        """Committed tokens never change, so the index only grows: nothing drafted ever enters it."""
        index, n = self._indices[slot], self.shortest
        # The suffix itself must not be found: its own end is indexed once a token follows it.
        for end in range(max(index.indexed, n), len(tokens)):
            index.ends[tuple(tokens[end - n : end])].append(end)
        index.indexed = max(index.indexed, len(tokens))

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        return [self._propose(request) for request in requests]

    def _propose(self, request: Request) -> Draft:
        self.observe(request.slot, request.tokens)
        tokens = request.tokens
        ends = self._indices[request.slot].ends.get(tuple(tokens[-self.shortest :]))
        if not ends:
            return Draft()
        end, agreed = 0, self.shortest - 1
        for other in reversed(ends[-self.candidates :]):
            # Most are told apart by the one token that would make the agreement longer than the best so far.
            if agreed < other and tokens[other - 1 - agreed] == tokens[-1 - agreed]:
                found = self._agreement(tokens, other)
                if found > agreed:
                    end, agreed = other, found
                if agreed == self.longest:
                    break
        # Reading on past the last token reads what was just drafted: a repeated pattern goes on repeating.
        drafted = list(tokens[end : end + request.k])
        while len(drafted) < request.k:
            drafted.append(drafted[end + len(drafted) - len(tokens)])
        return Draft.certain(drafted, self.vocab_size)

    def _agreement(self, tokens: Sequence[int], end: int) -> int:
        """How many tokens before `end` equal the last tokens, `longest` at most."""
        agreed = self.shortest
        while agreed < min(self.longest, end) and tokens[end - 1 - agreed] == tokens[-1 - agreed]:
            agreed += 1
        return agreed
