"""Checks of the other machines while the workers of a launch start. Runs in: coordinator."""

from __future__ import annotations

import os
import sys
import uuid
from functools import partial
from importlib.metadata import packages_distributions
from typing import TYPE_CHECKING

from distrain.decisions.host_checks import ANSWER_TIMEOUT_S, Finding, HostChecks, Question, inspection, must_connect
from distrain.hosts.inspection import package_versions
from distrain.system.log import warn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from distrain import wire
    from distrain.decisions.events import RunRequest
    from distrain.hosts.world import WorldPlan
    from distrain.system.background import Background
    from distrain.system.loop import Loop


class LaunchChecks:
    """Check versions and connections of hosts while their first workers import, so that it costs no time.

    Hosts that join later, or again, are checked when they join.

    send: sends a question to a host.
    refuse: is called with a host that cannot train, and why.
    imports: returns the top-level modules that the user's code imports; called in a thread.
    """

    def __init__(
        self,
        loop: Loop,
        request: RunRequest,
        background: Background,
        *,
        send: Callable[[str, wire.Message], None],
        refuse: Callable[[str, str], None],
        imports: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        self._loop = loop
        self._request = request
        self._background = background
        self._send = send
        self._refuse = refuse
        self._imports = imports
        self._checks = HostChecks({}, {}, nonce="")
        self._checked: set[str] = set()
        self._timed_out = False
        self._preparing: WorldPlan | None = None
        """The plan to check, while a thread looks up the versions of this machine."""

    def begin(self, plan: WorldPlan) -> None:
        """Check the hosts of a plan whose workers are starting. This machine alone needs no checks."""
        is_local = all(self._request.hosts[host].is_local for host in plan.hosts)
        if is_local or self._checked.issuperset(plan.hosts):
            return
        self._checked.update(plan.hosts)
        self._preparing = plan
        self._background.do(self._find_own_versions, partial(self._ask, plan))

    def _find_own_versions(self) -> Mapping[str, str | None]:
        """Return the versions of packages that this machine has, by the names of their distributions."""
        path = [os.fspath(entry) for entry in sys.path]
        found = package_versions(dict.fromkeys([*self._needed, *self._imports()]), path)
        versions = {name: version for name, version in found.items() if version}
        if "" in found.values():  # a module that is called otherwise than its distribution, such as yaml of PyYAML
            distributions = packages_distributions()
            named = [
                distributions[name][0] for name, version in found.items() if version == "" and name in distributions
            ]
            versions |= {name: version for name, version in package_versions(named, path).items() if version}
        return versions

    @property
    def _needed(self) -> list[str]:
        """The packages without which no worker runs."""
        return [name for name in (self._request.backend.framework, "cloudpickle") if name]

    def _ask(self, plan: WorldPlan, own_versions: Mapping[str, str | None]) -> None:
        if plan is not self._preparing:  # a host was lost meanwhile
            return
        self._preparing = None
        self._timed_out = False
        question = partial(
            inspection,
            own_versions=own_versions,
        )
        self._checks = HostChecks(
            {host: question(self._request.hosts[host]) for host in plan.hosts},
            {} if plan.shares_network else dict(zip(plan.hosts, plan.addresses, strict=True)),
            own_versions=own_versions,
            imported=own_versions.keys() - {*self._needed},
            nonce=uuid.uuid4().hex,
            must_connect=must_connect(self._request),
        )
        self._carry_out(self._checks.begin())
        self._loop.call_in("checks", ANSWER_TIMEOUT_S, self._time_out)

    @property
    def is_under_way(self) -> bool:
        """True while answers are missing, until the time for them is over."""
        return not self._checks.is_done and not self._timed_out

    def handle(self, host: str, answer: wire.Message) -> None:
        """Take the answer of a host."""
        if self.is_under_way:
            self._carry_out(self._checks.handle(host, answer))

    def lost(self, host: str) -> None:
        """Stop waiting for a lost host. It is checked again when it is back; all are, if any check was still open."""
        if self.is_under_way or self._preparing is not None:
            self._checked.clear()
            self._preparing = None
        self._checked.discard(host)
        if self.is_under_way:
            self._carry_out(self._checks.remove(host))

    def _time_out(self) -> None:
        self._timed_out = True
        for finding in self._checks.overdue(ANSWER_TIMEOUT_S):
            warn(f"{finding.host}: {finding.text}")

    def _carry_out(self, steps: Iterable[Question | Finding]) -> None:
        for step in steps:
            if isinstance(step, Question):
                self._send(step.host, step.message)
            elif step.is_fatal:
                self._refuse(step.host, step.text)
            else:
                warn(f"{step.host}: {step.text}")
