"""The needs of workers before they start: the user's files, an environment, the storage. Runs in: agent.

A host that sees the same files as the coordinator's machine uses them where they are. Any other host gets copies in its
cache (:mod:`distrain.transfer.host_side.host_cache`), and the paths of the coordinator's machine are replaced by those
there.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from distrain import wire
from distrain.hosts.host import MIRROR
from distrain.hosts.inspection import storage_problem
from distrain.system import process
from distrain.system.background import Background
from distrain.wire.shipped_file import ShippedFile, project_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distrain.system.loop import Loop
    from distrain.transfer.host_side.host_cache import HostCache, RunFolder

_STORAGE_PATIENCE_S = 10.0


class HostSetup:
    """The answer to :class:`~distrain.wire.SetUpHost`, and what follows from it for the messages about workers.

    Threads do the work, so that no disk stops the heartbeats.
    """

    def __init__(self, loop: Loop, send: Callable[[wire.Message], None]) -> None:
        self._send = send
        self._thread = Background(loop, "setup")
        self._asked = wire.SetUpHost(files=[], folders=[], place="")
        """The latest question; as long as there was none, the paths of the coordinator's machine are those of here."""
        self._cache: HostCache | None = None
        self._run: RunFolder | None = None
        self._is_mirrored = False
        """True if the workers use copies of the user's files."""
        self._project, self._digest = Path(), ""
        """The copy, and the digest of what was copied."""
        self._storage_problem: str | None = None
        self._trial_dir = ""
        self._python = ""

    # -- setting up -----------------------------------------------------------------------------------------------

    def begin(self, asked: wire.SetUpHost) -> None:
        """Set up the host, and send the answer."""
        self._asked = asked
        failed = lambda error: self._send(wire.HostSetUp(failed=str(error)))  # noqa: E731
        self._thread.do(lambda: self._set_up(asked), self._send, failed)

    def _set_up(self, asked: wire.SetUpHost) -> wire.HostSetUp:
        """Do what can be done, and return what is missing."""
        files = [ShippedFile(*fields) for fields in asked.files]
        self._storage_problem = _problem_within_limit(asked) if asked.storage else None
        has_files = all(map(os.path.isdir, asked.folders)) and all(file.is_in_place for file in files)
        self._is_mirrored = self._is_mirrored or not has_files
        if not (self._is_mirrored or self._storage_problem is not None or asked.requirements):
            return wire.HostSetUp()
        cache, run = self._claim(asked.place)
        wanted = ""
        if self._is_mirrored:
            digest = project_digest(files, asked.folders)
            if digest != self._digest:  # else workers may have changed the copy, and find that again
                self._project, is_there = cache.use_project(digest, files)
                wanted, self._digest = ("", digest) if is_there else (str(self._project), "")
        if asked.requirements and not wanted and not self._python:
            from distrain.transfer.host_side.environments import make_environment

            self._python = str(
                make_environment(cache.environments, asked.requirements, python=asked.python, show=self._show)
            )
        if self._storage_problem is not None:
            self._trial_dir = f"{run.files}{asked.storage}"
            os.makedirs(self._trial_dir, exist_ok=True)
        return wire.HostSetUp(
            wanted=wanted,
            checkpoints=str(run.checkpoints),
            trial_dir=self._trial_dir,
            storage_problem=self._storage_problem,
        )

    def _claim(self, place: str) -> tuple[HostCache, RunFolder]:
        """Open the cache, and the run's directory in it."""
        from distrain.transfer.host_side.host_cache import HostCache

        if self._cache is None or self._run is None:
            self._cache = HostCache()
            with contextlib.suppress(OSError):
                self._cache.trim()
            self._run = self._cache.claim_run(place)
        return self._cache, self._run

    def _show(self, text: str) -> None:
        self._thread.report(lambda: self._send(wire.Notice(text=text)))

    def delete_checkpoints(self, folders: list[str]) -> None:
        """Delete checkpoints that were copied here. One that a worker reads stays until the end of the run.

        Nobody tries again: by then, the same checkpoint may have been copied again.
        """

        def delete() -> None:
            from distrain.storage.checkpoint import delete_unread

            delete_unread(map(Path, folders))

        self._thread.do(delete)

    @property
    def has_files(self) -> bool:
        """True if files were copied to this host, perhaps by processes that still run."""
        return self._run is not None

    def end(self) -> None:
        """Delete what the run no longer needs, once the host has no worker left."""
        self._thread.close()
        if self._run is not None:
            self._run.end()

    # -- messages about workers, as they apply to this host -------------------------------------------------------

    def prepare(self, message: wire.Prepare) -> wire.Prepare:
        """Return the message with the directory, interpreter and environment that workers have here."""
        environment = message.environment
        if self._has_other_interpreter:
            left_out = self._asked.interpreter_variables
            environment = {name: value for name, value in environment.items() if name not in left_out}
        if self._python:
            folder = os.path.dirname(self._python)
            path = environment.get("PATH", os.environ.get("PATH", os.defpath))
            environment |= {"VIRTUAL_ENV": os.path.dirname(folder), "PATH": f"{folder}{os.pathsep}{path}"}
        directory = self._here(message.directory)
        return replace(message, directory=directory, environment=environment, python=self._python)

    def worker(self, spec: wire.WorkerSpec) -> wire.WorkerSpec:
        """Return what a worker is told, with the paths of this host."""
        context, environment = dict(spec.context), dict(spec.environment)
        if self._storage_problem is not None:
            context |= {"sees_storage": False, "trial_dir": self._trial_dir}
        if self._is_mirrored:
            environment[MIRROR] = self._here("/")
        return replace(
            spec,
            context=context,
            environment=environment,
            directory=self._here(spec.directory),
            sys_path=self._sys_path(spec.sys_path),
        )

    def probe(self, asked: wire.ProbeHost) -> wire.ProbeHost:
        """Return the question with the paths of this host."""
        path = self._sys_path(asked.sys_path)
        if self._python:  # the agent does not have the packages of that environment
            packages = os.path.join(os.path.dirname(self._python), f"../lib/python{self._asked.python}/site-packages")
            brought = os.path.dirname(process.own_package())
            path = [*(os.path.normpath(packages) if entry is None else entry for entry in path), brought]
        return replace(asked, sys_path=path, executable=self._python)

    @property
    def _has_other_interpreter(self) -> bool:
        """True if workers do not run under the interpreter of the coordinator's path."""
        return bool(self._python) or sys.executable != self._asked.executable

    def _here(self, path: str) -> str:
        """Return where a directory of the coordinator's machine is on this host."""
        if not self._is_mirrored or not os.path.isabs(path):
            return path
        is_mirrored = path == "/" or any(path == top or path.startswith(f"{top}/") for top in self._asked.folders)
        is_mirrored = is_mirrored or any(path == file[0] for file in self._asked.files)  # such as an archive
        return f"{self._project}{os.path.normpath(path)}".rstrip("/") if is_mirrored else path

    def _sys_path(self, path: Sequence[str | None]) -> list[str | None]:
        def here(entry: str | None) -> str | None:
            if entry in self._asked.interpreter_path:  # also if it lies in a folder that was copied
                return None if self._has_other_interpreter else entry
            return None if entry is None else self._here(entry)

        replaced = [here(entry) for entry in (*path, *(self._asked.more_path if self._is_mirrored else []))]
        if None not in replaced:
            return replaced
        first = replaced.index(None)  # the others are not needed: this one stands for all entries of the interpreter
        return [*replaced[: first + 1], *(entry for entry in replaced[first:] if entry is not None)]


def _problem_within_limit(asked: wire.SetUpHost) -> str | None:
    """Return why workers of this host cannot use the storage, or None. A storage that hangs is of no use, either."""
    problems: list[str | None] = []

    def look() -> None:
        problems.append(storage_problem(asked.storage, asked.probe_file, asked.nonce))

    thread = threading.Thread(target=look, name="distrain-storage", daemon=True)
    thread.start()
    thread.join(_STORAGE_PATIENCE_S)
    return problems[0] if problems else f"has not answered for {_STORAGE_PATIENCE_S:g} s there"
