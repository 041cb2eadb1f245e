"""Writes the prompts that the shipped draft is trained on: those of a JSONL file of {"source", "prompt"}; code to be
completed, a signature and a docstring that are continued as they are: made from its MBPP tasks, without examples and
with made-up ones, and taken from the standard library of the Python that runs this; and tasks about the articles of a
JSONL file of {"document", "summary"}, the half of them behind an example.

    python benchmarks/draft_prompts.py draft_prompts.jsonl xsum_train_1000.jsonl prompts.jsonl

The evaluation sets have no part in it. The order is a fixed shuffle, so that any beginning of it is a fair sample; code
with examples and the standard library's come behind all others, shuffled among themselves, and articles behind these.
"""

from __future__ import annotations

import ast
import json
import random
import re
import sys
import sysconfig
import warnings
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


def parts(task: str) -> tuple[str, str, list[str]]:
    """What an MBPP task asks for in words, a name and arguments for it."""
    goal = re.sub(r"(?i)^.*?\bfunction\s+(that|which|to|for)?\s*", "", task).strip()
    goal = re.sub(r"\s+", " ", goal)
    words = re.findall(r"[a-z0-9]+", goal.lower())
    name = "_".join([word for word in words if f" {word} " not in IDLE and not word.isdigit()][:4]) or "solve"
    arguments = list(dict.fromkeys(TYPES[word] for word in words if word in TYPES))[:3] or ["x"]
    return goal[:1].upper() + goal[1:], name, arguments


def stub(task: str, shuffle: random.Random) -> str:
    """A function to be completed that does what an MBPP task says."""
    goal, name, arguments = parts(task)
    head = "from typing import List\n\n\n" if any("List" in a for a in arguments) or shuffle.random() < 0.3 else ""
    quotes = shuffle.choice(['"""', '"""', "'''"])
    begin = shuffle.choice(["", " ", "\n    "])
    return f"{head}def {name}({', '.join(arguments)}):\n    {quotes}{begin}{goal}\n    {quotes}\n"


WORDS = [
    "apple",
    "river",
    "stone",
    "python",
    "cloud",
    "green",
    "seven",
    "night",
    "orange",
    "letter",
    "small",
    "music",
    "window",
    "paper",
    "summer",
]


def value(kind: str, shuffle: random.Random) -> str:
    """Anything of a type, as it is written in Python."""
    if kind.startswith(("List[", "list")):
        inner = kind[5:-1] if kind.startswith("List[") else "int"
        return f"[{', '.join(value(inner, shuffle) for _ in range(shuffle.randint(2, 5)))}]"
    one: dict[str, Any] = {
        "int": shuffle.randint(0, shuffle.choice([9, 100, 1000])),
        "float": round(shuffle.uniform(0, 20), 1),
        "bool": shuffle.random() < 0.5,
        "str": " ".join(shuffle.sample(WORDS, shuffle.choice([1, 1, 2, 3]))),
        "tuple": (shuffle.randint(0, 9), shuffle.randint(0, 9)),
        "dict": {shuffle.choice(WORDS): shuffle.randint(0, 9) for _ in range(2)},
    }
    return repr(one.get(kind, one["int"]))


def stub_with_examples(task: str, shuffle: random.Random) -> str:
    """The same with types and with examples. What these give is made up and mostly wrong: it is read, not run."""
    goal, name, arguments = parts(task)
    kinds = [argument.partition(": ")[2] or "int" for argument in arguments]
    asks = re.match(r"(?i)(check|whether|determine|test|verify)", goal)
    given = "bool" if asks else shuffle.choice([kinds[0], "int", "int", "str", "List[int]"])
    typed = [argument if ": " in argument else f"{argument}: int" for argument in arguments]
    arrow = f" -> {given}" if shuffle.random() < 0.5 else ""
    wide = re.sub(r"(.{60,90}?) ", r"\1\n    ", goal)
    style = shuffle.choice([">>>", ">>>", "==", "=>"])
    lines = []
    for _ in range(shuffle.randint(1, 4)):
        call, result = f"{name}({', '.join(value(kind, shuffle) for kind in kinds)})", value(given, shuffle)
        lines.append(f"    >>> {call}\n    {result}\n" if style == ">>>" else f"    {call} {style} {result}\n")
    title = shuffle.choice(["", "", "    Examples:\n", "    For example:\n", "\n    Example:\n"])
    head = "from typing import List\n\n\n" if "List" in arrow + "".join(typed) else shuffle.choice(["", "\n"])
    begin = shuffle.choice(["", " ", "\n    "])
    signature = f"{head}def {name}({', '.join(typed)}){arrow}:\n"
    return f'{signature}    """{begin}{wide}\n{title}{"".join(lines)}    """\n'


def documented(count: int, shuffle: random.Random) -> list[str]:
    """Functions of the standard library up to the end of their docstrings."""
    found = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if {"site-packages", "test", "tests", "idlelib", "lib2to3"} & set(file.parts):
            continue
        with warnings.catch_warnings():  # about escapes in strings
            warnings.simplefilter("ignore")
            source = file.read_text(encoding="utf-8", errors="replace")
            tree = ast.parse(source)
        lines = source.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and 40 <= len(ast.get_docstring(node) or "") <= 600:
                taken = lines[node.lineno - 1 : node.body[0].end_lineno]
                found.append("\n".join(line[node.col_offset :] for line in taken) + "\n")
    return shuffle.sample(sorted(set(found)), count)


OF_LIBRARY = 600
"""Functions of the standard library."""


ASKED = (
    "Summarise the article in one sentence.",
    "Summarize this news story in two or three sentences.",
    "What happened? Answer in the words of the text.",
    "Copy the three most important sentences of this text.",
    "Repeat the first paragraph of the article word by word.",
    "List the main facts of this report, with names and numbers.",
    "Rewrite the article so that it is half as long.",
    "Who says what in this article? Quote them.",
)
"""What is asked of an article without an example; half of those with one are asked for the first of these."""
ARTICLE, SHOWN = 4000, 1200
"""Characters at most of an article, and of one that is shown as the example."""


def articles(items: list[dict[str, str]], shuffle: random.Random) -> list[dict[str, Any]]:
    """Two tasks an article: one behind another article and its summary, one alone."""
    shown = [item for item in items if len(item["document"]) <= SHOWN]
    lines = []
    for item in items:
        if len(item["document"]) > ARTICLE:
            continue
        shot = shuffle.choice(shown)
        while shot is item:
            shot = shuffle.choice(shown)
        ask = ASKED[shuffle.randint(0, 1)]
        messages = [
            {"role": "user", "content": f"{ask}\n\n{shot['document']}"},
            {"role": "assistant", "content": shot["summary"]},
            {"role": "user", "content": f"{ask}\n\n{item['document']}"},
        ]
        lines.append({"source": "xsum-shot", "messages": messages})
        lines.append({"source": "xsum-asked", "prompt": f"{shuffle.choice(ASKED)}\n\n{item['document']}"})
    shuffle.shuffle(lines)
    return lines


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
    source, reports, target = map(Path, sys.argv[1:4])
    shuffle = random.Random(0)
    items = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    lines = list(prompts(items, shuffle))
    shuffle.shuffle(lines)
    tasks = [item["prompt"] for item in items if item["source"] == "mbpp"]
    code = [{"source": "mbpp-examples", "prompt": stub_with_examples(task, shuffle), "chat": False} for task in tasks]
    library = documented(OF_LIBRARY, shuffle)
    code += [{"source": "standard-library", "prompt": prompt, "chat": False} for prompt in library]
    shuffle.shuffle(code)
    lines += code
    lines += articles([json.loads(line) for line in reports.read_text(encoding="utf-8").splitlines()], shuffle)
    target.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
