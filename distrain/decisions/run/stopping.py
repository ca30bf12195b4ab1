"""The stop of an attempt: the orders to its agents and ranks, and the line for the user. Runs in: coordinator.

Pure: no I/O, no clock. The machine decides when: it sends what is returned here.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from distrain import wire
from distrain.decisions.events import ShowLine
from distrain.decisions.run.stop_consensus import StopConsensus
from distrain.system.text import BY_COMMAND, signal_of, stopped_by

if TYPE_CHECKING:
    from collections.abc import Collection

    from distrain.decisions.events import RunRequest

STOP_TIMEOUT_S = 10.0
"""Seconds, beyond the grace, to wait for hosts to end all processes of an attempt before the run gives them up."""
LEASE_MARGIN_S = 2.0
"""Seconds between the expiry of a silent host's lease and the moment when the coordinator surely knows of it."""
TERM_GRACE_S = 2.0
"""Seconds to SIGKILL for ranks that get a signal after others were in vain: should_stop(), or another signal."""


class Stopping:
    """The wish of the user that the run should stop, and the end of one attempt after the other."""

    def __init__(self, request: RunRequest) -> None:
        self._request = request
        self.reason: str | None = None
        """The reason for which the user asked the run to stop."""
        self.forbids_retry = False
        """True if the user asked for that after the attempt had failed: then the run ends with the failure."""
        self.save_by = math.inf
        """Until when ranks may save because the user wants the run to stop."""
        self.grace_is_over = False
        """True once ranks were sent SIGTERM because they had not ended in their grace."""
        self.begin(request.first_attempt - 1)

    def begin(self, attempt: int) -> None:
        """Begin with an attempt that nobody stops yet."""
        self._attempt = attempt
        self.consensus = StopConsensus(attempt)
        self._order: wire.Stop | None = None
        """The latest one."""
        self._signalled: set[str] = set()

    @property
    def was_asked(self) -> bool:
        """True if the user has asked the run to stop, even if it ends because it had failed before."""
        return self.reason is not None or self.forbids_retry

    @property
    def lets_save(self) -> bool:
        """True if ranks that should stop learn it from should_stop() first, and can save a checkpoint."""
        return bool(self.consensus.callers and self._request.stop_grace_s)

    def was_told(self, host: str) -> bool:
        """Return whether the ranks of a host were told to end by a signal, and may do so by themselves."""
        return host in self._signalled

    # -- what agents are told -------------------------------------------------------------------------------------

    def order(self, grace_s: float = 0.0, *, culprit_known: bool = True, last_grace_s: float = 0.0) -> wire.Stop:
        """Return an order to stop all processes of the attempt: at once, unless they have a grace."""
        return wire.Stop(
            attempt=self._attempt,
            grace_s=grace_s,
            last_grace_s=last_grace_s,
            exit_grace_s=0.0 if self.was_asked else self._request.stop_grace_s,
            culprit_known=culprit_known,
            reason=self.reason or "",
        )

    def signal_order(self, grace_s: float) -> wire.Stop:
        """Return the order to stop the ranks by the signal that came; at last by SIGTERM those that do not end."""
        assert self.reason is not None
        if not grace_s:
            return self.order()
        name = signal_of(self.reason)
        return replace(self.order(grace_s, last_grace_s=0.0 if name == "SIGTERM" else TERM_GRACE_S), signal=name)

    def note_order(self, order: wire.Stop, hosts: Collection[str]) -> float:
        """Note that hosts get an order. Return the seconds to wait for them to end all processes.

        Wait at least until every remote lease has expired: a silent host then counts as lost, and the next attempt may
        run without it.
        """
        self._order = order
        self._signalled.update(hosts if order.signal else ())
        settings = [self._request.hosts[host] for host in hosts if not self.was_asked]
        leases_s = [host.lease_s + LEASE_MARGIN_S for host in settings if not host.is_local]
        return order.grace_s + max(order.last_grace_s, order.exit_grace_s) + max([STOP_TIMEOUT_S, *leases_s])

    def note_last_stacks(self, host: str) -> None:
        """Note that the ranks of a host get SIGTERM now: ends of ranks that arrived before were not due to it."""
        self.grace_is_over = self.was_asked
        if self._order and self._order.last_grace_s:
            self._signalled.add(host)

    # -- what the user is told ------------------------------------------------------------------------------------

    def announcement(self) -> ShowLine:
        """Say how the ranks are stopped that train."""
        grace = f"{self._request.stop_grace_s:g} s"
        if self.lets_save:
            text = f"the run stops; the workers have {grace} to save a checkpoint"
        elif self._request.is_script:
            text = f"passed on to the workers, which have {grace} to end"
        else:
            text = f"the run stops within {grace}"
            if not self.consensus.callers:
                text += "; no checkpoint is saved because no rank has called should_stop()"
        return self.say(text)

    def say(self, text: str, more: str = "kills the workers now") -> ShowLine:
        """Say what happens, and what happens if the user asks again."""
        assert self.reason is not None
        pressed = stopped_by(self.reason)
        again = "Ctrl-C" if self.reason == BY_COMMAND else f"{pressed} again"
        return ShowLine(f"{pressed}: {text}. {again} {more}")
