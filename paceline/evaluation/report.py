"""One HTML page of finished runs: tables, figures, how they came about, and transcripts marked by provenance.

Self-contained: no script at all, nothing fetched. What models wrote is hostile and is escaped; the page's own policy
forbids scripts besides.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from paceline.evaluation import plots, tables
from paceline.evaluation.bench import LETTERS, RESULTS
from paceline.evaluation.record import read_lines

SHOWN = 3
"""Items of each setting whose answers are shown."""
ASKED = 2000
"""Characters of a prompt's end that are shown."""
CONTROLS = {code: 0xFFFD for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
MEANINGS = {
    "accepted": "drafted, and kept by the verification",
    "recovered": "the model's own token in place of the first rejected one",
    "bonus": "the model's own token behind a draft that was kept whole",
    "plain": "a round without a draft",
}
CODE = r"<code>\1</code>"
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(folders: Sequence[Path]) -> str:
    """Raises ValueError for a folder without the results of a finished run."""
    sections = "\n".join(part for folder in folders for part in _section(folder))
    style = Path(__file__).with_name("report.css").read_text()
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Paceline: measured</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        "<h1>Paceline: plain and speculative decoding, measured</h1>\n"
        f"{sections}\n</body>\n</html>\n"
    )


def _section(folder: Path) -> Iterator[str]:
    try:
        if (folder / "results.json").exists():
            yield from _task(json.loads((folder / "results.json").read_text()), read_lines(folder / RESULTS))
            return
        if (folder / "sweep.json").exists():
            yield from _sweep(json.loads((folder / "sweep.json").read_text()))
            return
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(
            f"{folder} does not hold what `paceline bench` writes: {type(error).__name__} {error}"
        ) from error
    raise ValueError(f"{folder} has no results.json and no sweep.json: let `paceline bench` finish there first")


def _task(summary: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield f"<h2>{_escaped(summary['title'])}</h2>"
    yield _table(tables.main_table(summary))
    yield _list(tables.notes(summary))
    yield f"<figure>{plots.svg_element(plots.comparison(summary['settings']))}</figure>"
    for setting in summary["settings"]:
        if setting["groups"]:
            yield f"<h3>{_escaped(setting['name'])}, by kind of task</h3>" + _table(tables.group_table(setting))
    yield "<h3>Acceptance</h3>" + _table(tables.acceptance_table(summary))
    yield from _how(summary["run"])
    yield "<h3>Answers, by where each token came from</h3>" + _legend()
    for setting in summary["settings"]:
        timed = [line for line in lines if line["timed"] and line["setting"] == setting["name"]]
        for line in timed[:SHOWN]:
            yield from _transcript(setting["name"], line)
    for setting in summary["settings"]:
        yield (
            f"<details><summary>{_escaped(setting['name'])}, item by item</summary>"
            f"{_table(tables.item_table(setting))}</details>"
        )


def _sweep(found: Mapping[str, Any]) -> Iterator[str]:
    names = " and ".join(task["title"] for task in found["tasks"])
    yield f"<h2>By the number of drafted tokens: {_escaped(names)}</h2>"
    yield f"<figure>{plots.svg_element(plots.figure_1(found['tasks']))}</figure>"
    yield _list(found["verdict"])
    for task in found["tasks"]:
        yield f"<h3>{_escaped(task['task'])}, {_escaped(task['setting'])}, {task['items']} items</h3>"
        yield _table(tables.sweep_table(task)) + _table(tables.position_table(task))
    yield from _how(found["run"])


def _how(run: Mapping[str, Any]) -> Iterator[str]:
    yield "<h3>How</h3>" + _list(tables.circumstances(run))


def _legend() -> str:
    words = (f'<span class="{name}">{name}</span>: {meaning}' for name, meaning in MEANINGS.items())
    return f'<p class="legend">{"; ".join(words)}.</p>'


def _transcript(setting: str, line: Mapping[str, Any]) -> Iterator[str]:
    yield f"<details open><summary>{_escaped(setting)}, {_escaped(line['item'])}</summary>"
    answers = [found for found in line["completions"] if found["method"] == "speculative"]
    for asked, found in zip(line["asked"], answers, strict=False):
        shown = asked if len(asked) <= ASKED else "... " + asked[-ASKED:]
        yield f'<div class="text asked">{_escaped(shown)}</div><div class="text">{_coloured(found)}</div>'
    yield "</details>"


def _coloured(found: Mapping[str, Any]) -> str:
    """The text, its tokens marked by provenance; each token is a span, so that their borders show."""
    parts, start = [], 0
    for letter, of_letter in groupby(zip(found["provenance"], found["widths"], strict=True), key=lambda pair: pair[0]):
        name = LETTERS[letter].value
        for _, width in of_letter:
            text = _escaped(found["text"][start : start + width])
            parts.append(f'<span class="{name}">{text}</span>' if text else "")
            start += width
    return "".join(parts)


def _table(table: tables.Table) -> str:
    head, rows = table

    def cells(tag: str, values: Sequence[str]) -> str:
        kinds = [' class="name"' if name in tables.NAMES else "" for name in head]
        return "".join(f"<{tag}{kind}>{_escaped(value)}</{tag}>" for kind, value in zip(kinds, values, strict=True))

    lines = [f"<tr{' class=paper' * row[0].endswith(tables.OF_PAPER)}>{cells('td', row)}</tr>" for row in rows]
    head_row, body = f"<tr>{cells('th', head)}</tr>", "".join(lines)
    return f'<div class="wide"><table><thead>{head_row}</thead><tbody>{body}</tbody></table></div>'


def _list(lines: Iterator[str] | Sequence[str]) -> str:
    """What stands between backticks is code, as in the tables' Markdown."""
    return "<ul>" + "".join(f"<li>{re.sub('`(.*?)`', CODE, _escaped(line))}</li>" for line in lines) + "</ul>"


def _escaped(text: Any) -> str:
    return html.escape(str(text).translate(CONTROLS))
