"""Tasks read hostile files, build the prompts that are said, and score as defined."""

from __future__ import annotations

import gzip
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoints.tokenizer import Tokenizer
from paceline.evaluation.sandbox import SandboxUnavailable, run
from paceline.evaluation.tasks import (
    EXAMPLE,
    Task,
    _last_number,
    gsm8k,
    humaneval,
    pass_at_k,
    prompt_tokens,
    spec_bench,
    xsum,
)
from tests import tiny

ARTICLE = {"id": "a", "document": "It rained in Hagenau.", "summary": "There was heavy rain in Hagenau on Monday."}
PROBLEM = {
    "task_id": "HumanEval/0",
    "prompt": 'def double(x):\n    """Twice x."""\n',
    "entry_point": "double",
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-1) == -2\n",
}
SUM = {"question": "How many are 1,000 and 250?", "answer": "1,000 + 250 = <<1000+250=1250>>1,250\n#### 1,250"}
QUESTION = {"question_id": 81, "category": "writing", "turns": ["Write a poem.", "Make it rhyme."]}
READERS: list[tuple[Callable[[Path], Task], dict[str, Any]]] = [
    (xsum, ARTICLE),
    (humaneval, PROBLEM),
    (gsm8k, SUM),
    (spec_bench, QUESTION),
]


def written(folder: Path, rows: Sequence[Any], name: str = "data.jsonl") -> Path:
    file = folder / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


# --- reading


@pytest.mark.parametrize(("reader", "row"), READERS)
def test_a_field_that_is_missing_or_no_text_is_named_with_its_line(
    reader: Callable[[Path], Task], row: dict[str, Any], tmp_path: Path
) -> None:
    other = {**row, "id": "b", "task_id": "b", "question_id": 1}
    assert len(reader(written(tmp_path, [row, other])).items) == 2
    needed = row.keys() - {"canonical_solution"}
    for field in needed:
        for wrong in ({k: v for k, v in other.items() if k != field}, {**other, field: [1]}, {**other, field: None}):
            with pytest.raises(ValueError, match=rf"line 2: .*{field}.*; expected is "):
                reader(written(tmp_path, [row, wrong]))


@pytest.mark.parametrize(("reader", "row"), READERS)
def test_files_that_are_none(reader: Callable[[Path], Task], row: dict[str, Any], tmp_path: Path) -> None:
    good = json.dumps(row).encode()
    cases = {
        "line 1: .*; expected is": [b"[]", b"{", b"[" * 100_000, b"7", b'"x"'],
        "line 3: .*; expected is": [good + b"\n\n{", good + b"\n\nnull"],
        "holds nothing: expected": [b"", b"\n \n"],
        "cannot be read .*: expected": [b"\xff", gzip.compress(good)[:-9], b"\x1f\x8b\x08 no gzip"],
    }
    for message, contents in cases.items():
        for content in contents:
            (tmp_path / "file").write_bytes(content)
            with pytest.raises(ValueError, match=message):
                reader(tmp_path / "file")
    with pytest.raises(ValueError, match="none does not exist: expected is"):
        reader(tmp_path / "none")
    with pytest.raises(ValueError, match="cannot be read"):
        reader(tmp_path)
    if reader is not gsm8k:
        with pytest.raises(ValueError, match=r"line 2: the id .* stands in an earlier line too"):
            reader(written(tmp_path, [row, row]))


def test_a_compressed_file_reads_as_the_plain_one(tmp_path: Path) -> None:
    plain = written(tmp_path, [PROBLEM])
    (tmp_path / "data.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    assert humaneval(tmp_path / "data.jsonl.gz").items == humaneval(plain).items


# --- prompts and settings


def test_xsum_shows_one_example(tmp_path: Path) -> None:
    task = xsum(written(tmp_path, [ARTICLE]))
    (item,) = task.items
    assert not isinstance(item.prompt, str)
    assert [message["role"] for message in item.prompt] == ["user", "assistant", "user"]
    assert item.prompt[0]["content"].endswith(EXAMPLE[0])
    assert item.prompt[1]["content"] == EXAMPLE[1]
    assert item.prompt[2]["content"].endswith(ARTICLE["document"])
    assert ARTICLE["summary"] not in str(item.prompt)
    assert task.title == "1 XSum articles"
    assert xsum(written(tmp_path, [{**ARTICLE, "id": "task1290-x"}])).title == "1 XSum articles (SuperNI task1290)"
    nucleus, greedy = (setting.params for setting in task.settings)
    assert (nucleus.temperature, nucleus.top_p, nucleus.max_tokens) == (1.0, 0.8, 128)
    assert (greedy.temperature, greedy.max_tokens) == (0.0, 128)


def test_humaneval_is_continued_as_it_is(tmp_path: Path) -> None:
    task = humaneval(written(tmp_path, [PROBLEM]), n=10)
    assert task.items[0].prompt == PROBLEM["prompt"]
    assert PROBLEM["canonical_solution"] not in str(task.items[0])
    (setting,) = task.settings
    params = setting.params
    assert (params.n, params.temperature, params.top_p, params.max_tokens) == (10, 0.8, 0.95, 512)
    with pytest.raises(ValueError, match="n is 0"):
        humaneval(tmp_path / "data.jsonl", n=0)
    with pytest.raises(ValueError, match="entry_point is 'f\\(\\)'"):
        humaneval(written(tmp_path, [{**PROBLEM, "entry_point": "f()"}]))


def test_spec_bench_keeps_further_turns(tmp_path: Path) -> None:
    qa = {"question_id": 9, "category": "qa", "turns": ["Who?"]}
    first, second = spec_bench(written(tmp_path, [QUESTION, qa])).items
    assert (first.id, first.category, second.category) == ("81", "mt_bench", "qa")
    assert first.prompt == ({"role": "user", "content": "Write a poem."},)
    assert first.reference["turns"] == ("Write a poem.", "Make it rhyme.")
    assert (first.reference["category"], first.reference["question_id"]) == ("writing", 81)
    with pytest.raises(ValueError, match="turns must be"):
        spec_bench(written(tmp_path, [{**QUESTION, "turns": []}]))


def test_prompts_become_the_ids_an_engine_reads(tmp_path: Path) -> None:
    tiny.tokenizer().save_pretrained(tmp_path / "tokenizer")
    tokenizer = Tokenizer.from_folder(tmp_path / "tokenizer")
    (text,) = humaneval(written(tmp_path, [PROBLEM])).items
    (chat,) = gsm8k(written(tmp_path, [SUM])).items
    assert tokenizer.decode(prompt_tokens(text, tokenizer)) == PROBLEM["prompt"]
    shown = tokenizer.decode(prompt_tokens(chat, tokenizer), skip_special_tokens=False)
    assert shown.startswith(f"<|user|>{SUM['question']}")
    assert shown.endswith("<|end|><|assistant|>")


# --- scores


def test_rouge2(tmp_path: Path) -> None:
    task = xsum(written(tmp_path, [ARTICLE]))
    assert task.metric == "ROUGE-2"
    # The reference has 7 pairs of words. The second answer shares 2 of its 2 with it, the third none (words, no pairs).
    texts = [ARTICLE["summary"], "heavy rain in", "rain heavy Monday on", ""]
    assert task.score(task.items[0], texts) == pytest.approx([1.0, 2 * (2 / 7) / (1 + 2 / 7), 0.0, 0.0])


def test_rouge2_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    task = xsum(written(tmp_path, [ARTICLE]))
    with pytest.raises(ImportError, match=r"paceline\[evaluation\]"):
        task.score(task.items[0], ["x"])


def test_humaneval_runs_the_problems_own_tests(tmp_path: Path) -> None:
    try:
        run("pass")
    except SandboxUnavailable as missing:
        pytest.skip(str(missing))
    task = humaneval(written(tmp_path, [PROBLEM]), n=7)
    texts = [
        PROBLEM["canonical_solution"],
        "    return x * x\n",
        "    pass",
        "    return 2 *",
        "    import os; os._exit(0)",
        "    return x + x",
        "    return 2 * x\n\nraise SystemExit",
    ]
    assert task.score(task.items[0], texts) == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    assert task.score(task.items[0], []) == []


def test_without_a_sandbox_nothing_is_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = humaneval(written(tmp_path, [PROBLEM]))
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SandboxUnavailable):
        task.score(task.items[0], [PROBLEM["canonical_solution"]])


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 12 + 3 = 15.", "15"),
        ("It is $1,450,000!", "1450000"),
        ("18.00 dollars", "18"),
        ("minus: -7", "-7"),
        ("-$3.50", "-3.5"),
        ("10-3", "3"),
        ("a COVID-19", "19"),
        ("1, 2, 3", "3"),
        ("(4)-2", "2"),
        ("none", None),
        ("", None),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_the_last_number(text: str, number: str | None) -> None:
    assert _last_number(text) == (None if number is None else Decimal(number))


def test_gsm8k_compares_the_last_number(tmp_path: Path) -> None:
    task = gsm8k(written(tmp_path, [SUM]))
    texts = ["1250", "It is 1,250.00 in all.", "1,250, not 1,251", "no idea", "#### 1250"]
    assert task.score(task.items[0], texts) == [1.0, 1.0, 0.0, 0.0, 1.0]
    with pytest.raises(ValueError, match="line 1: answer must end with ####"):
        gsm8k(written(tmp_path, [{**SUM, "answer": "#### many"}]))


def test_what_has_no_metric_has_no_score(tmp_path: Path) -> None:
    task = spec_bench(written(tmp_path, [QUESTION]))
    assert task.metric == ""
    assert task.score(task.items[0], ["x"]) == []
    assert replace(task, scorer=lambda item, texts: [1.0]).score(task.items[0], ["x"]) == [1.0]


def test_pass_at_k_is_the_share_of_subsets_with_a_pass() -> None:
    for n in range(1, 8):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)
    assert pass_at_k(10_000, 1, 100) == pytest.approx(0.01)


def test_pass_at_k_is_unbiased() -> None:
    """Its mean over the number of passes, binomial with chance p, is 1 - (1 - p)^k; 1 - (1 - c/n)^k is not."""
    import math

    n, k, p = 6, 3, 0.3
    chance = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    mean = sum(w * pass_at_k(n, c, k) for c, w in enumerate(chance))
    naive = sum(w * (1 - (1 - c / n) ** k) for c, w in enumerate(chance))
    assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-12)
    assert abs(naive - mean) > 0.01


@pytest.mark.parametrize(("n", "c", "k"), [(5, 6, 1), (5, -1, 1), (5, 1, 0), (5, 1, 6)])
def test_pass_at_k_out_of_range(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError):
        pass_at_k(n, c, k)
