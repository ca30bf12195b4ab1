"""Processes: their death, their signals, their leftovers. Nobody else kills. Runs in: anywhere.

What keeps a host clean, in layers: workers die with their parent (PDEATHSIG), the forkserver, the agent and its guard
adopt and kill every descendant (subreaper), and :func:`sweep` finds by environment what even those have lost.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import psutil

RUN_IDS = "DISTRAIN_RUN_IDS"
"""Environment variable: ids of the runs that a process belongs to, colon-separated, the innermost last."""

STACKS_SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR2) + (7 if hasattr(signal, "SIGRTMIN") else 0)
"""Makes a worker write the stacks of all its threads. Real-time: NCCL, submitit and Lightning use SIGUSR1 and 2."""

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PF_EXITING = 4  # linux/sched.h; field 9 of /proc/PID/stat
_KILL_ROUNDS = 50

# `python -m` and `python -c` put the working directory first on sys.path, where a user's queue.py shadows the standard
# library's. So start with -c, take that entry away before anything is imported, and load exactly our own package. Only
# a host that does not have it there has to have one of its own.
_BOOTSTRAP = """\
import sys
if sys.path and sys.path[0] == "": del sys.path[0]
from os.path import isfile
root, program = sys.argv[1:3]
if root and isfile(root + "/__init__.py"):
    from importlib.util import module_from_spec, spec_from_file_location
    spec = spec_from_file_location("distrain", root + "/__init__.py", submodule_search_locations=[root])
    package = sys.modules["distrain"] = module_from_spec(spec)
    spec.loader.exec_module(package)
from importlib import import_module
import_module(MODULE).main(sys.argv[3:])
"""
_PROGRAMS = {
    "agent": "distrain.agent.main",
    "forkserver": "distrain.agent.forkserver",
    "uploader": "distrain.storage.uploader",
    "validator": "distrain.worker.validator",
    "worker": "distrain.worker.main",
}
"""The module of each program, by the name that ``ps`` shows."""


Process = subprocess.Popen[bytes]


def bootstrap_argv(program: str, *arguments: str, python: str = "", flags: Sequence[str] = ()) -> list[str]:
    """Return the command line that runs a program of distrain in a fresh interpreter.

    python: another interpreter than ours, which has a distrain of its own.
    """
    root = "" if python else str(Path(__file__).parents[1])
    bootstrap = _BOOTSTRAP.replace("MODULE", repr(_PROGRAMS[program]))
    # Without a newline: in the C shell, which may be somebody's login shell, no quote spans lines.
    return [python or sys.executable, *flags, "-c", f"exec({bootstrap!r})", root, program, *arguments]


def extended_run_ids(run_id: str) -> str:
    """Value of :data:`RUN_IDS` for the processes of ``run_id``, which may be started from within another run."""
    return ":".join(filter(None, (os.environ.get(RUN_IDS), run_id)))


def own_run_id() -> str:
    """The innermost of :data:`RUN_IDS` of this process."""
    return os.environ[RUN_IDS].rpartition(":")[2]


def spawn(
    argv: Sequence[str],
    *,
    pass_fds: Iterable[int] = (),
    stderr: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, with pipes on stdin and stdout; ``environment`` is added to ours. Raises
    OSError if there is no such program.
    """
    return subprocess.Popen(  # noqa: S603
        list(argv),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
        pass_fds=tuple(pass_fds),
    )


def spawn_quiet(
    argv: Sequence[str], *, environment: Mapping[str, str], directory: str, pass_fds: Iterable[int]
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, with nothing on stdin and our stderr as its output."""
    return subprocess.Popen(  # noqa: S603
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=2,
        env=dict(environment),
        cwd=directory,
        start_new_session=True,
        pass_fds=tuple(pass_fds),
    )


def private_stdio() -> tuple[int, int]:
    """The wire, moved away from descriptors 0 and 1, so that no stray print can corrupt it."""
    read_fd, write_fd = os.dup(0), os.dup(1)
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return read_fd, write_fd


def describe(argv: Sequence[str]) -> str:
    """A command line for people: quoted, and cut before our bootstrap."""
    shown = list(argv)
    if "-c" in shown:
        shown = [*shown[: shown.index("-c") + 1], "..."]
    return shlex.join(shown)[:200]


# -- life and death --------------------------------------------------------------------------------------------------


def _prctl(option: int, value: int | bytes) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Have the kernel SIGKILL this process when ``parent``, which must be its parent, dies (Linux). Exits at once if
    the parent is gone already. The signal fires when the parent's *thread* that started us ends: start from the main
    thread.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def live_without_parent() -> None:
    """Take :func:`die_with_parent` back."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies (Linux), so that none can slip away."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def show_as(name: str) -> None:
    """Be listed under this name, at most 15 characters (Linux)."""
    _prctl(_PR_SET_NAME, name.encode())


def open_pidfd(pid: int) -> int:
    """A descriptor that becomes readable when the process ends; -1 where there is no such thing. Raises
    ProcessLookupError if it is gone.
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
    """Tell if /proc, and so psutil, has the same numbers for processes as we have. In a PID namespace with the /proc of
    another one (``unshare --pid`` without ``--mount-proc``) it has not, and its numbers must not be killed.
    """
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:  # psutil needs no /proc elsewhere
        return sys.platform != "linux"


def began_at(pid: int) -> float | None:
    """When a process began, in seconds since 1970, which tells it from another one with the same number; None if there
    is no such process, or if it cannot be seen.
    """
    import psutil

    if not sees_pids():
        return None
    try:
        moment: float = psutil.Process(pid).create_time()
    except psutil.Error:
        return None
    return moment


def kill_group(leader: int, number: int) -> None:
    """Signal every process of a process group led by our own child. Once that is reaped this does nothing, as its pid
    may be somebody else's by then.
    """
    with contextlib.suppress(ChildProcessError, ProcessLookupError, PermissionError):
        os.waitid(os.P_PID, leader, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        os.killpg(leader, number)


def kill(pid: int, number: int) -> None:
    """Signal one of our own unreaped children."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def ended_child() -> int | None:
    """The pid of a child that has ended and waits to be reaped; None if there is none."""
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return ended.si_pid if ended is not None else None


def has_ended(child: int) -> bool:
    """Whether a child of ours is dead, or dying and past any signal, without reaping it."""
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
    """Whether this process has any child, dead ones included."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def descendants() -> list[psutil.Process]:
    """All living processes below this one; none where they cannot be seen (:func:`sees_pids`)."""
    import psutil

    if not sees_pids():
        return []
    with contextlib.suppress(psutil.Error):
        return [p for p in psutil.Process().children(recursive=True) if _is_alive(p)]
    return []


def kill_descendants(spared: Iterable[int] = ()) -> list[int]:
    """SIGKILL everything below this process until nothing is left, and reap it. Returns the pids that would not die
    (in an uninterruptible sleep). ``spared`` pids and what is below them are left alone.
    """
    if not has_children():  # we adopt orphans, so without a child there is nothing below us either
        return []
    import psutil

    kept = set(spared)
    for round_number in range(_KILL_ROUNDS):
        victims = [p for p in descendants() if p.pid not in kept and not _is_below(p, kept)]
        if not victims:
            return []
        for process in reversed(victims):  # a forkserver or agent after what is below it: it would go on in our place
            with contextlib.suppress(psutil.Error):
                process.kill()
        _reap_orphans({p.pid for p in victims})
        time.sleep(min(0.001 * 2**round_number, 0.1))
    return [p.pid for p in descendants() if p.pid not in kept and not _is_below(p, kept)]


def sweep(run_id: str) -> list[int]:
    """SIGKILL every process of this user whose environment names the run, and all processes below those, this one and
    its ancestors excepted.

    Never by name, and never a recycled pid: psutil compares start times. Returns the pids that were found.
    """
    import psutil

    if not sees_pids():
        return []
    kept = {os.getpid(), *(p.pid for p in psutil.Process().parents())}
    others = [process for process in psutil.process_iter() if process.pid not in kept]
    found = {process.pid: process for process in others if _belongs_to(process, run_id)}
    while below := [p for p in others if p.pid not in found and _parent_of(p) in found]:  # with other environments
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
    """Threads of this process that a fork would lose and that are not known to survive it: all but the main one and
    the idle pool of OpenBLAS, which re-creates itself after a fork.
    """
    try:
        threads = len(os.listdir("/proc/self/task"))
    except OSError:
        threads = threading.active_count()
    return threads - 1 - _openblas_threads()


def native_thread_names() -> list[str]:
    """Return the kernel's names of all threads of this process but the main one."""
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
