"""Checks of hosts: of the other machines while workers start, or of all hosts instead of that. Runs in: coordinator."""

from __future__ import annotations

import os
import sys
import time
import uuid
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from distrain import wire
from distrain.decisions import events
from distrain.decisions.events import SendMessage
from distrain.decisions.hearing import does, hears
from distrain.decisions.host_checks import ANSWER_TIMEOUT_S, Finding, HostChecks, must_connect
from distrain.hosts.inspection import package_versions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from distrain.coordinator.host_files import HostFiles
    from distrain.decisions.events import RunRequest
    from distrain.hosts.world import WorldPlan


@dataclass(eq=False)
class LaunchChecks:
    """Check versions and connections of hosts while their first workers import, so that it costs no time.

    Hosts that join later, or again, are checked when they join.

    files: knows what the user's code imports, and how to reach the hosts. report: gets the problems of hosts.
    """

    request: RunRequest
    files: HostFiles
    report: Callable[[Finding], None]

    def __post_init__(self) -> None:
        self._checks = HostChecks({}, {}, nonce="")
        self._checked: set[str] = set()
        self._must_connect = must_connect(self.request)
        self.asked_at = 0.0
        """When the hosts were asked, in seconds since the epoch."""
        self._preparing: WorldPlan | None = None
        """The plan to check, while a thread looks up the versions of this machine."""

    @does(events.WorkersStart)
    def begin(self, starts: events.WorkersStart) -> None:
        """Check the hosts whose workers are starting. This machine alone needs no checks."""
        plan = starts.plan
        is_local = all(self.request.hosts[host].is_local for host in plan.hosts)
        if (is_local and not self.request.checks_hosts) or self._checked.issuperset(plan.hosts):
            return
        self._checked.update(plan.hosts)
        self._preparing = plan
        self.files.background.do(self._find_own_versions, partial(self._ask, plan))

    def _find_own_versions(self) -> Mapping[str, str | None]:
        """Return the versions of packages that this machine has, of those that are called as their modules."""
        path = [os.fspath(entry) for entry in sys.path]
        found = package_versions(dict.fromkeys([*self._needed, *self.files.imports()]), path)
        return {name: version for name, version in found.items() if version}

    @property
    def _needed(self) -> list[str]:
        """The packages without which no worker runs."""
        return [name for name in (self.request.backend.framework, "cloudpickle") if name]

    def _ask(self, plan: WorldPlan, own_versions: Mapping[str, str | None]) -> None:
        if plan is not self._preparing:  # a host was lost meanwhile
            return
        self._preparing = None
        self.asked_at = time.time()
        self._checks = HostChecks(
            {
                host: wire.ProbeHost(
                    nonce="",
                    packages=list(own_versions),
                    sys_path=list(self.request.hosts[host].sys_path),
                    is_thorough=self.request.checks_hosts,
                    folder=self.request.storage_path,
                )
                for host in plan.hosts
            },
            {} if plan.shares_network else dict(zip(plan.hosts, plan.addresses, strict=True)),
            own_versions=own_versions,
            imported=own_versions.keys() - {*self._needed},
            nonce=uuid.uuid4().hex,
            must_connect=self._must_connect,
        )
        self._carry_out(self._checks.begin())
        self.files.loop.call_in("checks", ANSWER_TIMEOUT_S, self._time_out)

    @does(events.HangDetected)
    def forget(self, _: events.HangDetected) -> None:
        """Check all hosts again when the next attempt starts: the network may have failed.

        It may also come back, so a connection that fails then is only warned of.
        """
        self._checked.clear()
        self._must_connect = False

    @property
    def is_under_way(self) -> bool:
        """True while answers are missing."""
        return not self._checks.is_done or self._preparing is not None

    @hears(wire.HostProbed)
    def handle(self, host: str, answer: wire.HostProbed) -> None:
        """Take the answer of a host."""
        self._carry_out(self._checks.handle(host, answer))

    @does(events.HostLost)
    def lost(self, lost: events.HostLost) -> None:
        """Stop waiting for a lost host. It is checked again when it is back; all are, if any check was still open."""
        host = lost.host
        if self.is_under_way:
            self._checked.clear()
            self._preparing = None
        self._checked.discard(host)
        self._carry_out(self._checks.remove(host))

    def _time_out(self) -> None:
        """Report the hosts that have not answered, and continue without them: the others can still connect."""
        for finding in self._checks.overdue(ANSWER_TIMEOUT_S):
            self.report(replace(finding, is_fatal=self.request.checks_hosts))
            self._carry_out(self._checks.remove(finding.host))
        if not self._checks.is_done:
            self.files.loop.call_in("checks", ANSWER_TIMEOUT_S, self._time_out)

    def _carry_out(self, steps: Iterable[SendMessage | Finding]) -> None:
        for step in steps:
            if isinstance(step, SendMessage):
                self.files.ranks.send(step.host, step.message)
            else:
                self.report(step)
