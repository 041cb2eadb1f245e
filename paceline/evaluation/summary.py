"""From the lines of a run to its figures: quality, time per token, speed-up, acceptance, each with its interval.

Computes; `tables` and `report` show. Every figure is over items, and plain and speculative are paired by item.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from paceline.decoding.stats import Stats
from paceline.evaluation.bench import METHODS, stats_of
from paceline.evaluation.intervals import Estimate, bootstrap, mean, ratio
from paceline.evaluation.tasks import Item, Setting, Task, pass_at_k

PASSES = (1, 10, 100)
"""The k of pass@k, as far as there are samples."""

Line = dict[str, Any]
Metrics = dict[str, Callable[[Sequence[float]], float]]


def summarise(task: Task, results: Sequence[Line], scores: Sequence[Line], *, seed: int = 0) -> dict[str, Any]:
    """JSON: what `tables.markdown` and the HTML page are made of. Items without timed completions are not counted."""
    return {
        "task": task.name,
        "title": task.title,
        "metric": task.metric,
        "settings": [
            _setting(
                task,
                setting,
                [line for line in results if line["setting"] == setting.name],
                [line for line in scores if line["setting"] == setting.name],
                seed,
            )
            for setting in task.settings
        ],
    }


def metrics(metric: str, n: int) -> Metrics:
    """By name: what the scores of an item's n completions give. pass@k for every k that n allows."""
    if not metric:
        return {}
    if metric.startswith("pass@"):
        return {f"pass@{k}": _passing(k) for k in PASSES if k <= n}
    return {metric: lambda scores: sum(scores) / len(scores)}


def _passing(k: int) -> Callable[[Sequence[float]], float]:
    return lambda scores: pass_at_k(len(scores), round(sum(scores)), k)


def _setting(
    task: Task, setting: Setting, results: Sequence[Line], scores: Sequence[Line], seed: int
) -> dict[str, Any]:
    timed: dict[str, dict[str, list[Line]]] = {}
    totals = {method: Stats() for method in METHODS}
    for line in results:
        for found in line["completions"]:
            totals[found["method"]] += stats_of(found)
            if line["timed"]:
                timed.setdefault(line["item"], {name: [] for name in METHODS})[found["method"]].append(found)
    items = [item for item in task.items if item.id in timed]
    of_item = {(line["item"], line["method"]): line["scores"] for line in scores}
    scored = [item for item in items if all((item.id, method) in of_item for method in METHODS)]
    wanted = metrics(task.metric, setting.params.n)
    quality = {
        method: {name: [f(of_item[item.id, method]) for item in scored] for name, f in wanted.items()}
        for method in METHODS
    }
    sums = {
        method: {item.id: sum(map(stats_of, timed[item.id][method]), Stats()) for item in items} for method in METHODS
    }
    greedy = setting.params.temperature == 0
    return {
        "name": setting.name,
        "params": _told(setting),
        "samples": setting.params.n,
        "items": len(task.items),
        "timed_items": len(items),
        "scored_items": len(scored),
        "differing_texts": sum(_differ(timed[item.id]) for item in items) if greedy else None,
        "methods": {
            method: {
                "quality": {name: _json(mean(values, seed=seed)) for name, values in quality[method].items()},
                "ms_per_token": _json(_ms_per_token(sums[method].values(), seed)),
                "prefill_ms": _milliseconds(sums[method].values()),
                **_acceptance(totals[method]),
            }
            for method in METHODS
        },
        "speedup": _json(speedup(list(sums["plain"].values()), list(sums["speculative"].values()), seed=seed)),
        "difference": {name: _json(_difference(quality, name, seed)) for name in wanted},
        "groups": _groups(items, sums, seed),
        "per_item": [
            {
                "item": item.id,
                "category": item.category,
                **{
                    method: {
                        "scores": of_item.get((item.id, method), []),
                        "ms_per_token": 1000 * seconds(sums[method][item.id]) / max(tokens(sums[method][item.id]), 1),
                        "tokens": sums[method][item.id].output_tokens,
                        "tokens_per_round": per_round(sums[method][item.id]),
                    }
                    for method in METHODS
                },
            }
            for item in items
        ],
    }


def seconds(stats: Stats) -> float:
    """Of decoding, prefill apart."""
    return stats.decode_s


def tokens(stats: Stats) -> int:
    """Those that decoding gave: the first token of each completion comes out of reading the prompt."""
    return stats.output_tokens - stats.completions


def per_round(stats: Stats) -> float:
    """Tokens a round, rounds without a draft included."""
    return tokens(stats) / stats.rounds if stats.rounds else 0.0


def speedup(plain: Sequence[Stats], speculative: Sequence[Stats], *, seed: int = 0) -> Estimate | None:
    """Plain time per token over speculative time per token, each of all items together; paired by item."""
    columns = [[f(stats) for stats in side] for side in (plain, speculative) for f in (seconds, tokens)]
    return bootstrap(lambda s0, t0, s1, t1: (s0 / t0) / (s1 / t1), *columns, seed=seed) if plain else None


def _ms_per_token(found: Iterable[Stats], seed: int) -> Estimate | None:
    stats = list(found)
    return ratio([1000 * seconds(s) for s in stats], [tokens(s) for s in stats], seed=seed)


def _milliseconds(found: Iterable[Stats]) -> float:
    """Mean time to the first token of a completion."""
    total = sum(found, Stats())
    return 1000 * total.prefill_s / max(total.completions, 1)


def _difference(quality: dict[str, dict[str, list[float]]], name: str, seed: int) -> Estimate | None:
    pairs = zip(quality["speculative"][name], quality["plain"][name], strict=True)
    differences = [speculative - plain for speculative, plain in pairs]
    return bootstrap(lambda d, n: d / n, differences, [1] * len(differences), seed=seed) if differences else None


def _groups(items: Sequence[Item], sums: dict[str, dict[str, Stats]], seed: int) -> list[dict[str, Any]]:
    found = []
    for name in sorted({item.category for item in items} - {""}):
        of_group = [item.id for item in items if item.category == name]
        plain, speculative = ([sums[method][id] for id in of_group] for method in METHODS)
        acceptance = _acceptance(sum(speculative, Stats()))
        estimate = speedup(plain, speculative, seed=seed)
        found.append({"name": name, "items": len(of_group), "speedup": _json(estimate), **acceptance})
    return found


def _acceptance(total: Stats) -> dict[str, Any]:
    reached = sum(total.reached_at)
    return {
        "completions": total.completions,
        "tokens": total.output_tokens,
        "rounds": total.rounds,
        "drafts": total.drafts,
        "tokens_per_round": per_round(total),
        "acceptance_length": total.acceptance_length,
        "alpha": sum(total.accepted_at) / reached if reached else None,
        "conditional_acceptance": total.conditional_acceptance,
        "marginal_acceptance": total.marginal_acceptance,
    }


def _differ(timed: dict[str, list[Line]]) -> bool:
    plain, speculative = ([found["tokens"] for found in timed[method]] for method in METHODS)
    return plain != speculative


def _told(setting: Setting) -> str:
    p = setting.params
    heat = "the most probable token" if p.temperature == 0 else f"T = {p.temperature:g}, top_p = {p.top_p:g}"
    return f"{heat}, at most {p.max_tokens} tokens"


def _json(estimate: Estimate | None) -> dict[str, float | None] | None:
    return estimate.record() if estimate else None
