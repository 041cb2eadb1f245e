"""The K sweep: on a tiny model, and its arithmetic on counts made by hand."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import LLM, SamplingParams
from paceline.decoding.stats import Stats
from paceline.evaluation import sweep
from paceline.evaluation.command import run_sweep, swept
from paceline.evaluation.record import read_lines
from paceline.evaluation.sweep import expected_length, summarise, verdict
from paceline.evaluation.tasks import Setting
from tests.evaluation.fakes import GREEDY, SAMPLED, task, tiny_llm, without_times

ASKED: dict[str, Any] = {"most": 3, "tokens": 12, "limit": None, "seed": 1}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return tiny_llm(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def whole(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    swept([task(4, settings=[SAMPLED, GREEDY])], folder, llm, {}, **ASKED)
    return folder


def test_every_item_runs_with_every_k_to_the_same_length(whole: Path) -> None:
    lines = read_lines(whole / sweep.LINES)
    assert [line["item"] for line in lines] == ["0", "1", "2", "3"]
    assert [[run["k"] for run in line["runs"]] for line in lines] == [
        [0, 1, 2, 3],
        [1, 2, 3, 0],
        [2, 3, 0, 1],
        [3, 0, 1, 2],
    ]
    for line in lines:
        for run in line["runs"]:
            assert run["stats"]["output_tokens"] == 12
            assert len(run["stats"]["drafts_of"]) <= run["k"]
            if run["k"] == 0:
                assert run["stats"]["rounds"] == 11


def test_the_end_of_a_text_and_stop_strings_are_ignored() -> None:
    asked = task(1, settings=[Setting("s", SamplingParams(temperature=0.7, n=5, stop="x", max_tokens=3)), GREEDY])
    assert sweep.sweep_params(asked, 12) == SamplingParams(temperature=0.7, max_tokens=12, ignore_eos=True)


def test_a_killed_sweep_goes_on_to_the_same_counts(whole: Path, llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes((whole / "run.json").read_bytes())
    data = (whole / sweep.LINES).read_bytes()
    (tmp_path / sweep.LINES).write_bytes(data[: len(data) // 2])
    swept([task(4, settings=[SAMPLED, GREEDY])], tmp_path, llm, {}, **ASKED)
    assert without_times(tmp_path) == without_times(whole)
    with pytest.raises(ValueError, match="most was 3 and is now 2"):
        swept([task(4, settings=[SAMPLED, GREEDY])], tmp_path, llm, {}, **{**ASKED, "most": 2})


def test_figures_and_numbers_are_written(whole: Path) -> None:
    assert (whole / "figure.png").read_bytes().startswith(b"\x89PNG")
    drawn = (whole / "figure.svg").read_text()
    for text in (
        "Time of a round",
        "Efficiency",
        "Time per 128 tokens",
        "ms a round (mean)",
        "tokens a round / (K + 1)",
    ):
        assert text in drawn
    assert (whole / "sweep.json").exists()


def simulated(alphas: list[float], *, items: int, rounds: int, most: int, none: float = 0.0) -> list[dict[str, Any]]:
    """Lines of a sweep whose tokens are accepted independently, at position i with alphas[i]; `none` of the rounds
    draft nothing. A round takes 10 ms and 1 ms for each drafted token."""
    rng = np.random.default_rng(0)
    lines = []
    for item in range(items):
        runs = []
        for k in range(most + 1):
            stats = Stats(completions=1)
            for _ in range(rounds):
                drafted = 0 if rng.random() < none else k
                accepted = 0
                while accepted < drafted and rng.random() < alphas[accepted]:
                    accepted += 1
                stats.count_round(drafted, accepted)
                stats.output_tokens += accepted + 1
                stats.draft_s += 0.001 * drafted
                stats.score_s += 0.010
            stats.output_tokens += 1
            runs.append({"k": k, "stats": asdict(stats)})
        lines.append({"task": "counting", "item": str(item), "runs": runs})
    return lines


def test_alpha_and_the_formula_are_recovered_where_they_hold() -> None:
    found = summarise(task(), simulated([0.7] * 6, items=20, rounds=400, most=6))
    assert found["alpha"] == pytest.approx(0.7, abs=0.01)
    assert found["worst_error"]["formula"] < 0.02
    of_4 = found["by_k"][4]
    expected = (1 - 0.7**5) / 0.3
    assert of_4["acceptance_length"]["value"] == pytest.approx(expected, rel=0.02)
    assert of_4["efficiency"]["value"] == pytest.approx(expected / 5, rel=0.02)
    assert of_4["efficiency"]["low"] < expected / 5 < of_4["efficiency"]["high"]
    assert of_4["parts_ms"] == pytest.approx({"draft": 4, "score": 10, "verify": 0, "other": 0})
    assert of_4["loop_ms"]["value"] == pytest.approx(14)
    assert of_4["ms_per_128_tokens"]["p50"] == pytest.approx(128 * 14 / expected, rel=0.02)
    assert found["by_k"][0]["ms_per_128_tokens"]["p99"] == pytest.approx(1280)
    assert not any("does not hold" in line or "more items would tell" in line for line in verdict(found))


def test_rounds_that_draft_nothing_are_told_and_not_taken_for_rejections() -> None:
    found = summarise(task(), simulated([0.7] * 6, items=20, rounds=400, most=6, none=0.5))
    assert found["alpha"] == pytest.approx(0.7, abs=0.01)
    assert found["worst_error"]["formula"] < 0.03
    assert found["by_k"][4]["efficiency"]["value"] == pytest.approx(
        (0.5 + 0.5 * expected_length([0.7] * 4)) / 5, rel=0.03
    )
    (shares,) = (line for line in verdict(found) if "of the rounds" in line)
    assert float(shares.partition("%")[0]) == pytest.approx(50, abs=1)
    assert "100.0% of those drafts had K tokens" in shares


def test_where_positions_differ_one_alpha_does_not_hold_and_this_is_said() -> None:
    """The negative control of the formula: first positions that are rarely right, and later ones that are."""
    found = summarise(task(), simulated([0.3, 0.95, 0.95, 0.95], items=20, rounds=400, most=4))
    assert found["worst_error"]["formula"] > 0.1
    assert found["worst_error"]["positions"] < 0.02
    assert any(
        "does not hold here within 3%" in line and "not the same at every position" in line for line in verdict(found)
    )


def test_an_error_that_the_measurement_cannot_tell_from_none_is_called_that() -> None:
    found = summarise(task(), simulated([0.7] * 6, items=4, rounds=5, most=6))
    assert found["worst_error"]["formula"] > 0.03
    said = verdict(found)
    outside = [f["k"] for f in found["by_k"] if f["k"] and not _inside(f)]
    assert any("more items would tell" in line for line in said) == (not outside)
    assert any("does not hold here" in line for line in said) == bool(outside)


def _inside(found: dict[str, Any]) -> bool:
    of = found["acceptance_length"]
    return bool(of["low"] <= found["predicted_acceptance_length"]["formula"] <= of["high"])


def test_marginal_and_conditional_rates_are_not_mixed_up() -> None:
    found = summarise(task(), simulated([0.5] * 3, items=20, rounds=400, most=3))["by_k"][3]
    assert found["conditional_acceptance"] == pytest.approx([0.5, 0.5, 0.5], abs=0.02)
    assert found["marginal_acceptance"] == pytest.approx([0.5, 0.25, 0.125], abs=0.02)


def test_nothing_drafted_is_no_fit() -> None:
    found = summarise(task(), simulated([0.5] * 2, items=2, rounds=3, most=2, none=1.0))
    assert found["alpha"] is None
    assert verdict(found) == ["counting: nothing was drafted."]


def test_expected_length_is_the_formula() -> None:
    assert expected_length([0.8] * 4) == pytest.approx((1 - 0.8**5) / 0.2)
    assert expected_length([]) == 1
    assert expected_length([0.5, 0.2]) == 1 + 0.5 + 0.1


@pytest.mark.parametrize(
    ("change", "told"), [({"most": 0}, "largest K is 0"), ({"tokens": 1}, "tokens is 1"), ({}, "'other' is no task")]
)
def test_what_cannot_be_swept_is_refused(llm: LLM, tmp_path: Path, change: dict[str, int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        run_sweep({"other": tmp_path}, tmp_path / "out", llm, {}, **{"most": 2, "tokens": 4, **change})
    assert not (tmp_path / "out").exists()
