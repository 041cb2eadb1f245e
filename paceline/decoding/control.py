"""How many tokens each sequence drafts in a round, decided before anything of it is drafted.

What decides is what rounds cost here (`Costs`, measured beforehand) and how much of its recent drafts a sequence kept.
No clock runs and no drafted token is looked at, so the law of the output is untouched, and a run repeats itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.proposers.base import Proposer, Prospect, Request

MAX_DRAFT = 8
"""Tokens that a round drafts at most where nobody asked for a number."""
LEAST_GAIN = 1.01
"""Drafting must promise this many times the speed of plain decoding."""
NEGLIGIBLE = 0.02
"""A smaller chance of being kept never pays."""
HORIZON = 100
"""Rounds that a sequence is expected to go on for, unless it has room for fewer tokens."""
PROBING = 0.01
"""Where drafting does not pay, this share of the time is spent on finding out whether it has begun to."""
ADVANCE = 50
"""Rounds whose share a sequence may spend on that from its beginning: its text need not be like those before it."""
RECENT = 0.9
"""What an observed draft of a sequence weighs against the next one: about ten of them count."""
POOLED = 0.99
"""The same for all sequences of a model together."""
OF_POOL = 6.0
"""Drafts of its own at which a sequence trusts itself as much as the others."""
UNKNOWN = (0.6, 0.6)
"""Acceptance that is believed before any was seen: enough to try."""
FEW = 4.0
"""Drafts that overrule what was believed."""
WHOLE = (1.0, 1.0)
"""Drafts are believed to be as long as asked for before any was seen."""
REST = 16
"""Rounds at most for which drafting nothing is left at, where nothing but the length of the text can have changed."""
PARTS = 16
"""Rows and steps that may or may not be there are counted in such parts."""


class Control(Protocol):
    def begin(self, slot: int) -> None:
        """A new sequence enters this slot."""
        ...

    def choose(self, requests: Sequence[Request]) -> list[int]:
        """How many tokens each may draft, from 0 to its `k`, the room it has."""
        ...

    def learn(self, slot: int, drafted: int, accepted: int) -> None:
        """What became of the draft chosen last for this slot; 0 drafted where there was none, or it came out empty."""
        ...


NewControl = Callable[[Proposer], Control]
"""What controls the drafts of one run."""


@dataclass(frozen=True)
class Fixed:
    """`k` tokens, whatever happens."""

    k: int

    def begin(self, slot: int) -> None:
        pass

    def choose(self, requests: Sequence[Request]) -> list[int]:
        return [min(self.k, request.k) for request in requests]

    def learn(self, slot: int, drafted: int, accepted: int) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of the parts of a round, as measured on one machine for one target and draft."""

    rows: tuple[int, ...]
    """Tokens of a pass (over all sequences) that were measured, ascending from 1."""
    round_s: tuple[float, ...]
    """Scoring so many rows, verifying and committing, but for what the context adds."""
    context_s: tuple[float, ...]
    """What each token of context adds to that."""
    batches: tuple[int, ...]
    """Numbers of sequences drafting together that were measured, ascending from 1."""
    draft_s: tuple[tuple[float, ...], ...]
    """For each of `batches`: drafting 0, 1, 2, ... tokens."""
    read_s: float
    """Each token that the draft has yet to read."""

    def __post_init__(self) -> None:
        if not self.rows or list(self.rows) != sorted({*self.rows}) or self.rows[0] != 1:
            raise ValueError(f"rows are {self.rows}, they must ascend from 1")
        if not self.batches or list(self.batches) != sorted({*self.batches}) or self.batches[0] != 1:
            raise ValueError(f"batches are {self.batches}, they must ascend from 1")
        if not len(self.rows) == len(self.round_s) == len(self.context_s):
            raise ValueError("rows, round_s and context_s must be equally long")
        if len(self.batches) != len(self.draft_s) or any(len(by_k) < 2 for by_k in self.draft_s):
            raise ValueError("draft_s must have one row for each of batches, with the seconds of 0, 1, ... tokens")

    def round(self, rows: float, context: float) -> float:
        short = between(self.rows, self.round_s, rows)
        return short + context * max(0.0, between(self.rows, self.context_s, rows))

    def draft(self, k: float, sequences: int) -> float:
        by_batch = [between(range(len(by_k)), by_k, k) for by_k in self.draft_s]
        return between(self.batches, by_batch, sequences)


def between(xs: Sequence[int], ys: Sequence[float], x: float) -> float:
    """Linear between the measured points; beyond the last one as from the first to the last, since two that lie close
    together may differ by nothing but noise."""
    if len(xs) == 1:
        return ys[0] * x / xs[0]
    if x > xs[-1]:
        return ys[-1] + (x - xs[-1]) * (ys[-1] - ys[0]) / (xs[-1] - xs[0])
    at = min(max(bisect_right(xs, x) - 1, 0), len(xs) - 2)
    share = (x - xs[at]) / (xs[at + 1] - xs[at])
    return ys[at] + share * (ys[at + 1] - ys[at])


def _rate(accepted: float, reached: float, unknown: float) -> float:
    return accepted / reached if reached else unknown


@dataclass
class Acceptance:
    """How often a token was accepted, given that those ahead of it were: at the first position, and behind it.

    Counts fade by `memory` with each draft.
    """

    memory: float
    accepted: list[float] = field(default_factory=lambda: [0.0, 0.0])
    reached: list[float] = field(default_factory=lambda: [0.0, 0.0])

    @classmethod
    def believed(cls, rates: tuple[float, float], drafts: float) -> Acceptance:
        return cls(POOLED, [drafts * rate for rate in rates], [drafts, drafts])

    def rates(self, others: tuple[float, float] = UNKNOWN, weight: float = 0.0) -> tuple[float, float]:
        """First, later; `others` count like `weight` drafts."""
        accepted, reached = self.accepted, self.reached
        return (
            _rate(accepted[0] + weight * others[0], reached[0] + weight, others[0]),
            _rate(accepted[1] + weight * others[1], reached[1] + weight, others[1]),
        )

    def learn(self, drafted: int, accepted: int) -> None:
        seen = [(min(accepted, 1), 1), (max(accepted - 1, 0), max(min(accepted + 1, drafted) - 1, 0))]
        for i, (kept, reached) in enumerate(seen):
            self.accepted[i] = self.memory * self.accepted[i] + kept
            self.reached[i] = self.memory * self.reached[i] + reached


@dataclass
class Seen:
    """What became of the tokens that drafts of one kind were asked for."""

    kept: Acceptance
    drafted: Acceptance
    """Drafts that a model ends early have fewer: the others cost nothing, and are not kept."""

    @classmethod
    def believed(cls, rates: tuple[float, float], drafts: float) -> Seen:
        return cls(Acceptance.believed(rates, drafts), Acceptance.believed(WHOLE, FEW))

    @classmethod
    def nothing(cls) -> Seen:
        return cls(Acceptance(RECENT), Acceptance(RECENT))

    def learn(self, asked: int, drafted: int, accepted: int) -> None:
        self.kept.learn(asked, accepted)
        self.drafted.learn(asked, drafted)


NOTHING = Seen.nothing()
"""Of a kind that a sequence has not met: nobody learns into it."""

Pool = dict[str, Seen]
"""What all sequences of a model saw together, by kind of draft."""


def pool(believed: Mapping[str, tuple[float, float]] = {}) -> Pool:
    """`believed`: rates that were measured before, by kind."""
    return {kind: Seen.believed(rates, 10 * FEW) for kind, rates in believed.items()}


@dataclass
class _Slot:
    seen: Pool = field(default_factory=dict)
    kind: str = ""
    """Of the draft that was chosen last."""
    asked: int = 0
    """Tokens that a model was asked for then. Where it ended its draft early, it drafted fewer."""
    saved_s: float | None = None
    """What may be spent on a probe; None before the first round."""
    worth_s: float = 0.0
    """What each token saves that a probe, if it was one, had right."""
    rest: int = 0
    """Rounds for which it is settled that nothing is drafted, as long as the kind stays what it is."""


class Adaptive:
    """As many tokens as give the batch the most tokens a second: E[tokens of the round] / seconds of the round.

    Tokens are expected by the kind of draft that is ahead (`Proposer.prospects`): a sequence's own recent acceptance,
    leaning on what `pool` saw of others. Sequences that draft nothing probe with one token as often as PROBING allows,
    and what a probe brought in is spent on the next.

    A request with a seed of its own is decided as if it ran alone, leaning on what was `believed` from the beginning:
    its text does not depend on what runs beside it, or ran before.
    """

    def __init__(
        self,
        proposer: Proposer,
        costs: Costs,
        pool: Pool,
        believed: Mapping[str, tuple[float, float]] = {},
    ) -> None:
        self.proposer, self.costs, self.pool, self.believed = proposer, costs, pool, believed
        self._slots: dict[int, _Slot] = {}
        self._by_rows: dict[int, tuple[float, float]] = {}  # by PARTS, as the other
        self._by_k: dict[tuple[int, int], float] = {}

    def begin(self, slot: int) -> None:
        self._slots[slot] = _Slot()

    def choose(self, requests: Sequence[Request]) -> list[int]:
        prospects = self.proposer.prospects(requests)
        if len(requests) == 1 and self._rests(requests[0], prospects[0]):
            return [0]
        together = [n for n, request in enumerate(requests) if not _alone(request)]
        chosen = [0] * len(requests)
        for group in [together, *([n] for n, request in enumerate(requests) if _alone(request))]:
            if group:
                found = self._choose([requests[n] for n in group], [prospects[n] for n in group])
                for n, k in zip(group, found, strict=True):
                    chosen[n] = k
        for request, ahead, k in zip(requests, prospects, chosen, strict=True):
            held = self._slots[request.slot]
            held.kind, held.asked = (ahead.kind, k if ahead.by_model else 0) if ahead else ("", 0)
        return chosen

    def _rests(self, request: Request, ahead: Prospect | None) -> bool:
        """Right behind a pass, deciding takes a percent of it."""
        held = self._slots[request.slot]
        if not held.rest or ahead is None or ahead.kind != held.kind:
            return False
        held.rest -= 1
        return True

    def _choose(self, requests: Sequence[Request], prospects: Sequence[Prospect | None]) -> list[int]:
        odds = [self._odds(r, ahead) for r, ahead in zip(requests, prospects, strict=True)]
        context = sum(len(r.tokens) for r in requests) / len(requests)
        chosen = self._allot(odds, prospects, context, [min(r.k, HORIZON) for r in requests])
        plain_s = self._round_s(len(requests), context)
        for n, (request, ahead) in enumerate(zip(requests, prospects, strict=True)):
            held = self._slots[request.slot]
            held.rest = 0
            if held.saved_s is None:
                held.saved_s = 0.0 if chosen[n] else PROBING * ADVANCE * plain_s
                continue
            held.saved_s = 0.0 if chosen[n] else held.saved_s + PROBING * plain_s
            if ahead and not chosen[n]:
                probe_s = self._round_s(len(requests) + 1, context) - plain_s
                probe_s += self._draft_s(1, 1) + self.costs.read_s * ahead.unread if ahead.by_model else 0.0
                if held.saved_s >= probe_s:
                    chosen[n], held.saved_s, held.worth_s = 1, 0.0, plain_s
                elif len(requests) == 1 and not _alone(request):
                    held.rest = min(REST, int((probe_s - held.saved_s) / (PROBING * plain_s)))
                    held.saved_s += held.rest * PROBING * plain_s
        return chosen

    def learn(self, slot: int, drafted: int, accepted: int) -> None:
        held = self._slots[slot]
        if asked := max(drafted, held.asked):
            for seen in (held.seen.setdefault(held.kind, Seen.nothing()), self._of_all(held.kind)):
                seen.learn(asked, drafted, accepted)
        if held.worth_s:
            held.saved_s = accepted * held.worth_s
        held.asked, held.worth_s = 0, 0.0

    def _of_all(self, kind: str) -> Seen:
        if kind not in self.pool:
            self.pool[kind] = Seen.believed(UNKNOWN, FEW)
        return self.pool[kind]

    def _odds(self, request: Request, ahead: Prospect | None) -> list[tuple[float, float]]:
        """The chances that the i-th token is kept, and that it is drafted at all; none where it is hardly ever kept."""
        if ahead is None:
            return []
        own = self._slots[request.slot].seen.get(ahead.kind, NOTHING)
        if _alone(request):
            kept, drafted = self.believed.get(ahead.kind, UNKNOWN), WHOLE
        else:
            of_all = self._of_all(ahead.kind)
            kept, drafted = of_all.kept.rates(), of_all.drafted.rates()
        first, later = own.kept.rates(kept, OF_POOL)
        there, further = own.drafted.rates(drafted, OF_POOL)
        chances: list[tuple[float, float]] = []
        while first >= NEGLIGIBLE and len(chances) < _reach(request, ahead):
            chances.append((first, max(first, there)))  # what was believed of one may outlast the other
            first, there = first * later, there * further
        return chances

    def _allot(
        self,
        odds: list[list[tuple[float, float]]],
        prospects: Sequence[Prospect | None],
        context: float,
        shares: Sequence[int],
    ) -> list[int]:
        """A sequence's gains never rise, so the best allotment of a number of rows takes the largest gains of all.

        Sequences draft together: the longest draft tells how many steps the model makes. A step is made to draft the
        token that may not be there, too. What the model has to read first serves the rounds to come as well, so one of
        so many `shares` of it counts.
        """
        if not any(odds):
            return [0] * len(odds)
        order = sorted(((*chances, n) for n, of_n in enumerate(odds) for chances in of_n), key=lambda of: -of[0])
        tokens, rows, counts, chosen = float(len(odds)), float(len(odds)), [0] * len(odds), [0] * len(odds)
        steps, reached = [0.0] * len(odds), [1.0] * len(odds)
        best = LEAST_GAIN * tokens / self._round_s(rows, context)
        models, longest, reading_s = 0, 0.0, 0.0
        for gain, drafted, n in order:
            tokens += gain
            rows += drafted
            counts[n] += 1
            seconds, ahead = self._round_s(rows, context), prospects[n]
            if ahead and ahead.by_model:
                steps[n] += reached[n]
                reached[n], longest = drafted, max(longest, steps[n])
                if counts[n] == 1:
                    models += 1
                    reading_s += self.costs.read_s * ahead.unread / shares[n]
            if models:
                seconds += self._draft_s(longest, models) + reading_s
            if tokens > best * seconds:
                best, chosen = tokens / seconds, [*counts]
        return chosen

    # A handful of costs are asked for in every round.

    def _round_s(self, rows: float, context: float) -> float:
        parts = round(PARTS * rows)
        if parts not in self._by_rows:
            short = self.costs.round(parts / PARTS, 0.0)
            self._by_rows[parts] = short, self.costs.round(parts / PARTS, 1.0) - short
        short, of_context = self._by_rows[parts]
        return short + context * of_context

    def _draft_s(self, steps: float, sequences: int) -> float:
        parts = round(PARTS * steps)
        if (parts, sequences) not in self._by_k:
            self._by_k[parts, sequences] = self.costs.draft(parts / PARTS, sequences)
        return self._by_k[parts, sequences]


def _reach(request: Request, ahead: Prospect) -> int:
    """Tokens that a draft may have at most."""
    return min(request.k, MAX_DRAFT, ahead.most or MAX_DRAFT)


def _alone(request: Request) -> bool:
    params = request.sampler.params
    return params.seed is not None and params.temperature > 0


class Everything(Adaptive):
    """As many tokens as a round drafts at most, whatever it costs: for finding out what is accepted."""

    def _choose(self, requests: Sequence[Request], prospects: Sequence[Prospect | None]) -> list[int]:
        return [_reach(r, ahead) if ahead else 0 for r, ahead in zip(requests, prospects, strict=True)]
