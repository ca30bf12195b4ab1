"""Checkpoints that hosts without the storage read: copied to each host once. Runs in: coordinator."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from distrain import wire
from distrain.coordinator.host_files import full_cache_hint
from distrain.decisions.checkpoints.actions import BringTo
from distrain.decisions.events import HostLost
from distrain.decisions.hearing import does

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrain.coordinator.host_files import HostFiles

    Then = Callable[[str, str | None], None]


@dataclass(slots=True)
class _Copy:
    """A checkpoint on one host, or on its way there. waiting: is told where it is."""

    path: str
    folder: str
    waiting: list[Then] = field(default_factory=list)
    is_ready: bool = False


class CheckpointCopies:
    """The copies of checkpoints on all hosts."""

    def __init__(self, hosts: HostFiles) -> None:
        self._hosts = hosts
        self._copies: dict[str, list[_Copy]] = {}
        """By host, in the order in which they were asked for."""
        self._count = 0

    @property
    def is_busy(self) -> bool:
        """True while a checkpoint is on its way to a host."""
        return any(not copy.is_ready for copies in self._copies.values() for copy in copies)

    @does(BringTo)
    def fetch(self, asked: BringTo) -> None:
        """Copy a checkpoint to a host."""
        host, path, then = asked.host, asked.path, asked.then
        copies = self._copies.setdefault(host, [])
        copy = next((copy for copy in copies if copy.path == path), None)
        if copy is not None:
            copy.waiting.append(then)
            if copy.is_ready:
                self._answer(copy)
            return
        self._count += 1  # a copy that is dropped is deleted later
        staging = self._hosts.checkpoints_on(host)
        copy = _Copy(path, f"{staging}/{Path(path).name}-{self._count}", [then])
        copies.append(copy)
        order = wire.Deliver(folder=copy.folder, root=path, staging=staging, is_checkpoint=True)
        self._hosts.deliver(host, order, partial(self._on_delivered, host, copy))

    def _on_delivered(self, host: str, copy: _Copy, failed: str | None) -> None:
        copy.is_ready = failed is None
        if failed is not None:
            self._copies[host].remove(copy)
            failed += full_cache_hint(failed)
        self._answer(copy, failed)
        if failed is None:
            self._drop_surplus(host, copy)

    def _answer(self, copy: _Copy, failed: str | None = None) -> None:
        waiting, copy.waiting = copy.waiting, []
        for then in waiting:
            then(copy.folder, failed)

    def _drop_surplus(self, host: str, latest: _Copy) -> None:
        """Have a host delete checkpoints that it no longer needs: all but the first and the latest."""
        for copy in self._copies[host][1:]:
            if copy is not latest and copy.is_ready:
                self._copies[host].remove(copy)
                self._hosts.drop_checkpoint(host, copy.folder)

    @does(HostLost)
    def lost(self, lost: HostLost) -> None:
        """Forget a host that was lost. Its mover no longer answers."""
        self._copies.pop(lost.host, None)
