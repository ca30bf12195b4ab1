"""The parent of a host's workers: imports modules once for all of them, forks them and reaps them.

Runs in: forkserver. It has one thread and talks to the agent over an inherited socket. With start method ``spawn``, or
after an import that makes forks unsafe, it starts fresh interpreters instead of forks.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
import warnings
import weakref
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from distrain.agent.guard import scheduler_signals
from distrain.hosts.cgroup import OomWatch
from distrain.system import process, scratch
from distrain.system.loop import Loop
from distrain.worker.main import WorkerFds, run_worker

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_PACKET_BYTES = 64 << 10
_MOST_FDS = 8
_CUDA_DRIVER = "libcuda.so.1"
_CUDA_NOT_INITIALISED = 3
_FOR_IMPORTS = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Variables without which imports make forks unsafe. The first one makes torch.cuda.is_available() use NVML; by default
it initialises CUDA. The second one keeps the allocator of pyarrow from starting a thread that returns memory to the
kernel; it then does so itself."""


def main(arguments: list[str]) -> None:
    """Run a forkserver.

    arguments: the descriptor of the socket, and the settings as JSON.
    """
    ForkServer(socket.socket(fileno=int(arguments[0])), json.loads(arguments[1])).run()
    os._exit(0)  # skips the clean-up of imported modules


class ForkServer:
    """The server behind the socket. Each packet is one JSON object.

    Commands of the agent: ``spawn`` (with the descriptors of the worker), ``signal``, ``sweep``, ``ping``, ``renew``.
    Answers: ``ready``, ``spawned``, ``failed``, ``exited``, ``swept``, ``alive``, ``stale``.
    """

    def __init__(self, sock: socket.socket, settings: dict[str, Any]) -> None:
        self._socket = sock
        self._settings = settings
        self._agent = os.getppid()
        self._loop = Loop()
        self._workers: dict[int, int] = {}
        self._signalled: dict[int, set[int]] = {}
        self._ended: set[int] = set()
        """Processes that have ended since the last sweep."""
        self._forks = settings["start_method"] == "forkserver"
        self._oom = OomWatch()
        self._began = time.time()

    def run(self) -> None:
        """Serve until the agent ends, then kill all descendants."""
        for number in scheduler_signals():  # workers inherit it
            signal.signal(number, signal.SIG_IGN)
        process.die_with_parent(self._agent)  # until it serves: it has no workers yet, and hears no one
        process.adopt_orphans()
        reason = self._preload(self._settings["preload"]) if self._forks else None
        process.live_without_parent()
        self._agent_fd = process.open_pidfd(self._agent)
        if os.getppid() != self._agent:
            return
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for worker_signal in process.WORKER_SIGNALS:
            signal.signal(worker_signal, signal.SIG_IGN)  # it would kill a worker that has no handler for it yet
        self._loop.on_signals((signal.SIGCHLD,), lambda number: self._on_child())
        self._loop.on_readable(self._socket.fileno(), self._on_command)
        if self._agent_fd >= 0:
            self._loop.on_readable(self._agent_fd, self._loop.stop)
        self._send(kind="ready", reason=reason)
        try:
            self._loop.run()
        finally:
            self._leave()

    # -- before the first fork ------------------------------------------------------------------------------------

    def _preload(self, names: Sequence[str]) -> str | None:
        """Import what the workers share. Return why forks would be unsafe now, or None."""
        culprits = []
        with _variables_for_imports():
            for name in names:
                before = process.count_native_threads()
                with contextlib.suppress(BaseException):  # a worker runs into the same error and reports it
                    importlib.import_module(name)
                if process.count_native_threads() > before:
                    culprits.append(name)
        reason = _why_not_fork(culprits)
        if reason is not None:
            self._forks = False
        for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
            finalizer.atexit = False  # its object is the forkserver's: no worker may clean up after it
        gc.collect()
        gc.freeze()  # a collection would write to, and so copy, pages that all workers share
        warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork.*", category=DeprecationWarning)
        return reason

    # -- commands -------------------------------------------------------------------------------------------------

    def _on_command(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, _PACKET_BYTES, _MOST_FDS)
        except OSError:
            data, fds = b"", []
        if not data:
            self._loop.stop()
            return
        command = json.loads(data)
        match command.pop("kind"):
            case "spawn":
                self._spawn(command["rank"], command["cpus"], WorkerFds._make(fds))
            case "signal":
                self._signal(command["ranks"], command["number"])
            case "ping":
                self._send(kind="alive")
            case "sweep":
                self._sweep()
            case "renew":
                self._renew(command["preload"])

    def _send(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # the end of the agent is noticed when reading
            self._socket.send(json.dumps(message).encode())

    def _renew(self, preload: Sequence[str]) -> None:
        """Get ready for another run, with further modules."""
        if not self._forks or _has_changed_since(self._began):
            self._send(kind="stale")
            return
        self._oom = OomWatch()
        importlib.invalidate_caches()  # directories of sys.path may exist by now
        missing = [name for name in preload if name not in sys.modules]
        self._send(kind="ready", reason=self._preload(missing) if missing else None)

    def _spawn(self, rank: int, cpus: Sequence[int] | None, fds: WorkerFds) -> None:
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:  # too many processes, or no memory
            self._send(
                kind="failed", rank=rank, text=f"its process could not be started: {error} (ulimit -u, pids cgroup)"
            )
        else:
            if pid == 0:
                self._become_worker(cpus, fds, parent)
            self._workers[pid] = rank
            self._send(kind="spawned", rank=rank, pid=pid)
        for fd in fds:
            os.close(fd)

    def _become_worker(self, cpus: Sequence[int] | None, fds: WorkerFds, parent: int) -> None:
        try:
            if cpus is not None:
                os.sched_setaffinity(0, cpus)
            os.setsid()
            process.die_with_parent(parent)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._loop.close()
            self._socket.close()
            if self._agent_fd >= 0:
                os.close(self._agent_fd)
            if self._forks:
                run_worker(fds, forked=True)
            for fd in fds:
                os.set_inheritable(fd, True)
            argv = process.bootstrap_argv("worker", json.dumps(fds), flags=self._settings["python_flags"])
            os.execv(argv[0], argv)  # noqa: S606
        except BaseException as error:
            os.write(2, f"distrain: the worker could not be started: {error!r}\n".encode())
        finally:
            os._exit(1)

    def _signal(self, ranks: list[int], number: int) -> None:
        """Signal workers that live. SIGKILL also ends their process groups.

        They are unreaped children, so that their pids cannot have been reused.
        """
        living = [pid for pid, rank in self._workers.items() if rank in ranks and not process.has_ended(pid)]
        if number in process.WORKER_SIGNALS:  # a rank that is another program would die of them
            living = [pid for pid in living if process.catches(pid, number)]
        for pid in living:
            self._signalled.setdefault(pid, set()).add(number)
        if number == signal.SIGKILL:
            self._ended |= process.kill_groups(living)
        else:
            for pid in living:
                process.kill(pid, number)

    # -- children -------------------------------------------------------------------------------------------------

    def _on_child(self) -> None:
        while (pid := process.ended_child()) is not None:
            rank = self._workers.get(pid)
            if rank is not None and self._has_orphans():
                self._ended |= process.kill_groups([pid])  # before reaping, while the pid cannot be reused
            self._workers.pop(pid, None)
            self._ended.add(pid)
            _, status, usage = os.wait4(pid, 0)
            if rank is not None:
                sent = self._signalled.pop(pid, set())
                by_us = os.WIFSIGNALED(status) and os.WTERMSIG(status) in sent
                if status == signal.SIGKILL and not by_us and _is_out_of_cpu_time(usage):
                    status = signal.SIGXCPU  # which a soft limit sends
                self._send(
                    kind="exited",
                    rank=rank,
                    status=status,
                    max_rss_bytes=usage.ru_maxrss * 1024,
                    by_us=by_us,
                    oom=self._oom.killed() if status else None,
                )

    def _has_orphans(self) -> bool:
        """Tell if this process may have adopted what a worker has started."""
        children = process.children()
        return children is None or not children <= self._workers.keys()

    def _sweep(self) -> None:
        """Kill what the workers have left. Resource trackers get some time, for which no restart waits."""
        self._oom = OomWatch()  # later kills belong to the next attempt
        remains = process.kill_descendants()
        scratch.remove_shared_memory(self._ended.union(remains.killed))
        self._ended.clear()
        self._loop.call_in("trackers", process.TRACKERS_S, partial(process.kill_trackers, remains.trackers))
        self._send(kind="swept", stuck=remains.stuck)

    def _leave(self) -> None:
        """Kill the workers, with their process groups, and all other descendants."""
        process.kill_groups([pid for pid in self._workers if not process.has_ended(pid)])
        process.kill_descendants()


def _is_out_of_cpu_time(usage: resource.struct_rusage) -> bool:
    """Tell if a process has used the CPU time of a hard limit, such as that of ``ulimit -t``."""
    return 0 < resource.getrlimit(resource.RLIMIT_CPU)[1] < usage.ru_utime + usage.ru_stime + 1  # infinity is -1


@contextlib.contextmanager
def _variables_for_imports() -> Iterator[None]:
    """Set :data:`_FOR_IMPORTS` within a block, except those that the user has set."""
    added = {name: value for name, value in _FOR_IMPORTS.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _has_changed_since(moment: float) -> bool:
    """Tell if a file of an imported module has changed since then, or if packages were installed or removed."""
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    files = [vars(module).get("__file__") for module in modules]  # getattr() may run code of the module
    folders = [entry for entry in map(str, sys.path) if entry.endswith("-packages")]
    paths = [path for path in (*files, *folders) if isinstance(path, str) and os.path.isabs(path)]
    try:
        return any(os.stat(path).st_ctime >= moment for path in paths)
    except OSError:  # one was removed, or is in an archive
        return True


def _why_not_fork(culprits: Sequence[str]) -> str | None:
    """Return why forks would be unsafe, or None.

    A fork loses all threads but one; locks that the others held stay locked. CUDA contexts must not be shared.
    culprits: modules that started threads when they were imported.
    """
    names = [thread.name for thread in threading.enumerate()[1:]]
    count = len(names) or process.count_native_threads()
    if count > 0:
        which = f" ({', '.join(dict.fromkeys(names or process.native_thread_names()))})"
        whose = f"importing {', '.join(culprits)}" if culprits else "the start of the interpreter (sitecustomize, .pth)"
        return f"{whose} started {count} thread{'s' if count > 1 else ''}{which}, which a fork would lose"
    if _cuda_is_initialised():
        return "an imported module initialised CUDA"
    return None


def _cuda_is_initialised() -> bool:
    """Tell if CUDA was initialised, by its driver, if that is loaded. Forks survive that NVML was."""
    with contextlib.suppress(OSError):  # the driver is not loaded
        driver = ctypes.CDLL(_CUDA_DRIVER, mode=os.RTLD_NOLOAD)
        return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _CUDA_NOT_INITIALISED)
    return False
