"""The page: what it shows, that hostile text stays text, and how a real browser sees it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from paceline import LLM
from paceline.evaluation import report
from paceline.evaluation.bench import METHODS, RESULTS
from paceline.evaluation.command import measured, swept
from paceline.evaluation.record import read_lines
from paceline.evaluation.report import page
from tests.evaluation.fakes import GREEDY, SAMPLED, task, tiny_llm

HOSTILE = (
    "<script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\">"
    "</div></details></style><style>body{display:none}</style>&lt;b&gt; \"quoted\" 'too' \x1b[31m \u202e \ud800"
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return tiny_llm(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def folders(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    of_task, of_sweep = (tmp_path_factory.mktemp(name) for name in ("task", "sweep"))
    measured(task(4, two_turns=True, settings=[SAMPLED, GREEDY]), of_task, llm, {"model": "tiny"}, limit=None, seed=0)
    swept([task(3, settings=[GREEDY])], of_sweep, llm, {"model": "tiny"}, most=2, tokens=8, limit=None, seed=0)
    return [of_task, of_sweep]


@pytest.fixture(scope="module")
def hostile(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same with hostile text wherever text comes from models, data or files."""
    copy = tmp_path_factory.mktemp("hostile") / "run"
    shutil.copytree(folders[0], copy)
    lines = read_lines(copy / RESULTS)
    for line in lines:
        for found in line["completions"]:
            found["text"] = HOSTILE
            # Tokens that end within tags and entities, the last with what is left.
            found["widths"] = [5] * (len(found["tokens"]) - 1)
            found["widths"].append(len(HOSTILE) - sum(found["widths"]))
        line["asked"] = [HOSTILE] * 2
    (copy / RESULTS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = (copy / "results.json").read_text()
    summary = json.loads(text.replace("A few words", "TITLE").replace('"tiny"', '"MODEL"'))
    summary["title"] = HOSTILE
    summary["run"]["settings"]["model"] = HOSTILE
    summary["run"]["sessions"][0]["command"] = HOSTILE
    summary["settings"][0]["name"] = "<script>document.title = 'owned'</script>"
    summary["settings"][0]["per_item"][0]["item"] = HOSTILE
    (copy / "results.json").write_text(json.dumps(summary))
    return [copy, folders[1]]


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == [], "everything that was opened is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_shows_tables_figures_commands_and_answers(folders: list[Path]) -> None:
    text = page(folders)
    assert text.count("<svg") == 2
    for shown in ("A few words", "vowels (95%)", "Acceptance", "by kind of task", "item by item", "model tiny"):
        assert shown in text, shown
    for shown in ("Time of a round", "Efficiency", "alpha = ", "accepted, given all before (by position)", "commit"):
        assert shown in text, shown
    tags = Elements(text).tags
    assert "script" not in tags
    assert "link" not in tags
    assert tags.count("style") == 1 + 2, "ours, and one in each figure"


def test_nothing_is_fetched(folders: list[Path]) -> None:
    named = [(name, value or "") for name, value in Elements(page(folders)).attributes]
    assert not [value for name, value in named if name in ("src", "href") and not value.startswith("#")]
    outside = {value for _, value in named if "//" in value}
    assert outside <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}, "names, not addresses"


def test_answers_are_shown_whole_and_marked_by_provenance(folders: list[Path]) -> None:
    text = page(folders[:1])
    for line in read_lines(folders[0] / RESULTS)[:6]:
        for found in line["completions"]:
            assert sum(found["widths"]) == len(found["text"])
            assert len(found["widths"]) == len(found["tokens"]) == len(found["provenance"])
    (line, *_) = (line for line in read_lines(folders[0] / RESULTS) if line["timed"] and line["setting"] == "greedy")
    (answer, _) = (found for found in line["completions"] if found["method"] == METHODS[1])
    shown = [re.sub("<[^>]+>", "", found) for found in re.findall(r'<div class="text">(.*?)</div>', text, re.S)]
    assert html.escape(answer["text"].translate(report.CONTROLS)) in shown
    accepted = "".join(
        answer["text"][sum(answer["widths"][:i]) :][: answer["widths"][i]]
        for i, letter in enumerate(answer["provenance"])
        if letter == "a"
    )
    assert accepted, "the example has accepted tokens"
    marked = report._coloured(answer)
    spans = re.findall(r'<span class="accepted">(.*?)</span>', marked, re.S)
    assert html.unescape("".join(spans)) == accepted.translate(report.CONTROLS)


def test_hostile_text_stays_text(hostile: list[Path]) -> None:
    text = page(hostile)
    found = Elements(text)
    assert "script" not in found.tags
    assert "img" not in found.tags
    assert found.tags.count("style") == 1 + 2
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    assert "\x1b" not in text
    assert "&lt;script&gt;" in text, "the control: it is there, as text"


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({}, "has no results.json and no sweep.json"),
        ({"results.json": "{}", "results.jsonl": ""}, "does not hold what"),
        ({"results.json": "[]", "results.jsonl": ""}, "does not hold what"),
        ({"sweep.json": '{"tasks": []}'}, "does not hold what"),
        ({"results.json": "{"}, "Expecting"),
    ],
)
def test_folders_of_something_else_are_refused(tmp_path: Path, files: dict[str, str], told: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=told):
        page([tmp_path])


# ---- in a real browser ----

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH: install it to see the page as people do")


def seen(file: Path, tmp_path: Path) -> tuple[str, list[str]]:
    """The page after it was loaded, as markup, and what the browser's console said."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--user-data-dir={tmp_path}"]
    done = subprocess.run(
        [str(CHROMIUM), *flags, "--dump-dom", f"file://{file}"], capture_output=True, timeout=120, check=True
    )
    console = [line for line in done.stderr.decode(errors="replace").splitlines() if "CONSOLE" in line]
    return done.stdout.decode(errors="replace"), console


def written(folders: list[Path], tmp_path: Path) -> Path:
    file = tmp_path / "page.html"
    file.write_text(page(folders), encoding="utf-8", errors="replace")
    return file


@browser
@pytest.mark.browser
def test_a_browser_shows_hostile_text_and_runs_none_of_it(hostile: list[Path], tmp_path: Path) -> None:
    markup, console = seen(written(hostile, tmp_path), tmp_path / "profile")
    assert "<title>Paceline: measured</title>" in markup
    assert "&lt;script&gt;document.title = 'owned'&lt;/script&gt;" in markup
    assert "<script" not in markup
    assert "<img" not in markup
    assert "Efficiency" in markup, "the figures are drawn, behind all that was hostile"
    assert console == []


@browser
@pytest.mark.browser
def test_the_check_in_the_browser_would_see_a_page_that_does_not_escape(
    hostile: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control, first with the policy and then without it."""
    monkeypatch.setattr(report, "_escaped", str)
    _, console = seen(written(hostile, tmp_path), tmp_path / "profile")
    assert any("Content Security Policy" in line for line in console), "the policy still forbids it"
    monkeypatch.setattr(report, "POLICY", "default-src * 'unsafe-inline'")
    markup, _ = seen(written(hostile, tmp_path), tmp_path / "profile")
    assert "<title>owned</title>" in markup
