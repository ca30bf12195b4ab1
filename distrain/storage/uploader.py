"""Stores checkpoints while the workers train on, and keeps a run directory elsewhere up to date. Runs in: uploader.

Started by an agent, when it is first needed, or by a coordinator whose run directory is elsewhere. Orders come in on
stdin, answers go out on stdout, in the order of the orders. It ends with who started it.
"""

from __future__ import annotations

import signal
import threading
import time

from distrain import wire
from distrain.errors import StorageError
from distrain.storage.executor import StorageExecutor
from distrain.storage.run_lock import BEAT_S
from distrain.system import process
from distrain.system.remote_path import tell_troubles_to
from distrain.wire.channel import Channel

_MIRROR_S = 10.0
_MIRROR_SHARE = 0.1
"""Of the time, at most."""


def main(arguments: list[str]) -> None:
    """``arguments``: the pid of the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process.die_with_parent(int(arguments[0]))
    _Uploader(Channel(*process.private_stdio())).run()


class _Uploader:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._keeper = StorageExecutor(tell=self._tell)
        self._mirror_at: float | None = None
        self._complained = False

    def run(self) -> None:
        tell_troubles_to(self._tell)
        while not self._channel.at_end:
            left_s = None if self._mirror_at is None else max(0.0, self._mirror_at - time.monotonic())
            for frame in self._channel.wait(left_s):
                order = frame.message()
                answer = self._keeper.do(order)
                self._channel.send(answer)
                if isinstance(order, wire.OpenStorage) and order.spool and answer == wire.StorageOpened():
                    self._mirror_at = time.monotonic()
                    threading.Thread(target=self._beat, daemon=True).start()
            if self._mirror_at is not None and time.monotonic() >= self._mirror_at:
                self._mirror()

    def _tell(self, text: str) -> None:
        self._channel.send(wire.Notice(text=text))

    def _mirror(self) -> None:
        began = time.monotonic()
        try:
            self._keeper.mirror()
            self._complained = False
        except StorageError as error:
            self._channel.send(wire.HostFailed(text=str(error)))
        except OSError as error:
            if not self._complained:
                self._channel.send(wire.Notice(text=f"the run directory is behind for now: {error}"))
            self._complained = True
        ended = time.monotonic()
        self._mirror_at = ended + max(_MIRROR_S, (ended - began) / _MIRROR_SHARE)

    def _beat(self) -> None:
        """In a thread of its own, as bringing a large file may take its time."""
        complained = False
        while True:
            time.sleep(BEAT_S)
            try:
                self._keeper.beat()
                complained = False
            except StorageError as error:
                self._channel.send(wire.HostFailed(text=str(error)))
                return
            except OSError as error:
                if not complained:
                    self._channel.send(wire.Notice(text=f"the run cannot show that it is alive: {error}"))
                complained = True
