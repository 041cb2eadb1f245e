"""Spec-Bench's answer files, as its own `evaluation/speed.py` reads them (--file-path and --base-path).

That script takes the mean of tokens/s over questions; the tokens of the baseline it counts by tokenizing the texts
anew, minus one for a beginning-of-sequence token. Our own tables count the tokens that were generated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from paceline.evaluation.bench import METHODS, round_lengths, stats_of
from paceline.evaluation.tasks import Item, Task


def write(task: Task, results: Sequence[dict[str, Any]], run: Mapping[str, Any], folder: Path) -> None:
    """`spec-bench-plain.jsonl` and `spec-bench-speculative.jsonl`."""
    dates = [datetime.fromisoformat(session["date"]).timestamp() for session in run["sessions"]]
    timed = {line["item"]: line for line in results if line["timed"]}
    for method in METHODS:
        lines = [
            _answer(item, method, timed[item.id]["completions"], dates[timed[item.id]["session"]])
            for item in task.items
            if item.id in timed
        ]
        lines.sort(key=lambda line: line["question_id"])
        (folder / f"spec-bench-{method}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _answer(item: Item, method: str, completions: Sequence[dict[str, Any]], date: float) -> dict[str, Any]:
    of_turns = [found for found in completions if found["method"] == method]
    stats = [stats_of(found) for found in of_turns]
    # The round that reads the prompt gives a token and is no decoding step.
    lengths = [round_lengths(found["provenance"])[1:] for found in of_turns]
    choice = {
        "index": 0,
        "turns": [found["text"] for found in of_turns],
        "decoding_steps": [len(of_turn) for of_turn in lengths],
        "new_tokens": [s.output_tokens for s in stats],
        "wall_time": [s.prefill_s + s.decode_s for s in stats],
        "accept_lengths": [length for of_turn in lengths for length in of_turn],
    }
    return {
        "question_id": item.reference["question_id"],
        "category": item.reference["category"],
        "answer_id": f"{item.id}-{method}",
        "model_id": f"paceline-{method}",
        "choices": [choice],
        "tstamp": date,
    }
