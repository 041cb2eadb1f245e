"""Which draft pays on this machine? Plain decoding, prompt lookup and cuts of the target's own layers, interleaved.

`python benchmarks/drafts.py [--repeats 3] [--max-tokens 64] [--temperature 0]`

Every prompt runs with every draft in turn, so that the machine's drift falls on all of them alike; a ratio is between
runs of the same prompt in the same repeat. Ends in one JSON line.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from importlib.metadata import version
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from paceline import LLM, SamplingParams
from paceline.decoding.stats import Stats
from paceline.models.decoder import Decoder

PROMPTS = {
    "code": "Write a Python function that merges two sorted lists into one sorted list, with a docstring.",
    "edit": "Rewrite this function so that it also accepts None:\n\ndef area(width, height):\n    if width < 0 or "
    "height < 0:\n        raise ValueError('width and height must not be negative')\n    return width * height\n",
    "summary": "Summarise in two sentences: The tide mill at the river's mouth ground flour for three hundred years. "
    "At high tide a gate let the water into the mill pond; when the tide fell, the pond was emptied over the wheel. "
    "The miller worked by the moon and not by the clock, and slept when the water stood.",
    "explain": "Explain in a few sentences why the sky is blue and sunsets are red.",
}


def main(
    model: str = "smollm2-135m",
    repeats: int = 3,
    max_tokens: int = 64,
    temperature: float = 0.0,
    draft_tokens: int = 4,
    threads: Annotated[int | None, typer.Option()] = None,
    only: Annotated[list[str] | None, typer.Option(help="Of the drafts, these alone; may be repeated.")] = None,
) -> None:
    target = LLM(model, None, threads=threads)
    assert isinstance(target.target, Decoder)
    last = target.target.config.num_layers - 1
    drafts: dict[str, Any] = {
        "plain": None,
        "ngram": "ngram",
        "layers first+last 2": target.target.cut((0, 1, last - 1, last)),
        "layers first 4": target.target.cut((0, 1, 2, 3)),
        "every other layer": target.target.cut(tuple(range(0, last + 1, 2))),
    }
    llms = {
        name: LLM(target.target, draft, tokenizer=target.tokenizer, draft_tokens=draft_tokens)
        for name, draft in drafts.items()
        if name == "plain" or not only or name in only
    }
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True, seed=1)
    for llm in llms.values():  # warm up
        llm.generate("Hello", SamplingParams(max_tokens=4))

    runs: dict[str, dict[str, list[Stats]]] = {name: {kind: [] for kind in PROMPTS} for name in llms}
    jobs = [(repeat, kind, name) for repeat in range(repeats) for kind in PROMPTS for name in llms]
    for _, kind, name in track(jobs, console=Console(stderr=True), description="measuring"):
        (completion,) = llms[name].chat([{"role": "user", "content": PROMPTS[kind]}], params)
        runs[name][kind].append(completion.stats)

    table = Table(
        "draft", "ms/token", "times plain", "accepted/drafted", "acceptance length", "draft", "score", "verify"
    )
    results = {}
    for name, by_kind in runs.items():
        ratios = {
            kind: statistics.median(
                mine.tokens_per_second / plain.tokens_per_second
                for mine, plain in zip(stats, runs["plain"][kind], strict=True)
            )
            for kind, stats in by_kind.items()
        }
        total = sum((s for stats in by_kind.values() for s in stats), Stats())
        ms = 1000 / max(total.rounds, 1)
        results[name] = {
            "ms_per_token": 1000 / total.tokens_per_second,
            "times_plain": ratios,
            "times_plain_mean": statistics.fmean(ratios.values()),
            "accepted": total.accepted,
            "drafted": total.drafted,
            "acceptance_length": total.acceptance_length,
            "ms_per_round": {"draft": ms * total.draft_s, "score": ms * total.score_s, "verify": ms * total.verify_s},
        }
        table.add_row(
            name,
            f"{1000 / total.tokens_per_second:.1f}",
            f"{statistics.fmean(ratios.values()):.2f}  ({', '.join(f'{k} {r:.2f}' for k, r in ratios.items())})",
            f"{total.accepted}/{total.drafted}",
            f"{total.acceptance_length:.2f}",
            *(f"{ms * part:.1f} ms" for part in (total.draft_s, total.score_s, total.verify_s)),
        )
    Console(stderr=True, width=150).print(table)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    setting = {
        "command": " ".join(sys.argv),
        "commit": commit,
        "machine": f"{platform.machine()}, {os.cpu_count()} processors, {torch.get_num_threads()} threads",
        "versions": {name: version(name) for name in ("torch", "numpy", "transformers")},
        "python": platform.python_version(),
    }
    print(json.dumps({"benchmark": "drafts", **setting, "results": results}))


if __name__ == "__main__":
    typer.run(main)
