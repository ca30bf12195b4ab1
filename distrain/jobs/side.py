"""The side of a job: a process on each host that it may use, which looks for free GPUs, and claims them.

Another one serves the directory of the queue, if that is on another machine. It ends with the connection to the waiter,
or after a silence. Runs in: side.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import signal
from functools import partial
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.errors import DistrainError
from distrain.hosts.claims import Claims, holder_of
from distrain.hosts.gpu_health import gpu_health
from distrain.hosts.gpus import find_gpus
from distrain.hosts.host_info import usable_cpus
from distrain.jobs.desk import Desk
from distrain.system import process
from distrain.system.loop import Loop
from distrain.wire.channel import Channel

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrain.hosts.gpu_health import GpuHealth

SILENCE_S = 15.0
"""Seconds without a sign of life of the waiter after which its claims here end, but for those that an agent shares."""
_HIDDEN_BYTES = 1 << 30
"""Memory of a GPU that is taken, although no process can be seen, from which on it counts as used."""


def main(arguments: list[str]) -> None:
    """Serve a waiter. arguments: the label of its claims."""
    Side(arguments[0]).run()


class Side:
    """The host, as a job sees it. Its methods without underscore answer the requests of these names."""

    def __init__(self, label: str) -> None:
        self._loop = Loop()
        self._up = Channel(*process.private_stdio())
        self._claims = Claims(label)
        self._desk: Desk | None = None

    def run(self) -> None:
        """Answer requests until the waiter is gone."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._up.queue(wire.MAGIC + wire.encode(wire.Ping()))
        self._up.attach(self._loop, self._on_frames)
        self._check()
        self._loop.run()

    def _check(self) -> None:
        if self._loop.silence_s(self._up.heard_at) > SILENCE_S:
            self._loop.stop()
        self._loop.call_in("check", 1.0, self._check)

    def _on_frames(self, frames: list[wire.Frame]) -> None:
        for frame in frames:
            asked = frame.message()
            if isinstance(asked, wire.Ask):
                self._up.queue(self._answer(asked))
        if not frames:
            self._loop.stop()

    def _answer(self, asked: wire.Ask) -> wire.OrderDone:
        try:
            found = getattr(self, asked.what)(**json.loads(asked.body))
            return wire.OrderDone(body=json.dumps(found).encode())
        except (OSError, DistrainError) as error:
            return wire.OrderDone(failed=str(error))

    # -- requests -------------------------------------------------------------------------------------------------

    def look(self, *, kind: str, slots: int | None) -> dict[str, Any]:
        """Return who uses each GPU or slot, by name (empty: nobody), and the products of GPUs.

        kind: ``gpu`` or ``slot``. slots: the number of the latter; None for one for each CPU.
        """
        if kind == "slot":
            names = [f"slot-{number}" for number in range(slots or usable_cpus())]
            return {"users": {name: holder_of(name) or "" for name in names}, "products": {}}
        gpus, _ = find_gpus(os.environ)
        strangers = {one.uuid: _users_of(one) for one in gpu_health({gpu.uuid for gpu in gpus})}
        users = {gpu.uuid: holder_of(gpu.uuid) or strangers.get(gpu.uuid, "") for gpu in gpus}
        return {"users": users, "products": {gpu.uuid: gpu.name for gpu in gpus}}

    def claim(self, *, names: list[str]) -> bool:
        """Claim all of these names, or none. Return False if another job has one of them."""
        taken = self._claims.take(names)
        for one in self._claims.sockets if taken else ():
            self._loop.on_readable(one.fileno(), partial(self._claims.answer, one))
        return taken

    def desk(self, *, folder: str, method: str, arguments: list[Any]) -> Any:
        """Call a method of the queue in a directory of this machine."""
        self._desk = self._desk or Desk(folder)
        call: Callable[..., Any] = getattr(self._desk, method)
        return call(*arguments)


def _users_of(gpu: GpuHealth) -> str:
    """Return who uses a GPU: the processes with their users, or empty."""
    found = [f"{_user_of(shown)} {shown}".strip() for shown in gpu.processes]
    if not found and gpu.memory_bytes - gpu.free_bytes > _HIDDEN_BYTES:
        return "processes that cannot be seen"
    return ", ".join(found)


def _user_of(shown: str) -> str:
    """Return the user of ``python (pid 4711)``; empty if unknown."""
    try:
        pid = re.findall(r"\d+", shown)[-1]
        return pwd.getpwuid(os.stat(f"/proc/{pid}").st_uid).pw_name
    except (OSError, KeyError, IndexError):
        return ""
