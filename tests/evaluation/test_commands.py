"""`paceline bench` end to end: on a tiny model and files of a few items, and as processes that are stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from tests.evaluation.fakes import without_times
from tests.test_cli import save_model


def run(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["bench", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    return result


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "sums.jsonl"
    rows = [{"question": f"How much is {n} and {n}?", "answer": f"It is #### {2 * n}"} for n in range(12)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def whole(model: str, sums: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "of-sums"
    result = run("gsm8k", "--data", sums, "--out", folder, "--model", model, "--draft", model, "-k", 3, "--limit", 6)
    assert result.stdout.startswith("# 6 of 12 GSM8K problems\n")
    assert result.stdout.strip() == (folder / "table.md").read_text().strip()
    return folder


def test_a_run_leaves_what_it_says(whole: Path) -> None:
    assert {file.name for file in whole.iterdir()} == {
        "run.json",
        "results.jsonl",
        "scores.jsonl",
        "results.json",
        "table.md",
    }
    run_record = json.loads((whole / "run.json").read_text())
    assert run_record["settings"]["format"] == "float32"
    (session,) = run_record["sessions"]
    assert {"date", "command", "commit", "versions", "machine"} == set(session)
    assert session["versions"]["torch"]
    assert session["machine"]["threads"] >= 1
    (setting,) = json.loads((whole / "results.json").read_text())["settings"]
    assert setting["differing_texts"] == 0
    assert setting["methods"]["speculative"]["alpha"] == 1, "the draft is the target itself"


def test_the_commit_is_that_of_this_checkout(whole: Path) -> None:
    root = Path(__file__).parents[2]
    asked = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True)
    (session,) = json.loads((whole / "run.json").read_text())["sessions"]
    assert (session["commit"] or "").rstrip("+") == asked.stdout.strip()


def test_the_page_of_a_run(whole: Path, tmp_path: Path) -> None:
    result = run("report", whole, "--out", tmp_path / "page.html")
    assert result.stdout.strip() == str(tmp_path / "page.html")
    assert "6 of 12 GSM8K problems" in (tmp_path / "page.html").read_text()
    assert "no results.json" in run("report", tmp_path, "--out", tmp_path / "page.html", code=2).stderr


def test_a_sweep_from_the_command_line(model: str, sums: Path, tmp_path: Path) -> None:
    asked = ["--out", tmp_path, "--model", model, "--draft", model, "--limit", 2, "--most", 2, "--tokens", 7]
    result = run("sweep", f"gsm8k={sums}", *asked)
    assert "gsm8k: alpha = 1.000" in result.stdout
    assert "off by 0.0% at worst" in result.stdout
    assert (tmp_path / "figure.png").exists()
    assert "draft_tokens" not in json.loads((tmp_path / "run.json").read_text())["settings"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["gsm8k", "--draft", "none"], "there is nothing to compare"),
        (["gsm8k", "-k", "0"], "there is nothing to compare"),
        (["gsm8k", "-n", "0"], "n is 0"),
        (["gsm8k", "--limit", "0"], "limit is 0"),
        (["sweep", "gsm8k"], "'gsm8k' is not of the form TASK=FILE"),
        (["sweep", "gsm8k=a", "gsm8k=b"], "with each task once"),
        (["sweep", "gsm8k=a", "-k", "3"], "--draft-tokens is 3, and every K is measured"),
        (["sweep", "other=a"], "'other' is no task: it must be one of xsum, humaneval, gsm8k, spec-bench"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    model: str, sums: Path, tmp_path: Path, arguments: list[str], told: str
) -> None:
    data = ["--data", sums] if arguments[0] != "sweep" else []
    result = run(*arguments, *data, "--out", tmp_path / "run", "--model", model, code=2)
    assert told in result.stderr.replace("\n", " ")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_process_that_is_stopped_loses_nothing_and_goes_on(
    model: str, sums: Path, whole: Path, tmp_path: Path, how: signal.Signals
) -> None:
    out = tmp_path / "run"
    drafting = ["--model", model, "--draft", model, "-k", "3"]
    asked = ["gsm8k", "--data", str(sums), "--out", str(out), *drafting, "--limit", "6"]
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "bench", *asked],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    results = out / "results.jsonl"
    deadline = time.monotonic() + 120
    while not (results.exists() and results.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(how)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL), stderr.decode()
    assert stdout == b""
    assert b"Traceback" not in stderr
    assert (b"keeps what is done, and the same command goes on" in stderr) == (how == signal.SIGINT)
    kept = results.read_bytes()
    assert 0 < kept.count(b"\n") < 6, "stopped in the middle"
    run(*asked)
    assert results.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
    assert without_times(out) == without_times(whole)
    assert len(json.loads((out / "run.json").read_text())["sessions"]) == 2
