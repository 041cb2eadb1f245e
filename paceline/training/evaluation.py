"""What serving will see of a draft, on texts it was not trained on: how often its tokens would be accepted.

p and q both go through the one path to probabilities, at the parameters asked for, so alpha = sum min(p, q) is the
probability that a token drafted here is accepted. It is kept by position along a draft, since a draft that goes on from
its own guesses gets worse.

Shapes: N positions of a batch, R rows, V vocabulary, J positions along a draft, P parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING

import numpy as np
import torch

from paceline.decoding.control import MAX_DRAFT, Costs
from paceline.sampling.distribution import Among, Distribution, distribution, on_host
from paceline.sampling.params import SamplingParams

if TYPE_CHECKING:
    from paceline.training.data import Batch
    from paceline.training.learners import Learner

CONTEXT = 128
"""Tokens that speed-ups are told for."""
ROWS = 64
"""Rows of logits over the whole vocabulary that are in memory at once."""


@dataclass(frozen=True)
class Evaluation:
    """By position along a draft: how probably a token is accepted, and the share of rows whose best tokens agree."""

    alpha: list[float]
    greedy: list[float]
    rows: int
    """Rows of the first position."""
    reach: int | None = None
    """The most tokens that the draft can propose; None: any number."""

    @classmethod
    def of(cls, sums_J3: torch.Tensor, reach: int | None = None) -> Evaluation:
        """From the sums of `evaluate`. Raises ValueError where there was nothing to evaluate on."""
        found = [(alpha / rows, greedy / rows) for alpha, greedy, rows in sums_J3.tolist() if rows]
        if not found:
            raise ValueError("the held-out texts have no trained positions: give more prompts")
        return cls([alpha for alpha, _ in found], [greedy for _, greedy in found], int(sums_J3[0, 2]), reach)

    @property
    def lengths(self) -> list[float]:
        """Tokens a round is expected to give, for K = 1 to 8: 1 + the sum over k <= K of alpha_1 ... alpha_k. Positions
        beyond those that were unrolled count with the last alpha that was measured."""
        further = 0.0 if self.reach == len(self.alpha) else self.alpha[-1]
        along = [*self.alpha, *[further] * MAX_DRAFT][:MAX_DRAFT]
        return list(accumulate(accumulate(along, mul), initial=1.0))[1:]

    def speedups(self, costs: Costs) -> list[float]:
        """Against plain decoding, for K = 1 to 8, one sequence at a time."""
        rounds = [costs.round(k + 1, CONTEXT) + costs.draft(k, 1) for k in range(1, MAX_DRAFT + 1)]
        return [length * costs.round(1, CONTEXT) / of_k for length, of_k in zip(self.lengths, rounds, strict=True)]


@torch.no_grad()
def evaluate(
    learner: Learner,
    batches: Iterable[Batch],
    target_logits: Callable[[torch.Tensor], torch.Tensor],
    params: SamplingParams,
    steps: int = MAX_DRAFT,
) -> torch.Tensor:
    """[J, 3] in float64, J = `steps`: by position, the sums over rows of alpha and of greedy agreement, and the rows.

    `target_logits` gives the target's logits [R, V] from its last hidden states [R, H]; R is small. Raises ValueError
    for parameters that look at the text before a token: rows are evaluated without one.
    """
    if params.penalises or params.min_tokens:
        raise ValueError("penalties and min_tokens depend on the text so far: evaluate a draft without them")
    both = (params, replace(params, temperature=0.0))
    among: Among | None = None
    sums_J3 = torch.zeros(steps, 3, dtype=torch.float64)
    for batch in batches:
        trained = batch.trained_N.nonzero()[:, 0]
        p_PN: list[dict[int, Distribution]] = [{}, {}]
        for part in trained.split(ROWS):
            logits_RV = target_logits(batch.hidden_NH[part])
            for kept, wanted in zip(p_PN, both, strict=True):
                kept.update(zip(part.tolist(), _rows(logits_RV, wanted), strict=True))
            among = None if learner.ids_D is None else Among(logits_RV.shape[-1], learner.ids_D.cpu().numpy())
        for j, (logits_RD, rows_R) in enumerate(learner.unroll(batch, steps)):
            for column, (kept, wanted) in enumerate(zip(p_PN, both, strict=True)):
                for logits, part in zip(logits_RD.split(ROWS), rows_R.split(ROWS), strict=True):
                    q_R = _rows(logits, wanted, among)
                    sums_J3[j, column] += math.fsum(_alpha(kept[n], q) for n, q in zip(part.tolist(), q_R, strict=True))
            sums_J3[j, 2] += len(rows_R)
    return sums_J3


def _rows(logits_RV: torch.Tensor, params: SamplingParams, among: Among | None = None) -> list[Distribution]:
    return [distribution(row_V, params, among=among) for row_V in on_host(logits_RV)]


def _alpha(p: Distribution, q: Distribution) -> float:
    return float(p.probs.sum(dtype=np.float64) - p.minus(q).probs.sum(dtype=np.float64))
