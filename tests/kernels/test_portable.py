"""The kernels as other compilers and older processors would have them (portable.c says what is tried)."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.kernels import build

X86 = platform.machine() in ("x86_64", "AMD64")


@pytest.mark.parametrize(("compiler", "target"), [("gcc", "x86-64"), ("gcc", "ivybridge"), ("clang", "native")])
def test_every_build_is_right_and_row_invariant(compiler: str, target: str, tmp_path: Path) -> None:
    found = shutil.which(compiler)
    if found is None or (not X86 and target != "native"):
        pytest.skip(f"no {compiler} here that compiles for {target}")
    flag = f"-march={target}" if X86 else "-mcpu=native"
    program = tmp_path / "portable"
    command = [found, *build.FLAGS, flag, f"-I{build.SOURCE.parent}", str(Path(__file__).with_name("portable.c"))]
    subprocess.run([*command, "-o", str(program), "-lm"], check=True, capture_output=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("rows alike") == 12
