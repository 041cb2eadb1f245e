"""Figures of what was measured, drawn with matplotlib: the paper's Figure 1 of a sweep, and speed-ups of a task.

The colours are Okabe and Ito's, which colour-blind people tell apart; what they tell apart also differs in shape.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.evaluation.bench import METHODS
from paceline.evaluation.sweep import PARTS, PER, expected_length

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PART_COLOURS = dict(zip(PARTS, ("#E69F00", "#0072B2", "#009E73", "#999999"), strict=True))
TASK_STYLES = (("#0072B2", "o", ""), ("#D55E00", "s", "///"), ("#009E73", "^", "..."))
"""By task: colour, marker, hatch."""
BELOW: dict[str, Any] = {
    "loc": "upper center",
    "bbox_to_anchor": (0.5, -0.13),
    "frameon": False,
    "ncols": 2,
    "fontsize": "small",
}
"""Legends hide nothing there."""


def new_figure(width: float, height: float) -> Figure:
    """Raises ValueError where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("the figures need matplotlib: pip install 'paceline[evaluation]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, folder: Path, name: str) -> None:
    """As PNG and SVG."""
    figure.savefig(folder / f"{name}.png", dpi=150)
    (folder / f"{name}.svg").write_text(_svg(figure))


def svg_element(figure: Figure) -> str:
    """For a page: without the XML declaration."""
    text = _svg(figure)
    return text[text.index("<svg") :]


def _svg(figure: Figure) -> str:
    """Text is text, and the same figure gives the same bytes."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "paceline"}):
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return buffer.getvalue()


def figure_1(tasks: Sequence[Mapping[str, Any]]) -> Figure:
    """Three panels by K: time of a round by its parts, efficiency, time per 128 tokens with its spread."""
    figure = new_figure(15, 6)
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
    axes.set_ylim(top=1.05 * max(sum(found["parts_ms"].values()) for task in tasks for found in task["by_k"]))
    parts = [Patch(color=colour, label=part) for part, colour in reversed(PART_COLOURS.items())]
    shapes = [
        Patch(facecolor="#cccccc", edgecolor="white", hatch=hatch, label=task["task"])
        for task, (_, _, hatch) in zip(tasks, TASK_STYLES, strict=False)
    ]
    axes.legend(handles=[*parts, *shapes], **BELOW)
    axes.set_title("Time of a round")
    axes.set_ylabel("ms a round (mean)")


def _efficiency(axes: Axes, tasks: Sequence[Mapping[str, Any]]) -> None:
    for task, (colour, marker, _) in zip(tasks, TASK_STYLES, strict=False):
        found = [f["efficiency"] for f in task["by_k"]]
        values = [f["value"] for f in found]
        ks = [f["k"] for f in task["by_k"]]
        axes.plot(ks, values, color=colour, marker=marker, label=f"{task['task']}: measured (95%)")
        axes.errorbar(ks, values, yerr=_errors(found), fmt="none", ecolor=colour, capsize=3)
        if task["alpha"] is None:
            continue
        formula = [expected_length([task["alpha"]] * k) / (k + 1) for k in ks]
        label = f"{task['task']}: formula, alpha = {task['alpha']:.2f}"
        axes.plot(ks, formula, color=colour, linestyle="--", linewidth=1, label=label)
        predicted = [1.0, *(_expected_per_round(f) / (f["k"] + 1) for f in task["by_k"] if f["k"])]
        axes.plot(ks, predicted, color=colour, linestyle=":", label="formula, over actual drafts")
    axes.set_title("Efficiency")
    axes.set_ylabel("tokens a round / (K + 1)")
    axes.legend(**BELOW)


def _expected_per_round(found: Mapping[str, Any]) -> float:
    """With the rounds that had no draft, which give one token each."""
    share = found["drafts"] / found["rounds"]
    return 1 - share + share * found["predicted_acceptance_length"]["lengths"]


def _total(axes: Axes, tasks: Sequence[Mapping[str, Any]]) -> None:
    for task, (colour, marker, _) in zip(tasks, TASK_STYLES, strict=False):
        ks = [found["k"] for found in task["by_k"]]
        times = {q: [found[f"ms_per_{PER}_tokens"][f"p{q}"] for found in task["by_k"]] for q in (10, 50, 90, 99)}
        axes.plot(ks, times[50], color=colour, marker=marker, label=f"{task['task']}: P50 of {task['items']} items")
        axes.fill_between(ks, times[10], times[90], color=colour, alpha=0.15, lw=0, label="P10 to P90")
        axes.plot(ks, times[99], color=colour, linestyle=":", linewidth=1, label="P99")
    axes.set_title(f"Time per {PER} tokens")
    axes.set_ylabel(f"ms per {PER} tokens, reading the prompt apart")
    axes.legend(**BELOW)


def comparison(settings: Sequence[Mapping[str, Any]]) -> Figure:
    """Of a task: speculative minus plain in quality, the speed-ups, and every item's time per token with both."""
    quality = [
        (f"{setting['name']}, {metric}", found)
        for setting in settings
        for metric, found in setting["difference"].items()
        if found
    ]
    speed = [(setting["name"], setting["speedup"]) for setting in settings]
    speed += [(found["name"], found["speedup"]) for setting in settings for found in setting["groups"]]
    panels = 2 + bool(quality)
    figure = new_figure(5 * panels, 3.4)
    axes = list(figure.subplots(1, panels))
    if quality:
        _estimates(axes[0], quality, "Quality, speculative minus plain", "difference of means (95%)", nothing=0)
    _estimates(axes[-2], speed, "Speed-up", "plain / speculative ms per token (95%)", nothing=1)
    _items(axes[-1], settings)
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    return figure


def _estimates(
    axes: Axes, rows: Sequence[tuple[str, Mapping[str, float] | None]], title: str, label: str, *, nothing: float
) -> None:
    """A point with its interval in each row; the line stands where there is no difference."""
    shown = [(name, found) for name, found in rows if found]
    axes.axvline(nothing, color="#555555", linewidth=1)
    for number, (_, found) in enumerate(reversed(shown)):
        axes.errorbar(found["value"], number, xerr=_errors([found]), color=TASK_STYLES[0][0], marker="o", capsize=3)
    axes.set_yticks(range(len(shown)), [name for name, _ in reversed(shown)])
    axes.set_ylim(-0.7, len(shown) - 0.3)
    axes.set_title(title)
    axes.locator_params(axis="x", nbins=5)
    axes.set_xlabel(label)


def _errors(found: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """Down and up from the values; none where one item alone was measured."""
    return [
        [sign * (f[end] - f["value"]) if f[end] is not None else 0.0 for f in found]
        for end, sign in (("low", -1), ("high", 1))
    ]


def _items(axes: Axes, settings: Sequence[Mapping[str, Any]]) -> None:
    most = 0.0
    for setting, (colour, marker, _) in zip(settings, TASK_STYLES, strict=False):
        plain, speculative = ([item[m]["ms_per_token"] for item in setting["per_item"]] for m in METHODS)
        axes.scatter(plain, speculative, s=20, color=colour, marker=marker, alpha=0.7, lw=0, label=setting["name"])
        most = max([most, *plain, *speculative])
    axes.plot([0, most], [0, most], color="#555555", linewidth=1, label="equal")
    axes.set_title("Every item: faster below the line")
    axes.set_xlabel("plain, ms per token")
    axes.set_ylabel("speculative, ms per token")
    axes.set_xlim(0, 1.05 * most)
    axes.set_ylim(0, 1.05 * most)
    axes.legend(frameon=False, fontsize="small", loc="upper left")
