"""What training tells: a live table on a terminal, lines of JSON for scripts, a plot, and a verdict at the end.

The log has one line for each optimiser step ("loss") and one for each evaluation ("alpha"). A run that goes on first
takes out what its checkpoint does not know of, so the log reads as if nothing had happened.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from paceline.decoding.control import Costs
from paceline.training.evaluation import Evaluation
from paceline.training.trainer import Counters

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 4
"""K at which acceptance lengths are compared and shown: what `LLM` drafts unless told otherwise."""
ROWS = 12
"""Evaluations in the live table."""


class Report:
    """Of one run, in its folder. `costs`: what serving costs on this machine; without it no speed-ups are told.
    `reach`: the most tokens that the draft can propose; None: any number."""

    def __init__(
        self, folder: Path, *, costs: Costs | None = None, reach: int | None = None, console: Console | None = None
    ) -> None:
        self._folder, self._costs, self._reach = folder, costs, reach
        self._log = folder / "log.jsonl"
        self._console = console or Console(stderr=True, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._began = (0.0, 0.0)
        self._loss: float | None = None
        self._rows: list[dict[str, str]] = []
        self.records: list[dict[str, Any]] = []

    def begin(self, counters: Counters) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        lines = self._log.read_text().split("\n")[:-1] if self._log.exists() else []
        for record in map(json.loads, lines):
            if record["step"] <= counters.step and record.get("evaluation", 0) <= counters.evaluations:
                self._enter(record)
        unfinished = self._log.with_suffix(".unfinished")
        unfinished.write_text("".join(json.dumps(record) + "\n" for record in self.records))
        unfinished.replace(self._log)
        self._began = (time.monotonic(), -1.0)
        if counters.step:
            self._console.print(f"going on from step {counters.step}, {counters.tokens:,} tokens")

    def step(self, counters: Counters, progress: float, measured: Mapping[str, float]) -> None:
        if self._began[1] < 0:
            self._began = (time.monotonic(), progress)  # the first step is slower than others
        self._write({"step": counters.step, "tokens": counters.tokens, "epoch": counters.epoch, **measured})
        if self._console.is_terminal:
            if not self._live.is_started:
                self._live.start()
            self._live.update(self._table(counters, progress, measured), refresh=True)

    def evaluation(self, counters: Counters, progress: float, sums_J3: torch.Tensor) -> None:
        found = Evaluation.of(sums_J3, self._reach)
        record = {
            "step": counters.step,
            "tokens": counters.tokens,
            "evaluation": counters.evaluations,
            "seconds": counters.seconds,
            **asdict(found),
            "acceptance_lengths": found.lengths,
            "speedups": found.speedups(self._costs) if self._costs else None,
        }
        self._write(record)
        if not self._live.is_started:
            self._console.print(" | ".join(f"{name} {value}" for name, value in self._rows[-1].items()), soft_wrap=True)

    def close(self) -> None:
        """Leaves the table on the screen."""
        if self._live.is_started:
            self._live.transient = False
            self._live.stop()

    def verdict(self) -> str:
        """What became of the draft, in one line."""
        first, last = self.evaluations[0], self.evaluations[-1]
        start, end = (record["acceptance_lengths"][SHOWN - 1] for record in (first, last))
        if end > start:
            return f"acceptance length at K = {SHOWN}: {end:.2f}, untrained {start:.2f}"
        return (
            f"this draft does NOT beat its untrained start: acceptance length at K = {SHOWN} is {end:.2f}, it was "
            f"{start:.2f}; train it longer, on more prompts, or with another learning rate"
        )

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        return [record for record in self.records if "alpha" in record]

    def plot(self) -> str | None:
        """Draws curves.png and curves.svg; returns why not, if it cannot."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            return "no plot of the curves: pip install 'paceline[training]'"
        figure = Figure(figsize=(7, 6), layout="constrained")
        self._draw(figure)
        for kind in ("png", "svg"):
            figure.savefig(self._folder / f"curves.{kind}", dpi=150)
        return None

    def _draw(self, figure: Figure) -> None:
        above, below = figure.subplots(2, 1, sharex=True)
        steps = [record for record in self.records if "loss" in record]
        above.plot([r["tokens"] for r in steps], [r["loss"] for r in steps], linewidth=0.8)
        above.set_ylabel("loss")
        tokens = [record["tokens"] for record in self.evaluations]
        for j in range(len(self.evaluations[0]["alpha"])):
            below.plot(tokens, [r["alpha"][j] for r in self.evaluations], marker=".", label=f"position {j + 1}")
        below.set(xlabel="tokens", ylabel="alpha", ylim=(0, 1))
        below.legend()

    def _write(self, record: dict[str, Any]) -> None:
        self._enter(record)
        with self._log.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def _enter(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        if "loss" in record:
            self._loss = record["loss"]
            return
        speedups: Sequence[float] = record["speedups"] or ()
        row = {
            "step": f"{record['step']}",
            "tokens": f"{record['tokens']:,}",
            "loss": "-" if self._loss is None else f"{self._loss:.3f}",
            "alpha by position": " ".join(f"{alpha:.2f}" for alpha in record["alpha"]),
            f"length at K = {SHOWN}": f"{record['acceptance_lengths'][SHOWN - 1]:.2f}",
            "speed-up": f"{max(speedups):.2f} at K = {speedups.index(max(speedups)) + 1}" if speedups else "-",
        }
        self._rows.append(row)

    def _table(self, counters: Counters, progress: float, measured: Mapping[str, float]) -> Group:
        table = Table()
        for name in self._rows[-1]:
            table.add_column(name, justify="right")
        for row in self._rows[-ROWS:]:
            table.add_row(*row.values())
        began, before = self._began
        left = "-"
        if progress > before:
            seconds = (time.monotonic() - began) * max(1 - progress, 0) / (progress - before)
            left = f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"
        line = (
            f"step {counters.step}  {counters.tokens:,} tokens  loss {measured['loss']:.3f}  "
            f"{measured['tokens_per_s']:,.0f} tokens/s  {min(progress, 1):.0%} done, {left} left"
        )
        return Group(table, Text(line))
