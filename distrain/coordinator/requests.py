"""Requests to a running run, from other processes of its machine. Runs in: coordinator, and in the process that asks.

A process connects to a socket in the run directory, and sends a :class:`~distrain.wire.Ask`: no network port is open,
and only the user of the run can ask.
"""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.errors import WireError
from distrain.storage.ownership import pinned
from distrain.storage.runs.listing import NoSuchRun
from distrain.system.text import count
from distrain.wire.channel import Channel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from distrain.coordinator.store.run_store import RunStore
    from distrain.decisions.run_status import RunStatus
    from distrain.storage.paths import RunPaths
    from distrain.system.loop import Loop

STACKS, STOP, DEBUG, TYPED, PROFILE, ATTACH = "stacks", "stop", "debug", "typed", "profile", "attach"
REQUEST_TIMEOUT_S = 10.0
"""Seconds that :func:`ask` waits for a run to answer."""


@dataclass(eq=False)
class Requests:
    """Accept requests, and have them answered.

    actions: what to do for each request; called with the connection and the message. One that raises NoSuchRun,
    ValueError, TypeError or OSError refuses the request; one that returns True keeps the connection, and closes it
    itself. gone: called with a connection that has ended.
    """

    loop: Loop
    store: RunStore
    actions: Mapping[str, Callable[[Channel, wire.Ask], object]]
    gone: Callable[[Channel], None]

    def __post_init__(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._askers: weakref.WeakSet[Channel] = weakref.WeakSet()

    def open(self) -> None:
        """Accept requests, unless the file system has no sockets."""
        path = self.store.paths.requests
        os.fchmod(self._listener.fileno(), 0o600)  # that will be the mode of the file, from the first moment on
        # The path itself may be longer than addresses can be.
        with contextlib.suppress(OSError), pinned(path.parent) as folder:
            path.unlink(missing_ok=True)
            self._listener.bind(str(folder / path.name))
            self._listener.listen()
            self._listener.setblocking(False)
            self.loop.on_readable(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Accept no more requests."""
        self.loop.forget(self._listener.fileno())
        self._listener.close()
        self.store.delete_file(self.store.paths.requests)
        for asker in list(self._askers):
            asker.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the asker is gone, or this process has too many files open
            fd = self._listener.accept()[0].detach()
            asker = Channel(fd, fd)
            self._askers.add(asker)
            asker.attach(self.loop, partial(self._on_frames, asker))

    def _on_frames(self, asker: Channel, frames: list[wire.Frame]) -> None:
        for frame in frames:
            try:
                asked = frame.message()
                if not isinstance(asked, wire.Ask) or asked.what not in self.actions:
                    raise NoSuchRun("another version of distrain runs it, which does not know this request")
                if self.actions[asked.what](asker, asked):
                    self._askers.discard(asker)
            except (NoSuchRun, WireError, ValueError, TypeError, OSError) as refusal:
                asker.queue(wire.OrderDone(failed=str(refusal)))
        if not frames:
            asker.close()
            self.gone(asker)


def answer(asker: Channel, text: str) -> None:
    """Answer a request. The asker may be gone."""
    asker.queue(wire.OrderDone(text=text))


def check_rank(rank: int, status: RunStatus) -> int:
    """Return the rank for which somebody asks. Raise NoSuchRun if it does not run."""
    ranks = status.ranks
    if not ranks:
        raise NoSuchRun("no worker has started yet")
    if not 0 <= rank < len(ranks):
        raise NoSuchRun(f"there is no rank {rank}; the run has {count(len(ranks), 'worker')}, from 0")
    if ranks[rank].ended:
        raise NoSuchRun(f"rank {rank} has ended")
    return rank


# -- in the process that asks ----------------------------------------------------------------------------------------


def connect(paths: RunPaths) -> Channel:
    """Return a connection to a running run. Raise OSError if there is none on this machine."""
    with socket.socket(socket.AF_UNIX) as connection, pinned(paths.root) as folder:
        connection.connect(str(folder / paths.requests.name))
        fd = connection.detach()
    return Channel(fd, fd)


def ask(run: Channel, what: str, *, rank: int = 0, **fields: Any) -> str:
    """Send a request to a run, and return its answer. Raise NoSuchRun if it refuses, or does not answer."""
    with contextlib.suppress(OSError):  # the run has just ended
        run.send(wire.Ask(attempt=0, rank=rank, what=what, **fields))
    frames = run.wait(REQUEST_TIMEOUT_S)
    if not frames:
        raise NoSuchRun("the run has ended" if run.at_end else f"the run did not answer within {REQUEST_TIMEOUT_S:g} s")
    found = frames[0].message()
    assert isinstance(found, wire.OrderDone)
    if found.failed is not None:
        raise NoSuchRun(found.failed)
    return found.text
