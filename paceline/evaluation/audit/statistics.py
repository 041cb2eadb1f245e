"""Level 3: are sampled tokens distributed as p says? Knows no model and no engine: tokens and distributions in.

Two tests. Contrasts: sets of tokens, chosen by the context alone (those the draft favours, the target's favourite and
so on), whose total count over all contexts is a sum of independent yes-or-no events of known probabilities under p.
This sees small biases that point the same way everywhere, as those of all known faults do: towards the draft. Fit:
Pearson's statistic of each context, added up and compared with simulations under p. This sees large ones, whichever
way.

Shapes: V vocabulary, N trials.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.sampling.distribution import Distribution

Vector = npt.NDArray[np.float64]

CONTRASTS = {
    "favoured": "tokens that the draft gives more probability than the target",
    "draft's top": "the draft's most probable token",
    "target's top": "the target's most probable token",
    "low half": "tokens in the lower half of p, in the order of their ids",
    "below": "favoured tokens that all numbers which draw them would accept, were they used for that too",
    "above": "favoured tokens that none of these numbers would accept",
    "again": "tokens that were given since the context",
}
POWER = 0.95
"""How probable it is that a bias of the size that is stated would have been seen."""
_FEWEST_EXPECTED = 1.0


def share(p: Distribution) -> Vector:
    """[V] normalised, in float64."""
    probs_V = p.dense().astype(np.float64)
    return probs_V / probs_V.sum()


def contrasts(p_V: Vector, q_V: Vector | None, prefix: Sequence[int]) -> list[npt.NDArray[np.bool_] | None]:
    """[V] for each contrast; None where it is not defined."""
    top = np.zeros(len(p_V), bool)
    top[p_V.argmax()] = True
    low = p_V.cumsum() <= 0.5
    again = np.zeros(len(p_V), bool)
    again[list(prefix)] = True
    if q_V is None:
        return [None, None, top, low, None, None, again if prefix else None]
    favoured, of_draft = q_V > p_V, np.zeros(len(p_V), bool)
    of_draft[q_V.argmax()] = True
    # A token is drawn from q by the numbers between `start` and `end`, and accepted by those below p / q.
    end_V = q_V.cumsum()
    start_V, accepted_V = end_V - q_V, p_V / np.where(favoured, q_V, 1)
    below, above = favoured & (end_V <= accepted_V), favoured & (start_V >= accepted_V)
    return [favoured, of_draft, top, low, below, above, again if prefix else None]


@dataclass
class Counts:
    """Of one contrast at one position: `sizes` trials each of probability `masses`, and how many of all said yes."""

    masses: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    hits: int = 0

    def add(self, mass: float, size: int, hits: int) -> None:
        self.masses.append(min(1.0, max(0.0, mass)))
        self.sizes.append(size)
        self.hits += hits


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One contrast at one position."""

    position: int
    """1 is the first token behind the context."""
    contrast: str
    trials: int
    expected: float
    """How often p says, of all trials."""
    observed: float
    p_value: float
    limit: float
    """Observed and expected would differ by more than this with the probability of a false alarm alone."""
    detectable: float
    """The smallest difference that would have been seen with a probability of `POWER`."""


def test_counts(counts: Counts, *, position: int, contrast: str, alarm: float) -> Finding | None:
    """`alarm`: the probability of a false alarm this test may have. None where nothing could come out of it."""
    masses_N = np.repeat(counts.masses, counts.sizes)
    size, spread = len(masses_N), float((masses_N * (1 - masses_N)).sum())
    certain = (masses_N <= 0) | (masses_N >= 1)
    if not size or (certain.all() and counts.hits == round(masses_N.sum())):
        return None
    edge, margin = -NormalDist().inv_cdf(alarm / 2), NormalDist().inv_cdf(POWER)
    return Finding(
        position=position,
        contrast=contrast,
        trials=size,
        expected=float(masses_N.sum()) / size,
        observed=counts.hits / size,
        p_value=two_sided(masses_N, counts.hits),
        limit=edge * math.sqrt(spread) / size,
        detectable=(edge + margin) * math.sqrt(spread) / size,
    )


test_counts.__test__ = False  # type: ignore[attr-defined]


def two_sided(masses_N: Vector, hits: int) -> float:
    """How probable a count as far out as `hits` is, of independent events with these probabilities."""
    return min(1.0, 2 * min(_at_least(masses_N, hits), _at_least(1 - masses_N, len(masses_N) - hits)))


def _at_least(masses_N: Vector, hits: int) -> float:
    """P(sum >= hits), by the saddlepoint of Lugannani and Rice (1980) with the lattice correction of Daniels (1987)."""
    sure = int((masses_N >= 1).sum())
    masses_N, hits = masses_N[(masses_N > 0) & (masses_N < 1)], hits - sure
    size, mean = len(masses_N), float(masses_N.sum())
    if hits <= 0:
        return 1.0
    if hits > size:
        return 0.0
    if hits == size:
        return float(np.exp(np.log(masses_N).sum()))
    spread = float((masses_N * (1 - masses_N)).sum())
    if abs(hits - mean) < 0.5 * math.sqrt(spread) + 0.5:  # the formula is singular at the mean; nothing is decided here
        return 1 - NormalDist().cdf((hits - 0.5 - mean) / math.sqrt(spread))
    low, high = -60.0, 60.0
    for _ in range(80):
        tilt = (low + high) / 2
        low, high = (tilt, high) if _tilted(masses_N, tilt).sum() < hits else (low, tilt)
    tilted_N = _tilted(masses_N, tilt)
    # log(1 - m + m e^s), without overflow
    grown = float((np.logaddexp(np.log1p(-masses_N), np.log(masses_N) + tilt)).sum())
    w = math.copysign(math.sqrt(max(2 * (tilt * hits - grown), 0.0)), tilt)
    u = (1 - math.exp(-tilt)) * math.sqrt(float((tilted_N * (1 - tilted_N)).sum()))
    tail = 0.5 * math.erfc(w / math.sqrt(2))
    return min(1.0, max(0.0, tail + math.exp(-w * w / 2) / math.sqrt(2 * math.pi) * (1 / u - 1 / w)))


def _tilted(masses_N: Vector, tilt: float) -> Vector:
    odds = np.log(masses_N) - np.log1p(-masses_N) + tilt
    return 1 / (1 + np.exp(-odds))


@dataclass
class Cells:
    """The first tokens of one context, sorted into the tokens that p makes frequent and all the rest."""

    probs: list[float]
    counts: list[int]

    @staticmethod
    def of(p_V: Vector, tokens: Sequence[int]) -> Cells:
        own = [int(i) for i in np.flatnonzero(p_V * len(tokens) >= _FEWEST_EXPECTED)]
        counts = [list(tokens).count(i) for i in own]
        probs, rest = [float(p_V[i]) for i in own], float(max(0.0, 1 - p_V[own].sum()))
        if rest < 1e-9:  # what rounding left of a certain distribution
            return Cells(probs, counts)
        return Cells([*probs, rest], [*counts, len(tokens) - sum(counts)])

    def statistic(self, counts: npt.NDArray[np.int64]) -> Vector:
        """Pearson's, of [..., cells] counts."""
        expected = np.array(self.probs) * counts.sum(-1, keepdims=True)
        return ((counts - expected) ** 2 / expected).sum(-1)


@dataclass(frozen=True, kw_only=True)
class Fit:
    contexts: int
    statistic: float
    mean: float
    """Of the statistic under p."""
    p_value: float
    simulations: int
    distance: float
    """Total variation between observed and expected shares of the cells, averaged over contexts."""
    distance_limit: float
    """Exceeded under p with the probability of a false alarm alone."""


def test_fit(cells: Sequence[Cells], *, alarm: float, seed: int) -> Fit | None:
    """Against as many simulations as `alarm` needs to be told from chance."""
    cells = [each for each in cells if len(each.probs) > 1 and sum(each.counts) > 0]
    if not cells:
        return None
    simulations = math.ceil(2 / alarm) - 1
    rng = np.random.default_rng([seed, 3])
    total, apart, seen, seen_apart = np.zeros(simulations), np.zeros(simulations), 0.0, 0.0
    for each in cells:
        observed, size = np.array(each.counts), sum(each.counts)
        drawn = rng.multinomial(size, np.array(each.probs) / sum(each.probs), simulations)
        total += each.statistic(drawn)
        seen += float(each.statistic(observed))
        expected = np.array(each.probs) * size
        apart += np.abs(drawn - expected).sum(-1) / (2 * size)
        seen_apart += float(np.abs(observed - expected).sum()) / (2 * size)
    return Fit(
        contexts=len(cells),
        statistic=seen,
        mean=float(total.mean()),
        p_value=(1 + int((total >= seen).sum())) / (simulations + 1),
        simulations=simulations,
        distance=seen_apart / len(cells),
        distance_limit=float(np.quantile(apart, 1 - alarm)) / len(cells),
    )


test_fit.__test__ = False  # type: ignore[attr-defined]


@dataclass
class Sample:
    """Everything that was sampled, ready for the tests. `ahead` tokens a trial."""

    ahead: int
    counts: dict[str, Counts] = field(default_factory=dict)
    """By "position/contrast"."""
    cells: list[Cells] = field(default_factory=list)
    trials: int = 0
    rounds: int = 0
    """That the trials took, where rounds were run."""
    impossible: int = 0
    """Tokens that p gives no probability."""

    def add(
        self,
        p_V: Vector,
        q_V: Vector | None,
        prefix: Sequence[int],
        tokens: Sequence[int],
        *,
        position: int | None = None,
    ) -> None:
        """`tokens`: what the trials gave behind `prefix`, at its end unless `position` says where."""
        position = len(prefix) + 1 if position is None else position
        self.impossible += sum(p_V[token] <= 0 for token in tokens)
        for name, members_V in zip(CONTRASTS, contrasts(p_V, q_V, prefix), strict=True):
            if members_V is None:
                continue
            counts = self.counts.setdefault(f"{position}/{name}", Counts())
            counts.add(float(p_V[members_V].sum()), len(tokens), sum(bool(members_V[token]) for token in tokens))

    @staticmethod
    def load(stored: dict[str, Any]) -> Sample:
        """From its fields, as JSON has them."""
        counts = {key: Counts(**each) for key, each in stored["counts"].items()}
        return Sample(**{**stored, "counts": counts, "cells": [Cells(**each) for each in stored["cells"]]})

    def extend(self, other: Sample) -> None:
        for key, counts in other.counts.items():
            mine = self.counts.setdefault(key, Counts())
            mine.masses += counts.masses
            mine.sizes += counts.sizes
            mine.hits += counts.hits
        self.cells += other.cells
        self.trials += other.trials
        self.rounds += other.rounds
        self.impossible += other.impossible


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """What came out: `exact` unless a p-value is below its share of the false alarms, which are `alarm` in all."""

    exact: bool
    alarm: float
    trials: int
    impossible: int
    findings: list[Finding]
    fit: Fit | None
    worst_p_value: float
    """Corrected for the number of tests: compare with `alarm`."""

    @property
    def detectable(self) -> float:
        """The smallest bias towards what the draft favours, in total variation, that would have been seen; 1 where the
        draft favours nothing."""
        of_draft = [f.detectable for f in self.findings if f.position == 1 and f.contrast == "favoured"]
        return min(of_draft, default=1.0)


def examine(sample: Sample, *, alarm: float, seed: int = 0, slack: float = 0.0) -> Statistics:
    """Half of the false alarms for the contrasts, shared evenly, and half for the fit.

    `slack`: the part of the tokens that rounding may put where p has nothing (0 where rows are the same in every pass).
    """
    keys = sorted(sample.counts)
    each = alarm / 2 / max(len(keys), 1)
    findings = []
    for key in keys:
        position, _, contrast = key.partition("/")
        found = test_counts(sample.counts[key], position=int(position), contrast=contrast, alarm=each)
        if found:
            findings.append(found)
    fit = test_fit(sample.cells, alarm=alarm / 2, seed=seed)
    corrected = [f.p_value * 2 * len(keys) for f in findings] + ([fit.p_value * 2] if fit else [])
    worst = min([1.0, *corrected])
    impossible = sample.impossible > slack * sample.trials * sample.ahead
    return Statistics(
        exact=worst >= alarm and not impossible,
        alarm=alarm,
        trials=sample.trials,
        impossible=sample.impossible,
        findings=findings,
        fit=fit,
        worst_p_value=worst,
    )
