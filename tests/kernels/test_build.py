"""Compiling at first use: once, by anyone at any time, into a folder that is nobody else's.

Most tests compile a short source in place of the kernels.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.kernels import build
from paceline.kernels.build import Unavailable

GCC = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang") or ""
pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="XDG_CACHE_HOME, /proc and shell scripts"),
    pytest.mark.skipif(not GCC, reason="no compiler"),
]
ANSWER = "#include <math.h>\n#ifdef _OPENMP\n#include <omp.h>\n#endif\nint answer(void) { return %d; }\n"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, a short source, and nothing remembered of earlier calls: the folder of libraries."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv(build.SWITCH, raising=False)
    monkeypatch.setattr(build, "library", build.library.__wrapped__)
    monkeypatch.setattr(build, "notice", build.notice.__wrapped__)
    monkeypatch.setattr(build, "SOURCE", source(tmp_path / "rows.c", 42))
    return tmp_path / "cache" / "paceline" / "kernels"


def source(path: Path, answer: int) -> Path:
    path.write_text(ANSWER % answer)
    return path


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def compiles(*_: object) -> None:
    raise AssertionError("it was compiled again")


def test_it_is_made_once_and_found_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.library().answer() == 42
    (made,) = cache.iterdir()
    before = made.stat()
    monkeypatch.setattr(build, "_compile", compiles)
    assert build.library().answer() == 42
    assert build.available()
    assert build.notice() is None
    after = made.stat()
    assert (after.st_mtime_ns, after.st_ino) == (before.st_mtime_ns, before.st_ino)
    assert list(cache.iterdir()) == [made]


def test_a_process_asks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert build.library() is build.library()


def test_whatever_it_depends_on_gives_another_file(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Source, flags, the compiler's path and version, and the processor (a home folder may be shared)."""
    compiler = tmp_path / "compiler"
    version = '[ "$1" = --version ] && echo version %d && exit\nexec ' + GCC + ' "$@"'

    def made() -> int:
        build.library()
        return len(list(cache.iterdir()))

    assert made() == 1
    source(build.SOURCE, 43)
    assert made() == 2
    assert build.library().answer() == 43
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g0"))
    assert made() == 3
    monkeypatch.setenv("CC", script(compiler, version % 1))
    assert made() == 4
    script(compiler, version % 2)
    assert made() == 5
    monkeypatch.setattr(build, "_processor", lambda: "another")
    assert made() == 6
    source(build.SOURCE, 42)
    assert made() == 7
    monkeypatch.setattr(build, "_compile", compiles)
    assert made() == 7


PROCESS = """
import importlib.util, sys, types
from pathlib import Path
sys.modules["torch"] = types.SimpleNamespace(__file__=sys.argv[1])
spec = importlib.util.spec_from_file_location("build", sys.argv[2])
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)
build.SOURCE = Path(sys.argv[3])
assert build.library().answer() == 42
"""
"""The module alone, without the seconds of importing torch: it only asks where torch lies."""


def test_several_processes_may_start_at_once(cache: Path, tmp_path: Path) -> None:
    """No compilation begins before all four have: each of them found the folder empty."""
    begun = tmp_path / "begun"
    begun.mkdir()
    waiting = f"""
case "$*" in *--version*) ;; *) mkdir {begun}/$$ ;; esac
i=0; while [ "$*" != --version ] && [ $(ls {begun} | wc -l) -lt 4 ] && [ $i -lt 500 ]; do sleep 0.05; i=$((i+1)); done
exec {GCC} "$@"
"""
    environment = {**os.environ, "CC": script(tmp_path / "waiting", waiting), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROCESS, torch.__file__, build.__file__, str(build.SOURCE)]
    running = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    errors = [process.communicate(timeout=100)[1] for process in running]
    assert [process.returncode for process in running] == [0] * 4, errors
    assert len(list(begun.iterdir())) >= 4
    assert [path.suffix for path in cache.iterdir()] == [".so"]


def test_the_switch_turns_it_off(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.SWITCH, "0")
    assert not build.available()
    assert not cache.exists()
    monkeypatch.setenv(build.SWITCH, "1")
    assert build.available()


# The folder


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022])
def test_nobody_else_may_write_what_was_made(cache: Path, umask: int) -> None:
    """Not even where the user lets others write: code is loaded from here."""
    (cache.parents[1]).mkdir(mode=0o700)
    before = os.umask(umask)
    try:
        assert build.library().answer() == 42
    finally:
        os.umask(before)
    made = [cache.parent, cache, *cache.iterdir()]
    assert len(made) == 3
    assert [oct(path.stat().st_mode) for path in made if path.stat().st_mode & 0o022] == []


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
def test_a_folder_that_others_may_write_is_refused(cache: Path, mode: int) -> None:
    assert build.library().answer() == 42
    cache.chmod(mode)
    with pytest.raises(Unavailable, match=rf"{cache} is not yours alone: chmod 700 it, or set XDG_CACHE_HOME"):
        build.library()
    assert "chmod 700" in (build.notice() or "")
    assert not build.available()
    cache.chmod(0o700)
    assert build.library().answer() == 42


def test_a_folder_of_somebody_else_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.library().answer() == 42
    somebody = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: somebody)
    with pytest.raises(Unavailable, match="is not yours alone"):
        build.library()


def test_a_folder_that_cannot_be_made_is_a_reason_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(Unavailable, match=str(tmp_path / "file")):
        build.library()


def test_a_damaged_library_is_a_reason_not_an_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_compile", lambda command, path: path.write_bytes(b"half a library"))
    with pytest.raises(Unavailable, match="could not be compiled, stored or loaded"):
        build.library()


# The compiler

NO_COMPILER = """
import torch, paceline.kernels as kernels
matrix = kernels.Matrix.pack(torch.ones(3, 32))
assert not kernels.available()
assert torch.equal(kernels.product(torch.ones(2, 32), matrix), torch.full((2, 3), 32.0))
print(kernels.notice())
"""


def test_without_a_compiler_torch_does_it_and_a_line_says_so(cache: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "CC"}
    environment |= {"PATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", NO_COMPILER], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout == (
        "Running on torch's own CPU kernels, which are slower: no C compiler was found (gcc or clang; CC names another "
        "one).\n"
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("echo first line >&2; echo second line >&2; exit 1", "first line"),
        ("exit 3", "it gave no reason"),
        ('case "$*" in *-c*) exec ' + GCC + ' "$@" ;; esac; echo it cannot link >&2; exit 1', "it cannot link"),
    ],
)
def test_a_compiler_that_fails_says_why_in_one_line(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, reason: str
) -> None:
    """CC is what the user wants: no other is tried."""
    compiler = script(tmp_path / "compiler", text)
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(Unavailable) as caught:
        build.library()
    assert str(caught.value) == f"{compiler} could not compile the CPU kernels: {reason}"
    assert build.notice() == f"Running on torch's own CPU kernels, which are slower: {caught.value}."
    assert list(cache.iterdir()) == []


def test_an_error_in_the_source_says_where(cache: Path) -> None:
    build.SOURCE.write_text("int answer(void) { return nothing; }\n")
    with pytest.raises(Unavailable, match=r"could not compile the CPU kernels: .*rows\.c") as caught:
        build.library()
    assert "\n" not in str(caught.value)
    assert list(cache.iterdir()) == []


def test_a_file_that_is_no_program_is_a_reason_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_bytes(b"\x00" * 100)
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(Unavailable):
        build.library()


def test_a_compiler_without_openmp_is_good_enough(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'case "$*" in *-fopenmp*) echo no such library >&2; exit 1;; esac; exec ' + GCC + ' "$@"'
    monkeypatch.setenv("CC", script(tmp_path / "compiler", text))
    assert build.library().answer() == 42
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("step", [1, 2])
def test_an_interrupted_compilation_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    steps: list[list[str]] = []
    run = subprocess.run

    def interrupted(command: list[str], **options: object) -> object:
        result = run(command, **options)  # type: ignore[call-overload]
        if "--version" not in command:
            steps.append(command)
            if len(steps) == step:
                raise KeyboardInterrupt
        return result

    monkeypatch.setattr(subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build.library()
    assert len(steps) == step
    assert list(cache.iterdir()) == []
    assert build.library().answer() == 42


# The real thing

ONE_POOL = """
import torch
from paceline.kernels import build
torch.set_num_threads(2)
torch.ones(1000000).exp()
assert build.library().paceline_lanes() in (4, 8, 16)
print(len({line.split()[-1] for line in open("/proc/self/maps") if "gomp" in line or "iomp" in line}))
"""


def test_torch_and_the_kernels_share_one_pool_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    done = subprocess.run([sys.executable, "-c", ONE_POOL], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("1\n", 0), done.stderr[-500:]
