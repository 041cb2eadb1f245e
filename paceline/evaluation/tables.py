"""A summary as tables in Markdown, in the layout of the paper's Table 1 and with its own rows beside ours.

Shows what `summary` computed; every figure comes from there, but for the paper's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

PAPER = {
    ("xsum", "nucleus"): ("ROUGE-2", ("0.112", "14.1", "1"), ("0.114", "7.52", "1.92")),
    ("xsum", "greedy"): ("ROUGE-2", ("0.157", "14.1", "1"), ("0.156", "7.00", "2.01")),
    ("humaneval", "nucleus"): ("pass@100", ("45.1%", "14.1", "1"), ("47.0%", "5.73", "2.46")),
}
"""Table 1 of arXiv 2302.01318: metric, plain and speculative (benchmark result, ms per token, speed-up)."""
PAPER_IS = "Chinchilla 70B with a draft of 4B, K = 4, on 16 TPU v4 (arXiv 2302.01318, Table 1)"

OF_PAPER = ", the paper"
"""How the names of their rows end."""
NAMES = {"setting", "method", "kind", "item"}
"""Heads of columns that hold words."""

Table = tuple[list[str], list[list[str]]]
"""Head and rows."""


def markdown(summary: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    """`table.md`: the tables, what is to be said about them, and how they came about."""
    parts = [f"# {summary['title']}", text_table(main_table(summary))]
    parts += [f"- {line}" for line in notes(summary)]
    for setting in summary["settings"]:
        if setting["groups"]:
            parts += [f"## {setting['name']}, by kind of task", text_table(group_table(setting))]
    parts.append("## Acceptance")
    parts.append(text_table(acceptance_table(summary)))
    parts.append("## How")
    parts += [f"- {line}" for line in circumstances(run)]
    return "\n".join(line if line.startswith("- ") else f"\n{line}\n" for line in parts).strip() + "\n"


def main_table(summary: Mapping[str, Any]) -> Table:
    metrics = list(dict.fromkeys(name for s in summary["settings"] for name in s["difference"]))
    head = ["setting", "method", *(f"{name} (95%)" for name in metrics), "ms per token (95%)", "speed-up (95%)"]
    rows = []
    for setting in summary["settings"]:
        for method, found in setting["methods"].items():
            quality = [estimate(found["quality"].get(name), format_of(name)) for name in metrics]
            speed = "1" if method == "plain" else estimate(setting["speedup"], "{:.2f}")
            rows.append([setting["name"], method, *quality, estimate(found["ms_per_token"], "{:.2f}"), speed])
        if (key := (summary["task"], setting["name"])) in PAPER:
            metric, *theirs = PAPER[key]
            for method, (quality_there, ms, ratio) in zip(setting["methods"], theirs, strict=True):
                cells = [quality_there if name == metric else "" for name in metrics]
                if cells and metric not in metrics:
                    cells[0] = f"{quality_there} ({metric})"
                rows.append([setting["name"] + OF_PAPER, method, *cells, ms, ratio])
    return head, rows


def notes(summary: Mapping[str, Any]) -> Iterator[str]:
    """What has to be known to read the main table, and what it says about quality."""
    for setting in summary["settings"]:
        name, samples, timed = setting["name"], setting["samples"], setting["timed_items"]
        said = f"{name}: {setting['params']}; {timed} of {setting['items']} items timed"
        if summary["metric"]:
            said += f", {setting['scored_items']} scored with {samples} sample{'s' * (samples > 1)} each"
        yield said + "."
        for metric, found in setting["difference"].items():
            yield f"{name}, {metric}, speculative minus plain: {difference(found, metric)}."
        if setting["differing_texts"] is not None:
            yield f"{name}: {setting['differing_texts']} of {timed} greedy texts differ from plain decoding's."
        if samples > 1:
            yield (
                f"{name}: times are those of one completion of each item, at batch 1, plain and speculative by turns; "
                "further samples ran in batches and count for quality and acceptance alone."
            )
    yield (
        "ms per token: seconds of decoding over tokens behind the first one, reading the prompt apart. Speed-up: plain "
        "over speculative ms per token. Intervals: 95%, bootstrap over items (Wilson's where items are a yes or a no)."
    )
    if any((summary["task"], setting["name"]) in PAPER for setting in summary["settings"]):
        yield f"The paper's rows: {PAPER_IS}; other model, other machine, beside ours for the layout and the ratios."


def group_table(setting: Mapping[str, Any]) -> Table:
    head = ["kind", "items", "tokens a round", "alpha", "speed-up (95%)"]
    rows = [
        [
            found["name"],
            str(found["items"]),
            f"{found['tokens_per_round']:.2f}",
            number(found["alpha"], "{:.2f}"),
            estimate(found["speedup"], "{:.2f}"),
        ]
        for found in setting["groups"]
    ]
    return head, rows


def acceptance_table(summary: Mapping[str, Any]) -> Table:
    head = [
        "setting",
        "tokens a round",
        "rounds that drafted",
        "tokens a round that drafted",
        "accepted, given all before (by position)",
        "accepted at all, of drafts (by position)",
    ]
    rows = []
    for setting in summary["settings"]:
        found = setting["methods"]["speculative"]
        rows.append(
            [
                setting["name"],
                f"{found['tokens_per_round']:.2f}",
                f"{found['drafts']} of {found['rounds']}",
                f"{found['acceptance_length']:.2f}",
                " ".join(f"{rate:.2f}" for rate in found["conditional_acceptance"]),
                " ".join(f"{rate:.2f}" for rate in found["marginal_acceptance"]),
            ]
        )
    return head, rows


def item_table(setting: Mapping[str, Any]) -> Table:
    """Scores are means over an item's completions; times are those of its first one."""
    head = ["item"]
    sides = ("plain", "speculative")
    scored = any(item[side]["scores"] for item in setting["per_item"] for side in sides)
    head += [f"score, {side}" for side in sides] if scored else []
    head += [f"ms per token, {side}" for side in sides] + [f"tokens, {side}" for side in sides] + ["tokens a round"]
    rows = []
    for item in setting["per_item"]:
        scores = [item[side]["scores"] for side in sides]
        cells = [f"{sum(of_side) / len(of_side):.3f}" if of_side else "-" for of_side in scores] if scored else []
        cells += [f"{item[side]['ms_per_token']:.2f}" for side in sides]
        cells += [str(item[side]["tokens"]) for side in sides]
        rows.append([item["item"], *cells, f"{item['speculative']['tokens_per_round']:.2f}"])
    return head, rows


def sweep_table(task: Mapping[str, Any]) -> Table:
    """By K: the three panels of the figure, and what the fit predicts."""
    head = ["K", "ms a round (95%)", "draft", "score", "verify", "other", "tokens a round (95%)", "efficiency"]
    head += ["ms per 128 tokens: P50", "P90", "P99", "rounds that drafted", "tokens a round that drafted"]
    head += ["formula", "over lengths", "by position"]
    rows = []
    for found in task["by_k"]:
        parts = [f"{found['parts_ms'][part]:.2f}" for part in ("draft", "score", "verify", "other")]
        times = [f"{found['ms_per_128_tokens'][q]:.0f}" for q in ("p50", "p90", "p99")]
        predicted = found["predicted_acceptance_length"]
        rows.append(
            [
                str(found["k"]),
                estimate(found["loop_ms"], "{:.2f}"),
                *parts,
                estimate(found["tokens_per_round"], "{:.2f}"),
                f"{found['efficiency']['value']:.3f}",
                *times,
                f"{found['drafts'] / found['rounds']:.0%}",
                f"{found['acceptance_length']:.2f}",
                *(f"{predicted[name]:.2f}" if predicted else "-" for name in ("formula", "lengths", "positions")),
            ]
        )
    return head, rows


def position_table(task: Mapping[str, Any]) -> Table:
    """Both kinds of acceptance by position, and how long drafts were."""
    head = ["K", "accepted, given all before (by position)", "accepted at all, of drafts", "drafts of 1, 2, ... tokens"]
    rows = [
        [
            str(found["k"]),
            " ".join(f"{rate:.2f}" for rate in found["conditional_acceptance"]),
            " ".join(f"{rate:.2f}" for rate in found["marginal_acceptance"]),
            " ".join(map(str, found["drafts_of"])),
        ]
        for found in task["by_k"]
        if found["k"]
    ]
    return head, rows


def circumstances(run: Mapping[str, Any]) -> Iterator[str]:
    """Model, draft, and every session: command, commit, versions, machine."""
    notes = run["settings"].get("notes", [])
    yield ", ".join(
        f"{name} {value}" for name, value in run["settings"].items() if value is not None and name != "notes"
    )
    yield from notes
    for session in run["sessions"]:
        machine, commit = session["machine"], session["commit"] or "unknown"
        versions = ", ".join(f"{name} {value}" for name, value in session["versions"].items())
        where = f"{machine['processor']}, {machine['processors']} processors, {machine['threads']} threads"
        if machine["accelerator"]:
            where += f", {machine['accelerator']}"
        yield f"{session['date']}: `{session['command']}` at commit {commit}; {where}, {machine['system']}; {versions}"


def difference(found: Mapping[str, float] | None, metric: str) -> str:
    """In words, of a difference with its interval."""
    if found is None:
        return "not measured"
    pattern = format_of(metric).replace("{:", "{:+")
    if not any(found.values()):
        return "every item scored the same"
    told = estimate(found, pattern)
    if found["low"] <= 0 <= found["high"]:
        return f"no difference seen: {told}"
    return f"A DIFFERENCE: {told} (of equal ones, one comparison in twenty looks like this)"


def format_of(metric: str) -> str:
    return "{:.3f}" if metric.startswith("ROUGE") else "{:.1%}"


def estimate(found: Mapping[str, float] | None, pattern: str) -> str:
    """A figure with its interval."""
    if found is None:
        return "-"
    value, low, high = (pattern.format(found[name]) for name in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


def number(found: float | None, pattern: str) -> str:
    return "-" if found is None else pattern.format(found)


def text_table(table: Table) -> str:
    head, rows = table

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule = ["---" if name in NAMES else "---:" for name in head]
    return "\n".join(map(line, [head, rule, *rows]))
