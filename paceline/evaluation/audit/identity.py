"""Level 1: one real round at each context, and whether its parts recombine to the target's distribution.

Four checks, none of them statistical:
- rows: the p that verification was given, at every drafted position, against plain decoding of the same tokens;
- proposals: the q that verification was given against the distribution the token was really drawn from;
- numbers: no random number decides two things (under the ratio rules, which need them independent);
- recombination: accept, residual and bonus, by the rule's own function, recombine to p. Enumerated over blocks of two
  drafted tokens, with the real p and q of the round cut to their most probable tokens: over a vocabulary of tens of
  thousands whole blocks cannot be enumerated. Coupled verification has no such function: its identity is the equality
  of texts (level 2).

Shapes: K drafted tokens, S = K + 1 rows, W tokens of a cut distribution.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.evaluation.audit.statistics import Vector, share
from paceline.evaluation.audit.subject import Decide
from paceline.evaluation.audit.trials import Bench, Exact
from paceline.sampling.distribution import Distribution
from paceline.sampling.draft import Draft
from paceline.sampling.rejection import Verdict
from paceline.sampling.sampler import Sampler
from paceline.sampling.streams import Purpose, Stream

CUT = 3
"""How many of the most probable tokens of p, and of q, are kept for the enumeration."""
ROUNDING = 1e-5
"""Total variation that float32 probabilities may be off by where nothing else is wrong."""


@dataclass(frozen=True)
class _Noted(Stream):
    """Notes which numbers were asked for."""

    asked: list[tuple[int, int, int]] = field(default_factory=list)

    def seek(self, purpose: Purpose, position: int, anchor: int) -> np.random.Philox:
        self.asked.append((int(purpose), position, anchor))
        return super().seek(purpose, position, anchor)


@dataclass(frozen=True, kw_only=True)
class Notes(Sampler):
    """Passes everything on to `inner`, and keeps what went through."""

    inner: Sampler
    drawn: list[tuple[int, Distribution]] = field(default_factory=list)
    """(token, what it was drawn from) of each proposal."""
    verified: list[tuple[Sequence[Distribution], Draft]] = field(default_factory=list)

    @staticmethod
    def of(inner: Sampler) -> Notes:
        stream = _Noted(inner.stream.seed, inner.stream.sample)
        noted = type(inner)(**{**_fields(inner), "stream": stream})
        return Notes(**_fields(noted), inner=noted)

    def distribution(self, *args: Any, **more: Any) -> Distribution:
        return self.inner.distribution(*args, **more)

    def propose(self, q: Distribution, position: int, anchor: int) -> int:
        token = self.inner.propose(q, position, anchor)
        self.drawn.append((token, q))
        return token

    def verify(self, p_S: Sequence[Distribution], draft: Draft, anchor: int) -> Verdict:
        self.verified.append((list(p_S), draft))  # all of them, now: they are looked at when the round is over
        return self.inner.verify(p_S, draft, anchor)

    @property
    def reused(self) -> int:
        """Random numbers that were asked for more than once."""
        assert isinstance(self.stream, _Noted)
        return len(self.stream.asked) - len(set(self.stream.asked))


def _fields(sampler: Sampler) -> dict[str, Any]:
    return {name: getattr(sampler, name) for name in ("params", "rule", "stream", "prompt_length", "end_ids")}


@dataclass(kw_only=True)
class Identity:
    """Of one context or, added up, of many. Each list holds a total variation a context."""

    rows: list[float] = field(default_factory=list)
    proposals: list[float] = field(default_factory=list)
    recombined: list[float] = field(default_factory=list)
    overlap: list[float] = field(default_factory=list)
    """sum min(p, q) of the first drafted token: how often the ratio rules accept it."""
    reused: int = 0
    drafted: int = 0
    by_chance: int = 0
    """Drafted tokens whose q is not one-hot."""

    def extend(self, other: Identity) -> None:
        for name in ("rows", "proposals", "recombined", "overlap"):
            getattr(self, name).extend(getattr(other, name))
        self.reused += other.reused
        self.drafted += other.drafted
        self.by_chance += other.by_chance

    def exact(self, noise: float) -> bool:
        """`noise`: how far rows of one position were seen to differ between passes, in total variation."""
        return (
            max(self.rows, default=0.0) <= ROUNDING + 4 * noise
            and max(self.proposals, default=0.0) == 0
            and max(self.recombined, default=0.0) <= ROUNDING
            and self.reused == 0
        )


def distance(a: Distribution, b: Distribution) -> float:
    """Total variation of the two, normalised."""
    return float(np.abs(share(a) - share(b)).sum()) / 2


def examine(bench: Bench, exact: Exact, decide: Decide | None, *, seed: int) -> Identity:
    """One round of every context of `bench`. `decide` None: the rule is not a ratio rule."""
    subject, found = bench.subject, Identity()
    notes = [Notes.of(subject.new_sampler(len(c.prompt), seed + i)) for i, c in enumerate(bench.contexts)]
    bench.rewind(notes)
    bench.round()
    exact.learn([[note.verified[-1][1].tokens] for note in notes])
    for i, note in enumerate(notes):
        p_S, draft = note.verified[-1]
        found.rows.append(max(distance(p, exact.p(i, draft.tokens[:t])) for t, p in enumerate(p_S)))
        found.drafted += len(draft)
        if not draft.tokens:
            continue
        found.by_chance += sum(int(np.count_nonzero(q.probs) > 1) for q in draft.probs)
        found.overlap.append(float(np.minimum(share(p_S[0]), share(draft.probs[0])).sum()))
        found.proposals.append(max(_drawn_apart(note, draft)))
        if decide is not None:
            found.reused += note.reused
            found.recombined.append(_recombined(decide, *_tables(p_S, draft)))
    return found


def _drawn_apart(note: Notes, draft: Draft) -> Iterator[float]:
    """Of each drafted token, how far the q that verification was given lies from what it was drawn from."""
    drawn = note.drawn[-len(draft) :] if len(note.drawn) >= len(draft) else []
    for t, (token, q) in enumerate(zip(draft.tokens, draft.probs, strict=True)):
        if drawn:
            yield distance(q, drawn[t][1]) if drawn[t][0] == token else 1.0
        else:  # proposed without chance
            yield 1 - float(share(q)[token])


def _tables(p_S: Sequence[Distribution], draft: Draft) -> tuple[list[Vector], list[Vector]]:
    """p and q of the round's first positions, [W] each: cut to the tokens that are the most probable by either.

    Three of each for the enumeration: (), and two more that stand behind the drafted tokens in turn.
    """
    p_cut, q_cut = list[Vector](), list[Vector]()
    for t in range(3):
        p_V = share(p_S[min(t, len(draft) - 1)])
        q_V = share(draft.probs[min(t, len(draft) - 1)])
        kept = np.union1d(np.argsort(p_V)[-CUT:], np.argsort(q_V)[-CUT:])
        kept = kept[(p_V[kept] > 0) | (q_V[kept] > 0)]
        for rows, row_V in ((p_cut, p_V), (q_cut, q_V)):
            row_W = np.zeros(2 * CUT)
            row_W[: len(kept)] = row_V[kept]
            rows.append((row_W / row_W.sum()).astype(np.float32) if row_W.sum() else row_W)
    return p_cut, q_cut


def _recombined(decide: Decide, p_cut: list[Vector], q_cut: list[Vector]) -> float:
    """Total variation between the first two tokens that a round of two drafted tokens gives and those of p.

    The rows behind a first token i are number 1 + i % 2, real ones of this round. Sums in float64.
    """
    size = len(p_cut[0])

    def p(i: int) -> Distribution:
        return Distribution(size, p_cut[1 + i % 2])

    def q(i: int) -> Distribution:
        return Distribution(size, q_cut[1 + i % 2])

    first_p, first_q = Distribution(size, p_cut[0]), Distribution(size, q_cut[0])
    shares = [share(p(i)) for i in range(size)]
    wanted = share(first_p)[:, None] * np.array(shares)
    given = np.zeros((size, size))
    for i, j in itertools.product(np.flatnonzero(share(first_q)).tolist(), range(size)):
        chance = share(first_q)[i] * share(q(i))[j]
        if chance == 0:
            continue
        draft = Draft((i, j), (first_q, q(i)))
        p_S = [first_p, p(i), first_p]
        for weight, uniforms in _outcomes(decide, p_S, draft):
            accepted, rest = decide(p_S, draft, uniforms)
            if accepted == 2:
                given[i, j] += chance * weight
            elif accepted == 1:
                given[i] += chance * weight * share(rest)
            else:
                given += chance * weight * share(rest)[:, None] * np.array(shares)
    return float(np.abs(given - wanted).sum()) / 2


def _outcomes(decide: Decide, p_S: Sequence[Distribution], draft: Draft) -> Iterator[tuple[float, Vector]]:
    """(probability, uniforms inside) of the boxes in which a rule that compares two uniforms with thresholds decides
    alike. The thresholds are found by bisection, with the other uniform at either end."""
    last = 1 - 2.0**-53
    edges: list[set[float]] = [{0.0, 1.0}, {0.0, 1.0}]
    for axis, other in itertools.product((0, 1), (0.0, last)):

        def at(u: float, axis: int = axis, other: float = other) -> int:
            return decide(p_S, draft, np.array([u, other] if axis == 0 else [other, u]))[0]

        low, high = 0.0, last
        least, most = at(low), at(high)
        if least == most:
            continue
        while high - low > 1e-7:
            middle = (low + high) / 2
            low, high = (middle, high) if at(middle) == least else (low, middle)
        edges[axis].add((low + high) / 2)
    boxes = [list(itertools.pairwise(sorted(each))) for each in edges]
    for (a, b), (c, d) in itertools.product(*boxes):
        yield (b - a) * (d - c), np.array([(a + b) / 2, (c + d) / 2])
