"""Is `draft_tokens="auto"` never slower where many sequences share a pass? Sampled, with seeds of one's own or not.

    python benchmarks/batched.py HumanEval.jsonl.gz --batch 16 --repeats 3

The same prompts as one call of `generate`, by plain decoding, by auto and by a fixed K, in an order drawn anew for each
repeat. A request with a seed decides as if it ran alone, so that its text repeats: in a batch it may draft more than
pays. Ends in one JSON line.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline import LLM, SamplingParams
from paceline.decoding.stats import Stats
from paceline.evaluation.record import circumstances
from paceline.evaluation.tasks import humaneval, prompt_tokens


def main(
    humaneval_file: Annotated[Path, typer.Argument(metavar="HUMANEVAL")],
    model: str = "smollm2-135m",
    draft: str = "ngram",
    batch: int = 16,
    prompts: int = 32,
    max_tokens: int = 96,
    k: int = 4,
    repeats: int = 3,
    activations: str = "auto",
) -> None:
    llm = LLM(model, draft, max_num_seqs=batch, activations=activations)
    llm.profile()
    asked = [prompt_tokens(item, llm.tokenizer) for item in humaneval(humaneval_file, 1).items[:prompts]]
    sides: dict[str, tuple[Any, bool]] = {
        "plain": (0, True),
        "auto": ("auto", False),
        "auto, seeds": ("auto", True),
        f"K = {k}": (k, True),
    }
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    drafted: dict[str, list[int]] = {side: [] for side in sides}
    shuffle = random.Random(0)
    for _ in range(repeats):
        for side in shuffle.sample(list(sides), len(sides)):
            llm.draft_tokens, seeded = sides[side]
            params = [
                SamplingParams(
                    temperature=0.8, top_p=0.95, max_tokens=max_tokens, ignore_eos=True, seed=i if seeded else None
                )
                for i in range(len(asked))
            ]
            began = time.perf_counter()
            completions = llm.generate(asked, params)
            seconds[side].append(time.perf_counter() - began)
            drafted[side].append(sum((completion.stats for completion in completions), Stats()).drafted)
    times = {side: [a / b for a, b in zip(seconds["plain"], of, strict=True)] for side, of in seconds.items()}
    for side, of in times.items():
        print(f"{side}: {statistics.median(of):.3f} times plain ({min(of):.3f} to {max(of):.3f})", flush=True)
    record = {"seconds": seconds, "times_plain": times, "drafted": drafted, "batch": batch, "model": model}
    print(json.dumps({"benchmark": "batched", **circumstances(), **record}))


if __name__ == "__main__":
    typer.run(main)
