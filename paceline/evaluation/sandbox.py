"""Runs a program nobody has read, and says what became of it.

What a language model wrote may loop, fork, fill the disk or read your keys. `run` gives it an interpreter of its own
with no network, no other processes, no environment, the standard library to read and a small folder that vanishes;
`jail.py` does it, on Linux. Anywhere else, and where the system forbids it, `SandboxUnavailable` is raised: no program
is ever run without. docs/sandbox.md tells what this contains and what it does not.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import signal
import subprocess
import sys
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any

# The folder is in the path only while jail is imported (rather than run: its bytecode is cached).
_START = "import sys; sys.path.append({!r}); import jail; del sys.path[-1]; jail.main({})"
_MB = 1 << 20


# Runs in the program's interpreter. The token on stdin, a secret of each run, comes back through the verdict's pipe
# when the last statement is reached, from the process that started and no other, and nothing runs after it.
_HARNESS = """
import builtins, os, sys, types

def main(verdict, path):
    write, getpid, leave = os.write, os.getpid, os._exit  # the program may replace them
    token, pid = os.read(0, 64), getpid()
    write(verdict, token + b"started ")
    builtins.exit = builtins.quit = sys.exit
    sys.argv = [path]
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__file__ = path
    end = b"memory"
    try:
        with open(path, "rb") as file:
            source = file.read()
        exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
        end = b"passed"
    except MemoryError:
        pass
    if getpid() == pid:
        write(verdict, token + end)
    leave(end != b"passed")

main(int(sys.argv[1]), sys.argv[2])
"""


class SandboxUnavailable(RuntimeError):
    """This system lacks what the sandbox needs. The message says what, and what to do."""


class Verdict(str, Enum):
    PASSED = "passed"
    """The last statement was reached, in the process the program began in."""
    FAILED = "failed"
    TIMED_OUT = "timed out"
    OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a program may use. Raises ValueError for a limit below what an interpreter needs to start."""

    cpu_seconds: int = 5
    """Of each process."""
    wall_seconds: float = 15
    """Of all together; longer than the CPU's, so that a busy machine fails no program that is only waiting its turn."""
    memory: int = 512 * _MB
    """Bytes of address space of each process, and of resident memory of all together. The former is exact, the latter
    is looked at every 20 ms: at worst a program holds `processes` times this much for that long."""
    processes: int = 16
    """Processes and threads alive at once."""
    disk: int = 16 * _MB
    """Bytes of all files together; they are kept in memory."""
    files: int = 256
    file_size: int = 8 * _MB
    open_files: int = 64
    """Of each process."""
    output: int = _MB
    """Bytes on stderr, of which the last lines are kept. Stdout is thrown away."""

    def __post_init__(self) -> None:
        least = {
            "wall_seconds": 0.1,
            "memory": 64 * _MB,
            "disk": 65536,
            "files": 4,
            "file_size": 4096,
            "open_files": 8,
            "output": 4096,
        }
        for field in fields(self):
            value, low = getattr(self, field.name), least.get(field.name, 1)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not (whole or (field.name == "wall_seconds" and isinstance(value, float))) or not low <= value < 1 << 62:
                raise ValueError(f"{field.name} is {value!r}, it must be a whole number from {low}: raise the limit")


@dataclass(frozen=True)
class Outcome:
    verdict: Verdict
    detail: str
    """Why, in words: "exit code 1", "killed by SIGSEGV", "15 s of wall time"; empty where the program passed."""
    stderr: str
    """The last lines, as the program wrote them: hostile text."""
    seconds: float
    """Of wall time."""

    @property
    def passed(self) -> bool:
        return self.verdict is Verdict.PASSED


def run(program: str, limits: Limits | None = None) -> Outcome:
    """Runs one Python program; only what comes with the interpreter can be imported.

    A program that ends early, even with exit code 0, has not passed. Raises SandboxUnavailable.
    """
    limits = limits or Limits()
    size = len(program.encode("utf-8", "surrogatepass"))
    if size > limits.disk // 2:
        return Outcome(Verdict.FAILED, f"{size} bytes of program, of at most {limits.disk // 2}", "", 0.0)
    token = secrets.token_hex(16)
    told = _supervised(
        {"program": program, "harness": _HARNESS, "token": token, "limits": asdict(limits)}, limits.wall_seconds + 60
    )
    if "missing" in told:
        raise SandboxUnavailable(_cure(told["missing"]))
    if not told["verdict"].startswith(f"{token}started "):
        raise SandboxUnavailable(
            f"the interpreter {_interpreter()} did not start in the sandbox: {told['stderr'].strip() or told}; "
            "use one whose libraries are in its own prefix, /lib or /usr/lib, or raise the limits"
        )
    return Outcome(*_judge(told, token, limits), stderr=told["stderr"], seconds=told["seconds"])


def run_all(
    programs: Iterable[str], limits: Limits | None = None, *, workers: int | None = None
) -> Generator[tuple[int, Outcome], None, None]:
    """(index, outcome) of each program as it ends; `workers` run at once, as many as there are CPUs by default.

    Closing the iterator waits for those that are running and starts no more.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers is {workers}, it must be at least 1")
    pool = ThreadPoolExecutor(workers or os.cpu_count())
    try:
        index = {pool.submit(run, program, limits): i for i, program in enumerate(programs)}
        for future in as_completed(index):
            yield index[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _judge(told: dict[str, Any], token: str, limits: Limits) -> tuple[Verdict, str]:
    said, stopped, status = told["verdict"].removeprefix(f"{token}started "), told["stopped"], told.get("status")
    if stopped == "wall":
        return Verdict.TIMED_OUT, f"{limits.wall_seconds:g} s of wall time"
    if stopped == "memory":
        return Verdict.OUT_OF_MEMORY, f"{limits.memory >> 20} MB in all its processes"
    if stopped == "output":
        return Verdict.FAILED, f"more than {limits.output} bytes on stderr"
    if said == f"{token}passed" and status == 0:
        return Verdict.PASSED, ""
    if said == f"{token}memory":
        return Verdict.OUT_OF_MEMORY, f"{limits.memory >> 20} MB in one process"
    if status is None:
        return Verdict.FAILED, "the sandbox was killed"
    # What the kernel counts for the limit and what it reports differ a little.
    if status == -signal.SIGXCPU or (status == -signal.SIGKILL and told["cpu_seconds"] > limits.cpu_seconds / 2):
        return Verdict.TIMED_OUT, f"{limits.cpu_seconds} s of CPU time"
    if said:
        return Verdict.FAILED, "wrote to the verdict's pipe"
    if status == 0:
        return Verdict.FAILED, "exit code 0 before its last statement"
    if status > 0:
        return Verdict.FAILED, f"exit code {status}"
    return Verdict.FAILED, f"killed by {next((s.name for s in signal.Signals if s == -status), f'signal {-status}')}"


def _supervised(request: dict[str, Any], timeout: float) -> dict[str, Any]:
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise SandboxUnavailable(
            f"generated programs run in a sandbox that needs Linux on x86-64 or ARM64, and this is {platform.system()} "
            f"on {platform.machine()}: use a Linux virtual machine or container"
        )
    # A new program rather than a fork: this process may have threads that hold locks.
    start = _START.format(os.path.dirname(os.path.abspath(__file__)), os.getpid())
    command = [_interpreter(), "-I", "-S", "-c", start]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(request).encode(),
            capture_output=True,
            env={},
            cwd="/",
            start_new_session=True,
            timeout=timeout,
        )
        return dict(json.loads(done.stdout))
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxUnavailable(f"the sandbox's supervisor failed: {error}") from error
    except ValueError as error:
        raise SandboxUnavailable(
            f"the sandbox's supervisor ended with {done.returncode}: {done.stderr.decode(errors='replace').strip()}"
        ) from error


def _interpreter() -> str:
    """The interpreter that virtual environments are made of: their own cannot be moved into a bare file system."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def _cure(missing: str) -> str:
    return (
        f"this system does not let the sandbox be built ({missing}), and generated programs are not run without: "
        "it needs Linux 5.14 with user namespaces for this user. Try `sysctl user.max_user_namespaces` (above 0), "
        "kernel.unprivileged_userns_clone=1 (older Debian) or kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu); "
        "in Docker or Podman, --security-opt seccomp=unconfined --security-opt apparmor=unconfined"
    )
