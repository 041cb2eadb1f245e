"""Which draft pays on which kind of text? The evaluation prompts of several tasks, each with every draft in turn.

    python benchmarks/tasks.py DATA --human-eval HumanEval.jsonl.gz --draft ngram --draft D -k 2 -k auto [--dtype D]

DATA is a folder with xsum_test_100.jsonl, gsm8k_test.jsonl and spec_bench.jsonl; what is not there is left out. A draft
is named as for `LLM` (auto, ngram, a folder made by `paceline train`, ...); "@0.3" behind it ends its drafts by
`draft_p_min`.
The prompts are those of `paceline bench`.

Every prompt runs with plain decoding and then with every draft and K, so that the machine's drift falls on all alike; a
speed-up is the ratio of the seconds of a task's prompts, its interval a bootstrap over prompts. Greedy texts must equal
those of plain decoding. `--llama FILE.gguf` lets llama.cpp decode the same prompts plainly, as many tokens (whatever
they are), where they fit its context. Ends in one JSON line.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from peers import ROOM, Side
from rich.console import Console
from rich.progress import track
from rich.table import Table

from paceline import LLM, SamplingParams
from paceline.decoding.stats import Stats
from paceline.engine.profile import Profile
from paceline.evaluation.intervals import ratio
from paceline.evaluation.record import circumstances
from paceline.evaluation.tasks import gsm8k, humaneval, prompt_tokens, spec_bench, xsum

SETTLE_S = 0.05
"""The threads of one side spin for a while behind their work, and take the other's processors."""


def prompts_of(data: Path, human_eval: Path | None, count: int, llm: LLM) -> dict[str, list[list[int]]]:
    """The prompts of each task, as tokens."""
    readers = {"xsum_test_100.jsonl": xsum, "gsm8k_test.jsonl": gsm8k, "spec_bench.jsonl": spec_bench}
    found = [humaneval(human_eval)] if human_eval else []
    found += [read(data / name) for name, read in readers.items() if (data / name).exists()]
    prompts: dict[str, list[list[int]]] = {}
    for task in found:
        for item in task.items:
            name = f"{task.name} {item.category}".strip()
            prompts.setdefault(name, []).append(prompt_tokens(item, llm.tokenizer))
    shuffle = random.Random(0)
    return {name: shuffle.sample(of_task, min(count, len(of_task))) for name, of_task in prompts.items()}


def drafting(llm: LLM, draft: str, k: int | Literal["auto"]) -> LLM:
    name, _, p_min = draft.partition("@")
    other = llm.with_draft(name, p_min=float(p_min) if p_min else None)
    other.draft_tokens = k
    if k == "auto":  # measured in this run, and not what an earlier one kept
        other.use(Profile(other.measure()))
    return other


def interval(plain: list[float], mine: list[float]) -> tuple[float, float, float]:
    """The ratio of the sums, and its interval over prompts."""
    found = ratio(plain, mine)
    assert found
    return found.value, found.low, found.high


def main(
    data: Path,
    draft: Annotated[list[str], typer.Option()],
    model: str = "smollm2-135m",
    human_eval: Path | None = None,
    k: Annotated[list[str] | None, typer.Option("-k", help="Tokens drafted a round, or auto.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Of the tasks, those whose names contain this.")] = None,
    prompts: int = 40,
    max_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    dtype: str = "auto",
    quantize: str | None = None,
    activations: str = "auto",
    threads: int | None = None,
    llama: Annotated[Path | None, typer.Option(help="The same weights for llama.cpp.")] = None,
    llama_python: Annotated[str, typer.Option(help="The Python that has llama-cpp-python.")] = sys.executable,
) -> None:
    peer = None
    if llama:
        count = threads or torch.get_num_threads()
        peer = Side("llama.cpp", python=llama_python, target=llama, draft=None, threads=count)
    plain = LLM(model, None, dtype=dtype, quantize=quantize, activations=activations, threads=threads)
    counts: list[int | Literal["auto"]] = ["auto" if n == "auto" else int(n) for n in k or ["4"]]
    sides = {(name, n): drafting(plain, name, n) for name in draft for n in counts}
    params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=1)
    chosen = {
        name: found
        for name, found in prompts_of(data, human_eval, prompts, plain).items()
        if not only or any(part.lower() in name.lower() for part in only)
    }
    for llm in (plain, *sides.values()):  # warm up
        llm.generate("Hello", SamplingParams(max_tokens=8))

    console = Console(stderr=True, width=150)
    table = Table(
        "task", "draft", "K", "times plain (95%)", "alpha", "by position", "tokens a round", "ms: draft/score/rest"
    )
    results: dict[str, Any] = {}
    for task, asked in chosen.items():
        runs: dict[Any, list[Stats]] = {key: [] for key in ("plain", *sides)}
        differing, of_peer = 0, dict[int, float]()
        for number, prompt in enumerate(track(asked, console=console, description=task)):
            (expected,) = plain.generate([prompt], params)
            runs["plain"].append(expected.stats)
            length = len(expected.token_ids)
            if peer and length > 1 and len(prompt) + length < ROOM:
                time.sleep(SETTLE_S)
                of_peer[number] = peer.generate("plain", prompt, length).decode_s / (length - 1)
                time.sleep(SETTLE_S)
            for key, llm in sides.items():
                (found,) = llm.generate([prompt], params)
                runs[key].append(found.stats)
                differing += temperature == 0 and found.outputs[0].token_ids != expected.outputs[0].token_ids
        if differing:
            raise SystemExit(f"{differing} greedy texts of {task} differ from plain decoding's: this must not be")
        seconds = {key: [s.decode_s / max(s.output_tokens - 1, 1) for s in stats] for key, stats in runs.items()}
        whole = {key: sum(stats, Stats()) for key, stats in runs.items()}
        results[task] = {"plain_ms_per_token": 1000 / whole["plain"].tokens_per_second, "drafts": {}}
        if of_peer:
            results[task]["llama_ms_per_token"] = 1000 * sum(of_peer.values()) / len(of_peer)
            plain_there = [seconds["plain"][n] for n in of_peer]
            results[task]["plain_times_llama"] = interval(list(of_peer.values()), plain_there)
        for key in sides:
            total, (ratio, low, high) = whole[key], interval(seconds["plain"], seconds[key])
            reached, accepted = sum(total.reached_at), sum(total.accepted_at)
            alpha, ms = accepted / max(reached, 1), 1000 / max(total.rounds, 1)
            rest = total.verify_s + total.other_s
            name = f"{key[0]} K={key[1]}"
            results[task]["drafts"][name] = {
                "times_plain": [ratio, low, high],
                "alpha": alpha,
                "alpha_by_position": total.conditional_acceptance,
                "tokens_per_round": (total.output_tokens - total.completions) / max(total.rounds, 1),
                "times_llama": interval(list(of_peer.values()), [seconds[key][n] for n in of_peer])
                if of_peer
                else None,
                "rounds": total.rounds,
                "drafts": total.drafts,
                "ms_per_round": {"draft": ms * total.draft_s, "score": ms * total.score_s, "rest": ms * rest},
            }
            table.add_row(
                task,
                ("ngram+" if key[0].startswith("ngram+") else "") + Path(key[0].removeprefix("ngram+")).name,
                str(key[1]),
                f"{ratio:.2f} ({low:.2f} to {high:.2f})"
                + (f", llama.cpp {results[task]['drafts'][name]['times_llama'][0]:.2f}" if of_peer else ""),
                f"{alpha:.3f}",
                " ".join(f"{a:.2f}" for a in total.conditional_acceptance),
                f"{results[task]['drafts'][name]['tokens_per_round']:.2f}",
                " / ".join(f"{ms * part:.1f}" for part in (total.draft_s, total.score_s, rest)),
            )
        table.add_section()
    console.print(table)
    print(json.dumps({"benchmark": "tasks", **circumstances(), "results": results}))


if __name__ == "__main__":
    typer.run(main)
