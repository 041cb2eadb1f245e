"""`paceline bench TASK`: from a model and a file of items to scores, tables and figures. An interruption loses nothing:
the same command goes on.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from paceline.engine.llm import LLM
from paceline.evaluation import answers, bench, sweep, tasks
from paceline.evaluation.plots import figure_1, new_figure, save
from paceline.evaluation.record import RunFolder, write_json
from paceline.evaluation.sandbox import SandboxUnavailable
from paceline.evaluation.summary import summarise
from paceline.evaluation.tables import markdown
from paceline.evaluation.tasks import Setting, Task

TASKS: dict[str, Callable[[Path], Task]] = {
    "xsum": tasks.xsum,
    "humaneval": tasks.humaneval,
    "gsm8k": tasks.gsm8k,
    "spec-bench": tasks.spec_bench,
}

TOLD_EVERY_S = 60.0
"""Between two lines on progress where no bar can be shown."""

Say = Callable[[str], None]


def run(
    name: str,
    data: Path,
    out: Path,
    llm: LLM,
    model: Mapping[str, Any],
    *,
    limit: int | None = None,
    n: int | None = None,
    seed: int = 0,
    say: Say = lambda text: None,
) -> str:
    """The table, which is also in `out`. `model` is how `llm` came about, for the record. Raises ValueError for what
    cannot be measured, KeyboardInterrupt after Ctrl-C, when everything is kept."""
    if n is not None and n < 1:
        raise ValueError(f"n is {n}, it must be at least 1")
    task = bench.with_samples(tasks.humaneval(data, n or 1) if name == "humaneval" else TASKS[name](data), n)
    task, left_out = bench.fitting(bench.chosen(task, limit, seed), llm)
    if left_out:
        say(f"{left_out} items are left out: their prompts leave no room in the model's context")
    return measured(task, out, llm, {"data": sha256(data), **model}, limit=limit, seed=seed, left_out=left_out)


def measured(
    task: Task, out: Path, llm: LLM, settings: Mapping[str, Any], *, limit: int | None, seed: int, left_out: int = 0
) -> str:
    """Measure, score and write the tables of this task; after Ctrl-C those of what is done."""
    _check_scoring(task)
    n = max(setting.params.n for setting in task.settings)
    asked = {"task": task.name, "limit": limit, "left_out": left_out, "n": n, "seed": seed, **settings}
    folder = RunFolder(out, asked | {"prompts": bench.digest(task, llm), "notes": list(llm.notes)})
    try:
        bench.measure(llm, task, folder, seed=seed, track=track)
        bench.score(task, folder, track=track)
    except KeyboardInterrupt:
        if folder.read(bench.RESULTS):
            _tables(task, folder, seed)
        raise
    return _tables(task, folder, seed)


def _tables(task: Task, folder: RunFolder, seed: int) -> str:
    """Of what is in the folder."""
    results = folder.read(bench.RESULTS)
    summary = summarise(task, results, folder.read(bench.SCORES), seed=seed)
    table = markdown(summary, folder.run)
    write_json(folder.folder / "results.json", summary | {"run": folder.run})
    (folder.folder / "table.md").write_text(table)
    if task.name == "spec-bench":
        answers.write(task, results, folder.run, folder.folder)
    return table


def run_sweep(
    data: Mapping[str, Path],
    out: Path,
    llm: LLM,
    model: Mapping[str, Any],
    *,
    most: int,
    tokens: int,
    limit: int | None = None,
    seed: int = 0,
) -> list[str]:
    """`data`: by task, its file. Writes `sweep.json` and `figure.png` and `.svg`; returns what the fit says."""
    if most < 1:
        raise ValueError(f"the largest K is {most}, it must be at least 1")
    if tokens < 2:
        raise ValueError(f"tokens is {tokens}, it must be at least 2: the first one comes out of reading the prompt")
    for name in data:
        if name not in TASKS:
            raise ValueError(f"{name!r} is no task: it must be one of {', '.join(TASKS)}")
    loaded = [bench.chosen(TASKS[name](file), limit, seed) for name, file in data.items()]
    files = {name: sha256(file) for name, file in data.items()}
    return swept(loaded, out, llm, {"data": files, **model}, most=most, tokens=tokens, limit=limit, seed=seed)


def swept(
    given: Sequence[Task],
    out: Path,
    llm: LLM,
    settings: Mapping[str, Any],
    *,
    most: int,
    tokens: int,
    limit: int | None,
    seed: int,
) -> list[str]:
    """Sweep over these tasks, and draw."""
    new_figure(1, 1)  # that it can be drawn is known before hours of measuring
    asked = [
        replace(task, settings=(Setting(task.settings[0].name, sweep.sweep_params(task, tokens)),)) for task in given
    ]
    fit = [bench.fitting(task, llm) for task in asked]
    folder = RunFolder(
        out,
        {
            "task": "sweep",
            "most": most,
            "tokens": tokens,
            "limit": limit,
            "left_out": [left_out for _, left_out in fit],
            "seed": seed,
            **settings,
            "prompts": [bench.digest(task, llm) for task, _ in fit],
            "notes": list(llm.notes),
        },
    )
    for task, _ in fit:
        sweep.measure(llm, task, folder, most=most, tokens=tokens, seed=seed, track=track)
    lines = folder.read(sweep.LINES)
    found = [sweep.summarise(task, lines, seed=seed) for task, _ in fit]
    said = [line for summary in found for line in sweep.verdict(summary)]
    write_json(
        out / "sweep.json", {"tasks": found, "verdict": said, "predictions": sweep.PREDICTIONS, "run": folder.run}
    )
    save(figure_1(found), out, "figure")
    return said


def _check_scoring(task: Task) -> None:
    """What scoring lacks is said before hours of answering."""
    try:
        task.score(task.items[0], [""])
    except (ImportError, SandboxUnavailable) as error:
        raise ValueError(str(error)) from error


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def track(work: Sequence[Any], description: str) -> Iterator[Any]:
    """The work, with a bar on stderr where that is a terminal, and a line a minute where it is not."""
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    told = time.monotonic()
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar:
        for number, part in enumerate(bar.track(work, description=description), start=1):
            yield part
            if not console.is_terminal and time.monotonic() - told > TOLD_EVERY_S:
                told = time.monotonic()
                console.print(f"{description}: {number} of {len(work)}", soft_wrap=True)
