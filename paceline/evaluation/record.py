"""The folder of a run: what was asked, where and when it ran, and results that are on disk as soon as they are there.

`run.json` holds the settings, which are the same for all of a run, and its sessions: a run that was interrupted goes on
in another one, maybe of another commit. JSONL files grow line by line, and a line is what is kept or lost as a whole.
Knows nothing of what is measured.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

VERSIONS = ("paceline", "torch", "numpy", "transformers", "tokenizers", "openvino-genai")


class RunFolder:
    """`settings` must be JSON. Raises ValueError where the folder holds a run with other settings, naming them."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder, self._file = folder, folder / "run.json"
        folder.mkdir(parents=True, exist_ok=True)
        settings = json.loads(json.dumps(settings))
        if self._file.exists():
            self.run = read_run(folder)
            _refuse_others(folder, self.run["settings"], settings)
        else:
            if any(folder.glob("*.jsonl")):
                raise ValueError(f"{folder} holds results and no run.json: name another folder")
            self.run = {"settings": settings, "sessions": []}
        self._registered = False

    @property
    def session(self) -> int:
        """The number of this session. The first call enters it in run.json: sessions without results leave no trace."""
        if not self._registered:
            self.run["sessions"].append(circumstances())
            write_json(self._file, self.run)
            self._registered = True
        return len(self.run["sessions"]) - 1

    def read(self, name: str) -> list[dict[str, Any]]:
        """The lines of a file, in order. A last line that was not written to its end is cut off the file."""
        file = self.folder / name
        if not file.exists():
            return []
        data = file.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(file, whole)
        return read_lines(file)

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        line = json.dumps({"session": self.session, **record}, separators=(",", ":")) + "\n"
        with (self.folder / name).open("a") as file:
            file.write(line)


def read_run(folder: Path) -> dict[str, Any]:
    """`run.json`. Raises ValueError where it is not one of ours."""
    file = folder / "run.json"
    try:
        found = json.loads(file.read_text())
        if isinstance(found["settings"], dict) and isinstance(found["sessions"], list):
            return found
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise ValueError(f"{file} does not describe a run: name another folder, or delete this one")


def read_lines(file: Path) -> list[dict[str, Any]]:
    """JSONL, a last line without its end left out. Raises ValueError for a line that is no JSON object."""
    found = []
    for number, line in enumerate(file.read_bytes().split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise ValueError(f"{file}, line {number} is no JSON object: delete the line, and it is measured again")
        found.append(record)
    return found


def write_json(file: Path, value: Any) -> None:
    """Whole or not at all."""
    unfinished = file.with_name(file.name + ".unfinished")
    unfinished.write_text(json.dumps(value, indent=1) + "\n")
    unfinished.replace(file)


def circumstances() -> dict[str, Any]:
    """Command, commit, versions, machine and date of this process."""
    program = Path(sys.argv[0])
    called = ["python", "-m", program.parent.name] if program.name == "__main__.py" else [program.name]
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([*called, *sys.argv[1:]]),
        "commit": _commit(),
        "versions": {"python": platform.python_version(), **_versions()},
        "machine": {
            "processor": _processor(),
            "processors": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "system": platform.platform(),
            "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
    }


def _refuse_others(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    other = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if other:
        told = "; ".join(f"{name} was {before.get(name)!r} and is now {now.get(name)!r}" for name in other)
        raise ValueError(f"{folder} holds a run with other settings: {told}; name another folder")


def _versions() -> dict[str, str]:
    found = {}
    for name in VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    """Of the checkout that the package lies in, with a + where files of it were changed; None outside of one."""
    package = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(package), *arguments], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    if git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None  # an installed copy, in whatever repository its environment lies
    commit = git("rev-parse", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", "..")
    return None if commit is None else commit + "+" * bool(changed)


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
