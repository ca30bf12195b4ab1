"""``distrain check``: hosts are connected, set up and asked as at the start of a run. Runs in: coordinator."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from distrain import wire
from distrain.coordinator.connection.agent_link import FILES_PER_HOST
from distrain.coordinator.connection.connections import Connections
from distrain.coordinator.host_files import HostFiles
from distrain.coordinator.launch_checks import LaunchChecks
from distrain.coordinator.ranks.stop_signals import note_stop, stop_signals
from distrain.decisions.events import HostLost, WorkersStart
from distrain.decisions.host_checks import Finding, clock_findings, disk_findings, gpu_findings
from distrain.decisions.placement import make_plan, prepare_message
from distrain.decisions.run.host_pool import HOST_ANSWER_TIMEOUT_S, HostPool, Readiness, info_of
from distrain.errors import ResourcesError
from distrain.hosts.gpu_health import GpuHealth
from distrain.system.background import Background
from distrain.system.log import warn
from distrain.system.loop import Loop
from distrain.system.process import raise_fd_limit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distrain.api.config import ScalingConfig
    from distrain.coordinator.connection.transport import Transport
    from distrain.coordinator.host_files import Shipping
    from distrain.decisions.events import RunRequest
    from distrain.hosts.host import HostInfo

_STORAGE_S = 60.0
"""Seconds that a host has to write to a remote storage."""


@dataclass(slots=True)
class HostFacts:
    """The facts that a check has found about one host.

    ahead_s: by how much its clock is ahead of this machine's.
    """

    hello: wire.Hello | None = None
    info: HostInfo | None = None
    sees_storage: bool = False
    probed: wire.HostProbed | None = None
    ahead_s: float = 0.0
    gpus: Sequence[GpuHealth] = ()


class HostCheck:
    """A look at all hosts. A problem does not end it, but becomes a finding.

    Its request has one worker for each host, without needs: :func:`lacking` tells what the user's workers lack.
    opening: the order to open a remote storage.
    """

    def __init__(
        self,
        request: RunRequest,
        transports: Sequence[Transport],
        shipping: Shipping,
        opening: wire.OpenStorage | None,
    ) -> None:
        self._request, self._opening = request, opening
        self._loop = Loop()
        self._background = Background(self._loop, "files")
        self._ranks = Connections(transports, request)
        self._files = HostFiles(
            self._loop,
            self._background,
            shipping,
            self._ranks,
            flags=request.python_flags,
            receive=self._hear,
            refuse=self._lose,
        )
        self._checks = LaunchChecks(request, self._files, self._report)
        self._pool = HostPool({name: settings.slots for name, settings in request.hosts.items()}, request.scaling)
        self._hosts: list[str] | None = None
        """The hosts that have answered, once nobody waits for others."""
        self._opening_hosts: set[str] = set()
        """Those that owe an answer about the storage."""
        self._facts = {name: HostFacts(sees_storage=host.is_local) for name, host in request.hosts.items()}
        self._lost: dict[str, str] = {}
        """The reason why each host was lost."""
        self._findings: dict[Finding, None] = {}
        """Without repetitions: a loss makes the other hosts answer again."""
        self._is_stopped = False

    def look(self) -> tuple[list[Finding], dict[str, HostFacts]]:
        """Look at the hosts. Return the problems, and the facts about each.

        Raises KeyboardInterrupt, and ResourcesError if this process may not open enough files.
        """
        hosts = len(self._request.hosts)
        try:
            raise_fd_limit(hosts * FILES_PER_HOST, hosts * (FILES_PER_HOST + 2))  # a host may have a mover
            with self._loop.signals(stop_signals(self._request.stop_signals), self._on_signal):
                self._run()
        finally:
            self._background.close()
            self._loop.close()
        if self._is_stopped:
            raise KeyboardInterrupt
        silent = [name for name, facts in self._facts.items() if facts.hello is None]
        whys = dict.fromkeys(silent, f"no answer within {HOST_ANSWER_TIMEOUT_S:g} s")
        for name, why in {**whys, **self._lost}.items():
            self._report(Finding(name, why))
        return list(self._findings), self._facts

    def _run(self) -> None:
        try:
            self._ranks.open(self._loop, self._hear, self._on_lost)
            self._pool.begin_search(time.monotonic(), reconnect_s=0.0, wait_s=HOST_ANSWER_TIMEOUT_S)
            self._connect()
            while not self._is_finished():
                self._loop.step()
        finally:
            self._files.close()
            self._ranks.close(keep=False)

    def _on_signal(self, number: int) -> None:
        note_stop(signal.Signals(number).name)
        self._is_stopped = True

    def _report(self, finding: Finding) -> None:
        self._findings[finding] = None

    # -- one step after the other ---------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Connect further hosts. Once all have answered or are lost, set them up."""
        if self._hosts is not None:
            return
        now = time.monotonic()
        for host in self._pool.hosts_to_connect(now):
            self._ranks.connect(host)
        if self._pool.readiness(now) is Readiness.WAITING:
            if text := self._pool.describe_progress(now):
                warn(text)
            self._loop.call_at("connect", self._pool.deadline(), self._connect)
            return
        self._loop.cancel("connect")
        self._hosts = [info.name for info in self._pool.connected]
        for host in self._hosts:
            if self._request.hosts[host].is_local:
                self._prepare(host)
            else:
                self._files.set_up(host, partial(self._prepare, host))

    def _prepare(self, host: str) -> None:
        self._ranks.send(host, prepare_message(self._request, host, workers=1))
        if self._opening is not None:
            self._opening_hosts.add(host)
            self._ranks.send(host, self._opening)
            why = f"no answer within {_STORAGE_S:g} s"
            self._loop.call_in(f"open {host}", _STORAGE_S, partial(self._on_opened, host, why))

    def _on_opened(self, host: str, failed: str | None) -> None:
        self._loop.cancel(f"open {host}")
        self._opening_hosts.discard(host)
        if failed is not None:
            self._report(Finding(host, f"it cannot use the storage: {failed}"))

    def _is_finished(self) -> bool:
        """Ask the hosts once they are set up. Return True when all have answered."""
        if self._hosts is None or self._is_stopped:
            return self._is_stopped
        hosts = [host for host in self._hosts if host not in self._lost]
        if self._files.is_busy(hosts):
            return False
        if infos := [info for host in hosts if (info := self._facts[host].info) is not None]:
            self._checks.begin(WorkersStart(make_plan(infos, self._request.scaling, num_workers=len(infos))))
        return not self._checks.is_under_way and self._opening_hosts.isdisjoint(hosts)

    # -- what hosts say -------------------------------------------------------------------------------------------

    def _on_lost(self, lost: HostLost) -> None:
        host, now = lost.host, time.monotonic()
        if self._hosts is not None:
            self._lose(host, lost.why)
        elif not (lost.turned_away and self._pool.may_try_later(host, now)):
            self._lost[host] = lost.why
            self._pool.mark_lost(host, lost.why, now)
        self._connect()

    def _lose(self, host: str, why: str) -> None:
        """Continue without a host."""
        self._lost.setdefault(host, why)
        lost = HostLost(host, why)
        self._files.lost(lost)
        self._checks.lost(lost)

    def _hear(self, host: str, message: wire.Message) -> None:
        facts = self._facts[host]
        match message:
            case wire.Hello():
                self._lost.pop(host, None)
                facts.hello, facts.info = message, info_of(host, message, self._request.hosts[host])
                self._pool.mark_connected(host, facts.info)
                self._connect()
            case wire.HostFailed(text=why):
                self._lose(host, why)
            case wire.Notice(text=text):
                self._report(Finding(host, text, is_fatal=False))
            case _ if host in self._lost:
                pass
            case wire.HostSetUp(storage_problem=problem):
                facts.sees_storage = problem is None
                if problem is not None:
                    text = f"it does not see the storage, which {problem}; its checkpoints travel over the connection"
                    self._report(Finding(host, text, is_fatal=False))
                self._files.on_set_up(host, message)
            case wire.OrderDone(failed=failed):
                self._on_opened(host, failed)
            case wire.HostProbed():
                if facts.probed is None:
                    self._note(host, facts, message)
                self._checks.handle(host, message)

    def _note(self, host: str, facts: HostFacts, answer: wire.HostProbed) -> None:
        now, asked_at = time.time(), self._checks.asked_at
        facts.probed = answer
        facts.ahead_s = ((answer.received - asked_at) + (answer.sent - now)) / 2
        uncertain_s = max(0.0, (now - asked_at) - (answer.sent - answer.received)) / 2
        facts.gpus = [GpuHealth(**gpu) for gpu in answer.gpus]
        for finding in (
            *disk_findings(host, answer.disk_free_bytes),
            *gpu_findings(host, facts.gpus),
            *clock_findings(host, facts.ahead_s, uncertain_s),
        ):
            self._report(finding)


def lacking(facts: Mapping[str, HostFacts], scaling: ScalingConfig, shares: Mapping[str, int]) -> list[Finding]:
    """Return what hosts lack for their workers. ``shares``: how many workers each host gets."""
    found = []
    for name, info in ((name, one.info) for name, one in facts.items() if one.info is not None):
        if info.driver_problem and not scaling.use_gpu:
            found.append(Finding(name, info.driver_problem, is_fatal=False))
        try:
            make_plan([replace(info, slots=None)], scaling, num_workers=shares[name])
        except ResourcesError as error:
            found.append(Finding(name, str(error)))
    return found
