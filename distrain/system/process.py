"""Start, see, signal and kill processes. No other module does. Runs in: anywhere.

Three layers keep a host clean: workers die with their parent (PDEATHSIG); the forkserver, the agent and its guard adopt
and kill every descendant (subreaper); and :func:`sweep` finds the remaining processes by their environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from distrain.errors import ResourcesError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

RUN_IDS = "DISTRAIN_RUN_IDS"
"""Environment variable with the ids of the runs that a process belongs to, colon-separated, the innermost last."""
WITHIN_RUN = "DISTRAIN_WITHIN_RUN"
"""Environment variable with the id of the run, in ranks of another launcher while they train."""

STACKS_SIGNAL = signal.SIGRTMIN + 7
"""Signal that makes a worker write its main thread's stack. NCCL, submitit and Lightning use SIGUSR1 and SIGUSR2."""
DEBUG_SIGNAL = signal.SIGRTMIN + 8
"""Signal that makes a worker open its debugger."""
UNWIND_SIGNAL = signal.SIGRTMIN + 9
"""Signal that unwinds a worker, so that its ``finally`` blocks run, even if it has no handler for SIGTERM."""
WAKE_SIGNAL = signal.SIGRTMIN + 10
"""Signal that makes a worker notice an earlier one. Python runs no handler for a signal that came just before a sleep
until that ends, and while the main thread waits for another one to take the GIL, such a moment is not short."""
WORKER_SIGNALS = (STACKS_SIGNAL, DEBUG_SIGNAL, UNWIND_SIGNAL, WAKE_SIGNAL)

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PF_EXITING = 4  # linux/sched.h; field 9 of /proc/PID/stat
TRACKERS_S = 2.5
"""Seconds that resource trackers have after the death of all other processes. The one of torch takes 2 of them."""
_REAP_S = 1.0
"""Seconds to wait for the end of a child that was killed: the waiting thread has a lease to keep."""
_KILL_ROUNDS = 50
_PROC = Path("/proc")
_TRACKER_CODE = re.compile(rb"from [\w.]+\.resource_tracker import main; ?main\(")
"""The code that ``python -c`` runs as a resource tracker: the one of multiprocessing, or that of loky (joblib)."""
_TORCH_TRACKER = b"torch_shm_manager"
_LONGEST_COMMAND = 400
"""Characters of a command line that people are shown."""
_LEAST_SPARE_FILES, _SPARE_FILES = 32, 256
"""Files that the parts of a run need beside those that are counted, and those that the user's code may want."""

# `python -m` and `python -c` put the working directory first on sys.path, where a user's queue.py shadows the standard
# library's. So this starts with -c, removes that entry before any import, and loads exactly this package. Only a host
# without the package in this directory uses one of its own. A package that was copied to this host has packages that
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
import_module("distrain.system.process").show_program(program, arguments=sys.argv[3:])
import_module(MODULE).main(sys.argv[3:])
"""
BROUGHT = ".brought"
"""File next to a distrain that was copied to this host by :mod:`distrain.transfer.program`."""
_PROGRAMS = {
    "agent": "distrain.agent.main",
    "forkserver": "distrain.agent.forkserver",
    "mover": "distrain.transfer.mover",
    "side": "distrain.jobs.side",
    "stream-server": "distrain.transfer.stream_server",
    "uploader": "distrain.transfer.uploader",
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


def _start(argv: Sequence[str], **options: Any) -> Process:
    """Start a process in a session of its own, with ``options`` of Popen. Raises OSError without such a program."""
    child = subprocess.Popen(list(argv), start_new_session=True, **options)  # noqa: S603
    _keep_usual_open_files(child.pid)
    return child


def spawn(
    argv: Sequence[str],
    *,
    stderr: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Process:
    """Start a process in a session of its own, with pipes on stdin and stdout. Raises OSError without such a program.

    environment: variables in addition to those of this process.
    """
    pipe, variables = subprocess.PIPE, {**os.environ, **(environment or {})}
    return _start(argv, stdin=pipe, stdout=pipe, stderr=stderr, env=variables)


def spawn_quiet(
    argv: Sequence[str],
    *,
    environment: Mapping[str, str],
    directory: str,
    pass_fds: Iterable[int] = (),
    output: int = 2,
) -> Process:
    """Start a process in a session of its own, with nothing on stdin. Raises OSError without such a program.

    output: a descriptor for its output, or subprocess.PIPE; by default our stderr.
    """
    nothing, fds = subprocess.DEVNULL, tuple(pass_fds)
    return _start(argv, stdin=nothing, stdout=output, stderr=output, env=environment, cwd=directory, pass_fds=fds)


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


def user_of_peer(fd: int) -> int:
    """Return the user of the process at the other end of a Unix socket, when it connected or began to listen."""
    import socket  # few processes need it

    with socket.socket(fileno=os.dup(fd)) as connection:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)  # pid, uid, gid
    return int.from_bytes(credentials[4:8], sys.byteorder)


# -- open files ------------------------------------------------------------------------------------------------------

_usual_open_files: tuple[int, int] | None = None
"""The limits on open files before they were raised."""


def raise_fd_limit(needed: int, wanted: int) -> None:
    """Let this process open more files from now on. Programs that :func:`spawn` starts get the usual limit.

    needed: the number of further files without which it cannot work. wanted: a larger one, for comfort.

    Raises ResourcesError if the hard limit is below ``needed``.
    """
    global _usual_open_files
    already = len(os.listdir("/dev/fd"))
    needed, wanted = already + needed + _LEAST_SPARE_FILES, already + wanted + _SPARE_FILES
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


def _keep_usual_open_files(child: int) -> None:
    """Give a child the limits that this process usually has. User code may depend on them: select() does."""
    if _usual_open_files is not None:
        with contextlib.suppress(OSError):  # it has ended
            resource.prlimit(child, resource.RLIMIT_NOFILE, _usual_open_files)


# -- the table of processes ------------------------------------------------------------------------------------------

# It is read from /proc, and not with psutil, which takes several times as long: after a kill of its siblings, a process
# may have only milliseconds to kill the rest.


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEntry:
    """A process at the moment at which the table was read.

    group: its process group. began: when it was started, in a unit of the system. It tells the process from a later one
    with the same pid. is_dead: it only waits to be reaped.
    """

    pid: int
    parent: int
    group: int
    began: float
    is_dead: bool


def process_table() -> dict[int, ProcessEntry]:
    """Return all processes that this one can see, by pid."""
    pids = [int(name) for name in os.listdir(_PROC) if name.isdigit()]
    return {pid: entry for pid in pids if (entry := find_process(pid)) is not None}


def find_process(pid: int) -> ProcessEntry | None:
    """Return a process, or None if there is none with this pid."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:  # it has ended
        return None
    state, threads = fields[0], int(fields[17])
    return ProcessEntry(
        pid=pid,
        parent=int(fields[1]),
        group=int(fields[2]),
        began=int(fields[19]),
        is_dead=state in (b"Z", b"X") and threads <= 1,  # other threads may outlive the first one
    )


def is_alive(entry: ProcessEntry) -> bool:
    """Tell if the process of an older table still lives."""
    now = find_process(entry.pid)
    return now is not None and now.began == entry.began and not now.is_dead


def below(
    table: Mapping[int, ProcessEntry], roots: Collection[int], spared: Collection[int] = ()
) -> list[ProcessEntry]:
    """Return the descendants of some processes, parents first. Those of ``spared`` are left out, like themselves."""
    children: dict[int, list[ProcessEntry]] = {}
    for entry in table.values():
        children.setdefault(entry.parent, []).append(entry)
    found: list[ProcessEntry] = []
    parents = list(roots)
    while parents:
        level = [child for parent in parents for child in children.pop(parent, ()) if child.pid not in spared]
        found += level
        parents = [child.pid for child in level]
    return found


def _ancestors(table: Mapping[int, ProcessEntry], pid: int) -> set[int]:
    """Return the pids of all processes above one."""
    found: set[int] = set()
    while (entry := table.get(pid)) is not None and entry.parent not in found:
        pid = entry.parent
        found.add(pid)
    return found


def command_line(pid: int) -> list[bytes]:
    """Return the command line of a process; empty for one that is dead, belongs to the kernel or cannot be seen."""
    return _texts(pid, "cmdline")[:-1]


def environment_of(pid: int, name: str) -> str:
    """Return a variable of the environment with which a process was started; empty if it cannot be seen."""
    prefix = f"{name}=".encode()
    found = (entry[len(prefix) :] for entry in _texts(pid, "environ") if entry.startswith(prefix))
    return os.fsdecode(next(found, b""))


def _texts(pid: int, file: str) -> list[bytes]:
    """Return the texts between zeros in a file about a process; none if it cannot be read."""
    try:
        return (_PROC / str(pid) / file).read_bytes().split(b"\0")
    except OSError:
        return []


def is_resource_tracker(pid: int) -> bool:
    """Tell if a process removes shared memory that others have left, and ends once all of those are dead.

    multiprocessing, loky and torch start such processes. They must live a moment longer than the rest.
    """
    words = command_line(pid)
    runs_code = any(flag == b"-c" and _TRACKER_CODE.match(code) for flag, code in itertools.pairwise(words))
    return runs_code or (bool(words) and os.path.basename(words[0]) == _TORCH_TRACKER)


def catches(pid: int, number: int) -> bool:
    """Tell if a process has a handler for a signal; True where that cannot be seen.

    A process that has become another program (``execv``) has lost its handlers: the signal would kill it.
    """
    handled = handled_signals(pid)
    return handled is None or number in handled[0]


# -- life and death --------------------------------------------------------------------------------------------------


def _prctl(option: int, value: int | bytes) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Make the kernel send this process a signal when ``parent``, which must be its parent, dies.

    The process exits at once if the parent is dead already. The signal fires when the parent's *thread* that started
    this process ends, so start it from the main thread.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def live_without_parent() -> None:
    """Undo :func:`die_with_parent`."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, so that none can escape."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def show_command(*words: str) -> None:
    """Set the command line of this process, and of those that it forks, that ``ps`` shows.

    It replaces the real one, as far as there is room. A last byte that is not NUL tells the kernel to end it at the
    first one; else psutil would show an empty word for each of the others.
    """
    with contextlib.suppress(OSError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end; 0 where they are hidden
        if (room := end - start - 2) > 0:
            text = os.fsencode(" ".join(words))[:room]
            ctypes.memmove(start, text.ljust(room + 1, b"\0") + b".", room + 2)


def show_program(*words: str, arguments: Sequence[str] = ()) -> None:
    """Set the command line that ``ps`` shows for a program of distrain: the run rather than the bootstrap.

    arguments: shown if the process belongs to no run.
    """
    show_command("distrain:", *words, *(["of", "run", own_run_id()] if os.environ.get(RUN_IDS) else arguments))


def show_as(name: str) -> None:
    """Set the name under which ``ps`` lists this process, at most 15 characters."""
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
    """Tell if /proc uses the process ids of this process's PID namespace.

    In a PID namespace with the /proc of another one (``unshare --pid`` without ``--mount-proc``) it does not, and its
    process ids must not be killed.
    """
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


def began_at(pid: int) -> float | None:
    """Return when a process began, or None if it cannot be seen. It tells it from another one that gets the same id.

    On Linux these are clock ticks since the boot: seconds since 1970 would change whenever the clock is set.
    """
    found = find_process(pid) if sees_pids() else None
    return None if found is None else found.began


def reap(child: Process) -> int:
    """Wait for a child that was killed, and return its exit code.

    Not for long: the kernel may hold one that waits for a dead file system. Python reaps it later.
    """
    try:
        return child.wait(_REAP_S)
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL


def _is_unreaped(child: int) -> bool:
    """Tell if a child still has its pid. Once it is reaped, another process may have it."""
    try:
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def kill_groups(leaders: Iterable[int]) -> set[int]:
    """SIGKILL the process groups that unreaped children of this process lead, except for resource trackers.

    Return the pids of those that were killed.
    """
    leaders = {leader for leader in leaders if _is_unreaped(leader)}
    for leader in leaders:
        kill(leader, signal.SIGKILL)
    killed = set[int]()
    for _ in range(_KILL_ROUNDS if sees_pids() else 0):
        members = [e for e in process_table().values() if e.group in leaders and e.pid not in killed and not e.is_dead]
        victims = [member for member in members if not is_resource_tracker(member.pid)]
        killed |= {victim.pid for victim in victims}
        if len(victims) == len(members):
            break
        if not victims:
            return killed
        for victim in victims:
            _kill_entry(victim)
    for leader in leaders:  # no tracker is in the group
        if _is_unreaped(leader):
            kill(-leader, signal.SIGKILL)
    return killed


def _kill_entry(entry: ProcessEntry) -> None:
    """SIGKILL a process, unless it is dead and another one has its pid."""
    if is_alive(entry):
        kill(entry.pid, signal.SIGKILL)


def kill(pid: int, number: int) -> None:
    """Signal a process that still has this pid, as an unreaped child has; with a minus, the group that it leads."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def kill_tree(root: int) -> None:
    """SIGKILL a process and its descendants at once, so that none sees another one die; this process last."""
    table, own = process_table(), os.getpid()
    pids = [root, *(entry.pid for entry in below(table, [root]))]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            if pid != own:
                kill(pid, number)
    if own in pids:
        kill(own, signal.SIGKILL)


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


def handled_signals(pid: int) -> tuple[Collection[int], Collection[int]] | None:
    """Return the signals that a process catches, and those that it ignores; None if that cannot be known."""
    if not sees_pids():
        return None
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    return _members(status, "SigCgt:"), _members(status, "SigIgn:")


def _members(status: str, label: str) -> set[int]:
    mask = int((status.partition(label)[2].split() or ["0"])[0], 16)
    return {number for number in range(1, mask.bit_length() + 1) if mask >> (number - 1) & 1}


def children() -> set[int] | None:
    """Return the pids of the children of this process, dead ones included, or None where the kernel has no such list.

    It takes less time than to look at every process of the host.
    """
    try:
        lists = [(task / "children").read_text() for task in Path("/proc/self/task").iterdir()]
    except OSError:
        return None
    return {int(pid) for pids in lists for pid in pids.split()}


class Remains(NamedTuple):
    """The outcome of :func:`kill_descendants`.

    killed: the pids of the processes that were killed. stuck: those that do not die: they are in an uninterruptible
    sleep. trackers: the resource trackers, which live.
    """

    killed: Collection[int]
    stuck: list[int]
    trackers: list[ProcessEntry]


def kill_descendants(spared: Collection[int] = ()) -> Remains:
    """SIGKILL and reap all descendants until only resource trackers are left.

    spared: pids that are left alone, together with their descendants.
    """
    own = children()
    # This process adopts orphans, so every other descendant has an ancestor among its children.
    if (own is not None and own <= set(spared)) or not sees_pids():
        return Remains((), [], [])
    killed, victims, trackers = set[int](), list[ProcessEntry](), list[ProcessEntry]()
    for round_number in range(_KILL_ROUNDS):
        living = [entry for entry in below(process_table(), [os.getpid()], spared) if not entry.is_dead]
        trackers = [entry for entry in living if is_resource_tracker(entry.pid)]
        victims = [entry for entry in living if entry not in trackers]
        if not victims:
            break
        for victim in reversed(victims):  # descendants first: a forkserver or agent would continue killing in our place
            _kill_entry(victim)
        killed |= {victim.pid for victim in victims}
        for pid in killed:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(min(0.001 * 2**round_number, 0.1))
    return Remains(killed, [victim.pid for victim in victims], trackers)


def end_descendants() -> None:
    """Kill all descendants, and wait for their resource trackers, but not for long."""
    trackers = kill_descendants().trackers
    deadline = time.monotonic() + TRACKERS_S
    while any(map(is_alive, trackers)) and time.monotonic() < deadline:
        time.sleep(0.005)
    kill_trackers(trackers)


def kill_trackers(trackers: Iterable[ProcessEntry]) -> None:
    """SIGKILL resource trackers that had :data:`TRACKERS_S` seconds to end: a stopped one would stay forever."""
    for tracker in trackers:
        _kill_entry(tracker)


def sweep(run_id: str) -> list[int]:
    """SIGKILL every process of this user whose environment names the run, with its descendants. Return their pids.

    This process and its ancestors are spared, and resource trackers, which end when all others are dead. Processes are
    never found by name, and a recycled pid is never killed.
    """
    return sweep_environment(RUN_IDS, lambda value: run_id in value.split(":"))


def sweep_environment(variable: str, is_meant: Callable[[str], bool]) -> list[int]:
    """Do the work of :func:`sweep` for another environment variable."""
    if not sees_pids():
        return []
    table = process_table()
    kept = {os.getpid(), *_ancestors(table, os.getpid())}
    named = [pid for pid in table if pid not in kept and is_meant(environment_of(pid, variable))]
    found = {pid: table[pid] for pid in named}
    found |= {entry.pid: entry for entry in below(table, named, kept)}  # they may have changed their environment
    victims = [entry for entry in found.values() if not entry.is_dead and not is_resource_tracker(entry.pid)]
    for victim in victims:
        _kill_entry(victim)
    return [victim.pid for victim in victims]


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


def run_lines(argv: Sequence[str], on_line: Callable[[str], None], *, pass_fds: Iterable[int]) -> int:
    """Run a command in a session of its own, and return its exit code: 128 + the number of a signal.

    on_line: called with each line that it writes. pass_fds: descriptors, such as a lock, that stay open until the
    command is dead.
    """
    nothing, pipe, same = subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT
    child = _start(argv, stdin=nothing, stdout=pipe, stderr=same, pass_fds=tuple(pass_fds))
    assert child.stdout is not None
    with child.stdout as lines:
        for line in lines:
            on_line(line.decode(errors="replace").rstrip())
    try:
        child.returncode = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
    except ChildProcessError:  # the end of this process has begun: another thread has killed and reaped it
        child.returncode = -signal.SIGKILL
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def run_shell(command: str, text: str, environment: Mapping[str, str], limit_s: float) -> None:
    """Run a shell command with a text on stdin. What it writes goes to stderr.

    After ``limit_s``, and on Ctrl-C, it is killed with its descendants.

    Raises OSError, and an error of subprocess for a command that fails or takes longer.
    """
    child = _start(["/bin/sh", "-c", command], stdin=subprocess.PIPE, stdout=2, env=environment)
    try:
        child.communicate(text.encode(), limit_s)
    finally:
        if child.poll() is None:
            kill_tree(child.pid)
            kill_groups([child.pid])
            reap(child)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)


def run_guarded(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a program that gets our SIGTERM, and return its exit code: -15 if SIGTERM has ended it.

    No descendant survives the program, or the parent of this process, which has started it from the main thread.
    """
    guard, parent = os.getpid(), os.getppid()
    adopt_orphans()
    program = _start(argv, env=environment, preexec_fn=lambda: die_with_parent(guard))
    signal.signal(signal.SIGTERM, lambda number, _: kill(program.pid, number))
    signal.signal(signal.SIGHUP, lambda *_: sys.exit(1))
    die_with_parent(parent, signal.SIGHUP)
    try:
        return program.wait()
    finally:
        end_descendants()


# -- other programs --------------------------------------------------------------------------------------------------


def output_of(argv: Sequence[str], directory: str, timeout_s: float = 30) -> bytes | None:
    """Return what a program writes to stdout. Return None if there is none, or it fails or takes longer."""
    try:
        nothing = subprocess.DEVNULL
        return subprocess.check_output(  # noqa: S603
            list(argv), cwd=directory, stdin=nothing, stderr=nothing, timeout=timeout_s
        )
    except (OSError, subprocess.SubprocessError):
        return None
