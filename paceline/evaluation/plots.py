"""Figures of what was measured, drawn with matplotlib: the paper's Figure 1 of a sweep, and speed-ups of a task.

The colours are Okabe and Ito's, which colour-blind people tell apart; what they tell apart also differs in shape.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.evaluation.sweep import PARTS, PER, expected_length

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PART_COLOURS = dict(zip(PARTS, ("#E69F00", "#0072B2", "#009E73", "#999999"), strict=True))
TASK_STYLES = (("#0072B2", "o", ""), ("#D55E00", "s", "///"), ("#009E73", "^", "..."))
"""By task: colour, marker, hatch."""


def new_figure(width: float, height: float) -> Figure:
    """Raises ValueError where matplotlib is missing."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("the figures need matplotlib: pip install 'paceline[evaluation]'") from error
    matplotlib.rcParams["svg.fonttype"] = "none"
    matplotlib.rcParams["svg.hashsalt"] = "paceline"  # the same figure is the same file
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, folder: Path, name: str) -> None:
    """As PNG and SVG."""
    figure.savefig(folder / f"{name}.png", dpi=150)
    figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


def svg(figure: Figure) -> str:
    """The element alone, for a page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def figure_1(tasks: Sequence[Mapping[str, Any]]) -> Figure:
    """Three panels by K: time of a round by its parts, efficiency, time per 128 tokens with its spread."""
    figure = new_figure(15, 5)
    loop, efficiency, total = figure.subplots(1, 3)
    _loop(loop, tasks)
    _efficiency(efficiency, tasks)
    _total(total, tasks)
    for axes in (loop, efficiency, total):
        axes.set_xlabel("K, tokens drafted a round at most")
        axes.set_xticks([found["k"] for found in tasks[0]["by_k"]])
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _loop(axes: Axes, tasks: Sequence[Mapping[str, Any]]) -> None:
    from matplotlib.patches import Patch

    width = 0.8 / len(tasks)
    for number, (task, (_, _, hatch)) in enumerate(zip(tasks, TASK_STYLES, strict=False)):
        at = [found["k"] + (number - (len(tasks) - 1) / 2) * width for found in task["by_k"]]
        below = [0.0] * len(at)
        for part in PARTS:
            heights = [found["parts_ms"][part] for found in task["by_k"]]
            axes.bar(
                at, heights, 0.92 * width, bottom=below, color=PART_COLOURS[part], hatch=hatch, edgecolor="white", lw=0
            )
            below = [a + b for a, b in zip(below, heights, strict=True)]
    parts = [Patch(color=colour, label=part) for part, colour in reversed(PART_COLOURS.items())]
    shapes = [
        Patch(facecolor="#cccccc", edgecolor="white", hatch=hatch, label=task["task"])
        for task, (_, _, hatch) in zip(tasks, TASK_STYLES, strict=False)
    ]
    axes.legend(handles=[*parts, *shapes], loc="upper left", frameon=False, ncols=2)
    axes.set_title("Time of a round")
    axes.set_ylabel("ms a round (mean)")
    axes.set_ylim(top=1.3 * max(sum(found["parts_ms"].values()) for task in tasks for found in task["by_k"]))


def _efficiency(axes: Axes, tasks: Sequence[Mapping[str, Any]]) -> None:
    for task, (colour, marker, _) in zip(tasks, TASK_STYLES, strict=False):
        found = [f["efficiency"] for f in task["by_k"]]
        values = [f["value"] for f in found]
        errors = [[f["value"] - f["low"] for f in found], [f["high"] - f["value"] for f in found]]
        ks = [f["k"] for f in task["by_k"]]
        axes.errorbar(
            ks, values, yerr=errors, color=colour, marker=marker, capsize=3, label=f"{task['task']}, measured (95%)"
        )
        if task["alpha"] is None:
            continue
        formula = [expected_length([task["alpha"]] * k) / (k + 1) for k in ks]
        label = f"formula, alpha = {task['alpha']:.2f}, every round drafting K"
        axes.plot(ks, formula, color=colour, linestyle="--", linewidth=1, label=label)
        predicted = [1.0, *(_expected_per_round(f) / (f["k"] + 1) for f in task["by_k"] if f["k"])]
        axes.plot(ks, predicted, color=colour, linestyle=":", label="the same over the lengths drafted")
    axes.set_title("Efficiency")
    axes.set_ylabel("tokens a round / (K + 1)")
    axes.legend(frameon=False, fontsize="small")


def _expected_per_round(found: Mapping[str, Any]) -> float:
    """With the rounds that had no draft, which give one token each."""
    share = found["drafts"] / found["rounds"]
    return 1 - share + share * found["predicted_acceptance_length"]["lengths"]


def _total(axes: Axes, tasks: Sequence[Mapping[str, Any]]) -> None:
    for task, (colour, marker, _) in zip(tasks, TASK_STYLES, strict=False):
        ks = [found["k"] for found in task["by_k"]]
        times = {q: [found[f"ms_per_{PER}_tokens"][f"p{q}"] for found in task["by_k"]] for q in (10, 50, 90, 99)}
        axes.plot(ks, times[50], color=colour, marker=marker, label=f"{task['task']}, P50")
        axes.fill_between(ks, times[10], times[90], color=colour, alpha=0.15, lw=0, label="P10 to P90")
        axes.plot(ks, times[99], color=colour, linestyle=":", linewidth=1, label=f"P99 of {task['items']} items")
    axes.set_title(f"Time per {PER} tokens")
    axes.set_ylabel(f"ms per {PER} tokens, reading the prompt apart")
    axes.legend(frameon=False, fontsize="small", loc="lower left")
