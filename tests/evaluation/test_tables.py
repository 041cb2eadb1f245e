"""Figures and tables from results made by hand, where every number can be worked out."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from paceline import SamplingParams
from paceline.decoding.stats import Stats
from paceline.evaluation import answers, tables
from paceline.evaluation.intervals import wilson
from paceline.evaluation.summary import metrics, summarise
from paceline.evaluation.tasks import Item, Setting, Task
from tests.evaluation.fakes import GREEDY, task

RUN: dict[str, Any] = {
    "settings": {"model": "some-model", "draft_tokens": 4, "threads": None, "notes": ["Held as it is."]},
    "sessions": [
        {
            "date": "2026-01-02T03:04:05+00:00",
            "command": "paceline bench xsum --out DIR",
            "commit": "0123abc+",
            "versions": {"torch": "2.9"},
            "machine": {
                "processor": "A processor",
                "processors": 2,
                "threads": 2,
                "system": "Linux",
                "accelerator": None,
            },
        }
    ],
}


def completion(method: str, seconds: float, tokens: int, *, text: str = "x", sample: int = 0) -> dict[str, Any]:
    """`tokens` behind the first; the speculative ones came in rounds of one drafted and accepted token and a bonus."""
    drafting = method == "speculative"
    rounds = tokens // 2 if drafting else tokens
    stats = Stats(completions=1, prompt_tokens=5, output_tokens=tokens + 1, prefill_s=0.5, score_s=seconds)
    for _ in range(rounds):
        stats.count_round(int(drafting), int(drafting))
    return {
        "method": method,
        "sample": sample,
        "turn": 0,
        "text": text,
        "tokens": [7] * (tokens + 1),
        "widths": [len(text)] + [0] * tokens,
        "provenance": "p" + ("ab" * (tokens // 2) if drafting else "p" * tokens),
        "finish": "length",
        "seed": 1,
        "stats": asdict(stats),
    }


def timed(setting: str, item: str, plain: dict[str, Any], speculative: dict[str, Any]) -> dict[str, Any]:
    line = {"session": 0, "setting": setting, "item": item, "timed": True, "asked": ["?"]}
    return line | {"completions": [plain, speculative]}


def scored(setting: str, item: str, plain: list[float], speculative: list[float]) -> list[dict[str, Any]]:
    both = (("plain", plain), ("speculative", speculative))
    return [{"setting": setting, "item": item, "method": method, "scores": scores} for method, scores in both]


XSUM = Task(
    "xsum",
    "2 articles",
    "ROUGE-2",
    (Item("a", "", "", {}), Item("b", "", "", {})),
    (Setting("nucleus", SamplingParams(top_p=0.8, max_tokens=128)), Setting("greedy", SamplingParams(temperature=0))),
)
LINES = [
    timed("nucleus", "a", completion("plain", 1.0, 100), completion("speculative", 0.5, 100)),
    timed("nucleus", "b", completion("plain", 3.0, 100), completion("speculative", 1.0, 100)),
    timed("greedy", "a", completion("plain", 1.0, 10), completion("speculative", 1.0, 10)),
    timed("greedy", "b", completion("plain", 1.0, 10), completion("speculative", 1.0, 12)),
]
SCORES = [
    *scored("nucleus", "a", [0.10], [0.20]),
    *scored("nucleus", "b", [0.30], [0.10]),
    *scored("greedy", "a", [0.25], [0.25]),
    *scored("greedy", "b", [0.35], [0.35]),
]


def test_every_figure_of_a_hand_made_run() -> None:
    nucleus, greedy = summarise(XSUM, LINES, SCORES)["settings"]
    plain, speculative = nucleus["methods"]["plain"], nucleus["methods"]["speculative"]
    assert plain["quality"]["ROUGE-2"]["value"] == pytest.approx(0.20)
    assert speculative["quality"]["ROUGE-2"]["value"] == pytest.approx(0.15)
    assert plain["ms_per_token"] == pytest.approx({"value": 20, "low": 10, "high": 30})
    assert speculative["ms_per_token"] == pytest.approx({"value": 7.5, "low": 5, "high": 10})
    assert nucleus["speedup"] == pytest.approx({"value": 4 / 1.5, "low": 2, "high": 3})
    assert nucleus["difference"]["ROUGE-2"] == pytest.approx({"value": -0.05, "low": -0.2, "high": 0.1})
    assert (plain["tokens_per_round"], speculative["tokens_per_round"]) == (1, 2)
    assert speculative["acceptance_length"] == 2
    assert plain["prefill_ms"] == 500
    assert (nucleus["differing_texts"], greedy["differing_texts"]) == (None, 1)
    assert greedy["speedup"]["value"] == pytest.approx((2 / 20) / (2 / 22))
    assert [item["item"] for item in nucleus["per_item"]] == ["a", "b"]
    assert nucleus["per_item"][1]["speculative"]["ms_per_token"] == pytest.approx(10)


def test_items_that_are_not_there_yet_are_not_counted() -> None:
    nucleus, greedy = summarise(XSUM, LINES[:1], SCORES[:1])["settings"]
    assert (nucleus["items"], nucleus["timed_items"], nucleus["scored_items"]) == (2, 1, 0)
    assert nucleus["difference"]["ROUGE-2"] is None
    assert nucleus["speedup"]["value"] == 2
    assert (greedy["timed_items"], greedy["speedup"]) == (0, None)
    assert "| greedy | plain | - | - | 1 |" in tables.markdown(summarise(XSUM, LINES[:1], []), RUN)


def test_the_table_has_the_papers_layout_and_its_rows_beside() -> None:
    text = tables.markdown(summarise(XSUM, LINES, SCORES), RUN)
    assert text.startswith("# 2 articles\n")
    for row in (
        "| setting | method | ROUGE-2 (95%) | ms per token (95%) | speed-up (95%) |",
        "| nucleus | plain | 0.200 (0.100 to 0.300) | 20.00 (10.00 to 30.00) | 1 |",
        "| nucleus | speculative | 0.150 (0.100 to 0.200) | 7.50 (5.00 to 10.00) | 2.67 (2.00 to 3.00) |",
        "| nucleus, the paper | plain | 0.112 | 14.1 | 1 |",
        "| nucleus, the paper | speculative | 0.114 | 7.52 | 1.92 |",
        "| greedy, the paper | speculative | 0.156 | 7.00 | 2.01 |",
    ):
        assert row in text.splitlines()
    assert "nucleus, ROUGE-2, speculative minus plain: no difference seen: -0.050 (-0.200 to +0.100)." in text
    assert "greedy, ROUGE-2, speculative minus plain: every item scored the same." in text
    assert "greedy: 1 of 2 greedy texts differ" in text
    assert "model some-model, draft_tokens 4" in text
    assert "threads None" not in text
    assert "`paceline bench xsum --out DIR` at commit 0123abc+; A processor, 2 processors, 2 threads, Linux" in text


def test_a_real_difference_is_called_one() -> None:
    low = {"value": -0.1, "low": -0.15, "high": -0.02}
    assert tables.difference(low, "ROUGE-2").startswith("A DIFFERENCE: -0.100 (-0.150 to -0.020)")
    assert tables.difference({**low, "high": 0.0}, "pass@1") == "no difference seen: -10.0% (-15.0% to +0.0%)"
    assert tables.difference(None, "pass@1") == "not measured"


HUMANEVAL = Task(
    "humaneval", "2 problems", "pass@1", XSUM.items, (Setting("nucleus", SamplingParams(temperature=0.8, n=10)),)
)


def test_pass_at_k_for_every_k_that_n_allows() -> None:
    assert list(metrics("pass@1", 9)) == ["pass@1"]
    assert list(metrics("pass@1", 10)) == ["pass@1", "pass@10"]
    lines = [
        timed("nucleus", item, completion("plain", 1, 10), completion("speculative", 1, 10)) for item in ("a", "b")
    ]
    half, none, one = [1.0] * 5 + [0.0] * 5, [0.0] * 10, [1.0] + [0.0] * 9
    summary = summarise(HUMANEVAL, lines, [*scored("nucleus", "a", half, half), *scored("nucleus", "b", none, one)])
    (setting,) = summary["settings"]
    plain, speculative = (setting["methods"][method]["quality"] for method in ("plain", "speculative"))
    assert plain["pass@1"]["value"] == pytest.approx(0.25)
    assert plain["pass@10"] == asdict(wilson(1, 2))
    assert speculative["pass@1"]["value"] == pytest.approx(0.30)
    assert speculative["pass@10"]["value"] == 1
    text = tables.markdown(summary, RUN)
    assert "| nucleus, the paper | speculative | 47.0% (pass@100) |  | 5.73 | 2.46 |" in text
    assert "further samples ran in batches and count for quality and acceptance alone" in text


def test_speed_is_of_timed_completions_alone_and_acceptance_of_all() -> None:
    more = completion("speculative", 0.0, 4, sample=1)
    more["stats"] = {name: value for name, value in more["stats"].items() if not name.endswith("_s")}
    rest = {"session": 0, "setting": "nucleus", "item": "a", "timed": False, "completions": [more]}
    (setting, _), (without, _) = (summarise(XSUM, lines, [])["settings"] for lines in ([*LINES, rest], LINES))
    assert setting["speedup"] == without["speedup"]
    assert setting["methods"]["speculative"]["ms_per_token"] == without["methods"]["speculative"]["ms_per_token"]
    assert setting["methods"]["speculative"]["drafts"] == without["methods"]["speculative"]["drafts"] + 2


def test_kinds_of_task_are_told_apart(tmp_path: Path) -> None:
    asked = replace(task(4, settings=[GREEDY], two_turns=True), metric="", scorer=None, name="spec-bench")
    lines = [
        timed("greedy", item.id, completion("plain", 4, 10), completion("speculative", 1 + int(item.id) % 2, 10))
        for item in asked.items
    ]
    summary = summarise(asked, lines, [])
    (setting,) = summary["settings"]
    found = [(group["name"], group["items"], group["speedup"]["value"]) for group in setting["groups"]]
    assert found == [("mt_bench", 2, pytest.approx(4)), ("qa", 2, pytest.approx(2))]
    text = tables.markdown(summary, RUN)
    assert "| mt_bench | 2 | 2.00 | 1.00 | 4.00 (4.00 to 4.00) |" in text
    assert "scored" not in text

    answers.write(asked, lines, RUN, tmp_path)
    for method, lengths in (("plain", [1] * 10), ("speculative", [2] * 5)):
        rows = [json.loads(line) for line in (tmp_path / f"spec-bench-{method}.jsonl").read_text().splitlines()]
        assert [row["question_id"] for row in rows] == [80, 81, 82, 83]
        assert [row["category"] for row in rows] == ["writing", "qa"] * 2
        assert {*rows[0]} == {"question_id", "category", "answer_id", "model_id", "choices", "tstamp"}
        (choice,) = rows[0]["choices"]
        assert choice == {
            "index": 0,
            "turns": ["x"],
            "decoding_steps": [len(lengths)],
            "new_tokens": [11],
            "wall_time": [4.5 if method == "plain" else 1.5],
            "accept_lengths": lengths,
        }
        assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"]) - 1
