"""``--check``: a run that ends before its ranks start. Runs in: coordinator."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from distrain import wire
from distrain.coordinator.coordinator import Coordinator
from distrain.coordinator.engine import Engine
from distrain.decisions import events
from distrain.decisions.host_checks import Finding, clock_findings, disk_findings, gpu_findings
from distrain.decisions.host_pool import HOST_ANSWER_TIMEOUT_S, info_of
from distrain.decisions.placement import make_plan
from distrain.errors import ResourcesError, StorageError
from distrain.hosts.gpu_health import GpuHealth

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distrain.api.config import ScalingConfig
    from distrain.hosts.host import HostInfo


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


class HostCheck(Engine):
    """A run on all hosts that ends before its ranks start. A problem does not end it, but becomes a finding.

    Its request has one worker for each host, without needs: :func:`lacking` tells what the user's workers lack.
    """

    def look(self) -> tuple[list[Finding], dict[str, HostFacts]]:
        """Look at the hosts. Return the problems, and the facts about each. Raises StorageError, KeyboardInterrupt."""
        self._findings: dict[Finding, None] = {}
        """Without repetitions: a loss makes the other hosts answer again."""
        self._facts = {name: HostFacts(sees_storage=host.is_local) for name, host in self.request.hosts.items()}
        self._lost: dict[str, str] = {}
        """Hosts that have not come back so far, and why each was lost."""
        _Looking(self).run()
        if self.machine.stop_reason is not None:
            raise KeyboardInterrupt
        if self.machine.storage_failed:
            raise StorageError(self.machine.problem)
        silent = [name for name, facts in self._facts.items() if facts.hello is None]
        whys = dict.fromkeys(silent, f"no answer within {HOST_ANSWER_TIMEOUT_S:g} s")
        if self.machine.problem and self.machine.plan is not None:
            self._lost.setdefault(self.machine.plan.hosts[0], self.machine.problem)
        for name, why in {**whys, **self._lost}.items():
            self._report(Finding(name, why))
        return list(self._findings), self._facts

    # -- instead of what a run does -------------------------------------------------------------------------------

    def is_finished(self) -> bool:
        """Ask the hosts once they are set up. Return True when all have answered."""
        plan = self.machine.plan
        if plan is None or self.machine.stop_reason is not None or self.machine.storage_failed:
            return self.machine.stop_reason is not None or self.machine.state.is_terminal
        hosts = [host for host in plan.hosts if host not in self._lost]
        if self.host_files.is_busy(hosts):
            return False
        if infos := [info for host in hosts if (info := self._facts[host].info) is not None]:
            self.launch_checks.begin(make_plan(infos, self.request.scaling, num_workers=len(infos)))
        return not self.launch_checks.is_under_way

    def do(self, actions: list[events.Action]) -> None:
        """Start no rank, and show no line about the plan."""
        is_planned = self.machine.plan is not None
        for action in actions:
            match action:
                case events.SendMessage(_, wire.Start()) | events.WorkersStart():
                    pass
                case events.ShowLine() if is_planned:
                    pass
                case _:
                    super().do([action])

    def happened(self, event: events.Event) -> None:
        match event:
            case events.MessageReceived(host, wire.HostFailed(text=why)):
                self._lose(host, why)
            case events.HostLost(host, why) if self.machine.plan is not None:
                self._lose(host, why)
            case events.HostLost(host, why):
                self._lost[host] = why
                super().happened(event)
            case events.MessageReceived(host, wire.Notice(text=text)):
                self._report(Finding(host, text, is_fatal=False))
            case _:
                super().happened(event)

    def _lose(self, host: str, why: str) -> None:
        """Continue without a host."""
        self._lost.setdefault(host, why)
        self.host_files.lost(host)
        self.launch_checks.lost(host)

    def _report(self, finding: Finding) -> None:
        self._findings[finding] = None

    def hear(self, host: str, message: wire.Message) -> None:
        facts = self._facts[host]
        match message:
            case wire.Hello():
                self._lost.pop(host, None)
                facts.hello, facts.info = message, info_of(host, message, self.request.hosts[host])
            case _ if host in self._lost:
                return
            case wire.HostSetUp(storage_problem=str(problem)):
                text = f"it does not see the storage, which {problem}; its checkpoints travel over the connection"
                self._report(Finding(host, text, is_fatal=False))
            case wire.HostSetUp():
                facts.sees_storage = True
            case wire.RendezvousPorts():
                self.happened(events.MessageReceived(host, message))
                return
            case wire.OrderDone(failed=str(why)):
                self._report(Finding(host, f"it cannot use the storage: {why}"))
                return
            case wire.HostProbed() if facts.probed is None:
                self._note(host, facts, message)
        super().hear(host, message)

    def _note(self, host: str, facts: HostFacts, answer: wire.HostProbed) -> None:
        now, asked_at = time.time(), self.launch_checks.asked_at
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


class _Looking(Coordinator):
    """The loop of a check."""

    engine: HostCheck

    def is_finished(self) -> bool:
        return self.engine.is_finished()


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
