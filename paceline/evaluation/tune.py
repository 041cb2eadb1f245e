"""Does it pay here, how much, with which draft and which K, up to how many sequences at once? Measured, then said.

Costs are measured by the decoding loop (`engine.profile`), acceptance on prompts with the longest drafts. Both together
predict every K and batch; what is recommended is then run beside plain decoding, prompt by prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import takewhile
from math import isfinite
from typing import Any

import numpy as np

from paceline.decoding.control import LEAST_GAIN, MAX_DRAFT, Costs, Everything, Pool
from paceline.decoding.stats import Stats
from paceline.engine.llm import LLM
from paceline.engine.profile import LONG, READ, SERIES, SHORT, Profile
from paceline.evaluation.intervals import Estimate, bootstrap
from paceline.sampling.params import SamplingParams

SECONDS = 2.0
"""Of each series of rounds that costs are taken from: more than where nobody asked for a measurement."""
Advance = Callable[[], None]


@dataclass(frozen=True)
class Accepted:
    """What became of drafts of MAX_DRAFT tokens, one sequence at a time."""

    drafting: float
    """The share of rounds that drafted anything."""
    marginal: tuple[float, ...]
    """By position in the draft: how often it was accepted, of the rounds that drafted."""
    context: float
    """Mean length of the sequences."""
    drafted: tuple[float, ...] = (1.0,) * MAX_DRAFT
    """By position: how often it was drafted at all, of these rounds. A draft may end early."""

    @classmethod
    def seen(cls, stats: Sequence[Stats]) -> Accepted:
        total = sum(stats, Stats())
        return cls(
            drafting=total.drafts / max(total.rounds, 1),
            marginal=tuple((total.marginal_acceptance + [0.0] * MAX_DRAFT)[:MAX_DRAFT]),
            context=(total.prompt_tokens + total.output_tokens / 2) / max(total.completions, 1),
            drafted=tuple(sum(total.drafts_of[i:]) / max(total.drafts, 1) for i in range(MAX_DRAFT)),
        )


def predicted(costs: Costs, accepted: Accepted, k: int, batch: int) -> float:
    """Times the speed of plain decoding, with K = `k`, for `batch` sequences at once that are all alike.

    Where a round finds nothing to draft it costs a plain one and the step that looked. Drafts count with their mean
    length, and so do the steps: one more than it drafts is made where a draft ends early. In a batch the rows of all
    count, so the mean number of rows is what a pass takes.
    """
    if not k:
        return 1.0
    drafting = accepted.drafting
    tokens = 1 + drafting * sum(accepted.marginal[:k])
    length, steps = sum(accepted.drafted[:k]), 1 + sum(accepted.drafted[: k - 1])
    plain_s = costs.round(batch, accepted.context)
    if batch == 1:
        with_s = costs.round(1 + length, accepted.context) + costs.draft(steps, 1)
        seconds = drafting * with_s + (1 - drafting) * (plain_s + costs.draft(1, 1))
    else:
        rows = batch * (1 + drafting * length)
        seconds = costs.round(rows, accepted.context) + costs.draft(steps, max(1, round(batch * drafting)))
    return tokens * plain_s / seconds


@dataclass(frozen=True)
class Advice:
    """Of one draft."""

    draft: str
    costs: Costs
    accepted: Accepted
    predictions: dict[int, list[float]]
    """By number of sequences at once: times plain for K = 0, 1, 2, ..."""
    measured: Estimate
    """Times plain of "auto", one sequence at a time, side by side."""
    fixed: dict[int, Estimate]
    """The same for the K that was predicted to be best."""
    totals: dict[str, dict[str, Any]]
    """Counts and seconds of what ran side by side."""
    kept_in: str | None
    """The file of the profile."""

    def best(self, batch: int) -> tuple[int, float]:
        """(K, times plain) that is predicted to be fastest."""
        by_k = self.predictions[batch]
        k = max(range(len(by_k)), key=by_k.__getitem__)
        return k, by_k[k]

    @property
    def pays(self) -> bool:
        return self.measured.low > 1

    def record(self) -> dict[str, Any]:
        estimates = {"measured": self.measured.record(), "fixed": {k: of.record() for k, of in self.fixed.items()}}
        return asdict(self) | estimates | {"pays": self.pays}


def tune(
    llm: LLM,
    drafts: Sequence[str],
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    batches: Sequence[int] = (1, 2, 4, 8),
    track: Callable[[int, str], Advance] = lambda total, what: lambda: None,
) -> Iterable[Advice]:
    """Advice on each of `drafts`, named as for `LLM`, as soon as it is there; its profile is kept where `LLM` finds it.

    `llm` holds the target. `track` is told of each part of the work, how many steps it has and what it is, and gives
    what is to be called after each. Raises ValueError for a draft that cannot be used.
    """
    batches = sorted({1, *batches})
    for draft in drafts:
        drafting = llm.with_draft(draft)
        advance = track(SERIES, f"{draft}: what rounds cost")
        longest = max(2 * SHORT, min(LONG, max(map(len, prompts)) + (params.max_tokens or READ) // 2))
        contexts = (SHORT, (SHORT + longest) // 2, longest)
        costs = drafting.measure(batches=batches, contexts=contexts, seconds=SECONDS, advance=advance)
        seen: Pool = {}
        drafting.draft_tokens = partial(Everything, costs=costs, pool=seen)
        accepted = Accepted.seen(_run(drafting, prompts, params, track(len(prompts), f"{draft}: what is accepted")))
        by_batch = {n: [predicted(costs, accepted, k, n) for k in range(MAX_DRAFT + 1)] for n in batches}
        best = max(range(1, MAX_DRAFT + 1), key=by_batch[1].__getitem__)
        drafting.use(Profile(costs))
        runs = _side_by_side(
            drafting, prompts, params, ("auto", 0, best), track(len(prompts), f"{draft}: side by side")
        )
        file = drafting.profile_file
        if file:
            Profile(costs, {kind: of_kind.kept.rates() for kind, of_kind in seen.items()}).save(file)
        yield Advice(
            draft,
            costs,
            accepted,
            by_batch,
            _ratio(runs[0], runs["auto"]),
            {best: _ratio(runs[0], runs[best])},
            {str(side): asdict(sum(stats, Stats())) for side, stats in runs.items()},
            str(file) if file else None,
        )


def _run(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams, advance: Advance) -> list[Stats]:
    found = []
    for number, prompt in enumerate(prompts):
        (completion,) = llm.generate([list(prompt)], replace(params, seed=number))
        found.append(completion.stats)
        advance()
    return found


def _side_by_side(
    llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams, sides: Sequence[Any], advance: Advance
) -> dict[Any, list[Stats]]:
    """Every prompt with every K, in an order that moves on, so that the machine's drift falls on all alike."""
    runs: dict[Any, list[Stats]] = {side: [] for side in sides}
    for number, prompt in enumerate(prompts):
        turn = number % len(sides)
        for side in [*sides[turn:], *sides[:turn]]:
            llm.draft_tokens = side
            (completion,) = llm.generate([list(prompt)], replace(params, seed=number))
            runs[side].append(completion.stats)
        advance()
    return runs


def _ratio(plain: Sequence[Stats], other: Sequence[Stats]) -> Estimate:
    """Times the speed: seconds a token of one by those of the other."""
    columns = [
        [float(value) for value in column]
        for stats in (plain, other)
        for column in ([s.decode_s for s in stats], [s.output_tokens - 1 for s in stats])
    ]
    found = bootstrap(_speedup, *columns)
    if found is None:
        raise ValueError("no prompt gave more than one token, so there is no speed to compare: give other prompts")
    return found


def _speedup(plain_s: Any, plain_tokens: Any, other_s: Any, other_tokens: Any) -> Any:
    return np.divide(plain_s * other_tokens, other_s * plain_tokens)


def words(advice: Advice) -> list[str]:
    """The answer to "does it pay?", in sentences."""
    of = advice.measured
    (best, fixed), *_ = advice.fixed.items()
    k, speed = advice.best(1)
    said = [
        f"{advice.draft}: {_verdict(of)}. auto gave {_figure(of)} times the speed of plain decoding, one sequence at a "
        f"time, and K = {best} {_figure(fixed)}.",
        f"A round drafts in {advice.accepted.drafting:.0%} of the cases; the first token of a draft is accepted in "
        f"{advice.accepted.marginal[0]:.0%}, the fourth in {advice.accepted.marginal[3]:.0%}.",
        f"Predicted: best with K = {k}, {speed:.2f} times plain."
        if k
        else "Predicted: no fixed K pays; auto drafts where a draft is likely to be right, and not elsewhere.",
    ]
    paying = [*takewhile(lambda batch: advice.best(batch)[1] >= LEAST_GAIN, advice.predictions)]
    if len(advice.predictions) > 1 and paying:
        most = max(paying)
        k, speed = advice.best(most)
        beyond = [batch for batch in advice.predictions if batch > most]
        said.append(
            f"It is predicted to pay with up to {most} sequences at once ({speed:.2f} times plain with K = {k})"
            + (f", and not with {beyond[0]}." if beyond else ", the most that were asked about.")
        )
    return said


def choice(of: Sequence[Advice]) -> str:
    """Which of several drafts to take, by what was measured."""
    best = max(of, key=lambda advice: advice.measured.value)
    if best.pays:
        return f"Of these, take {best.draft}: {_figure(best.measured)} times plain decoding."
    return (
        f"Of these, none was shown to pay; {best.draft} came out best, {_figure(best.measured)} times plain decoding."
    )


def _verdict(of: Estimate) -> str:
    if of.low > 1:
        return "it pays"
    if of.high < 1:
        return "it does not pay"
    return "no difference that these prompts could show"


def _figure(of: Estimate) -> str:
    return f"{of.value:.2f} " + (f"({of.low:.2f} to {of.high:.2f})" if isfinite(of.low) else "(one prompt)")
