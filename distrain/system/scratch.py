"""Temporary files and shared memory on a host, which do not outlive the run. Runs in: agent, guard, forkserver, worker.

A killed process cannot delete its temporary files, such as a dict checkpoint that it is storing. So all of them are in
one directory. The agent and its guard hold a lock on it, and remove it when the host has no processes of the run left.
If both were killed, the guard of the next run on this host removes it, after the processes that are left. The same
holds for its twin in /dev/shm, which has the checkpoints in memory.

Resource trackers remove shared memory. :func:`remove_shared_memory` is for what they have missed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from distrain.system.locks import lock_path, locked_directory
from distrain.system.process import environment_of, find_process, sweep_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

_T = TypeVar("_T")

_VARIABLE = "DISTRAIN_SCRATCH"
_PREFIX = "distrain-run-"
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the kernel's
_NAMED_AFTER_ITS_MAKER = re.compile(r"(?:torch_|pym-)(\d+)[_-]")
"""Names that torch and multiprocessing give to their shared memory: with the pid of the process that makes it."""
_HOSTS_PIDS, _HOSTS_IPC = 0xEFFFFFFC, 0xEFFFFFFF
"""Inodes of the namespaces of the host itself (linux/proc_ns.h)."""


def scratch_directory() -> str | None:
    """Return the argument ``dir`` for tempfile: the directory of this host in a worker, else None.

    None means the usual directory. It is right outside of workers, where temporary files belong to the user, and in
    workers with a TMPDIR of their own.
    """
    path = os.environ.get(_VARIABLE, "")
    return path if os.path.dirname(path) == tempfile.gettempdir() and os.path.isdir(path) else None


def memory_directory(scratch: str | None = None) -> Path | None:
    """Return the directory for checkpoints in the memory of this host; it may not exist yet.

    scratch: the directory of :func:`claim`; by default, that of the agent of this process. None without an agent.
    """
    scratch = scratch or os.environ.get(_VARIABLE)
    return Path(_SHARED_MEMORY, os.path.basename(scratch)) if scratch else None


@contextlib.contextmanager
def temporary_directory(prefix: str) -> Iterator[str]:
    """Provide a directory for the block. If this process is killed, the agent or the next run on this host removes it.

    prefix: of its name in a worker.
    """
    path, lock = _new(prefix)
    try:
        yield path
    finally:
        _delete(os.getpid(), path, lock)


def directory_of(make_owner: Callable[[str], _T], prefix: str) -> _T:
    """Return an object made with a directory, as that of :func:`temporary_directory`, which lives as long as it."""
    path, lock = _new(prefix)
    owner = make_owner(path)
    weakref.finalize(owner, _delete, os.getpid(), path, lock)
    return owner


@contextlib.contextmanager
def kept_for_peer(path: str) -> Iterator[None]:
    """Keep a directory with the name of another host's temporary one, within the block."""
    top = next(folder for folder in (Path(path), *Path(path).parents) if folder.name.startswith(_PREFIX))
    os.makedirs(path, exist_ok=True)
    try:
        with locked_directory(top):
            yield
    finally:
        _remove_if_abandoned(str(top))


def _new(prefix: str) -> tuple[str, int]:
    """Make a directory, and return the descriptor of its lock, or -1 if it is in that of the agent."""
    inside = scratch_directory()
    return _make() if inside is None else (tempfile.mkdtemp(prefix=prefix, dir=inside), -1)


def _delete(pid: int, path: str, lock: int) -> None:
    if os.getpid() == pid:  # a child that was forked with the owner deletes nothing
        shutil.rmtree(path, ignore_errors=True)
        if lock >= 0:
            os.close(lock)


def claim() -> str | None:
    """Make the directory for the processes that this one starts. Return None if no temporary directory can be made.

    This process, and those that it forks, hold the lock until they end.
    """
    try:
        path, _ = _make()
    except OSError:
        return None
    os.environ[_VARIABLE] = path
    try:
        _make(lambda: _make_twin(path))
    except FileExistsError:  # a stranger's, who has seen the name
        remove(path)
        return claim()
    except OSError:  # a host without /dev/shm keeps nothing in memory
        pass
    return path


def _make_twin(path: str) -> str:
    os.mkdir(twin := str(memory_directory(path)), 0o700)
    return twin


def _make(make: Callable[[], str] = lambda: tempfile.mkdtemp(prefix=_PREFIX)) -> tuple[str, int]:
    """Make a directory, and lock it as long as the descriptor is open."""
    while True:
        path = make()
        lock = lock_path(path, fcntl.LOCK_SH)  # waits while another process removes it as abandoned
        if lock is not None:
            return path, lock


def clear(path: str | None) -> None:
    """Empty a directory of :func:`claim`."""
    if path is not None:
        for entry in Path(path).glob("*"):  # finds nothing in a directory that was removed
            shutil.rmtree(entry, ignore_errors=True)


def remove(path: str | None) -> None:
    """Remove a directory of :func:`claim`, and that in memory; harmless when done twice."""
    if path is not None:
        shutil.rmtree(path, ignore_errors=True)
        shutil.rmtree(str(memory_directory(path)), ignore_errors=True)


def remove_abandoned() -> None:
    """Remove the directories of this user that no process has locked, and kill the processes that were to use them."""
    for folder in (tempfile.gettempdir(), _SHARED_MEMORY):
        with contextlib.suppress(OSError):
            for path in list(Path(folder).glob(f"{_PREFIX}*")):
                _remove_if_abandoned(str(path))


def _remove_if_abandoned(path: str) -> None:
    def uses(scratch: str) -> bool:
        return os.path.basename(scratch) == os.path.basename(path)

    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(fd).st_uid == os.getuid():
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not uses(environment_of(os.getpid(), _VARIABLE) or ""):  # else it would kill itself
                    sweep_environment(_VARIABLE, uses)
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(fd)


def remove_shared_memory(pids: Collection[int], folder: str = _SHARED_MEMORY) -> None:
    """Remove the files that bear the pid of a dead process and that no process has open.

    Remove none in a container with pids of its own and the host's shared memory (``docker run --ipc=host``). There, the
    file may belong to another container: torch has a tensor closed on its way from one process to the next.

    pids: processes that have ended.
    """
    with contextlib.suppress(OSError):
        if _namespace("pid") != _HOSTS_PIDS and _namespace("ipc") == _HOSTS_IPC:
            return
        for name in os.listdir(folder):
            match = _NAMED_AFTER_ITS_MAKER.match(name)
            if match and int(match[1]) in pids and find_process(int(match[1])) is None:
                _remove_unused(os.path.join(folder, name))


def _namespace(kind: str) -> int:
    return os.stat(f"/proc/self/ns/{kind}").st_ino


def _remove_unused(path: str) -> None:
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if os.fstat(fd).st_uid == os.geteuid():
                fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)  # fails if any process has it open or mapped
                os.unlink(path)
        finally:
            os.close(fd)
