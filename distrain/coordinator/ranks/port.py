"""The port between a run and the place where its ranks live. Runs in: coordinator.

A run knows hosts, and exchanges messages with them (:mod:`distrain.wire.messages`): it connects a host, which answers
``Hello``; it has ports reserved, starts ranks, asks for their stacks, stops them, and hears what they report and how
they end. It does not know how these messages travel, nor who answers them. There are three kinds of ranks:

- :class:`~distrain.coordinator.connection.connections.Connections`: distrain starts them, and agents answer.
- :class:`~distrain.coordinator.ranks.joined.JoinedRanks`: another launcher, such as torchrun, has started them.
- :class:`~distrain.coordinator.ranks.in_process.InProcessRank`: ``num_workers=0``. train_func runs in this process.

The last two are :class:`~distrain.coordinator.ranks.adopted.AdoptedRanks`, which answer as an agent would. A new kind
of ranks implements :class:`Ranks`; the run needs no change for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from distrain import wire
    from distrain.decisions.events import HostLost
    from distrain.system.loop import Loop


class Ranks(Protocol):
    """The ranks of a run, on one or several hosts."""

    @property
    def errors(self) -> Mapping[int, BaseException]:
        """The exceptions that were raised in this process, by rank. Those of other processes are pickled."""

    def drive(self, run: Callable[[], None]) -> None:
        """Call ``run``, which returns when the run has ended: here, or in a thread if this thread has to be a rank."""

    def open(
        self, loop: Loop, on_message: Callable[[str, wire.Message], None], on_lost: Callable[[HostLost], None]
    ) -> None:
        """Begin the run: use this loop from now on, and end what an earlier part of the run has left behind.

        Called in the thread of the loop. No callback is called before the loop's next step.

        on_message: gets the name of a host and its message.
        on_lost: gets the loss of a host. Nothing more comes from it until :meth:`connect`.
        """

    def connect(self, name: str) -> None:
        """Connect a host. It answers with ``Hello``, or is lost."""

    def send(self, name: str, message: wire.Message) -> None:
        """Send a message to a host, or to a rank on it, unless the host is lost."""

    def stream_argv(self, name: str) -> list[str]:
        """Return the command line that starts a stream server on a host that shares no files with this one."""

    def close(self, *, keep: bool) -> None:
        """End the connections at the end of the run. ``keep``: a later run may use what is there."""
