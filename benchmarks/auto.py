"""Does "auto" find the best K, and what does it cost where nothing pays? Plain decoding, every fixed K, and auto.

    python benchmarks/auto.py --humaneval HumanEval.jsonl.gz --xsum xsum_test_100.jsonl --draft ngram --draft random

A draft is named as for `paceline generate`, "auto" included; "random" is a model of the target's sizes with one layer
of random weights, which is never right. Every prompt runs with every K, in an order drawn anew for each, so that the
machine's drift, and what one run leaves to the next, fall on all alike. A speed is tokens by seconds of decoding;
intervals are bootstraps over prompts. The best fixed K is chosen for each prompt by all others: chosen by the seconds
it is then held against, the luckiest K would win. The same is told once more without a clock, each round taking what
the profile says of it: that is how well auto decides, apart from noise and from what a profile gets wrong. Ends in one
JSON line.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from paceline import LLM
from paceline.decoding.control import Costs
from paceline.decoding.stats import Stats
from paceline.evaluation.intervals import bootstrap
from paceline.evaluation.record import circumstances
from paceline.evaluation.tasks import Task, humaneval, prompt_tokens, xsum
from paceline.models.decoder import Decoder, pack
from paceline.sampling.params import SamplingParams


def drafting(plain: LLM, draft: str) -> LLM:
    """The same target in memory with another draft."""
    if draft != "random":
        return plain.with_draft(draft, max_num_seqs=1)
    assert isinstance(plain.target, Decoder)
    torch.manual_seed(0)
    config = plain.target.config
    model = Decoder(replace(config, layers=config.layers[:1]))
    torch.nn.init.normal_(model.embedding.weight)  # which a decoder leaves to what is loaded
    pack(model)
    return LLM(plain.target, model, tokenizer=plain.tokenizer, max_num_seqs=1)


def main(
    draft: Annotated[list[str], typer.Option()],
    model: str = "smollm2-135m",
    humaneval_file: Annotated[Path | None, typer.Option("--humaneval")] = None,
    xsum_file: Annotated[Path | None, typer.Option("--xsum")] = None,
    k: Annotated[list[int] | None, typer.Option("-k")] = None,
    prompts: int = 40,
    max_tokens: int = 128,
    dtype: str = "auto",
    quantize: str | None = None,
    threads: int | None = None,
) -> None:
    plain = LLM(model, None, dtype=dtype, quantize=quantize, threads=threads)
    tasks: list[Task] = [make(file) for make, file in ((humaneval, humaneval_file), (xsum, xsum_file)) if file]
    console = Console(stderr=True, width=120)
    results: dict[str, Any] = {}
    for name in draft:
        llm = drafting(plain, name)
        profile = llm.profile()
        results[name] = {"costs": vars(profile.costs)}
        for task in tasks:
            # A user's first prompts are in it: nothing of an earlier task is known to auto.
            llm.use(profile)
            sides: list[Any] = [0, *(k or range(1, 7)), "auto"]
            runs: dict[Any, list[Stats]] = {side: [] for side in sides}
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            shuffle = random.Random(0)
            for item in track(task.items[:prompts], console=console, description=task.name):
                texts = set()
                for side in shuffle.sample(sides, len(sides)):
                    llm.draft_tokens = side
                    (completion,) = llm.generate([prompt_tokens(item, llm.tokenizer)], params)
                    runs[side].append(completion.stats)
                    texts.add(tuple(completion.token_ids))
                if len(texts) > 1:
                    raise SystemExit(f"greedy texts of {task.name} {item.id} differ between values of K: must not be")
            results[name][task.name] = compare(runs, profile.costs, console, f"{task.name}, {name}")
    print(json.dumps({"benchmark": "auto", **circumstances(), "model": model, "results": results}))


def by_costs(stats: Stats, costs: Costs) -> float:
    """Seconds that the rounds of a run would take, were each what the profile says."""
    context = stats.prompt_tokens + stats.output_tokens / 2
    drafting = (n * (costs.round(1 + k, context) + costs.draft(k, 1)) for k, n in enumerate(stats.drafts_of, start=1))
    return (stats.rounds - stats.drafts) * costs.round(1, context) + sum(drafting)


def chosen_by_others(seconds: dict[Any, list[float]]) -> list[Any]:
    """For each prompt the fixed K that is best on all others."""
    fixed = [side for side in seconds if side != "auto"]
    others = {side: sum(seconds[side]) - np.array(seconds[side]) for side in fixed}
    return [min(fixed, key=lambda side: others[side][n]) for n in range(len(seconds[0]))]


def compare(runs: dict[Any, list[Stats]], costs: Costs, console: Console, title: str) -> dict[str, Any]:
    clocked = {side: [s.decode_s for s in stats] for side, stats in runs.items()}
    told = {side: [by_costs(s, costs) for s in stats] for side, stats in runs.items()}
    ratio: Callable[..., Any] = np.divide
    against = {}
    for seconds, how in ((clocked, ""), (told, "_by_costs")):
        best_s = [seconds[side][n] for n, side in enumerate(chosen_by_others(seconds))]
        against["times_plain" + how] = bootstrap(ratio, seconds[0], seconds["auto"])
        against["times_best" + how] = bootstrap(ratio, best_s, seconds["auto"])
    table = Table("K", "times plain (95%)", "by costs", "tokens a round", "drafted", "accepted", title=title)
    for side, stats in runs.items():
        of = bootstrap(ratio, clocked[0], clocked[side])
        total = sum(stats, Stats())
        assert of
        table.add_row(
            str(side),
            f"{of.value:.3f} ({of.low:.3f} to {of.high:.3f})",
            f"{sum(told[0]) / sum(told[side]):.3f}",
            f"{(total.output_tokens - total.completions) / total.rounds:.2f}",
            str(total.drafted),
            str(total.accepted),
        )
    console.print(table)
    for name, of in against.items():
        assert of
        console.print(f"auto {name.replace('_', ' ')}: {of.value:.3f} ({of.low:.3f} to {of.high:.3f})")
    best = chosen_by_others(clocked)
    return {
        "speed": {str(side): sum(clocked[0]) / sum(of_side) for side, of_side in clocked.items()},
        "speed_by_costs": {str(side): sum(told[0]) / sum(of_side) for side, of_side in told.items()},
        "best": {str(side): best.count(side) for side in {*best}},
        **{name: vars(of) for name, of in against.items() if of},
    }


if __name__ == "__main__":
    typer.run(main)
