"""Writes the prompts that the shipped draft is trained on: those of a JSONL file of {"source", "prompt"}, and code to
be completed, made from its MBPP tasks: a signature and a docstring, continued as they are.

    python benchmarks/draft_prompts.py draft_prompts.jsonl prompts.jsonl

The evaluation sets have no part in it. The order is a fixed shuffle, so that any beginning of it is a fair sample.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

IDLE = (
    " a an the to of in on at by for with from is are be it its given whether using use if not or and that which "
    "write function python find check all each into as this two one "
)
TYPES = {
    "string": "text: str",
    "strings": "words: List[str]",
    "list": "items: list",
    "lists": "lists: List[list]",
    "array": "numbers: List[int]",
    "tuple": "values: tuple",
    "tuples": "pairs: List[tuple]",
    "dictionary": "table: dict",
    "matrix": "matrix: List[List[int]]",
    "number": "n: int",
    "numbers": "numbers: List[int]",
    "integer": "n: int",
    "word": "word: str",
    "character": "c: str",
    "elements": "items: list",
    "digits": "n: int",
    "side": "side: float",
    "length": "length: int",
    "radius": "radius: float",
    "numbers.": "numbers: List[int]",
}


def stub(task: str, shuffle: random.Random) -> str:
    """A function to be completed that does what an MBPP task says."""
    goal = re.sub(r"(?i)^.*?\bfunction\s+(that|which|to|for)?\s*", "", task).strip()
    goal = re.sub(r"\s+", " ", goal)
    words = re.findall(r"[a-z0-9]+", goal.lower())
    name = "_".join([word for word in words if f" {word} " not in IDLE and not word.isdigit()][:4]) or "solve"
    arguments = list(dict.fromkeys(TYPES[word] for word in words if word in TYPES))[:3] or ["x"]
    head = "from typing import List\n\n\n" if any("List" in a for a in arguments) or shuffle.random() < 0.3 else ""
    quotes = shuffle.choice(['"""', '"""', "'''"])
    begin = shuffle.choice(["", " ", "\n    "])
    goal = goal[:1].upper() + goal[1:]
    return f"{head}def {name}({', '.join(arguments)}):\n    {quotes}{begin}{goal}\n    {quotes}\n"


LONG = 1200
"""Characters. Reading a long prompt takes as long as writing an answer, so only every fourth is kept."""


def prompts(items: list[dict[str, str]], shuffle: random.Random) -> Iterator[dict[str, Any]]:
    for index, item in enumerate(items):
        if len(item["prompt"]) > LONG and index % 4:
            continue
        yield {"source": item["source"], "prompt": item["prompt"]}
        if item["source"] == "mbpp":
            yield {"source": "mbpp-stub", "prompt": stub(item["prompt"], shuffle), "chat": False}


def main() -> None:
    source, target = map(Path, sys.argv[1:3])
    shuffle = random.Random(0)
    items = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    lines = list(prompts(items, shuffle))
    shuffle.shuffle(lines)
    target.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
