"""The far side of the sandbox, which `sandbox.py` starts in an interpreter of its own for each program.

Three processes. The supervisor (`main`) makes a user and a PID namespace and watches time, memory and output from
outside. Init, process 1 of the PID namespace, builds a file system and starts the program; once it ends, however it
ends, the kernel kills all that is left in there. The program is a fresh interpreter without privileges.
Reads a request as JSON on stdin and writes what happened as JSON on stdout; judges nothing, imports nothing of ours.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import select
import signal
import struct
import sys
import time
from contextlib import suppress

TYPE_CHECKING = False  # as typing's, which takes longer to import than the rest
if TYPE_CHECKING:
    from typing import Any, NoReturn

PROGRAM_ID = 1000
"""The program's user and group inside."""
NOBODY = 65534
"""Who that is outside when root starts the sandbox: limits on processes do not bind root."""
WORK = "/tmp"
PROGRAM = f"{WORK}/program.py"
KEPT_OUTPUT = 4096
POLL_SECONDS = 0.02

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
CLONE_NEW_ANY = 0x7E020000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 0x1000, 0x4000, 0x40000, 2
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 1, 22, 38, 2

# AUDIT_ARCH_*, then system calls by number. The denied ones reach what the namespaces and limits do not cover:
# memory that belongs to no process and no file system, keys, other processes' memory and descriptors, new namespaces,
# and corners of the kernel known for holes. memfd_create memfd_secret shmget msgget semget | add_key request_key keyctl
# | ptrace process_vm_readv process_vm_writev pidfd_getfd | unshare setns | bpf perf_event_open userfaultfd io_uring_*
SYSTEMS = {
    "x86_64": (
        0xC000003E,
        {"clone": 56, "clone3": 435, "socket": 41, "pivot_root": 155, "mount_setattr": 442},
        (319, 447, 29, 68, 64, 248, 249, 250, 101, 310, 311, 438, 272, 308, 321, 298, 323, 425, 426, 427),
    ),
    "aarch64": (
        0xC00000B7,
        {"clone": 220, "clone3": 435, "socket": 198, "pivot_root": 41, "mount_setattr": 442},
        (279, 447, 194, 186, 190, 217, 218, 219, 117, 270, 271, 438, 97, 268, 280, 241, 282, 425, 426, 427),
    ),
}
ARCHITECTURE, SYSTEM_CALLS, DENIED = SYSTEMS[os.uname().machine]

SOCKET_FAMILIES = (1, 2, 10)
"""Unix, IPv4, IPv6: those a network namespace isolates. A virtual machine's vsock, for one, it does not."""

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> None:
    """A function of libc that returns -1 and sets errno when it fails."""
    words = [os.fsencode(a) if isinstance(a, str) else ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    if getattr(libc, name)(*words) < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def die_with_parent() -> None:
    call("prctl", PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def enter_user_namespace() -> None:
    """Become PROGRAM_ID, or for root its own root with PROGRAM_ID as somebody else, in new user and PID namespaces.

    The map has to be written from outside the namespace, so a helper is forked first.
    """
    uid, gid, outside = os.geteuid(), os.getegid(), os.getpid()
    if uid == 0:
        os.setgroups([])
        uids = gids = f"0 0 1\n{PROGRAM_ID} {NOBODY} 1\n"
    else:
        uids, gids = f"{PROGRAM_ID} {uid} 1\n", f"{PROGRAM_ID} {gid} 1\n"
    made, make = os.pipe()
    helper = os.fork()
    if helper == 0:
        try:
            os.close(make)
            if os.read(made, 1):
                for name, text in (("setgroups", "deny"), ("uid_map", uids), ("gid_map", gids)):
                    with open(f"/proc/{outside}/{name}", "w") as file:
                        file.write(text)
            os._exit(0)
        except OSError as error:
            os._exit(error.errno or 1)
    try:
        call("unshare", CLONE_NEWUSER | CLONE_NEWPID)
        os.write(make, b"x")
    finally:
        os.close(make)
        code = os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1])
    if code:
        raise OSError(code, f"uid_map: {os.strerror(code)}")


def bind(source: str, target: str, flags: int) -> None:
    """`source` with everything mounted below it at `target`, under these flags."""
    call("mount", source, target, None, MS_BIND | MS_REC, None)
    attributes = ctypes.create_string_buffer(struct.pack("=QQQQ", flags, 0, 0, 0))
    call("syscall", SYSTEM_CALLS["mount_setattr"], AT_FDCWD, target, AT_RECURSIVE, attributes, 32)


def readable() -> list[str]:
    """What an interpreter needs: itself, its library, the system's shared libraries."""
    wanted = [sys.executable, *sys.path, f"{sys.base_prefix}/lib", "/lib", "/lib64", "/usr/lib", "/usr/lib64"]
    return [path for path in (*wanted, "/etc/ld.so.cache") if os.path.exists(path)]


def build_root(limits: dict[str, int]) -> None:
    """A file system of read-only folders, /dev/null, /dev/urandom and one writable folder of limited size."""
    links = {path: os.path.realpath(path) for path in readable()}
    call("mount", None, "/", None, MS_REC | MS_PRIVATE, None)
    call("mount", "tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    os.mkdir("/tmp/outside")
    call("syscall", SYSTEM_CALLS["pivot_root"], "/tmp", "/tmp/outside")
    os.chdir("/")
    locked = MS_RDONLY | MS_NOSUID | MS_NODEV
    bound: list[str] = []
    for path in sorted(set(links.values())):
        if not any(path.startswith(f"{above}/") for above in bound):
            bind(f"/outside{path}", place(path, folder=os.path.isdir(f"/outside{path}")), locked)
            bound.append(path)
    for path, target in links.items():
        if not os.path.lexists(path):
            os.symlink(target, path)
    for path in ("/dev/null", "/dev/urandom"):
        bind(f"/outside{path}", place(path, folder=False), locked & ~MS_NODEV)
    call("umount2", "/outside", MNT_DETACH)
    os.rmdir("/outside")
    os.mkdir(WORK)
    attributes = ctypes.create_string_buffer(struct.pack("=QQQQ", locked, 0, 0, 0))
    call("syscall", SYSTEM_CALLS["mount_setattr"], AT_FDCWD, "/", 0, attributes, 32)
    options = f"size={limits['disk']},nr_inodes={limits['files']},mode=700,uid={PROGRAM_ID},gid={PROGRAM_ID}"
    call("mount", "tmpfs", WORK, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options)
    os.chdir(WORK)


def place(path: str, *, folder: bool) -> str:
    """An empty folder or file to mount on."""
    os.makedirs(path if folder else os.path.dirname(path), exist_ok=True)
    if not folder:
        open(path, "x").close()
    return path


def limit_resources(limits: dict[str, int]) -> None:
    """Limits of each process; hard ones, so that they cannot be raised again."""
    for name, soft, hard in (
        (resource.RLIMIT_CPU, limits["cpu_seconds"], limits["cpu_seconds"] + 1),  # SIGXCPU may be ignored, SIGKILL not
        (resource.RLIMIT_AS, limits["memory"], limits["memory"]),
        (resource.RLIMIT_NPROC, limits["processes"] + 1, limits["processes"] + 1),  # init counts
        (resource.RLIMIT_FSIZE, limits["file_size"], limits["file_size"]),
        (resource.RLIMIT_NOFILE, limits["open_files"], limits["open_files"]),
        (resource.RLIMIT_CORE, 1, 1),  # 0 would still start a crash reporter that reads cores from a pipe
        (resource.RLIMIT_MSGQUEUE, 0, 0),
    ):
        resource.setrlimit(name, (soft, hard))


def filter_system_calls() -> None:
    """Installs the seccomp filter: BPF over the architecture, the number and the first argument of a system call."""

    def instruction(code: int, value: int, *, skip: int = 0) -> bytes:
        """`skip`: how many instructions to jump over where a test fails."""
        return struct.pack("=HBBI", code, 0, skip, value)

    def load(offset: int) -> bytes:
        return instruction(0x20, offset)

    def answer(action: int, code: int = 0) -> bytes:
        return instruction(0x06, action | code)

    def when(test: int, value: int, block: bytes) -> bytes:
        return instruction(test, value, skip=len(block) // 8) + block

    same, at_least, shares_a_bit = 0x15, 0x35, 0x45
    allow, kill, fail = 0x7FFF0000, 0x80000000, 0x50000
    refuse = answer(fail, errno.EPERM)
    skip_one = instruction(0x05, 1)
    program = b"".join(
        [
            load(4) + when(same, ARCHITECTURE, skip_one) + answer(kill),
            load(0),
            when(at_least, 0x40000000, refuse),  # the x32 calls, or another architecture's number
            *(when(same, number, refuse) for number in DENIED),
            # Its flags are out of reach in memory; libc falls back to clone.
            when(same, SYSTEM_CALLS["clone3"], answer(fail, errno.ENOSYS)),
            when(same, SYSTEM_CALLS["clone"], load(16) + when(shares_a_bit, CLONE_NEW_ANY, refuse) + answer(allow)),
            when(
                same,
                SYSTEM_CALLS["socket"],
                load(16)
                + b"".join(when(same, family, answer(allow)) for family in SOCKET_FAMILIES)
                + answer(fail, errno.EAFNOSUPPORT),
            ),
            answer(allow),
        ]
    )
    text = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("HP", len(program) // 8, ctypes.addressof(text)))
    call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0)


def start_program(request: dict[str, Any], token: int, errors: int, verdict: int) -> NoReturn:
    """Becomes the program; returns only by an OSError."""
    os.dup2(token, 0)
    os.dup2(os.open("/dev/null", os.O_WRONLY), 1)
    os.dup2(errors, 2)
    os.set_inheritable(verdict, True)
    limit_resources(request["limits"])
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    filter_system_calls()
    os.execve(sys.executable, [sys.executable, "-I", "-S", "-B", "-c", request["harness"], str(verdict), PROGRAM], {})


def init(request: dict[str, Any], token: int, errors: int, verdict: int, report: int) -> NoReturn:
    """Process 1: builds the file system, starts the program and waits for it. Never returns."""

    def tell(**what: Any) -> NoReturn:
        os.write(report, json.dumps(what).encode() + b"\n")
        os._exit(0)

    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # without handlers, no signal from inside reaches process 1
        call("unshare", CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS)
        call("sethostname", "sandbox", 7)
        build_root(request["limits"])
        os.setresgid(PROGRAM_ID, PROGRAM_ID, PROGRAM_ID)
        os.setresuid(PROGRAM_ID, PROGRAM_ID, PROGRAM_ID)
        die_with_parent()  # not earlier: a change of user clears it
        if parent_is_gone(report):
            os._exit(1)
        with open(PROGRAM, "wb") as file:
            file.write(request["program"].encode("utf-8", "surrogatepass"))
        program = os.fork()
        if program == 0:
            start_program(request, token, errors, verdict)
        while True:
            pid, status, usage = os.wait4(-1, 0)
            if pid == program:
                tell(status=os.waitstatus_to_exitcode(status), cpu_seconds=usage.ru_utime + usage.ru_stime)
    except OSError as error:
        tell(missing=str(error))
    finally:
        os._exit(1)


def parent_is_gone(pipe: int) -> bool:
    """Whether the read end of `pipe`, which the parent alone holds, is closed."""
    poll = select.poll()
    poll.register(pipe, 0)
    return bool(poll.poll(0))


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children") as file:
            found += map(int, file.read().split())
    return found


def resident(init_pid: int) -> int:
    """Bytes of memory in use by all processes below init; a page that several share counts for each."""
    total, left = 0, [init_pid]
    while left:
        with suppress(OSError):  # it ended meanwhile
            pid = left.pop()
            left += children(pid)
            if pid != init_pid:
                with open(f"/proc/{pid}/statm") as file:
                    total += int(file.read().split()[1]) * resource.getpagesize()
    return total


def supervise(request: dict[str, Any]) -> dict[str, Any]:
    """Runs the program and tells what happened; whoever reads the answer judges it."""
    limits = request["limits"]
    children(os.getpid())  # refuses where the kernel does not list them
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # should the machine run out of memory, the sandbox goes first
    enter_user_namespace()
    (token, give), (report, tell), (errors, complain), (verdict, decide) = (os.pipe() for _ in range(4))
    os.write(give, request["token"].encode())
    os.close(give)
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.close(report)
        init(request, token, complain, decide, tell)
    for descriptor in (token, tell, complain, decide):
        os.close(descriptor)

    stopped, tail, written = "", b"", 0
    looked, open_pipes = started, [report, errors]
    while not stopped:
        ready = select.select(open_pipes, [], [], POLL_SECONDS)[0]
        if report in ready:
            break
        if errors in ready:
            data = os.read(errors, 65536)
            tail, written = (tail + data)[-KEPT_OUTPUT:], written + len(data)
            if not data:
                open_pipes.remove(errors)
        now = time.monotonic()
        if now - started > limits["wall_seconds"]:
            stopped = "wall"
        elif written > limits["output"]:
            stopped = "output"
        elif now - looked > POLL_SECONDS:
            looked = now
            if resident(pid) > limits["memory"]:
                stopped = "memory"
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)  # returns when every process of the namespace is gone
    for descriptor in (errors, verdict):
        os.set_blocking(descriptor, False)
    with suppress(BlockingIOError):
        while data := os.read(errors, 65536):
            tail = (tail + data)[-KEPT_OUTPUT:]
    told = json.loads(os.read(report, 4096).partition(b"\n")[0] or "{}")  # a program that did not start tells first
    return {
        "stopped": stopped,
        "verdict": os.read(verdict, 256).decode("latin-1"),
        "stderr": tail.decode("utf-8", "replace"),
        "seconds": time.monotonic() - started,
        **told,
    }


def main(parent: int) -> None:
    """Answers the request on stdin, unless `parent` has died already."""
    die_with_parent()
    if os.getppid() != parent:
        return
    try:
        answer = supervise(json.load(sys.stdin))
    except OSError as error:
        answer = {"missing": str(error)}
    print(json.dumps(answer))
