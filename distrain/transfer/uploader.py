"""The process that stores checkpoints while the workers train, and mirrors the spool of a remote run.

Runs in: uploader.

An agent starts one with the first order for it, a coordinator with a remote run directory starts another one. Orders
come in on stdin. Answers go out on stdout, in the order of the orders. The process ends with its parent.
"""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING

from distrain import wire
from distrain.errors import StorageError
from distrain.storage.run_lock import Heartbeats
from distrain.system.remote_path import report_retries_to
from distrain.transfer.executor import StorageExecutor
from distrain.wire.child_link import channel_to_parent

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrain.wire.channel import Channel

_MIRROR_S = 10.0
"""Seconds to wait after the spool was mirrored before it is mirrored again."""
_MIRROR_SHARE = 0.1
"""The largest share of the time to spend on mirroring."""


def main(arguments: list[str]) -> None:
    """Run the uploader. ``arguments``: the pid of the parent."""
    _Uploader(channel_to_parent(arguments[0])).run()


class _Uploader:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._executor = StorageExecutor(notify=self._notify)
        self._mirror_at: float | None = None
        self._failing: set[str] = set()
        """Actions that failed the last time, in words."""

    def run(self) -> None:
        report_retries_to(self._notify)
        while not self._channel.at_end:
            left_s = None if self._mirror_at is None else max(0.0, self._mirror_at - time.monotonic())
            for frame in self._channel.wait(left_s):
                order = frame.message()
                answer = self._executor.do(order)
                self._channel.send(answer)
                if isinstance(order, wire.OpenStorage) and order.spool and answer == wire.OrderDone():
                    self._mirror_at = time.monotonic()
                    complaint = "the heartbeat of the run cannot be written"
                    Heartbeats(partial(self._try, self._executor.beat, complaint))  # as an order may take long
            if self._mirror_at is not None and time.monotonic() >= self._mirror_at:
                self._mirror()

    def _notify(self, text: str) -> None:
        self._channel.send(wire.Notice(text=text))

    def _mirror(self) -> None:
        began = time.monotonic()
        with contextlib.suppress(OSError, StorageError):
            self._try(self._executor.mirror, "the remote run directory is not up to date for now")
        ended = time.monotonic()
        self._mirror_at = ended + max(_MIRROR_S, (ended - began) / _MIRROR_SHARE)

    def _try(self, action: Callable[[], None], complaint: str) -> None:
        """Do what is done again and again. Tell the coordinator of the first failure in a row, and raise any."""
        try:
            action()
            self._failing.discard(complaint)
        except StorageError as error:
            self._channel.send(wire.HostFailed(text=str(error)))
            raise
        except OSError as error:
            if complaint not in self._failing:
                self._notify(f"{complaint}: {error}")
            self._failing.add(complaint)
            raise
