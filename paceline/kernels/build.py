"""Compiles `rows.c` for this machine, once, and loads it.

The library lies in the user's cache folder under a hash of everything it depends on: source, compiler, flags and
processor. It is written under another name and moved there, so any number of processes may start at once. Knows nothing
of what is in it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import platformdirs
import torch

SOURCE = Path(__file__).with_name("rows.c")
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
SWITCH = "PACELINE_KERNELS"
"""Set to 0, this variable leaves everything to torch."""


class Unavailable(Exception):
    """Why there are no kernels here, in a sentence for people."""


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernels. Raises `Unavailable` where they cannot be had (each time it is asked)."""
    if os.environ.get(SWITCH) == "0":
        raise Unavailable(f"{SWITCH}=0 switches the CPU kernels off")
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", ""), "gcc", "cc", "clang"))), None)
    if compiler is None:
        raise Unavailable("no C compiler was found (gcc or clang; CC names another one)")
    native = "-mcpu=native" if platform.machine().lower() in ("aarch64", "arm64") else "-march=native"
    command = [compiler, *FLAGS, native]
    try:
        path = _folder() / f"rows-{_key(command)}.so"
        if not path.is_file():
            # Seen without any setting up: whoever waits the first time should know for what.
            logging.getLogger(__name__).warning("compiling the CPU kernels for this machine: once, some seconds")
            _compile(command, path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"the kernels could not be compiled, stored or loaded ({error})") from error


@functools.cache
def notice() -> str | None:
    """One line for people where the kernels are missing; None where they are there."""
    try:
        library()
    except Unavailable as reason:
        return f"Running on torch's own CPU kernels, which are slower: {reason}."
    return None


def available() -> bool:
    return notice() is None


def _folder() -> Path:
    """Ours alone: code is loaded from here."""
    folder = platformdirs.user_cache_path("paceline") / "kernels"
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    folder.mkdir(exist_ok=True, mode=0o700)
    status = folder.stat()
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
        raise Unavailable(f"{folder} is not yours alone: chmod 700 it, or set XDG_CACHE_HOME")
    return folder


def _key(command: list[str]) -> str:
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=False).stdout
    parts = [*command, version, SOURCE.read_text(), str(_openmp()), _processor(), sys.platform]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _processor() -> str:
    """What `native` means here: a folder may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(("model name", "flags", "Features"))))


def _openmp() -> Path | None:
    """The OpenMP library that torch brought: with another one, two pools of threads would spin against each other."""
    libraries = Path(torch.__file__).parent / "lib"
    return next(iter(sorted(libraries.glob("libgomp*.so*"))), None)


def _compile(command: list[str], path: Path) -> None:
    bundled = _openmp()
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        made, objects = Path(work) / "rows.so", Path(work) / "rows.o"
        with_openmp = [[*command, "-fopenmp", "-c", str(SOURCE), "-o", str(objects)]]
        if bundled is None:
            with_openmp.append([*command, "-fopenmp", "-shared", str(objects), "-o", str(made), "-lm"])
        else:
            with_openmp.append([*command, "-shared", str(objects), str(bundled), "-o", str(made), "-lm"])
        without = [[*command, "-shared", str(SOURCE), "-o", str(made), "-lm"]]
        for steps in (with_openmp, without):
            results = []
            for step in steps:
                results.append(subprocess.run(step, capture_output=True, text=True, check=False))
                if results[-1].returncode:
                    break
            if not results[-1].returncode:
                made.chmod(0o700)
                os.replace(made, path)
                return
        last = (results[-1].stderr.strip() or "it gave no reason").splitlines()[0]
        raise Unavailable(f"{command[0]} could not compile the CPU kernels: {last}")
