"""What an audit found, as data. Knows no model; `page` shows it, JSON keeps it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, Literal

Verdict = Literal["exact", "not exact", "proves nothing"]
EXIT_CODES: dict[Verdict, int] = {"exact": 0, "not exact": 1, "proves nothing": 3}


@dataclass(frozen=True, kw_only=True)
class Control:
    """A deliberately wrong variant, before one level."""

    fault: str
    what: str
    level: int
    caught: bool | None
    """None: it cannot exist here, or this level cannot see it; `detail` says why."""
    detail: str


@dataclass(frozen=True, kw_only=True)
class Level:
    number: int
    title: str
    covers: str
    """What passing it says, and what it does not."""
    exact: bool
    summary: str
    figures: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Certificate:
    subject: dict[str, Any]
    """What was audited: target, draft, rule, parameters, format, device."""
    levels: list[Level]
    controls: list[Control]
    doubts: list[str]
    """Why it proves nothing, where it does not for another reason than a control."""
    setting: dict[str, Any]
    """What is needed to repeat it: command, versions, machine, seeds, sizes."""
    notes: list[str] = field(default_factory=list)

    @property
    def uncaught(self) -> list[Control]:
        return [control for control in self.controls if control.caught is False]

    @property
    def verdict(self) -> Verdict:
        """A level that fails is believed even where a control was missed: it failed for more than nothing."""
        if not all(level.exact for level in self.levels):
            return "not exact"
        return "proves nothing" if self.uncaught or self.doubts or not self.levels else "exact"

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    @property
    def reasons(self) -> list[str]:
        """Why the verdict is not "exact"."""
        failed = [f"level {level.number}: {level.summary}" for level in self.levels if not level.exact]
        missed = [f"level {c.level} did not catch the fault {c.fault!r}: {c.detail}" for c in self.uncaught]
        return [*failed, *missed, *self.doubts]

    def assert_exact(self) -> None:
        """Raises AssertionError, with the reasons, unless the verdict is "exact"."""
        if self.verdict != "exact":
            raise AssertionError("\n".join([f"{self.verdict}:", *self.reasons]))

    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"verdict": self.verdict, "reasons": self.reasons} | jsonable(asdict(self))

    def save(self, folder: Path) -> tuple[Path, Path]:
        """Write certificate.json and certificate.html; returns both."""
        from paceline.evaluation.audit.page import page

        folder.mkdir(parents=True, exist_ok=True)
        paths = folder / "certificate.json", folder / "certificate.html"
        paths[0].write_text(json.dumps(self.record(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        paths[1].write_text(page(self), encoding="utf-8")
        return paths


def jsonable(value: Any) -> Any:
    """Without what JSON does not have: infinities and NaN become text."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {str(key): jsonable(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


class Journal:
    """Steps that were done, one a line of a file, so that the same audit goes on where it was interrupted.

    `path` None keeps them in memory alone. Raises ValueError where the file belongs to an audit of another `setting`.
    """

    def __init__(self, path: Path | None, setting: dict[str, Any]) -> None:
        self._path, self._done = path, dict[str, Any]()
        setting = json.loads(json.dumps(jsonable(setting)))
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_bytes().splitlines() if path.exists() else []
        for number, line in enumerate(lines):
            try:
                entry = json.loads(line)
                key, value = entry["step"], entry["result"]
            except (ValueError, KeyError, TypeError):
                break  # a line that was being written when the run ended, and nothing stands behind it
            if number == 0 and (key, value) != ("setting", setting):
                raise ValueError(f"{path} holds an audit with another setting: give another --out, or remove it")
            self._done[key] = value
        # Written anew without the torn line, if there is one.
        self._write("".join(_line(key, value) for key, value in self._done.items()), "w")
        if not self._done:
            self._keep("setting", setting)

    def once(self, step: str, compute: Callable[[], Any]) -> Any:
        """What `compute` gives, as JSON has it; what it gave, where this step was done before."""
        if step not in self._done:
            self._keep(step, json.loads(json.dumps(compute(), default=_plain)))
        return self._done[step]

    def _keep(self, step: str, value: Any) -> None:
        self._done[step] = value
        self._write(_line(step, value), "a")

    def _write(self, text: str, mode: str) -> None:
        if self._path is not None:
            with self._path.open(mode, encoding="utf-8") as file:
                file.write(text)


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value.item()  # numpy's numbers


def _line(step: str, value: Any) -> str:
    return json.dumps({"step": step, "result": value}) + "\n"
