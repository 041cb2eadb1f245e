"""Prompt lookup: what followed the longest earlier occurrence of the present suffix, over prompt and output.

Costs no model and no training; pays where the output repeats its prompt or itself (code, summaries, extraction).
Its tokens are proposed without chance, so each q is one-hot.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline.proposers.base import Prospect, Request
from paceline.sampling.draft import Draft


@dataclass
class _Index:
    """Where each n-gram of a slot's tokens ends, in order."""

    indexed: int = 0
    ends: defaultdict[tuple[int, ...], list[int]] = field(default_factory=lambda: defaultdict(list))
    found_for: int = -1
    """How many tokens there were when `found` was looked up: committed tokens never change."""
    found: tuple[int, int] = (0, 0)


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

    def prospects(self, requests: Sequence[Request]) -> list[Prospect | None]:
        """The further back an occurrence agrees, the likelier its continuation is right: told apart by powers of 2."""
        found = [self._find(request) for request in requests]
        return [Prospect(f"ngram {1 << agreed.bit_length() - 1}") if agreed else None for _, agreed in found]

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        return [self._propose(request) for request in requests]

    def _propose(self, request: Request) -> Draft:
        tokens = request.tokens
        end, agreed = self._find(request)
        if not agreed:
            return Draft()
        # Reading on past the last token reads what was just drafted: a repeated pattern goes on repeating.
        drafted = list(tokens[end : end + request.k])
        while len(drafted) < request.k:
            drafted.append(drafted[end + len(drafted) - len(tokens)])
        return Draft.certain(drafted, self.vocab_size)

    def _find(self, request: Request) -> tuple[int, int]:
        """Where the best occurrence ends, and how many tokens of it agree; 0, 0 where there is none."""
        tokens, index = request.tokens, self._indices[request.slot]
        if index.found_for == len(tokens):
            return index.found
        self.observe(request.slot, tokens)
        end = 0
        ends = index.ends.get(tuple(tokens[-self.shortest :]), ())
        agreed = self.shortest - 1
        for other in reversed(ends[-self.candidates :]):
            # Most are told apart by the one token that would make the agreement longer than the best so far.
            if agreed < other and tokens[other - 1 - agreed] == tokens[-1 - agreed]:
                longer = self._agreement(tokens, other)
                if longer > agreed:
                    end, agreed = other, longer
                if agreed == self.longest:
                    break
        index.found_for, index.found = len(tokens), (end, agreed) if end else (0, 0)
        return index.found

    def _agreement(self, tokens: Sequence[int], end: int) -> int:
        """How many tokens before `end` equal the last tokens, `longest` at most."""
        agreed = self.shortest
        while agreed < min(self.longest, end) and tokens[end - 1 - agreed] == tokens[-1 - agreed]:
            agreed += 1
        return agreed
