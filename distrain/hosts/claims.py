"""Claims of jobs on the GPUs and slots of this host. Runs in: side of a job, agent.

A claim is a socket that listens in Linux's abstract namespace (unix(7)). The kernel gives a name to one socket only,
whichever user asks, and frees it when the last process that holds the socket has ended: no file can be left behind, and
nobody has to clean up. The side of a job takes the claims. The agent of its run gets copies, and so does the agent's
guard: the claims last until the workers are gone, however the processes end.
"""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from distrain.system.process import user_of_peer
from distrain.system.text import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distrain.hosts.host import HostInfo

CLAIM = "DISTRAIN_CLAIM"
"""Environment variable of an agent: the name of a claim of its job, or :data:`NO_CLAIM`."""
NO_CLAIM = "force"
"""The agent uses GPUs that jobs have claimed."""
_PATIENCE_S = 2.0
_MOST_BYTES = 4096
_MOST_COPIES = 250
"""Descriptors that the kernel passes in one message."""
_UNKNOWN = "a job"


class Claims:
    """The claims of one job on this host. label: tells others whose they are."""

    def __init__(self, label: str) -> None:
        self._label = label.encode()[:_MOST_BYTES]
        self.sockets: list[socket.socket] = []

    def take(self, names: Sequence[str]) -> bool:
        """Claim all of these names, or none. Return False if another job has one of them."""
        with ExitStack() as stack:
            taken = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in names]
            try:
                for one, name in zip(taken, names, strict=True):
                    one.bind(_address(name))
                    one.listen()
            except OSError:
                return False
            stack.pop_all()
        self.sockets += taken
        return True

    def answer(self, asked: socket.socket) -> None:
        """Tell who asks whose the claims are. A process of the same user gets copies of them."""
        with asked.accept()[0] as asker:
            is_own = user_of_peer(asker.fileno()) == os.geteuid()
            copies = [one.fileno() for one in self.sockets] if is_own else []
            with suppress(OSError):  # it has not waited
                socket.send_fds(asker, [self._label], copies[:_MOST_COPIES])


def holder_of(name: str) -> str | None:
    """Return the label of the job that has claimed a name, or None if nobody has."""
    with socket.socket(socket.AF_UNIX) as asker:
        asker.settimeout(_PATIENCE_S)
        try:
            asker.connect(_address(name))
        except ConnectionRefusedError:
            return None
        except OSError:  # many ask at the same time
            return _UNKNOWN
        try:
            return asker.recv(_MOST_BYTES).decode(errors="replace") or _UNKNOWN
        except OSError:  # the side of the job has ended; its agent still has the claim
            return _UNKNOWN


def share_claims() -> None:
    """Hold the claims of this agent's job for as long as it lives. Raise SystemExit if they are lost."""
    name = os.environ.get(CLAIM, NO_CLAIM)
    if name == NO_CLAIM:
        return
    with socket.socket(socket.AF_UNIX) as asker:
        asker.settimeout(_PATIENCE_S)
        try:
            asker.connect(_address(name))
            copies = socket.recv_fds(asker, _MOST_BYTES, _MOST_COPIES)[1]
        except OSError:
            copies = []
    if not copies:
        raise SystemExit(f"the claim of this job on {name} is lost: the process that held it has ended")


def leave_claimed(host: HostInfo) -> HostInfo:
    """Hide the GPUs that jobs have claimed from this process and its workers. Agents of a job use all that they see."""
    if CLAIM in os.environ or not host.gpus:
        return host
    holders = {gpu: holder for gpu in host.gpus if (holder := holder_of(gpu.uuid))}
    if not holders:
        return host
    left = tuple(gpu for gpu in host.gpus if gpu not in holders)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in left)
    named = ", ".join(dict.fromkeys(holders.values()))
    text = f"{count(len(holders), 'GPU')} left to {named}; --force uses them all the same, --wait waits for them"
    return replace(host, gpus=left, driver_problem="; ".join(filter(None, (host.driver_problem, text))))


def _address(name: str) -> str:
    return f"\0distrain/{name}"
