"""A task that needs no data and no programs, on a tiny random model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from paceline import LLM, SamplingParams
from paceline.evaluation.record import read_lines
from paceline.evaluation.tasks import Item, Setting, Task
from tests import tiny

WORDS = ["quick", "brown", "fox", "jumps", "over", "lazy", "dog", "one", "two", "three", "def", "add", "return"]
SAMPLED = Setting("sampled", SamplingParams(temperature=0.9, top_p=0.95, max_tokens=10, n=3))
GREEDY = Setting("greedy", SamplingParams(temperature=0, max_tokens=10))


def vowels(item: Item, texts: Sequence[str]) -> list[float]:
    """The share of a text's letters that are vowels."""
    return [sum(letter in "aeiou" for letter in text) / max(len(text), 1) for text in texts]


def task(items: int = 4, *, settings: Sequence[Setting] = (SAMPLED, GREEDY), two_turns: bool = False) -> Task:
    made = []
    for number in range(items):
        words = [WORDS[(3 * number + i) % len(WORDS)] for i in range(5)]
        said = [" ".join(words * 2), "and " + words[0]] if two_turns else [" ".join(words * 2)]
        message = {"role": "user", "content": said[0]}
        kind = ("mt_bench", "qa")[number % 2] if two_turns else ""
        reference = {"turns": said, "category": "writing" if kind == "mt_bench" else kind, "question_id": 80 + number}
        made.append(Item(str(number), (message,), kind, reference if two_turns else {}))
    return Task("counting", "A few words", "vowels", tuple(made), tuple(settings), vowels)


def tiny_llm(folder: Path, **options: Any) -> LLM:
    """The draft is the target with noise on its weights: right often, and wrong often."""
    target = tiny.save(folder / "target")
    noisy = AutoModelForCausalLM.from_pretrained(target)
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weights in noisy.parameters():
            weights += 0.03 * weights.std() * torch.randn(weights.shape, generator=noise) if weights.dim() > 1 else 0
    noisy.save_pretrained(folder / "draft")
    tiny.tokenizer().save_pretrained(folder / "draft")
    return LLM(str(target), str(folder / "draft"), device="cpu", draft_tokens=3, **options)


def without_times(folder: Path) -> dict[str, Any]:
    """What a run left, up to seconds, sessions, and the order in which a batch finished."""
    found: dict[str, Any] = {}
    for file in sorted(folder.glob("*.jsonl")):
        lines = [_timeless(line) for line in read_lines(file)]
        found[file.name] = sorted(lines, key=str)
    return found


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        volatile = re.compile(r".*_s$|session|wall_time|tstamp")
        return {key: _timeless(of_key) for key, of_key in value.items() if not volatile.match(key)}
    return [_timeless(part) for part in value] if isinstance(value, list) else value
