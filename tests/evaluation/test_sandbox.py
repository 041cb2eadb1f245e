"""Hostile programs are contained. Where it can be shown safely, the same act succeeds outside: the test could fail.

A program tells what it managed on stderr, and reaches its end where being refused is what it expects.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.evaluation import sandbox
from paceline.evaluation.sandbox import Limits, Outcome, SandboxUnavailable, Verdict, run, run_all

MB = 1 << 20

try:
    run("pass")
except SandboxUnavailable as missing:
    pytest.skip(str(missing), allow_module_level=True)


def inside(program: str, **limits: int | float) -> Outcome:
    return run(textwrap.dedent(program), Limits(**{"wall_seconds": 60, **limits}))  # type: ignore[arg-type]


def outside(program: str) -> subprocess.CompletedProcess[str]:
    """The same program without a sandbox: for harmless ones only."""
    command = [sys.executable, "-I", "-S", "-c", textwrap.dedent(program)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def refused_inside_done_outside(program: str, **limits: int | float) -> str:
    """`program` ends with exit code 0 if its act succeeds, with an OSError if not; returns the error it got inside."""
    control = outside(program)
    assert control.returncode == 0, control.stderr
    outcome = inside(program, **limits)
    assert outcome.verdict is Verdict.FAILED, outcome
    last = outcome.stderr.strip().splitlines()[-1]
    assert "Error" in last, outcome
    return last


def named(name: str) -> str:
    """Lines that make a program's processes recognisable from outside."""
    return f"import ctypes, os, sys, time, signal, threading\nctypes.CDLL(None).prctl(15, b'{name}')\n"


def alive(name: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "comm").read_text().strip() == name:
                found.append(int(entry.name))
        except OSError:
            pass
    return found


@pytest.fixture
def name() -> Iterator[str]:
    name = f"pl-{uuid.uuid4().hex[:10]}"
    yield name
    assert alive(name) == [], "the program outlived its sandbox"


def most_alive_during(act: Callable[[], Outcome], name: str) -> tuple[Outcome, int]:
    most, over = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.is_set():
            most = max(most, len(alive(name)))
            time.sleep(0.01)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        return act(), most
    finally:
        over.set()
        watcher.join()


# --- what passing means


def test_a_program_that_reaches_its_end_passes() -> None:
    outcome = inside("import math, json, re, collections, typing\nassert math.comb(5, 2) == 10")
    assert outcome == Outcome(Verdict.PASSED, "", "", outcome.seconds)


def test_a_failing_program_shows_its_last_lines() -> None:
    outcome = inside("def f():\n    assert 1 == 2, 'sums'\nf()")
    assert (outcome.verdict, outcome.detail) == (Verdict.FAILED, "exit code 1")
    assert outcome.stderr.endswith("AssertionError: sums\n")
    assert "assert 1 == 2, 'sums'" in outcome.stderr, "with the line of the source"


@pytest.mark.parametrize(
    "ending",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "exit()",
        "raise SystemExit",
        "import threading, os; t = threading.Thread(target=os._exit, args=(0,)); t.start(); t.join()",
        "import os, sys; os.execv(sys.executable, [sys.executable, '-I', '-S', '-c', ''])",
    ],
)
def test_ending_early_with_exit_code_0_is_no_pass(ending: str) -> None:
    outcome = inside(f"{ending}\nassert False")
    assert outcome.verdict is Verdict.FAILED
    assert outcome.detail == "exit code 0 before its last statement"


def test_a_child_cannot_pass_for_its_parent() -> None:
    assert not inside("import os\nif os.fork():\n    os._exit(0)").passed
    assert inside("import os\npid = os.fork()\nif not pid:\n    os._exit(3)\nos.waitpid(pid, 0)").passed
    assert inside("import os\nif os.fork():\n    os.wait()").passed, "both reach the end, one is counted"


def test_the_verdict_cannot_be_written_without_the_token() -> None:
    flood = "import contextlib, os\nfor fd in range(3, 64):\n"
    flood += "    with contextlib.suppress(OSError): os.write(fd, b'passed')\n"
    outcome = inside(flood + "os._exit(0)")
    assert (outcome.verdict, outcome.detail) == (Verdict.FAILED, "wrote to the verdict's pipe")
    assert not inside(flood).passed, "nor added to"


def test_the_token_is_not_left_on_stdin() -> None:
    assert inside("import sys\nassert sys.stdin.read() == ''").passed


def test_closing_everything_changes_no_verdict() -> None:
    close = "import os\nos.close(0), os.close(1), os.close(2)\n"
    assert inside(close).passed
    assert not inside(close + "assert False").passed
    assert not inside("import os\nos.closerange(0, 64)").passed, "the verdict's pipe too: nothing can be said"


def test_a_program_may_replace_what_the_harness_uses() -> None:
    break_it = "import os\nos.write = os.getpid = os._exit = os.read = open = compile = exec = None\n"
    assert inside(break_it).passed
    assert not inside(break_it + "assert False").passed


@pytest.mark.parametrize("text", ["x = '\ud800'", "x = 1\0", "def f(:", "\udcff", "x" * (9 * MB)])
def test_what_is_no_program_fails(text: str) -> None:
    assert run(text).verdict is Verdict.FAILED


# --- processor, memory, processes


def test_an_endless_loop() -> None:
    outcome = inside("while True: pass", cpu_seconds=1)
    assert (outcome.verdict, outcome.detail) == (Verdict.TIMED_OUT, "1 s of CPU time")
    assert inside("for i in range(10**5): pass", cpu_seconds=1).passed


def test_an_endless_loop_that_ignores_signals() -> None:
    outcome = inside(
        """
        import signal
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        while True: pass
        """,
        cpu_seconds=1,
    )
    assert (outcome.verdict, outcome.detail) == (Verdict.TIMED_OUT, "1 s of CPU time")


def test_sleeping_forever() -> None:
    outcome = inside("import time\ntime.sleep(1e6)", wall_seconds=0.5)
    assert (outcome.verdict, outcome.detail) == (Verdict.TIMED_OUT, "0.5 s of wall time")
    assert inside("import time\ntime.sleep(0.01)").passed


def test_stopping_itself() -> None:
    outcome = inside("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", wall_seconds=0.5)
    assert outcome.verdict is Verdict.TIMED_OUT


def test_a_fork_bomb(name: str) -> None:
    bomb = named(name) + "while True:\n    try:\n        os.fork()\n    except OSError:\n        time.sleep(0.01)\n"
    outcome, most = most_alive_during(lambda: inside(bomb, processes=8, wall_seconds=1), name)
    assert outcome.verdict is Verdict.TIMED_OUT
    assert 4 <= most <= 8


def test_a_thread_bomb() -> None:
    bomb = """
        import threading, time, sys
        for started in range(40):
            try:
                threading.Thread(target=time.sleep, args=(1,), daemon=True).start()
            except RuntimeError:
                break
        print(started, file=sys.stderr)
        """
    assert outside(bomb).stderr == "39\n"
    outcome = inside(bomb, processes=8)
    assert outcome.passed
    assert 4 <= int(outcome.stderr) <= 7


def test_memory_in_one_block() -> None:
    program = f"x = bytearray({150 * MB})"
    outcome = inside(program, memory=100 * MB)
    assert (outcome.verdict, outcome.detail) == (Verdict.OUT_OF_MEMORY, "100 MB in one process")
    assert inside(program, memory=200 * MB).passed


def test_memory_in_many_small_blocks() -> None:
    program = "x = []\nfor i in range({}):\n    x.append(bytes(1000))"
    assert inside(program.format(150_000), memory=100 * MB).verdict is Verdict.OUT_OF_MEMORY
    assert inside(program.format(1000), memory=100 * MB).passed


def test_memory_in_children(name: str) -> None:
    program = """
        for child in range({}):
            if not os.fork():
                x = bytearray(60 * 2**20)
                time.sleep(60)
        time.sleep({})
        """
    outcome = inside(named(name) + textwrap.dedent(program.format(6, 60)), memory=200 * MB)
    assert (outcome.verdict, outcome.detail) == (Verdict.OUT_OF_MEMORY, "200 MB in all its processes")
    assert inside(named(name) + textwrap.dedent(program.format(1, 0.3)), memory=200 * MB).passed


def test_the_machine_would_end_it_first(name: str) -> None:
    scores: list[str] = []

    def act() -> Outcome:
        thread = threading.Thread(target=look)
        thread.start()
        outcome = inside(named(name) + "time.sleep(0.5)")
        thread.join()
        return outcome

    def look() -> None:
        wait_for(lambda: alive(name))
        scores.append(Path(f"/proc/{alive(name)[0]}/oom_score_adj").read_text())

    assert act().passed
    assert scores == ["1000\n"]


def test_memory_of_no_process() -> None:
    assert "Errno 1]" in refused_inside_done_outside("import os\nos.memfd_create('x')")


def test_system_v_memory_is_not_left_behind() -> None:
    # A call that failed would leave nothing either: IPC_PRIVATE, 4 kB, at once marked for removal.
    make = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\nid = libc.shmget(0, 4096, 0o600)\n"
    make += "if id < 0: raise OSError(ctypes.get_errno(), 'shmget')\nlibc.shmctl(id, 0, None)"
    before = Path("/proc/sysvipc/shm").read_text()
    assert "shmget" in refused_inside_done_outside(make)
    assert Path("/proc/sysvipc/shm").read_text() == before


def test_system_v_objects_of_others_are_unseen() -> None:
    program = "import ctypes\nassert ctypes.CDLL(None).semctl({}, 0, 2, ctypes.create_string_buffer(256)) >= 0"
    import ctypes

    libc = ctypes.CDLL(None)
    semaphore = libc.semget(0, 1, 0o666)
    assert semaphore >= 0
    try:
        assert outside(program.format(semaphore)).returncode == 0
        assert not inside(program.format(semaphore)).passed
    finally:
        libc.semctl(semaphore, 0, 0)


def test_descriptors_run_out() -> None:
    outcome = inside("import os, sys\nx = []\nwhile True: x.append(os.dup(0)); print(len(x), file=sys.stderr)")
    assert outcome.verdict is Verdict.FAILED
    *_, count, error = [line for line in outcome.stderr.splitlines() if line[:1].isdigit() or "Error" in line]
    assert int(count) < 64
    assert "Errno 24" in error


def test_limits_cannot_be_raised_again() -> None:
    program = f"""
        import resource
        hard = {{"CPU": 6, "AS": {512 * MB}, "NPROC": 17, "FSIZE": {8 * MB}, "NOFILE": 64, "CORE": 1, "MSGQUEUE": 0}}
        for name, most in hard.items():
            limit = getattr(resource, f"RLIMIT_{{name}}")
            assert resource.getrlimit(limit)[1] == most, name
            try:
                resource.setrlimit(limit, (most + 1, most + 1))
            except (ValueError, OSError):
                continue
            raise AssertionError(name)
        """
    outcome = inside(program)
    assert outcome.passed, outcome
    assert outside(program).returncode != 0


def test_a_crash() -> None:
    outcome = inside("import ctypes\nctypes.string_at(0)")
    assert (outcome.verdict, outcome.detail) == (Verdict.FAILED, "killed by SIGSEGV")


def test_every_signal_has_a_name() -> None:
    assert inside("import os\nos.kill(os.getpid(), 11)").detail == "killed by SIGSEGV"
    assert inside("import os\nos.kill(os.getpid(), 40)").detail == "killed by signal 40"


def test_endless_recursion() -> None:
    deep = "import sys\nsys.setrecursionlimit(10**9)\nclass A:\n    def __repr__(self): return repr(self)\nrepr(A())"
    assert inside(deep).verdict in (Verdict.FAILED, Verdict.OUT_OF_MEMORY)


def test_endless_arguments() -> None:
    outcome = inside("import os, sys\nos.execv(sys.executable, ['x' * 100000] * 64)")
    assert outcome.verdict is Verdict.FAILED
    assert "Argument list too long" in outcome.stderr


# --- files and output


def test_a_huge_file() -> None:
    program = "with open('x', 'wb') as f:\n    for i in range({}): f.write(bytes(2**20))"
    outcome = inside(program.format(5), file_size=2 * MB)
    assert outcome.verdict is Verdict.FAILED
    assert "Errno 27" in outcome.stderr
    assert inside(program.format(1), file_size=2 * MB).passed


def test_many_files_fill_the_folder() -> None:
    program = "for i in range({}):\n    with open(str(i), 'wb') as f: f.write(bytes(2**20))"
    outcome = inside(program.format(8), disk=4 * MB)
    assert outcome.verdict is Verdict.FAILED
    assert "Errno 28" in outcome.stderr
    assert inside(program.format(2), disk=4 * MB).passed


def test_many_empty_files() -> None:
    program = "for i in range({}): open(str(i), 'x').close()"
    outcome = inside(program.format(100), files=50)
    assert outcome.verdict is Verdict.FAILED
    assert "Errno 28" in outcome.stderr
    assert inside(program.format(20), files=50).passed


def test_endless_output() -> None:
    outcome = inside("import os\nwhile True: os.write(2, b'x' * 65536)", output=MB)
    assert (outcome.verdict, outcome.detail) == (Verdict.FAILED, f"more than {MB} bytes on stderr")
    assert len(outcome.stderr) <= 4096
    quiet = inside("import os\nfor i in range(8): os.write(2, b'x' * 65536)\nos.write(2, b'end')", output=MB)
    assert quiet.passed
    assert quiet.stderr.endswith("xend")
    assert len(quiet.stderr) <= 4096


def test_endless_output_on_stdout_goes_nowhere() -> None:
    outcome = inside("import os\nwhile True: os.write(1, b'x' * 2**20)", cpu_seconds=1)
    assert outcome.verdict is Verdict.TIMED_OUT


def test_writing_outside() -> None:
    program = f"""
        import os, sys
        os.symlink("/", "root")
        library = os.path.dirname(os.__file__)
        for folder in ("/", "..", "root", "/usr/lib", "/dev", "/etc", "/var/tmp", {str(Path.home())!r}, library):
            try:
                open(f"{{folder}}/paceline-was-here", "w")
            except OSError:
                continue
            raise AssertionError(folder)
        for folder in ("/", "/dev", "/usr/lib", os.path.dirname(os.__file__), sys.executable, "/dev/null"):
            assert os.statvfs(folder).f_flag & os.ST_RDONLY, folder
        open("/tmp/x", "w").write("x")
        """
    outcome = inside(program)
    assert outcome.passed, outcome
    assert not Path("/tmp/x").exists() or Path("/tmp/x").read_text() != "x"


def test_writing_outside_control(tmp_path: Path) -> None:
    refused_inside_done_outside(f"open({str(tmp_path / 'x')!r}, 'w').write('x')")
    assert (tmp_path / "x").read_text() == "x", "by the control"


def test_reading_a_secret_at_home() -> None:
    with tempfile.NamedTemporaryFile("w", dir=Path.home(), prefix=".paceline-test-") as secret:
        secret.write("secret")
        secret.flush()
        os.chmod(secret.name, 0o644)
        error = refused_inside_done_outside(f"assert open({secret.name!r}).read() == 'secret'")
    assert "FileNotFoundError" in error or "PermissionError" in error


@pytest.mark.parametrize("path", ["/etc/passwd", "/proc/self/status", "/sys", "/bin/sh", "/home", "/var", __file__])
def test_the_rest_of_the_file_system_is_not_there(path: str) -> None:
    program = f"import os\nos.stat({path!r})"
    assert "FileNotFoundError" in refused_inside_done_outside(program)


def test_nothing_else_is_at_the_root() -> None:
    outcome = inside("import os, sys\nprint(*os.listdir('/'), file=sys.stderr)")
    library = {sys.base_prefix.split("/")[1], os.path.realpath(sys.base_prefix).split("/")[1]}
    assert set(outcome.stderr.split()) <= {"lib", "lib64", "usr", "etc", "dev", "tmp", *library}


def test_an_undeletable_folder_vanishes() -> None:
    mark = f"paceline-{uuid.uuid4().hex}"
    program = (
        f"import os\nos.mkdir('{mark}')\nfor i in range(9): os.mkdir('{mark}/' + str(i), 0)\nos.chmod('{mark}', 0)"
    )
    assert inside(program).passed
    assert not any(mark in entry for entry in os.listdir("/tmp"))


def test_devices_and_set_user_id_do_not_work_in_the_folder() -> None:
    program = "import os\nflags = os.statvfs('/tmp').f_flag\n"
    program += "assert flags & os.ST_NOSUID and flags & os.ST_NODEV and flags & os.ST_NOEXEC"
    assert inside(program).passed


def test_other_binaries_cannot_be_run() -> None:
    assert "FileNotFoundError" in refused_inside_done_outside("import os\nos.execv('/bin/sh', ['sh', '-c', ':'])")
    own = "import os, sys, shutil\nshutil.copy(sys.executable, 'p')\nos.chmod('p', 0o700)\nos.execv('./p', ['p'])"
    outcome = inside(own, file_size=100 * MB, disk=200 * MB)
    assert "PermissionError" in outcome.stderr


def test_inherited_descriptors_are_closed(tmp_path: Path) -> None:
    with open(tmp_path / "secret", "w+") as file:
        file.write("secret")
        file.flush()
        os.set_inheritable(file.fileno(), True)
        program = f"import os\nassert os.pread({file.fileno()}, 6, 0) == b'secret'"
        command = [sys.executable, "-I", "-S", "-c", program]
        assert subprocess.run(command, pass_fds=[file.fileno()]).returncode == 0
        assert not inside(program).passed


# --- network


def test_tcp() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        refused_inside_done_outside(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=5)")


def test_udp() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.settimeout(5)
        address = server.getsockname()
        program = f"import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', {address})"
        refused_inside_done_outside(program)
        assert server.recv(10) == b"x", "of the control"
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.recv(10)


@pytest.mark.parametrize("kind", ["abstract", "path"])
def test_unix_sockets(kind: str, tmp_path: Path) -> None:
    address = f"\0paceline-{uuid.uuid4().hex}" if kind == "abstract" else str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        refused_inside_done_outside(f"import socket\nsocket.socket(socket.AF_UNIX).connect({address!r})")


def test_names_are_not_resolved() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        program = "import socket\nsocket.getaddrinfo('example.org', 80)"
        outcome = inside(program)
    assert "gaierror" in outcome.stderr


@pytest.mark.parametrize(
    ("family", "kind"), [(16, 3), (17, 3), (38, 5), (40, 1)], ids=["netlink", "packet", "crypto", "vsock"]
)
def test_sockets_no_namespace_isolates_are_refused(family: int, kind: int) -> None:
    program = f"import socket\nsocket.socket({family}, {kind})"
    assert "Errno 97" in inside(program).stderr
    if "Errno 97" in outside(program).stderr:
        pytest.skip("this kernel has no such family either")


def test_the_host_has_no_name() -> None:
    assert inside("import os\nassert os.uname().nodename == 'sandbox'").passed


# --- the environment and other processes


def test_reading_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_SECRET", "hunter2")
    program = """
        import glob, os
        found = str(dict(os.environ)) + "".join(os.popen("env").read() if os.path.exists("/bin/sh") else "")
        for path in glob.glob("/proc/*/environ"):
            try:
                found += open(path).read()
            except OSError:
                pass
        raise SystemExit(0 if "hunter2" in found else 5)
        """
    assert outside(program).returncode == 0
    assert inside(program).detail == "exit code 5"


@pytest.fixture
def decoy() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the user that programs run as."""
    user = 65534 if os.geteuid() == 0 else None
    with subprocess.Popen(["/bin/sleep", "600"], user=user) as process:
        yield process
        process.kill()


def test_killing_other_processes(decoy: subprocess.Popen[bytes]) -> None:
    program = f"""
        import os, signal
        for pid in (os.getppid(), 1, 2, 3, {os.getpid()}, {decoy.pid}, -1):
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL):
                if pid != os.getpid():
                    try:
                        os.kill(pid, number)
                    except OSError:
                        pass
        """
    outcome = inside(program)
    assert outcome.passed, "nothing happened to its own process 1 either"
    assert decoy.poll() is None
    assert outside(f"import os\nos.kill({decoy.pid}, 15)").returncode == 0
    assert decoy.wait(10) == -15


def test_other_processes_are_unseen(decoy: subprocess.Popen[bytes]) -> None:
    refused_inside_done_outside(f"import os\nos.kill({decoy.pid}, 0)")


def test_zombies_of_others_are_reaped() -> None:
    """Orphans become init's children: were they not reaped, they would count against the limit for ever."""
    program = """
        import os, time
        for i in range(40):
            if not os.fork():
                for attempt in range(500):
                    try:
                        os.fork()
                        os._exit(0)
                    except OSError:
                        time.sleep(0.01)
                os._exit(1)
            assert os.wait()[1] == 0, i
        """
    assert inside(program, processes=8).passed


def test_zombies_of_its_own_vanish(name: str) -> None:
    program = named(name) + "for i in range(6):\n    if not os.fork(): os._exit(0)\ntime.sleep(0.5)"
    outcome, most = most_alive_during(lambda: inside(program), name)
    assert outcome.passed
    assert most == 7


DAEMON = """
if not os.fork():
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not os.fork():
        time.sleep(600)
    os._exit(0)
time.sleep(0.3)
"""


def test_a_daemon_does_not_outlive_its_program(name: str) -> None:
    control = [sys.executable, "-I", "-S", "-c", named(name) + DAEMON]
    assert subprocess.run(control, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0
    wait_for(lambda: len(alive(name)) == 1)  # its parent's zombie goes first
    (daemon,) = alive(name)
    os.kill(daemon, signal.SIGKILL)
    while alive(name):
        time.sleep(0.01)
    outcome, most = most_alive_during(lambda: inside(named(name) + DAEMON), name)
    assert outcome.passed
    assert most >= 2


def test_tracing() -> None:
    trace = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    trace += "if libc.ptrace({}) < 0: raise OSError(ctypes.get_errno(), 'ptrace')"
    assert "Errno 1]" in refused_inside_done_outside(trace.format("0, 0, 0, 0"))
    assert "Errno 1]" in inside(trace.format("16, 1, 0, 0")).stderr, "process 1"


def test_reading_the_memory_of_a_process() -> None:
    program = """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        there = ctypes.create_string_buffer(b"secret", 8)
        here = ctypes.create_string_buffer(8)
        vector = lambda buffer: (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8)
        pid = os.fork()
        if not pid:
            import time
            time.sleep(60)
        got = libc.process_vm_readv(pid, vector(here), 1, vector(there), 1, 0)
        code = ctypes.get_errno()
        os.kill(pid, 9)
        if got < 0: raise OSError(code, "process_vm_readv")
        """
    assert "Errno 1]" in refused_inside_done_outside(program)


@pytest.mark.parametrize(
    "act",
    ["mount(b'x', b'/tmp', b'tmpfs', 0, None)", "unshare(0x10000000)", "unshare(0x20000)", "umount2(b'/tmp', 2)"],
)
def test_mounting_and_new_namespaces(act: str) -> None:
    program = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    program += f"if libc.{act} < 0: raise OSError(ctypes.get_errno(), 'refused')"
    assert "Errno 1]" in inside(program).stderr
    if act == "unshare(0x10000000)":
        assert outside(program).returncode == 0


def test_new_namespaces_through_clone() -> None:
    number = {"x86_64": 56, "aarch64": 220}[platform.machine()]
    program = f"""
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        pid = libc.syscall({number}, 0x10000000 | 17, 0, 0, 0, 0)
        if pid == 0: os._exit(0)
        if pid < 0: raise OSError(ctypes.get_errno(), 'refused')
        os.waitpid(pid, 0)
        """
    assert "Errno 1]" in refused_inside_done_outside(program)
    modern = program.replace(
        f"{number}, 0x10000000 | 17, 0, 0, 0, 0", "435, (ctypes.c_uint64 * 8)(1 << 28, 0, 0, 0, 17), 64"
    )
    assert "Errno 38" in refused_inside_done_outside(modern)


DENIED = {  # x86-64, ARM64
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438), "unshare": (272, 97),
    "setns": (308, 268), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
}  # fmt: skip


@pytest.mark.parametrize("call", DENIED)
def test_system_calls_that_are_denied(call: str) -> None:
    number = DENIED[call][platform.machine() == "aarch64"]
    program = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    program += f"x = libc.syscall({number}, -1, 0, 0, 0, 0, 0)\nraise SystemExit(ctypes.get_errno() if x < 0 else 0)"
    assert inside(program).detail == "exit code 1"
    assert outside(program).returncode != 1


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the other architecture of the same processor")
def test_calls_of_another_architecture() -> None:
    program = r"""
        import ctypes, mmap
        code = mmap.mmap(-1, 4096, prot=7)
        code.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")  # mov eax, 20 (getpid); int 0x80; ret
        pid = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
        raise SystemExit(0 if pid > 0 else 7)
        """
    assert inside(program).detail == "killed by SIGSYS"
    x32 = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    x32 += "x = libc.syscall(0x40000000 | 39)\nraise SystemExit(ctypes.get_errno() if x < 0 else 0)"
    assert inside(x32).detail == "exit code 1", "refused by us, not unknown to the kernel"
    assert outside(x32).returncode != 1
    if outside(program).returncode:
        pytest.skip("this kernel runs no 32-bit calls")


def test_keys() -> None:
    number = {"x86_64": 250, "aarch64": 219}[platform.machine()]
    program = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    program += f"if libc.syscall({number}, 0, -3, 1) < 0: raise OSError(ctypes.get_errno(), 'refused')"
    assert "Errno 1]" in refused_inside_done_outside(program)


def test_no_privileges_are_left() -> None:
    program = """
        import ctypes, os
        assert os.getuid() == os.geteuid() == os.getgid() == 1000
        libc = ctypes.CDLL(None)
        header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        assert libc.capget(header, data) == 0
        assert not any((data[0], data[1], data[3], data[4])), list(data)
        assert libc.prctl(39, 0, 0, 0, 0) == 1, "no_new_privs"
        """
    outcome = inside(program)
    assert outcome.passed, outcome


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be in groups at will, and can leave them")
def test_roots_groups_are_left_behind() -> None:
    look = "import os\nassert os.getgroups() == []"
    call = f"from paceline.evaluation.sandbox import run\nimport os\nprint(os.getgroups(), run({look!r}).passed)"
    command = [sys.executable, "-c", call]
    cwd = Path(sandbox.__file__).parents[2]
    done = subprocess.run(command, cwd=cwd, extra_groups=[4], capture_output=True, text=True)
    assert done.stdout == "[4] True\n", done.stderr


# --- the sandbox itself


def supervisors() -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1]) if len(command) > 4 else 0
        except OSError:
            continue
        if parent == os.getpid() and b"jail" in command[4]:
            found.append(int(entry.name))
    return found


def wait_for(condition: Callable[[], object], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_when_the_supervisor_is_killed_the_program_dies(name: str) -> None:
    failed: list[Exception] = []

    def act() -> None:
        try:
            inside(named(name) + DAEMON + "time.sleep(600)")
        except SandboxUnavailable as error:
            failed.append(error)

    thread = threading.Thread(target=act)
    thread.start()
    wait_for(lambda: len(alive(name)) >= 2)
    (supervisor,) = supervisors()
    os.kill(supervisor, signal.SIGKILL)
    thread.join(20)
    assert "ended with -9" in str(failed[0])
    wait_for(lambda: not alive(name), 5)


def test_when_the_caller_is_killed_the_program_dies(name: str) -> None:
    program = named(name) + DAEMON + "time.sleep(600)"
    call = f"from paceline.evaluation.sandbox import run\nrun({program!r})"
    with subprocess.Popen([sys.executable, "-c", call], cwd=Path(sandbox.__file__).parents[2]) as caller:
        wait_for(lambda: len(alive(name)) >= 2)
        caller.kill()
    wait_for(lambda: not alive(name), 5)


def test_programs_run_side_by_side() -> None:
    programs = ["import time\ntime.sleep(0.5)", "assert False", "x = 1", "import os\nos._exit(0)"]
    outcomes = dict(run_all(programs, workers=4))
    assert [outcomes[i].passed for i in range(4)] == [True, False, True, False]
    with pytest.raises(ValueError, match="workers is 0"):
        list(run_all(programs, workers=0))


def test_closing_early_starts_no_more() -> None:
    running = run_all(["import time\ntime.sleep(0.2)"] * 50, workers=1)
    next(running)
    started = time.monotonic()
    running.close()
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("limits", [{"memory": MB}, {"processes": 0}, {"cpu_seconds": 1.5}, {"wall_seconds": True}])
def test_limits_out_of_range(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(limits))):
        Limits(**limits)


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxUnavailable, match="needs Linux"):
        run("pass")


def test_an_interpreter_that_does_not_start_is_no_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = Path(sandbox.__file__).with_name("jail.py").read_text()
    broken = tmp_path / "jail.py"
    broken.write_text(text.replace('"-I", "-S", "-B", "-c"', '"--no-such-option"'))
    monkeypatch.setattr(sandbox, "__file__", str(broken))
    with pytest.raises(SandboxUnavailable, match="did not start"):
        run("pass")


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_without_user_namespaces_nothing_runs(tmp_path: Path) -> None:
    program = f"open({str(tmp_path / 'ran')!r}, 'w')"
    call = f"from paceline.evaluation.sandbox import run\nrun({program!r})"
    script = f'echo 0 > /proc/sys/user/max_user_namespaces && exec {sys.executable} -c "$0"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", script, call]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(sandbox.__file__).parents[2])
    assert "SandboxUnavailable" in done.stderr
    assert "user.max_user_namespaces" in done.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_it_works_for_an_ordinary_user(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The same, without root: with the system's interpreter where ours is in root's home."""
    python = next((p for p in (sandbox._interpreter(), "/usr/bin/python3") if readable_by_all(Path(p))), None)
    if python is None:
        pytest.skip("no interpreter that others may read")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        for file in ("sandbox.py", "jail.py"):
            shutil.copy(Path(sandbox.__file__).with_name(file), folder)
        programs = [
            "pass",
            "import os\nos._exit(0)",
            "import os\nfor i in range(20):\n    if not os.fork():\n        import time; time.sleep(9)",
            f"open({folder + '/sandbox.py'!r})",
            f"import os\nos.kill({os.getpid()}, 0)",
            "import ctypes\nassert ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, None) == 0",
            "import ctypes, os\nopen(os.path.dirname(os.__file__) + '/x', 'w')",
            "import ctypes\nd = (ctypes.c_uint32 * 6)()\n"
            "assert ctypes.CDLL(None).capget((ctypes.c_uint32 * 2)(0x20080522, 0), d) or any(d)",
        ]
        call = f"import sys\nsys.path.insert(0, {folder!r})\nimport json, os, sandbox\nassert os.getuid() == 12345\n"
        call += f"print(json.dumps([sandbox.run(p, sandbox.Limits(processes=8)).verdict.value for p in {programs!r}]))"
        done = subprocess.run(
            [python, "-c", call], user=12345, group=12345, extra_groups=[], capture_output=True, text=True, cwd="/"
        )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["passed", *["failed"] * 7]


def readable_by_all(path: Path) -> bool:
    return path.exists() and all(p.stat().st_mode & 0o001 for p in path.resolve().parents)
