"""The orders to hosts when an attempt begins: the job, and the ranks to start.

Runs in: coordinator.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from distrain import wire
from distrain.decisions.events import SendMessage
from distrain.decisions.placement import fields_of, prepare_message, rendezvous_address, worker_spec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from distrain.decisions.events import RunRequest
    from distrain.hosts.world import WorldPlan


class Launch:
    """The launch of one attempt after the other. Set ``meeting_point``."""

    def __init__(self, request: RunRequest) -> None:
        self._request = request
        self._prepared: dict[str, int] = {}
        """The hosts that know the job, and for how many workers they are prepared."""
        self.meeting_point: wire.RendezvousPort | None = None
        """What rank 0's host has answered in this attempt."""

    def forget(self, host: str) -> None:
        """Note that a host no longer knows the job."""
        self._prepared.pop(host, None)

    def prepare(self, plan: WorldPlan) -> list[SendMessage]:
        """Send the job to hosts that do not have it, or are prepared for another number of workers."""
        workers = {host: len(plan.on(host)) for host in plan.hosts}
        new = [host for host in plan.hosts if self._prepared.get(host) != workers[host]]
        self._prepared |= workers
        orders: list[SendMessage] = []
        latest: wire.Prepare | None = None
        for host in new:
            message = prepare_message(self._request, host, workers[host])
            latest = latest if message == latest else message  # equal ones are encoded once
            orders.append(SendMessage(host, latest))
        return orders

    def reserve(self, plan: WorldPlan, attempt: int) -> SendMessage:
        """Reserve the port of the rendezvous on rank 0's host.

        Each attempt has a new one, so that no rank can connect to a process of an earlier attempt.
        """
        host = plan.hosts[0]
        return SendMessage(host, wire.ReservePort(attempt=attempt, peer=plan.peer_of(host)))

    def start(
        self, plan: WorldPlan, attempt: int, checkpoint: str | None, skip_to: Mapping[str, Any]
    ) -> list[SendMessage]:
        """Start the ranks of all hosts. Raise LaunchError if hosts cannot reach each other."""
        assert self.meeting_point is not None
        given = self._request.hosts[plan.hosts[0]].environment.get("MASTER_ADDR")
        address = rendezvous_address(plan, wanted=given, found=self.meeting_point.address)
        meeting = replace(self.meeting_point, address=address)
        spec_of = partial(worker_spec, self._request, plan, checkpoint=checkpoint, skip_to=skip_to, meeting=meeting)
        named = "" if plan.shares_network else address
        ranks = {host: [fields_of(spec_of(rank)) for rank in plan.on(host)] for host in plan.hosts}
        return [
            SendMessage(host, wire.Start(attempt=attempt, ranks=specs, rendezvous=named))
            for host, specs in ranks.items()
        ]
