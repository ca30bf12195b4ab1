"""The checks of a launch, carried out while its workers start, and what comes of them. Runs in: coordinator."""

from __future__ import annotations

import os
import sys
import uuid
from functools import partial
from typing import TYPE_CHECKING

from distrain.decisions.host_checks import INSPECT_TIMEOUT_S, LaunchChecks
from distrain.hosts.inspection import package_versions
from distrain.system.log import warn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from distrain import wire
    from distrain.decisions.events import RunRequest
    from distrain.decisions.host_checks import Finding
    from distrain.hosts.world import WorldPlan
    from distrain.storage.run_store import RunStore
    from distrain.system.background import Background
    from distrain.system.loop import Loop


class CheckedLaunch:
    """What is asked of other machines is found out while their first workers import, and again when others join them.
    ``send``: tells a host something. ``refuse``: hears of a host that cannot train, and why.
    """

    def __init__(
        self,
        loop: Loop,
        request: RunRequest,
        store: RunStore,
        background: Background,
        *,
        send: Callable[[str, wire.Message], None],
        refuse: Callable[[str, str], None],
    ) -> None:
        self._loop = loop
        self._request = request
        self._store = store
        self._background = background
        self._send = send
        self._refuse = refuse
        self._checks: LaunchChecks | None = None
        self._checked: set[str] = set()
        self._is_late = False
        self._asking: WorldPlan | None = None
        """The plan that is to be checked, while it is found out what this machine has installed."""

    def begin(self, plan: WorldPlan) -> None:
        """To be called when workers are on their way. This machine needs no checks."""
        is_here = all(self._request.hosts[host].is_local for host in plan.hosts)
        if is_here or self._checked.issuperset(plan.hosts):
            return
        self._checked.update(plan.hosts)
        self._asking = plan
        self._is_late = False
        packages = [name for name in (self._request.backend.framework, "cloudpickle") if name]
        find = partial(package_versions, packages, [os.fspath(entry) for entry in sys.path])
        self._background.do(find, partial(self._ask, plan))

    def _ask(self, plan: WorldPlan, own: Mapping[str, str | None]) -> None:
        if plan is not self._asking:  # a host was lost meanwhile
            return
        self._asking = None
        checks = self._checks = LaunchChecks(
            self._request,
            plan,
            own=own,
            storage="" if self._store.is_remote else str(self._store.paths.root),
            probe_file=str(self._store.paths.manifest),
            nonce=uuid.uuid4().hex,
        )
        self._tell(checks.begin())
        self._loop.call_in("checks", INSPECT_TIMEOUT_S, self._end)

    @property
    def is_under_way(self) -> bool:
        """Whether something is still to come from hosts."""
        return self._checks is not None and not self._checks.is_done and not self._is_late

    def heard(self, host: str, answer: wire.InspectionResult | wire.ProbePortOpened | wire.ProbeResult) -> None:
        """What a host has found."""
        assert self._checks is not None
        said, found = self._checks.heard(host, answer)
        self._tell(said)
        self._heed(found)

    def lost(self, host: str) -> None:
        """Do not wait for this host, and look at it again when it is back: at all, if not all is known yet."""
        if self.is_under_way or self._asking is not None:
            self._checked.clear()
            self._asking = None
        self._checked.discard(host)
        if self._checks is not None:
            self._tell(self._checks.lost(host))

    def _end(self) -> None:
        assert self._checks is not None
        self._is_late = True
        self._heed(self._checks.late(INSPECT_TIMEOUT_S))

    def _tell(self, said: Iterable[tuple[str, wire.Message]]) -> None:
        for host, message in said:
            self._send(host, message)

    def _heed(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            if finding.is_fatal:
                self._refuse(finding.host, finding.text)
            else:
                warn(f"{finding.host}: {finding.text}")
