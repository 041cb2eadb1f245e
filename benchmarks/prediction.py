"""Does a draft speed up as its training said it would? Predicted against measured, for K = 1 to 8, on held-out prompts.

    python benchmarks/prediction.py FOLDER PROMPTS.jsonl [--texts 16] [--max-tokens 64]

FOLDER is what `paceline train` wrote with these prompts, texts included. Predicted: acceptance by position on the
held-out texts that were answered greedily, unrolled to 8 tokens, and the costs of a round, measured as the command
measures them. Measured: the same prompts decoded greedily, plain and with every K in turn. Ends in one JSON line.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from paceline import LLM, SamplingParams
from paceline.checkpoints.drafts import read_draft
from paceline.checkpoints.folder import read_json
from paceline.decoding.control import MAX_DRAFT
from paceline.decoding.stats import Stats
from paceline.models.decoder import Decoder
from paceline.training.command import measured as measure
from paceline.training.data import Answering, Prompt, Texts, read_prompts
from paceline.training.evaluation import Evaluation, evaluate
from paceline.training.learners import begin


def main(
    folder: Path,
    prompts: Path,
    model: str = "smollm2-135m",
    texts: int = 16,
    max_tokens: int = 64,
    dtype: str = "auto",
    quantize: str | None = None,
) -> None:
    llm = LLM(model, None, dtype=dtype, quantize=quantize)
    assert isinstance(llm.target, Decoder)
    console = Console(stderr=True, width=120)
    values = read_json(folder / "config.json")
    _, ids, shape = read_draft(folder, llm.target, values["kind"])
    learner = begin(
        values["kind"],
        llm.target,
        model,
        None if ids is None else ids.tolist(),
        layers=shape.get("layers", ()),
        heads=shape.get("heads", 1),
    )
    learner.start(folder)
    asked = read_prompts(prompts, llm)
    greedy = [index for index in range(0, len(asked), 38) if asked[index].mask is None][:texts]
    chosen = [Prompt(asked[index].tokens) for index in greedy]
    # The texts again, as long as they are decoded below.
    answers = Texts(
        folder / "prediction",
        llm,
        chosen,
        Answering(temperatures=(0.0,), max_tokens=max_tokens),
        features=learner.features,
        budget=0,
    )
    answers.make()
    batches = (answers.batch([index]) for index in answers.indices)
    found = Evaluation.of(
        evaluate(learner, batches, llm.target.logits, SamplingParams(temperature=0), MAX_DRAFT), learner.reach
    )
    costs = measure(llm, folder)

    drafting = llm.with_draft(llm.new_proposer(folder))
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    runs: dict[int, list[Stats]] = {k: [] for k in range(MAX_DRAFT + 1)}
    for prompt in track(chosen, console=console, description="decoding"):
        for k, stats in runs.items():
            drafting.draft_tokens = k
            (completion,) = drafting.generate([list(prompt.tokens)], params)
            stats.append(completion.stats)
    whole = {k: sum(stats, Stats()) for k, stats in runs.items()}
    table = Table("K", "tokens a round: predicted", "measured", "times plain: predicted", "measured", "off by")
    rows = []
    for k in range(1, MAX_DRAFT + 1):
        measured = whole[k].tokens_per_second / whole[0].tokens_per_second
        length, predicted = found.lengths[k - 1], found.speedups(costs)[k - 1]
        rows.append(
            {
                "k": k,
                "length": [length, whole[k].acceptance_length],
                "times_plain": [predicted, measured],
                "off_by": predicted / measured - 1,
            }
        )
        table.add_row(
            str(k),
            f"{length:.3f}",
            f"{whole[k].acceptance_length:.3f}",
            f"{predicted:.3f}",
            f"{measured:.3f}",
            f"{predicted / measured - 1:+.1%}",
        )
    console.print(table)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    print(
        json.dumps(
            {
                "benchmark": "prediction",
                "command": " ".join(sys.argv),
                "commit": commit,
                "machine": f"{platform.machine()}, {os.cpu_count()} processors, {torch.get_num_threads()} threads",
                "alpha": found.alpha,
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    typer.run(main)
