"""Requests to a running run, from other processes of its machine. Runs in: coordinator, and in the process that asks.

A request is a line ``WORD TOKEN ARGUMENT`` in a named pipe of the run directory, answered by a file there: no
network port is open, and only the user of the run can ask.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
import uuid
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from distrain.errors import StorageError
from distrain.storage.lines import read_file
from distrain.storage.runs.listing import NoSuchRun
from distrain.system.text import count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from distrain.coordinator.store.run_store import RunStore
    from distrain.decisions.run_status import RunStatus
    from distrain.storage.paths import RunPaths
    from distrain.system.loop import Loop

STACKS, STOP, DEBUG, PROFILE = "stacks", "stop", "debug", "profile"
REQUEST_TIMEOUT_S = 10.0
"""Seconds that :func:`ask` waits for a run to answer."""
_REQUEST_BYTES = 4096
_REFUSED = "refused: "
"""How the answer to a request begins that cannot be fulfilled."""


@dataclass(eq=False)
class Requests:
    """Accept requests, and answer them.

    actions: what to do for each word; called with a function that takes the text of the answer, and with the argument.
    One that raises NoSuchRun, ValueError or OSError refuses the request.
    """

    loop: Loop
    store: RunStore
    actions: Mapping[str, Callable[[Callable[[str], None], str], None]]
    _pipe: int = -1

    def open(self) -> None:
        """Accept requests, unless the file system has no named pipes."""
        path = self.store.paths.requests
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            os.mkfifo(path, 0o600)
            self._pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            made = os.fstat(self._pipe)
            if not stat.S_ISFIFO(made.st_mode) or made.st_uid != os.geteuid() or made.st_mode & 0o077:
                self.close()  # another user has replaced it in the meantime
                return
            self.loop.on_readable(self._pipe, self._read)

    def close(self) -> None:
        """Accept no more requests."""
        if self._pipe >= 0:
            self.loop.forget(self._pipe)
            os.close(self._pipe)
            self._pipe = -1
            self.store.delete_file(self.store.paths.requests)

    def _read(self) -> None:
        for line in os.read(self._pipe, _REQUEST_BYTES).decode(errors="replace").splitlines():
            word, _, rest = line.partition(" ")
            token, _, argument = rest.partition(" ")
            if word in self.actions and token.isalnum():
                answer = partial(self._answer, token)
                try:
                    self.actions[word](answer, argument)
                except (NoSuchRun, ValueError, OSError) as refusal:
                    answer(f"{_REFUSED}{refusal}")

    def _answer(self, token: str, text: str) -> None:
        path = self.store.paths.answer(token)
        self.store.write_optional_file(path, text.encode(), "a request could not be answered")


def rank_in(argument: str, status: RunStatus) -> tuple[int, str]:
    """Return the rank that a request begins with, and the rest of the argument. Raise NoSuchRun if it does not run."""
    number, _, rest = argument.partition(" ")
    rank, ranks = int(number), status.ranks
    if not ranks:
        raise NoSuchRun("no worker has started yet")
    if not 0 <= rank < len(ranks):
        raise NoSuchRun(f"there is no rank {rank}; the run has {count(len(ranks), 'worker')}, from 0")
    if ranks[rank].ended:
        raise NoSuchRun(f"rank {rank} has ended")
    return rank, rest


def ask(paths: RunPaths, word: str, argument: str = "") -> str:
    """Send a request to a run, and return its answer. Raise NoSuchRun if it refuses, StorageError if none answers."""
    token = uuid.uuid4().hex
    try:
        pipe = os.open(paths.requests, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        raise StorageError(
            f"no run is active in {paths.root} on this machine ({error.strerror}); ask where fit() runs"
        ) from None
    try:
        if not stat.S_ISFIFO(os.fstat(pipe).st_mode):
            raise StorageError(f"{paths.requests} is not a named pipe, so no run has put it there: delete it")
        os.write(pipe, f"{word} {token} {argument}\n".encode())
    finally:
        os.close(pipe)
    answer, deadline = paths.answer(token), time.monotonic() + REQUEST_TIMEOUT_S
    while not answer.exists():
        if time.monotonic() > deadline:
            raise StorageError(
                f"the run in {paths.root} did not answer within {REQUEST_TIMEOUT_S:g} s; if an older distrain "
                f"started it, that version may not support `distrain {word}`"
            )
        time.sleep(0.02)
    text = read_file(answer, paths.root).decode(errors="replace")
    answer.unlink()
    if text.startswith(_REFUSED):
        raise NoSuchRun(text.removeprefix(_REFUSED))
    return text
