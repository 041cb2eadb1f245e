"""The log, the live table, the plot and the verdict of a run."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from paceline.decoding.control import Costs
from paceline.training.reporting import Report
from paceline.training.trainer import Counters

COSTS = Costs(
    rows=(1, 9),
    round_s=(0.01, 0.012),
    context_s=(0.0, 0.0),
    batches=(1,),
    draft_s=(tuple(0.0005 * k for k in range(9)),),
    read_s=0.0,
)
MEASURED = {"loss": 2.5, "lr": 0.001, "grad_norm": 0.7, "tokens_per_s": 1234.0}


def sums(*alphas: float) -> torch.Tensor:
    return torch.tensor([[100 * alpha, 90 * alpha, 100] for alpha in alphas], dtype=torch.float64)


def told(folder: Path, *, terminal: bool, last: float = 0.7, costs: Costs | None = COSTS) -> tuple[Report, str]:
    out = io.StringIO()
    report = Report(folder, costs=costs, console=Console(file=out, force_terminal=terminal, width=130))
    report.begin(Counters())
    report.evaluation(Counters(evaluations=1), 0.0, sums(0.1, 0.05))
    for step in (1, 2, 3):
        report.step(Counters(step=step, tokens=1000 * step), step / 4, {**MEASURED, "loss": 3.0 - step / 2})
    report.evaluation(Counters(step=3, tokens=3000, evaluations=16), 0.75, sums(last, 0.5))
    report.step(Counters(step=4, tokens=4000), 1.0, MEASURED)
    report.close()
    return report, out.getvalue()


def test_the_log_has_a_line_for_each_step_and_evaluation(tmp_path: Path) -> None:
    report, _ = told(tmp_path, terminal=False)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines == report.records
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    assert [line["tokens"] for line in lines if "alpha" in line] == [0, 3000]
    last = lines[-2]
    assert last["alpha"] == pytest.approx([0.7, 0.5])
    assert last["greedy"] == pytest.approx([0.63, 0.45])
    assert last["rows"] == 100
    assert last["acceptance_lengths"][1] == pytest.approx(1 + 0.7 + 0.35)
    assert last["speedups"][1] == pytest.approx(2.05 * 0.01 / (0.0105 + 0.001))


def test_a_terminal_shows_a_table_that_lives(tmp_path: Path) -> None:
    _, out = told(tmp_path, terminal=True)
    shown = out[out.rindex("┏") :]
    for text in ("alpha by position", "0.10 0.05", "0.70 0.50", "1.500", "length at K = 4", "speed-up", "at K = "):
        assert text in shown
    assert "step 4  4,000 tokens  loss 2.500  1,234 tokens/s  100% done, 0:00:00 left" in shown


def test_elsewhere_a_line_for_each_evaluation(tmp_path: Path) -> None:
    _, out = told(tmp_path, terminal=False)
    first, last = out.splitlines()
    assert "loss - | alpha by position 0.10 0.05" in first
    assert "step 3 | tokens 3,000 | loss 1.500 | alpha by position 0.70 0.50" in last
    assert "\x1b" not in out


def test_without_costs_no_speedups_are_told(tmp_path: Path) -> None:
    report, out = told(tmp_path, terminal=False, costs=None)
    assert out.splitlines()[-1].endswith("speed-up -")
    assert report.evaluations[-1]["speedups"] is None


@pytest.mark.parametrize(("last", "beats"), [(0.7, True), (0.1, False), (0.05, False)])
def test_a_draft_that_does_not_beat_its_start_is_told_so(tmp_path: Path, last: float, beats: bool) -> None:
    report = Report(tmp_path)
    report.begin(Counters())
    report.evaluation(Counters(evaluations=1), 0.0, sums(0.1))
    report.evaluation(Counters(step=3, evaluations=2), 1.0, sums(last))
    assert ("does NOT beat its untrained start" in report.verdict()) != beats


def test_going_on_takes_out_what_the_checkpoint_does_not_know(tmp_path: Path) -> None:
    told(tmp_path, terminal=False)
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 1, "lo')
    report = Report(tmp_path, console=Console(file=io.StringIO()))
    report.begin(Counters(step=3, tokens=3000, evaluations=1))
    assert [(r["step"], "loss" in r) for r in report.records] == [(0, False), (1, True), (2, True), (3, True)]
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == report.records
    report.evaluation(Counters(step=3, evaluations=2), 1.0, sums(0.5))
    assert "going on from step 3" in report._console.file.getvalue()  # type: ignore[attr-defined]


def test_the_plot_is_a_picture_and_a_drawing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report, _ = told(tmp_path, terminal=False)
    assert report.plot() is None
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "curves.svg").read_text()


def test_without_matplotlib_the_run_says_how_to_get_a_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    report, _ = told(tmp_path, terminal=False)
    assert "paceline[training]" in (report.plot() or "")
