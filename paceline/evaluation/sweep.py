"""The K sweep, the paper's Figure 1: what a round costs and gives by the number of drafted tokens, K = 0 being plain.

Every item runs with every K in turn, in this process, the order rotating from item to item, so that the machine's drift
falls on all K alike. All completions have the same length: the end of a text is ignored.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from paceline.decoding.stats import Stats
from paceline.engine.llm import LLM
from paceline.evaluation.bench import Track, plainly, seed_of, unshown
from paceline.evaluation.intervals import Estimate, ratio
from paceline.evaluation.record import RunFolder
from paceline.evaluation.tasks import Task, prompt_tokens
from paceline.sampling.params import SamplingParams

LINES = "sweep.jsonl"
PARTS = ("draft", "score", "verify", "other")
PER = 128
"""Tokens that times are told for."""
QUANTILES = (10, 50, 90, 99)
PREDICTIONS = {
    "formula": "(1 - alpha^(K+1))/(1 - alpha), as if every draft had K tokens",
    "lengths": "the same, averaged over the lengths that drafts had",
    "positions": "from the acceptance of each position instead of one alpha, over the lengths that drafts had",
}


def sweep_params(task: Task, tokens: int) -> SamplingParams:
    """Those of the task's first setting, always to `tokens` tokens."""
    return replace(task.settings[0].params, n=1, max_tokens=tokens, ignore_eos=True, stop=None)


def measure(
    llm: LLM, task: Task, folder: RunFolder, *, most: int, tokens: int, seed: int, track: Track = unshown
) -> None:
    """K = 0 to `most` on every item that is not in the folder yet; an item is one line, kept or lost as a whole."""
    params = sweep_params(task, tokens)
    done = {(line["task"], line["item"]) for line in folder.read(LINES)}
    engines = [plainly(llm), *(_with_draft_tokens(llm, k) for k in range(1, most + 1))]
    work = [(number, item) for number, item in enumerate(task.items) if (task.name, item.id) not in done]
    if work:
        for engine in engines:  # the first pass is slower than others
            engine.generate([prompt_tokens(task.items[0], llm.tokenizer)], replace(params, max_tokens=min(8, tokens)))
    for number, item in track(work, f"{task.name}, K = 0 to {most}"):
        prompt, runs = prompt_tokens(item, llm.tokenizer), []
        for step in range(most + 1):
            k = (number + step) % (most + 1)
            seeded = replace(params, seed=seed_of(seed, task.settings[0].name, item.id, f"K = {k}", 0))
            (completion,) = engines[k].generate([prompt], seeded)
            runs.append({"k": k, "stats": asdict(completion.stats)})
        folder.append(LINES, {"task": task.name, "item": item.id, "runs": runs})


def summarise(task: Task, lines: Sequence[dict[str, Any]], *, seed: int = 0) -> dict[str, Any]:
    """JSON: by K what was measured, the fitted alpha, and what is predicted from it. At least one line."""
    runs: dict[int, list[Stats]] = {}
    for line in lines:
        if line["task"] == task.name:
            for run in line["runs"]:
                runs.setdefault(run["k"], []).append(Stats(**run["stats"]))
    totals = {k: sum(found, Stats()) for k, found in sorted(runs.items())}
    everything = sum((total for k, total in totals.items() if k), Stats())
    reached = sum(everything.reached_at)
    alpha = sum(everything.accepted_at) / reached if reached else None
    by_k = [_of_k(k, runs[k], totals[k], alpha, seed) for k in totals]
    return {
        "task": task.name,
        "title": task.title,
        "setting": task.settings[0].name,
        "items": len(runs[0]),
        "alpha": alpha,
        "alpha_counts": [sum(everything.accepted_at), reached],
        "by_k": by_k,
        "worst_error": {name: _worst(by_k, name) for name in PREDICTIONS} if alpha is not None else None,
    }


def expected_length(rates: Sequence[float]) -> float:
    """Tokens that a round gives whose draft has as many tokens as `rates`, each accepted with its rate if all before
    it were. With one alpha for all of K positions it is (1 - alpha^(K+1))/(1 - alpha)."""
    return 1.0 + float(np.cumprod(rates).sum())


def _with_draft_tokens(llm: LLM, k: int) -> LLM:
    other = copy.copy(llm)
    other.draft_tokens = k
    return other


def _of_k(k: int, runs: Sequence[Stats], total: Stats, alpha: float | None, seed: int) -> dict[str, Any]:
    given = [s.output_tokens - s.completions for s in runs]
    rounds = [s.rounds for s in runs]
    times = [1000 * PER * s.decode_s / tokens for s, tokens in zip(runs, given, strict=True)]
    return {
        "k": k,
        "rounds": total.rounds,
        "drafts": total.drafts,
        "drafts_of": total.drafts_of,
        "loop_ms": _json(ratio([1000 * s.decode_s for s in runs], rounds, seed=seed)),
        "parts_ms": {part: 1000 * getattr(total, f"{part}_s") / total.rounds for part in PARTS},
        "tokens_per_round": _json(ratio(given, rounds, seed=seed)),
        "efficiency": _json(ratio(given, [(k + 1) * n for n in rounds], seed=seed)),
        "acceptance_length": total.acceptance_length,
        "conditional_acceptance": total.conditional_acceptance,
        "marginal_acceptance": total.marginal_acceptance,
        f"ms_per_{PER}_tokens": {f"p{q}": float(np.percentile(times, q)) for q in QUANTILES},
        "predicted_acceptance_length": _predictions(k, total, alpha) if k and alpha is not None else None,
    }


def _predictions(k: int, total: Stats, alpha: float) -> dict[str, float]:
    """Of the tokens that a round with a draft gives, by each of PREDICTIONS."""

    def over_lengths(rates: Sequence[float]) -> float:
        lengths = enumerate(total.drafts_of, start=1)
        return sum(count * expected_length(rates[:length]) for length, count in lengths) / max(total.drafts, 1)

    return {
        "formula": expected_length([alpha] * k),
        "lengths": over_lengths([alpha] * k),
        "positions": over_lengths(total.conditional_acceptance),
    }


def _worst(by_k: Sequence[dict[str, Any]], name: str) -> float:
    """The largest relative error of a prediction over all K."""
    errors = [
        abs(found["predicted_acceptance_length"][name] / found["acceptance_length"] - 1)
        for found in by_k
        if found["k"] and found["drafts"]
    ]
    return max(errors)


def verdict(summary: dict[str, Any]) -> list[str]:
    """What the fit says, in sentences."""
    if summary["alpha"] is None:
        return [f"{summary['task']}: nothing was drafted."]
    accepted, reached = summary["alpha_counts"]
    last, worst = summary["by_k"][-1], summary["worst_error"]
    drafting = [found for found in summary["by_k"] if found["k"]]
    share = sum(found["drafts"] for found in drafting) / sum(found["rounds"] for found in drafting)
    whole = sum(found["drafts_of"][found["k"] - 1] for found in drafting if len(found["drafts_of"]) == found["k"])
    of_all = whole / max(sum(found["drafts"] for found in drafting), 1)
    rates = " ".join(f"{rate:.2f}" for rate in last["conditional_acceptance"])
    said = [
        f"{summary['task']}: alpha = {summary['alpha']:.3f} ({accepted} of {reached} drafted tokens accepted whose "
        f"predecessors all were, all K together: the maximum of the likelihood).",
        f"The formula (1 - alpha^(K+1))/(1 - alpha) is off by {worst['formula']:.1%} at worst from the tokens that a "
        f"round with a draft gave; averaged over the lengths that drafts had, by {worst['lengths']:.1%}; with the "
        f"acceptance of each position instead of one alpha, by {worst['positions']:.1%}.",
        f"{share:.1%} of the rounds with K > 0 drafted, {of_all:.1%} of those drafts had K tokens; acceptance by "
        f"position, given all before, at K = {last['k']}: {rates}.",
    ]
    if worst["formula"] > 0.03:
        why = []
        if of_all < 0.99:
            why.append(f"{1 - of_all:.0%} of the drafts are shorter than K")
        if worst["lengths"] > 0.03:
            why.append("acceptance is not the same at every position and in every round, as one alpha supposes")
        said.append(f"So the formula alone does not hold here within 3%: {' and '.join(why) or 'chance'}.")
    return said


def _json(estimate: Estimate | None) -> dict[str, float] | None:
    return asdict(estimate) if estimate else None
