"""Start, signal and kill processes. No other module does. Runs in: anywhere.

Three layers keep a host clean: workers die with their parent (PDEATHSIG); the forkserver, the agent and its guard adopt
and kill every descendant (subreaper); and :func:`sweep` finds the remaining processes by their environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.errors import ResourcesError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import psutil

RUN_IDS = "DISTRAIN_RUN_IDS"
"""Environment variable with the ids of the runs that a process belongs to, colon-separated, the innermost last."""
WITHIN_RUN = "DISTRAIN_WITHIN_RUN"
"""Environment variable with the id of the run, in ranks of another launcher while they train."""

STACKS_SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR2) + (7 if hasattr(signal, "SIGRTMIN") else 0)
"""Signal that makes a worker write the stacks of its threads. NCCL, submitit and Lightning use SIGUSR1 and SIGUSR2."""
DEBUG_SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGURG) + (8 if hasattr(signal, "SIGRTMIN") else 0)
"""Signal that makes a worker open its debugger."""

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PF_EXITING = 4  # linux/sched.h; field 9 of /proc/PID/stat
_START_FIELD = 19
"""The start time among the fields of /proc/PID/stat that follow the name."""
_REAP_S = 1.0
"""Seconds to wait for the end of a child that was killed: the waiting thread has a lease to keep."""
_KILL_ROUNDS = 50
_LONGEST_COMMAND = 400
"""Characters of a command line that people are shown."""
_LEAST_SPARE_FILES, _SPARE_FILES = 32, 256
"""Files that the parts of a run need beside those that are counted, and those that the user's code may want."""

# `python -m` and `python -c` put the working directory first on sys.path, where a user's queue.py shadows the standard
# library's. So this starts with -c, removes that entry before any import, and loads exactly this package. Only a host
# without the package in this directory uses one of its own. A package that was brought to this host has packages that
# it needs next to it; those of the interpreter come first.
_BOOTSTRAP = """\
import sys
if sys.path and sys.path[0] == "": del sys.path[0]
PREPARE
from os.path import dirname, isfile
root, program = sys.argv[1:3]
if isfile(dirname(root) + "/BROUGHT"): sys.path.append(dirname(root))
if root and isfile(root + "/__init__.py"):
    from importlib.util import module_from_spec, spec_from_file_location
    spec = spec_from_file_location("distrain", root + "/__init__.py", submodule_search_locations=[root])
    package = sys.modules["distrain"] = module_from_spec(spec)
    spec.loader.exec_module(package)
from importlib import import_module
import_module(MODULE).main(sys.argv[3:])
"""
BROUGHT = ".brought"
"""File next to a distrain that was brought to this host by :mod:`distrain.shipping.program`."""
_PROGRAMS = {
    "agent": "distrain.agent.main",
    "debug": "distrain.cli.debugging",
    "forkserver": "distrain.agent.forkserver",
    "mover": "distrain.transfer.mover",
    "stream-server": "distrain.transfer.stream_server",
    "tracker": "distrain.trackers.main",
    "uploader": "distrain.storage.uploader",
    "validator": "distrain.worker.validator",
    "worker": "distrain.worker.main",
}
"""Modules of the programs, by the name that ``ps`` shows."""


Process = subprocess.Popen[bytes]


def bootstrap_argv(
    program: str,
    *arguments: str,
    python: Sequence[str] = (),
    package: str | None = None,
    prepare: str = "",
    flags: Sequence[str] = (),
) -> list[str]:
    """Return the command line that runs a program of distrain in a fresh interpreter.

    python: the command that runs the interpreter, instead of this one. package: the directory of the distrain to load,
    instead of this one; empty for the one that the interpreter has. prepare: code to run before it is loaded.
    """
    root = str(own_package()) if package is None else package
    bootstrap = _BOOTSTRAP.replace("MODULE", f'"{_PROGRAMS[program]}"').replace("BROUGHT", BROUGHT)
    bootstrap = bootstrap.replace("PREPARE", prepare)
    # On one line: in the C shell, which may be the user's login shell, no quoted text spans lines.
    return [*(python or [sys.executable]), *flags, "-c", f"exec({bootstrap!r})", root, program, *arguments]


def own_package() -> Path:
    """Return the directory of this distrain."""
    return Path(__file__).parents[1]


def extended_run_ids(run_id: str) -> str:
    """Return the value of :data:`RUN_IDS` for the processes of ``run_id``, which may start inside another run."""
    return ":".join(filter(None, (os.environ.get(RUN_IDS), run_id)))


def own_run_id() -> str:
    """Return the innermost of :data:`RUN_IDS` of this process."""
    return os.environ[RUN_IDS].rpartition(":")[2]


def spawn(
    argv: Sequence[str],
    *,
    pass_fds: Iterable[int] = (),
    stderr: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, with pipes on stdin and stdout. Raises OSError without such a program.

    environment: variables in addition to those of this process.
    """
    child = subprocess.Popen(  # noqa: S603
        list(argv),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
        pass_fds=tuple(pass_fds),
    )
    _keep_usual_open_files(child.pid)
    return child


def spawn_quiet(
    argv: Sequence[str], *, environment: Mapping[str, str], directory: str, pass_fds: Iterable[int]
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, with nothing on stdin and this process's stderr as its output."""
    return subprocess.Popen(  # noqa: S603
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=2,
        env=dict(environment),
        cwd=directory,
        start_new_session=True,
        pass_fds=tuple(pass_fds),
    )


def spawn_in_terminal(argv: Sequence[str]) -> Process:
    """Start a process that calls :func:`leave_group` and :func:`take_terminal`. Raises OSError."""
    return subprocess.Popen(list(argv))  # noqa: S603


def leave_group() -> None:
    """Get a process group of its own for this process, which no shell knows. So Ctrl-Z must not stop it."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)


def take_terminal() -> None:
    """Let the process group of this process read from its terminal, and be the one that Ctrl-C interrupts."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        with contextlib.suppress(OSError):  # the terminal is closed
            os.tcsetpgrp(0, os.getpgrp())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def private_stdio() -> tuple[int, int]:
    """Move the wire away from descriptors 0 and 1, where a stray print could corrupt it. Return the new descriptors."""
    read_fd, write_fd = os.dup(0), os.dup(1)
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return read_fd, write_fd


def describe(argv: Sequence[str]) -> str:
    """Return a command line for people: quoted, and cut before the bootstrap code."""
    shown = list(argv)
    if "-c" in shown:
        shown = [*shown[: shown.index("-c") + 1], "..."]
    text = shlex.join(shown)
    return text if len(text) <= _LONGEST_COMMAND else f"{text[:_LONGEST_COMMAND]} ..."


# -- open files ------------------------------------------------------------------------------------------------------

_open_files_lock = threading.Lock()
_open_files_users = 0
_usual_open_files: tuple[int, int] | None = None
"""The limits on open files before they were raised."""


@contextlib.contextmanager
def many_open_files(needed: int, wanted: int) -> Iterator[None]:
    """Let this process open more files within the block. Programs that :func:`spawn` starts get the usual limit.

    needed: the number of further files without which the block cannot work. wanted: a larger one, for comfort.

    Raises ResourcesError if the hard limit is below ``needed``.
    """
    global _open_files_users, _usual_open_files
    already = len(os.listdir("/dev/fd"))
    needed, wanted = already + needed + _LEAST_SPARE_FILES, already + wanted + _SPARE_FILES
    with _open_files_lock:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = math.inf if hard == resource.RLIM_INFINITY else hard
        if needed > most:
            raise ResourcesError(
                f"this process needs {needed:,} open files, but may have {most:,.0f}: raise its hard limit "
                "(ulimit -Hn, nofile in /etc/security/limits.conf, or LimitNOFILE of systemd)"
            )
        if soft != resource.RLIM_INFINITY and soft < wanted:
            _usual_open_files = _usual_open_files or (soft, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (int(min(wanted, most)), hard))
        _open_files_users += 1
    try:
        yield
    finally:
        with _open_files_lock:
            _open_files_users -= 1
            if not _open_files_users and _usual_open_files is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, _usual_open_files)
                _usual_open_files = None


def _keep_usual_open_files(child: int) -> None:
    """Give a child the limits that this process usually has (Linux). User code may depend on them: select() does."""
    if _usual_open_files is not None and hasattr(resource, "prlimit"):
        with contextlib.suppress(OSError):  # it has ended
            resource.prlimit(child, resource.RLIMIT_NOFILE, _usual_open_files)


# -- life and death --------------------------------------------------------------------------------------------------


def _prctl(option: int, value: int | bytes) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Make the kernel SIGKILL this process when ``parent``, which must be its parent, dies (Linux).

    The process exits at once if the parent is dead already. The signal fires when the parent's *thread* that started
    this process ends, so start it from the main thread.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def live_without_parent() -> None:
    """Undo :func:`die_with_parent`."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies (Linux), so that none can escape."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def show_as(name: str) -> None:
    """Set the name under which ``ps`` lists this process, at most 15 characters (Linux)."""
    _prctl(_PR_SET_NAME, name.encode())


def open_pidfd(pid: int) -> int:
    """Return a descriptor that becomes readable when the process ends, or -1 where the kernel has no such descriptors.

    Raises ProcessLookupError if there is no such process.
    """
    if not hasattr(os, "pidfd_open"):
        return -1
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        return -1


def has_pidfds() -> bool:
    """Tell if :func:`open_pidfd` works here."""
    fd = open_pidfd(os.getpid())
    if fd >= 0:
        os.close(fd)
    return fd >= 0


def sees_pids() -> bool:
    """Tell if /proc, and so psutil, uses the process ids of this process's PID namespace.

    In a PID namespace with the /proc of another one (``unshare --pid`` without ``--mount-proc``) it does not, and its
    process ids must not be killed.
    """
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:  # other systems have no /proc, and psutil needs none there
        return sys.platform != "linux"


def began_at(pid: int) -> float | None:
    """Return when a process began, or None if it cannot be seen. It tells it from another one that gets the same id.

    On Linux these are clock ticks since the boot: seconds since 1970 would change whenever the clock is set.
    """
    if not sees_pids():
        return None
    if not os.path.exists("/proc/self/stat"):  # such as macOS
        import psutil

        with contextlib.suppress(psutil.Error):
            return float(psutil.Process(pid).create_time())
        return None
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return float(stat.rpartition(")")[2].split()[_START_FIELD])


def reap(child: Process) -> int:
    """Wait for a child that was killed, and return its exit code.

    Not for long: the kernel may hold one that waits for a dead file system. Python reaps it later.
    """
    try:
        return child.wait(_REAP_S)
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL


def kill_group(leader: int, number: int) -> None:
    """Signal every process of a process group that is led by a child of this process.

    Once the child is reaped this does nothing, because another process may have its id.
    """
    with contextlib.suppress(ChildProcessError, ProcessLookupError, PermissionError):
        os.waitid(os.P_PID, leader, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        os.killpg(leader, number)


def kill(pid: int, number: int) -> None:
    """Signal an unreaped child of this process."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def ended_child() -> int | None:
    """Return the pid of a child that has ended and waits to be reaped; None if there is none."""
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return ended.si_pid if ended is not None else None


def has_ended(child: int) -> bool:
    """Tell if a child is dead, or dying and beyond any signal. Does not reap it."""
    try:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return True
        if not sees_pids():
            return False
        stat = Path(f"/proc/{child}/stat").read_text()
    except ChildProcessError:  # reaped already
        return True
    except OSError:  # no /proc
        return False
    return bool(int(stat.rpartition(")")[2].split()[6]) & _PF_EXITING)


def has_children() -> bool:
    """Tell if this process has any child, dead ones included."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _children() -> set[int] | None:
    """Return the pids of the children of this process, dead ones included, or None where the kernel has no such list.

    psutil would look at every process of the host.
    """
    try:
        lists = [(task / "children").read_text() for task in Path("/proc/self/task").iterdir()]
    except OSError:
        return None
    return {int(pid) for pids in lists for pid in pids.split()}


def descendants() -> list[psutil.Process]:
    """Return all living descendants of this process; none where they cannot be seen (:func:`sees_pids`)."""
    import psutil

    if not sees_pids():
        return []
    with contextlib.suppress(psutil.Error):
        return [p for p in psutil.Process().children(recursive=True) if _is_alive(p)]
    return []


def kill_descendants(spared: Iterable[int] = ()) -> list[int]:
    """SIGKILL and reap all descendants until none is left. Return the pids of those that do not die.

    Processes in an uninterruptible sleep do not die.

    spared: pids that are left alone, together with their descendants.
    """
    kept = set(spared)
    children = _children()
    # This process adopts orphans, so every other descendant has an ancestor among its children.
    if not has_children() or (children is not None and children <= kept):
        return []
    import psutil

    for round_number in range(_KILL_ROUNDS):
        victims = [p for p in descendants() if p.pid not in kept and not _is_below(p, kept)]
        if not victims:
            return []
        for process in reversed(
            victims
        ):  # descendants first: a forkserver or agent would continue killing in our place
            with contextlib.suppress(psutil.Error):
                process.kill()
        _reap_orphans({p.pid for p in victims})
        time.sleep(min(0.001 * 2**round_number, 0.1))
    return [p.pid for p in descendants() if p.pid not in kept and not _is_below(p, kept)]


def sweep(run_id: str) -> list[int]:
    """SIGKILL every process of this user whose environment names the run, with its descendants. Return their pids.

    This process and its ancestors are spared. Processes are never found by name, and a recycled pid is never killed, as
    psutil compares start times.
    """
    import psutil

    if not sees_pids():
        return []
    kept = {os.getpid(), *(p.pid for p in psutil.Process().parents())}
    others = [process for process in psutil.process_iter() if process.pid not in kept]
    found = {process.pid: process for process in others if _belongs_to(process, run_id)}
    while below := [
        p for p in others if p.pid not in found and _parent_of(p) in found
    ]:  # descendants may have changed their environment
        found |= {process.pid: process for process in below}
    for process in found.values():
        with contextlib.suppress(psutil.Error):
            process.kill()
    return list(found)


def _parent_of(process: psutil.Process) -> int:
    import psutil

    try:
        parent: int = process.ppid()
    except psutil.Error:
        return -1
    return parent


def _belongs_to(process: psutil.Process, run_id: str) -> bool:
    import psutil

    try:
        return _is_alive(process) and run_id in process.environ().get(RUN_IDS, "").split(":")
    except (psutil.Error, OSError):
        return False


def _is_alive(process: psutil.Process) -> bool:
    import psutil

    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False


def _is_below(process: psutil.Process, ancestors: set[int]) -> bool:
    import psutil

    if not ancestors:
        return False
    with contextlib.suppress(psutil.Error):
        return any(parent.pid in ancestors for parent in process.parents())
    return False


def _reap_orphans(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


# -- threads ---------------------------------------------------------------------------------------------------------


def count_native_threads() -> int:
    """Count the threads of this process that a fork would lose.

    The main thread does not count, and neither does the idle pool of OpenBLAS, which re-creates itself after a fork.
    """
    try:
        threads = len(os.listdir("/proc/self/task"))
    except OSError:
        threads = threading.active_count()
    return threads - 1 - _openblas_threads()


def native_thread_names() -> list[str]:
    """Return the kernel's names of all threads of this process except the main one."""
    try:
        others = [task for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())]
        return sorted((task / "comm").read_text().strip() for task in others)
    except OSError:
        return []


def _openblas_threads() -> int:
    total = 0
    for path in _mapped_libraries("openblas"):
        library = ctypes.CDLL(path)
        for prefix in ("", "scipy_"):
            for suffix in ("", "64_", "_64"):
                count = getattr(library, f"{prefix}openblas_get_num_threads{suffix}", None)
                if count is not None:
                    total += count() - 1
                    break
    return total


def _mapped_libraries(part: str) -> set[str]:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return set()
    return {path for line in lines if part in (path := line.split(maxsplit=5)[-1]).rpartition("/")[2] and ".so" in path}


# -- commands ----------------------------------------------------------------------------------------------------------

# Several processes may belong to the command, as a build of a package does. They are in the process group that this
# one leads, and which it kills when it gets SIGTERM: from the kernel, as soon as its parent is dead.
_TIED = """\
import ctypes, os, signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
if sys.platform == "linux": ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
if os.getppid() != int(sys.argv[1]): sys.exit(1)
code = subprocess.call(sys.argv[3:], stdin=subprocess.DEVNULL, cwd=sys.argv[2])
sys.exit(code if code >= 0 else 128 - code)
"""


def run_tied(
    argv: Sequence[str], on_line: Callable[[str], None], *, directory: str, tick_s: float, pass_fds: Iterable[int] = ()
) -> int:
    """Run a command that dies with this process (Linux), and return its exit code: 128 + the number of a signal.

    on_line: called with each line of its output, and with an empty one after ``tick_s`` seconds without any. If it
    raises, the command is killed. pass_fds: descriptors, such as a lock, that stay open until the command is dead.
    """
    tied = [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), directory, *argv]
    child = spawn(tied, stderr=subprocess.STDOUT, pass_fds=pass_fds)
    assert child.stdin is not None
    assert child.stdout is not None
    poll, rest = select.poll(), b""
    poll.register(child.stdout, select.POLLIN)
    with child.stdin, child.stdout:
        try:
            while not (is_silent := not poll.poll(tick_s * 1000)) or not has_ended(child.pid):
                data = b"\n" if is_silent else os.read(child.stdout.fileno(), 65536)
                if not data:
                    break
                *lines, rest = (rest + data).replace(b"\r", b"\n").split(b"\n")
                for line in lines:
                    on_line(line.decode(errors="replace"))
        finally:
            kill_group(child.pid, signal.SIGKILL)  # it has its exit code if it has ended; else its group ends with it
            try:
                child.returncode = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
            except ChildProcessError:  # the end of this process has begun: another thread has killed and reaped it
                child.returncode = -signal.SIGKILL
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


# -- other programs --------------------------------------------------------------------------------------------------


def run_with_input(argv: Sequence[str], text: str) -> subprocess.CompletedProcess[str]:
    """Run a program that reads ``text`` from stdin, and return its exit code and output. Raises OSError."""
    return subprocess.run(list(argv), input=text, capture_output=True, text=True, check=False)  # noqa: S603


class SilentProgram:
    """A program that runs without input and output, in a session of its own. Raises OSError if there is none."""

    def __init__(self, argv: Sequence[str], *, directory: str) -> None:
        nothing = subprocess.DEVNULL
        self._child = subprocess.Popen(  # noqa: S603
            list(argv), stdin=nothing, stdout=nothing, stderr=nothing, cwd=directory, start_new_session=True
        )

    def exit_code(self) -> int | None:
        """Return its exit code, None if it still runs."""
        return self._child.poll()

    def end(self, patience_s: float) -> None:
        """Wait for the end of the program, and kill it after some seconds."""
        try:
            self._child.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._child.kill()
            reap(self._child)


def output_of(argv: Sequence[str], directory: str, timeout_s: float = 30) -> bytes | None:
    """Return what a program writes to stdout. Return None if there is none, or it fails or takes longer."""
    try:
        done = subprocess.run(  # noqa: S603
            list(argv),
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
