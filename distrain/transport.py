"""How to start a program on a host. The only module that knows whether a host is local. Runs in: coordinator."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LocalTransport", "PrefixTransport", "Transport"]


class Transport(Protocol):
    """A way to a host: it turns a command line for that host into one for this machine, whose stdin and stdout are the
    wire. ``lease_s``: seconds without a sign of life after which either side takes the other for dead."""

    @property
    def name(self) -> str: ...

    @property
    def lease_s(self) -> float: ...

    def argv(self, command: Sequence[str]) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class LocalTransport:
    """This machine. The lease is long: the agent sees the death of its parent directly, and a user who suspends the
    coordinator with Ctrl-Z expects to find the training there when it goes on."""

    name: str = "localhost"
    lease_s: float = 24 * 3600.0

    def argv(self, command: Sequence[str]) -> list[str]:
        return list(command)


@dataclass(frozen=True, slots=True)
class PrefixTransport:
    """A host behind a program that takes a shell command as its last argument, such as ``ssh -T host``."""

    name: str
    prefix: tuple[str, ...]
    lease_s: float = 15.0

    def argv(self, command: Sequence[str]) -> list[str]:
        return [*self.prefix, shlex.join(command)]
