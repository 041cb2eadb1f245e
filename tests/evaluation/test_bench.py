"""The runner: what it asks for, what it keeps, and that an interrupted run is as good as one that was not."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM
from paceline.evaluation import bench, command
from paceline.evaluation.bench import chosen, fitting, measure, round_lengths, score, seed_of, with_samples
from paceline.evaluation.command import measured
from paceline.evaluation.record import RunFolder, read_lines
from paceline.evaluation.sandbox import SandboxUnavailable
from paceline.evaluation.tasks import Item
from tests.evaluation.fakes import GREEDY, SAMPLED, task, tiny_llm, without_times

ASKED: dict[str, Any] = {"limit": None, "seed": 3}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return tiny_llm(tmp_path_factory.mktemp("model"))


def lines(folder: Path) -> list[dict[str, Any]]:
    return read_lines(folder / bench.RESULTS)


@pytest.fixture(scope="module")
def whole(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("run")
    measured(task(), folder, llm, {}, **ASKED)
    return folder


def test_every_item_is_timed_in_pairs_and_the_rest_sampled_with_both_methods(whole: Path) -> None:
    found = lines(whole)
    timed = [(line["setting"], line["item"]) for line in found if line["timed"]]
    assert sorted(timed) == sorted((s, str(i)) for s in ("sampled", "greedy") for i in range(4))
    for line in found:
        if line["timed"]:
            assert [c["sample"] for c in line["completions"]] == [0, 0]
            assert sorted(c["method"] for c in line["completions"]) == ["plain", "speculative"]
            assert all(c["stats"]["score_s"] > 0 for c in line["completions"])
    rest = [
        (line["setting"], line["item"], c["method"], c["sample"])
        for line in found
        if not line["timed"]
        for c in line["completions"]
    ]
    wanted = [("sampled", str(i), m, k) for i in range(4) for m in bench.METHODS for k in (1, 2)]
    assert sorted(rest) == sorted(wanted)


def test_seconds_of_batches_are_not_kept(whole: Path) -> None:
    of_batches = [c["stats"] for line in lines(whole) if not line["timed"] for c in line["completions"]]
    assert of_batches
    assert not any(name.endswith("_s") for stats in of_batches for name in stats)


def test_which_method_goes_first_alternates(whole: Path) -> None:
    first = [line["completions"][0]["method"] for line in lines(whole) if line["timed"] and line["setting"] == "greedy"]
    assert first == ["plain", "speculative"] * 2


def test_greedy_texts_are_equal_and_samples_are_not_the_same_ones(whole: Path) -> None:
    for line in lines(whole):
        if line["timed"]:
            one, other = line["completions"]
            assert (one["tokens"] == other["tokens"]) == (line["setting"] == "greedy")
    seeds = [c["seed"] for line in lines(whole) for c in line["completions"]]
    assert len(seeds) == len(set(seeds)) == 2 * 4 * 4


def test_a_seed_is_a_function_of_what_it_is_for() -> None:
    assert seed_of(1, "s", "i", "plain", 0) == seed_of(1, "s", "i", "plain", 0)
    others = [seed_of(s, a, b, m, k) for s in (1, 2) for a in "st" for b in "ij" for m in bench.METHODS for k in (0, 1)]
    assert len(set(others)) == 32
    assert seed_of(1, "a", "bc", "plain", 0) != seed_of(1, "ab", "c", "plain", 0)
    assert all(0 <= seed < 2**63 for seed in others)


@pytest.mark.parametrize("trial", range(6))
def test_a_killed_run_goes_on_to_the_same_files(whole: Path, llm: LLM, tmp_path: Path, trial: int) -> None:
    """Killed at a random byte of either file: what a process that ends within a write leaves."""
    cut = random.Random(trial)
    for name in ("run.json", bench.RESULTS, *([bench.SCORES] if trial % 2 else [])):
        data = (whole / name).read_bytes()
        end = len(data) if name == "run.json" or (trial % 2 and name == bench.RESULTS) else cut.randrange(len(data))
        (tmp_path / name).write_bytes(data[:end])
    assert without_times(tmp_path) != without_times(whole)
    measured(task(), tmp_path, llm, {}, **ASKED)
    assert without_times(tmp_path) == without_times(whole)
    assert [len(json.loads((f / "run.json").read_text())["sessions"]) for f in (whole, tmp_path)] == [1, 2]


def test_a_run_that_is_interrupted_again_and_again_ends_the_same(whole: Path, llm: LLM, tmp_path: Path) -> None:
    def interrupted(work: Sequence[Any], description: str) -> Iterator[Any]:
        for number, part in enumerate(work):
            if number == 2:
                raise KeyboardInterrupt
            yield part

    asked = json.loads((whole / "run.json").read_text())["settings"]
    for _ in range(20):
        folder = RunFolder(tmp_path, asked)
        try:
            measure(llm, task(), folder, seed=3, track=interrupted)
            score(task(), folder, track=interrupted)
        except KeyboardInterrupt:
            continue
        break
    assert without_times(tmp_path) == without_times(whole)


@pytest.mark.parametrize("parts", [0, 3])
def test_after_an_interruption_there_are_tables_of_what_is_done(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    def interrupted(work: Sequence[Any], description: str) -> Iterator[Any]:
        yield from work[:parts]
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "track", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measured(task(), tmp_path, llm, {}, **ASKED)
    table = tmp_path / "table.md"
    assert table.exists() == bool(parts), "of nothing there is no table"
    if parts:
        assert "2 of 4 items timed, 0 scored" in table.read_text()
        assert "1 of 4 items timed" in table.read_text()


def test_a_finished_run_measures_nothing_again(whole: Path, llm: LLM) -> None:
    before = (whole / bench.RESULTS).read_bytes()
    sessions = json.loads((whole / "run.json").read_text())["sessions"]
    measured(task(), whole, llm, {}, **ASKED)
    assert (whole / bench.RESULTS).read_bytes() == before
    assert json.loads((whole / "run.json").read_text())["sessions"] == sessions


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"seed": 4}, "seed was 3 and is now 4"),
        ({"limit": 2}, "limit was None and is now 2"),
        ({"settings": {"draft": "none"}}, "draft was None and is now 'none'"),
        ({"task": task(5)}, "prompts was"),
        ({"task": task(settings=[SAMPLED])}, "prompts was"),
    ],
)
def test_other_settings_are_refused_by_name(whole: Path, llm: LLM, other: dict[str, Any], named: str) -> None:
    asked = {"task": task(), "out": whole, "llm": llm, "settings": {}, **ASKED, **other}
    before = without_times(whole)
    with pytest.raises(ValueError, match=named):
        measured(**asked)
    assert without_times(whole) == before


def test_a_folder_of_other_results_is_refused(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / bench.RESULTS).write_text("{}\n")
    with pytest.raises(ValueError, match=r"holds results and no run\.json"):
        measured(task(), tmp_path, llm, {}, **ASKED)
    (tmp_path / "run.json").write_text('{"settings": 1}')
    with pytest.raises(ValueError, match="does not describe a run"):
        measured(task(), tmp_path, llm, {}, **ASKED)


@pytest.mark.parametrize("error", [ImportError("needs rouge-score"), SandboxUnavailable("needs rouge-score")])
def test_what_scoring_lacks_is_said_before_anything_is_measured(llm: LLM, tmp_path: Path, error: Exception) -> None:
    def lacking(item: Item, texts: Sequence[str]) -> list[float]:
        raise error

    with pytest.raises(ValueError, match="needs rouge-score"):
        measured(replace(task(), scorer=lacking), tmp_path / "run", llm, {}, **ASKED)
    assert not (tmp_path / "run").exists()


def test_a_broken_line_is_named(whole: Path, llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes((whole / "run.json").read_bytes())
    (tmp_path / bench.RESULTS).write_text("nonsense\n")
    with pytest.raises(ValueError, match=r"results\.jsonl, line 1 is no JSON object"):
        measured(task(), tmp_path, llm, {}, **ASKED)


def test_further_turns_follow_the_models_own_answer(llm: LLM, tmp_path: Path) -> None:
    asked = task(2, settings=[GREEDY], two_turns=True)
    measured(asked, tmp_path, llm, {}, **ASKED)
    for line, item in zip(lines(tmp_path), asked.items, strict=True):
        for method in bench.METHODS:
            first, second = (c for c in line["completions"] if c["method"] == method)
            assert (first["turn"], second["turn"]) == (0, 1)
            assert not isinstance(item.prompt, str)
            said = [
                *item.prompt,
                {"role": "assistant", "content": first["text"]},
                {"role": "user", "content": item.reference["turns"][1]},
            ]
            (again,) = llm.chat(said, replace(GREEDY.params, seed=0))
            assert second["tokens"] == again.token_ids


def test_items_are_drawn_at_random_and_again_the_same() -> None:
    whole = task(12)
    some = chosen(whole, 4, seed=1)
    assert len(some.items) == 4
    assert some == chosen(whole, 4, seed=1) != chosen(whole, 4, seed=2)
    assert chosen(whole, 12, seed=1) == chosen(whole, None, seed=1) == whole
    with pytest.raises(ValueError, match="limit is 0"):
        chosen(whole, 0, seed=1)


def test_n_is_for_settings_that_sample() -> None:
    assert [s.params.n for s in with_samples(task(), 5).settings] == [5, 1]
    assert with_samples(task(), None) == task()


def test_prompts_without_room_are_left_out_and_counted(llm: LLM) -> None:
    long = replace(task().items[0], id="long", prompt="word " * 200)
    some, left_out = fitting(replace(task(), items=(*task().items, long)), llm)
    assert (some, left_out) == (task(), 1)
    with pytest.raises(ValueError, match="all 1 prompts are longer than 118 tokens"):
        fitting(replace(task(), items=(long,)), llm)


def test_rounds_are_read_off_the_provenance() -> None:
    assert round_lengths("paabrpa") == [1, 3, 1, 1, 1]
    assert round_lengths("p") == [1]
    assert round_lengths("") == []
