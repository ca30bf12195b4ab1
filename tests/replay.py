"""Ranks that are played from a recording, in memory: an implementation of ``Ranks`` for tests of the coordinator."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from distrain import wire
from distrain.decisions.events import HostLost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from distrain.system.loop import Loop

Recorded: TypeAlias = "tuple[str, wire.Message] | HostLost"


class ReplayedRanks:
    """Play the messages of one life of the run after the other: those of the n-th when its ranks are started.

    hosts: those that answer, until they are lost. ``heard``: what the run has sent, by host.
    """

    def __init__(self, hosts: Iterable[str], *lives: Sequence[Recorded]) -> None:
        self.heard: list[tuple[str, wire.Message]] = []
        self.errors: dict[int, BaseException] = {}
        self.is_closed = False
        self._hosts = list(hosts)
        self._lives = deque(lives)
        self._alive: dict[int, str] = {}
        self._attempt = -1
        self._due: deque[Recorded] = deque()

    def drive(self, run: Callable[[], None]) -> None:
        run()

    def begin(
        self, loop: Loop, on_message: Callable[[str, wire.Message], None], on_lost: Callable[[HostLost], None]
    ) -> None:
        self._loop, self._on_message, self._on_lost = loop, on_message, on_lost

    def open(self) -> None:
        """Nothing is left of an earlier run."""

    def connect(self, name: str) -> None:
        self._say((name, _HELLO) if name in self._hosts else HostLost(name, "it does not answer"))

    def stream_argv(self, name: str) -> list[str]:
        raise NotImplementedError

    def close(self, *, keep: bool) -> None:
        self.is_closed = True

    def send(self, name: str, message: wire.Message) -> None:
        self.heard.append((name, message))
        match message:
            case wire.ReservePorts(attempt=attempt, ports=ports):
                self._say((name, wire.RendezvousPorts(attempt=attempt, ports=[1] * ports)))
            case wire.Start(attempt=attempt):
                for spec in message.ranks:
                    self._alive[spec["rank"]] = name
                if attempt != self._attempt:
                    self._attempt = attempt
                    self._loop.call_in("life", 0.0, self._play)
            case wire.Release(attempt=attempt, rank=rank):
                self._say((name, wire.Exited(attempt=attempt, rank=rank, exit_code=0)))
            case wire.Stop(attempt=attempt):
                for rank in [rank for rank, host in self._alive.items() if host == name]:
                    self._say((name, wire.Exited(attempt=attempt, rank=rank, signal=9, by_us=True)))
                self._say((name, wire.HostIdle(attempt=attempt)))

    def _play(self) -> None:
        for one in self._lives.popleft():
            self._say(one if isinstance(one, HostLost) else (one[0], replace(one[1], attempt=self._attempt)))

    def _say(self, one: Recorded) -> None:
        """Let the run hear this in the next step of the loop."""
        self._due.append(one)
        self._loop.call_in("said", 0.0, self._deliver)

    def _deliver(self) -> None:
        while self._due:
            one = self._due.popleft()
            if isinstance(one, HostLost):
                self._alive = {rank: host for rank, host in self._alive.items() if host != one.host}
                self._hosts = [host for host in self._hosts if host != one.host]
                self._on_lost(one)
                continue
            host, message = one
            self._on_message(host, message)
            is_end = isinstance(message, wire.Exited) and self._alive.pop(message.rank, None) is not None
            if is_end and host not in self._alive.values():
                self._on_message(host, wire.HostIdle(attempt=self._attempt))


_HELLO = wire.Hello(
    wire=wire.WIRE_VERSION,
    distrain=wire.DISTRAIN_VERSION,
    python="3.11",
    pid=1,
    cpus=8,
    memory_bytes=0,
    gpus=None,
    network="here",
)
