"""Checkpoints that hosts without the storage read: brought there once, and copied from host to host.

Runs in: coordinator.

This machine sends a checkpoint to one host. Each host that has it gives it to one other host at a time. So the number
of hosts that have it doubles, and this machine's network carries it once. If two hosts cannot connect to each other,
this machine sends it again.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from distrain import wire
from distrain.coordinator.host_files import full_cache_hint
from distrain.errors import CheckpointError
from distrain.storage.checkpoint import locked_for_reading
from distrain.storage.file_transfer import hash_files
from distrain.storage.files import list_files
from distrain.storage.records import recorded_files

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from distrain.coordinator.host_files import HostFiles
    from distrain.system.background import Background

    Then = Callable[[wire.CheckpointFetched], None]


@dataclass(slots=True)
class _Copy:
    """A checkpoint on one host, or on its way there."""

    folder: str
    waiting: list[Then] = field(default_factory=list)
    is_ready: bool = False
    is_ordered: bool = False
    """True once the host was told to fetch it; then it reports a failure by itself."""
    gives_to: str | None = None
    """The host that copies it from there."""
    can_give: bool = True
    """False if the host cannot let others copy from it."""


@dataclass(slots=True)
class _Checkpoint:
    """A checkpoint that hosts want.

    files, folders: as :class:`~distrain.wire.Deliver` has them; files is None unless they are known. lock: keeps the
    checkpoint from being deleted. is_open: True from when the files are looked up until all hosts have them. queue:
    hosts that have to wait until somebody can send it to them. from_here: hosts that other hosts cannot reach.
    sent_to: the host that this machine sends it to.
    """

    path: str
    files: list[tuple[str, str, int, str]] | None = None
    folders: list[str] = field(default_factory=list)
    lock: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    is_open: bool = False
    copies: dict[str, _Copy] = field(default_factory=dict)
    queue: deque[str] = field(default_factory=deque)
    from_here: set[str] = field(default_factory=set)
    sent_to: str | None = None


class CheckpointCopies:
    """The copies of checkpoints on all hosts.

    addresses: by host, the address at which other hosts reach it, if that is known.
    """

    def __init__(self, hosts: HostFiles, thread: Background, *, addresses: Callable[[], Mapping[str, str]]) -> None:
        self._hosts = hosts
        self._thread = thread
        self._addresses = addresses
        self._wanted: dict[str, _Checkpoint] = {}
        self._count = 0

    @property
    def is_busy(self) -> bool:
        """True while a checkpoint is on its way to a host."""
        return any(not copy.is_ready for checkpoint in self._wanted.values() for copy in checkpoint.copies.values())

    def fetch(self, host: str, path: str, then: Then) -> None:
        """Bring a checkpoint to a host, and call ``then`` with where it is, or why it cannot be brought."""
        checkpoint = self._wanted.setdefault(path, _Checkpoint(path))
        copy = checkpoint.copies.get(host)
        if copy is None:
            self._count += 1  # a copy that is dropped is deleted later
            folder = f"{self._hosts.checkpoints_on(host)}/{Path(path).name}-{self._count}"
            copy = checkpoint.copies[host] = _Copy(folder)
            checkpoint.queue.append(host)
            if not checkpoint.is_open:
                checkpoint.is_open = True
                self._thread.do(partial(_look_up, checkpoint), partial(self._on_looked_up, checkpoint))
        copy.waiting.append(then)
        if copy.is_ready:
            self._answer(checkpoint, host)
        else:
            self._pump(checkpoint)

    def _on_looked_up(self, checkpoint: _Checkpoint, failed: str | None) -> None:
        if failed is None:
            self._go_on(checkpoint)
            return
        self._close(checkpoint)
        for host in list(checkpoint.queue):
            self._answer(checkpoint, host, failed)
            del checkpoint.copies[host]
        checkpoint.queue.clear()

    def _close(self, checkpoint: _Checkpoint) -> None:
        """Let the checkpoint be deleted: nobody reads it here any more."""
        checkpoint.lock.close()
        checkpoint.is_open, checkpoint.files = False, None

    # -- who sends to whom ----------------------------------------------------------------------------------------

    def _pump(self, checkpoint: _Checkpoint) -> None:
        """Let all senders that are free send to hosts that wait."""
        if checkpoint.files is None:
            return
        for host in list(checkpoint.queue):
            if host not in checkpoint.queue:  # an order that fails at once comes back here
                continue
            giver = None if host in checkpoint.from_here else self._free_giver(checkpoint)
            if giver is not None:
                checkpoint.queue.remove(host)
                self._give(checkpoint, giver, host)
            elif checkpoint.sent_to is None and self._must_send(checkpoint, host):
                checkpoint.queue.remove(host)
                self._send(checkpoint, host)

    def _free_giver(self, checkpoint: _Checkpoint) -> str | None:
        addresses = self._addresses()
        free = (
            host
            for host, copy in checkpoint.copies.items()
            if copy.is_ready and copy.can_give and copy.gives_to is None and addresses.get(host)
        )
        return next(free, None)

    def _must_send(self, checkpoint: _Checkpoint, host: str) -> bool:
        """Return whether only this machine can send a host the checkpoint."""
        addresses = self._addresses()
        givers = [
            other
            for other, copy in checkpoint.copies.items()
            if copy.is_ready and copy.can_give and addresses.get(other)
        ]
        return host in checkpoint.from_here or not givers

    def _send(self, checkpoint: _Checkpoint, host: str) -> None:
        copy = checkpoint.copies[host]
        checkpoint.sent_to, copy.is_ordered = host, True

        def done(failed: str | None) -> None:
            checkpoint.sent_to = None
            self._on_delivered(checkpoint, host, failed and f"{failed}{full_cache_hint(failed)}")

        self._hosts.deliver(host, self._order(checkpoint, host), done)

    def _order(self, checkpoint: _Checkpoint, host: str, peer: tuple[str, int, str] | None = None) -> wire.Deliver:
        return wire.Deliver(
            folder=checkpoint.copies[host].folder,
            files=checkpoint.files or [],
            staging=self._hosts.checkpoints_on(host),
            folders=checkpoint.folders,
            peer=peer,
        )

    def _give(self, checkpoint: _Checkpoint, giver: str, host: str) -> None:
        """Have ``host`` copy the checkpoint from ``giver``, which first has to listen."""
        source, copy, address = checkpoint.copies[giver], checkpoint.copies[host], self._addresses()[giver]
        source.gives_to = host

        def listening(answer: wire.Serving) -> None:
            if checkpoint.copies.get(host) is not copy:  # the host was lost
                return
            if answer.failed is not None:
                source.gives_to, source.can_give = None, False
                self._wait_again(checkpoint, host)
                return
            copy.is_ordered = True
            peer = (address, answer.port, answer.secret)
            self._hosts.deliver(host, self._order(checkpoint, host, peer), copied)

        def copied(failed: str | None) -> None:
            source.gives_to = None
            if failed is None:
                self._on_delivered(checkpoint, host, None)
            else:
                checkpoint.from_here.add(host)
                self._hosts.forget_serving(giver, source.folder)
                self._wait_again(checkpoint, host)

        self._hosts.serve(giver, source.folder, address, listening)

    def _wait_again(self, checkpoint: _Checkpoint, host: str) -> None:
        checkpoint.copies[host].is_ordered = False
        checkpoint.queue.append(host)
        self._pump(checkpoint)

    # -- the answers ----------------------------------------------------------------------------------------------

    def _on_delivered(self, checkpoint: _Checkpoint, host: str, failed: str | None) -> None:
        checkpoint.copies[host].is_ready = failed is None
        self._answer(checkpoint, host, failed)
        if failed is not None:
            del checkpoint.copies[host]
        else:
            self._drop_surplus(host, checkpoint)
        self._go_on(checkpoint)

    def _go_on(self, checkpoint: _Checkpoint) -> None:
        """Send to hosts that wait. If all have the checkpoint, let it be deleted."""
        self._pump(checkpoint)
        is_known = checkpoint.files is not None
        if is_known and not checkpoint.queue and all(copy.is_ready for copy in checkpoint.copies.values()):
            self._close(checkpoint)

    def _answer(self, checkpoint: _Checkpoint, host: str, failed: str | None = None) -> None:
        copy = checkpoint.copies[host]
        waiting, copy.waiting = copy.waiting, []
        for then in waiting:
            then(wire.CheckpointFetched(attempt=0, rank=0, path=checkpoint.path, folder=copy.folder, failed=failed))

    def _drop_surplus(self, host: str, latest: _Checkpoint) -> None:
        """Have a host delete checkpoints that it does not need any more: all but the first and the latest."""
        there = [checkpoint for checkpoint in self._wanted.values() if host in checkpoint.copies]
        for checkpoint in there[1:]:
            copy = checkpoint.copies[host]
            if checkpoint is not latest and copy.is_ready and copy.gives_to is None:
                self._hosts.drop_checkpoint(host, checkpoint.copies.pop(host).folder)

    def lost(self, host: str) -> None:
        """Forget a host that was lost. Its mover answers nothing any more."""
        for checkpoint in list(self._wanted.values()):
            copy = checkpoint.copies.pop(host, None)
            if copy is None:
                continue
            checkpoint.from_here.discard(host)
            with contextlib.suppress(ValueError):
                checkpoint.queue.remove(host)
            if checkpoint.sent_to == host:
                checkpoint.sent_to = None
            for other in checkpoint.copies.values():
                if other.gives_to == host:
                    other.gives_to = None
            taker = checkpoint.copies.get(copy.gives_to or "")
            if taker is not None and not taker.is_ordered:  # else its own mover sees the end of the connection
                checkpoint.queue.append(copy.gives_to or "")
            self._go_on(checkpoint)

    def close(self) -> None:
        """Release all checkpoints."""
        for checkpoint in self._wanted.values():
            checkpoint.lock.close()


def _look_up(checkpoint: _Checkpoint) -> str | None:
    """Find the files of a checkpoint, and keep it from being deleted. Return why that is not possible, or None."""
    folder = Path(checkpoint.path)
    try:
        checkpoint.lock.enter_context(locked_for_reading(folder))
        known = recorded_files(folder)
        names = list_files(folder)
        found = known | {
            name: (size, crc) for name, size, crc in hash_files(folder, [n for n in names if n not in known])
        }
        checkpoint.folders = [
            str(Path(parent, inner).relative_to(folder))
            for parent, inners, _ in os.walk(folder, followlinks=True)
            for inner in inners
        ]
        checkpoint.files = [(str(folder / name), name, found[name][0], f"crc32:{found[name][1]}") for name in names]
    except (OSError, CheckpointError) as error:
        return f"the checkpoint {folder} cannot be read: {error}"
    return None
