"""Hosts that were bad lately: runs and deep checks remember them, and new runs use them last. Runs in: coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distrain.api.observer import AttemptBegan, AttemptEnded, Observer, TroubleBegan
from distrain.coordinator.run.run import workers_by_host
from distrain.errors import LaunchError, ResourcesError
from distrain.storage.host_records import change_records, read_records
from distrain.system.log import warn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distrain.api.config import RunContext, ScalingConfig
    from distrain.api.observer import Fact, RunBegan
    from distrain.coordinator.connection.transport import Transport
    from distrain.coordinator.host_check import HostFacts
    from distrain.decisions.host_checks import Finding
    from distrain.decisions.run_status import RunStatus
    from distrain.storage.host_records import HostRecords

_FAILED = ("signal", "memory", "hang")
"""Kinds of failures for which a host may be to blame. Exceptions are usually the user's."""


def observers(context: RunContext, run: RunBegan, status: RunStatus) -> list[KnownHosts]:
    """Return the observer that remembers the hosts of a run, unless it trains in this process."""
    return [] if run.in_process else [KnownHosts(run.name)]


class KnownHosts(Observer):
    """Remembers hosts that were lost, whose GPUs have failed, that were slow, or whose ranks have often failed.

    Runs on a single host are left out: without it, the user has none.
    """

    name = "the memory of hosts"
    hears = (AttemptBegan, AttemptEnded, TroubleBegan)

    def __init__(self, run: str) -> None:
        self._run = run
        self._is_alone = True

    def hear(self, fact: Fact) -> None:
        match fact:
            case AttemptBegan(hosts=hosts):
                self._is_alone = len(set(hosts)) == 1
            case TroubleBegan(host, trouble) if trouble.kind == "host":
                self._note(host, "slow", trouble.text)
            case TroubleBegan(host, trouble) if trouble.kind == "GPU" and not trouble.problem.startswith("full "):
                self._note(host, "GPU", trouble.text)
            case AttemptEnded(failures=failures) if failures:
                for lost in {one.host: one for one in failures if one.kind == "lost"}.values():
                    self._note(lost.host, "lost", lost.summary)
                if failures[0].kind in _FAILED:
                    self._note(failures[0].host, "failed", failures[0].summary)

    def _note(self, host: str, what: str, text: str) -> None:
        if not self._is_alone:
            change_records(lambda known: known.add_trouble(host, what, text, self._run))


def note_check(hosts: Mapping[str, HostFacts]) -> None:
    """Remember the results of a deep check, and the hosts that it has found to be slow."""

    def change(known: HostRecords) -> None:
        for host, one in ((host, facts.fitness) for host, facts in hosts.items() if facts.fitness.kind):
            known.add_check(host, one.kind, one.results)
            if one.slow:
                known.add_trouble(host, "slow", one.slow.partition(";")[0], "distrain check --deep")

    change_records(change)


def with_bad_hosts_last(transports: Sequence[Transport], scaling: ScalingConfig) -> Sequence[Transport]:
    """Warn of hosts that were bad lately. Make them spare hosts, if the others have slots for all workers."""
    troubles = read_records().bad_hosts()
    bad = [one for one in transports if one.host.name in troubles]
    good = [one for one in transports if one.host.name not in troubles]
    is_enough = _slots_used(good, scaling) >= scaling.max_workers
    for host in (one.host.name for one in bad):
        use = "used only if another host is lost" if is_enough else "used, because there is no spare host"
        where = f"{troubles[host]['run']} ({troubles[host]['what']})"
        warn(f"{host} was bad in {where}, and is {use}; `distrain hosts` lists such hosts")
    return [*good, *bad] if is_enough else transports


def without_broken_hosts(
    transports: Sequence[Transport], scaling: ScalingConfig, findings: Sequence[Finding]
) -> Sequence[Transport]:
    """Return the hosts that a deep check has not found to be broken. Say what it has found.

    Raises LaunchError if they are too few.
    """
    broken = {finding.host: finding.text for finding in findings if finding.is_fatal}
    left = [one for one in transports if one.host.name not in broken]
    if not _slots_used(left, scaling):
        problems = "".join(f"\n    {host}: {text}" for host, text in broken.items())
        raise LaunchError(f"too few hosts are fit for this run, as the deep check has found:{problems}")
    for one in findings:
        warn(f"{one.host}: {one.text}{'; the run does not use this host' if one.host in broken else ''}")
    return left


def _slots_used(transports: Sequence[Transport], scaling: ScalingConfig) -> int:
    """Return how many workers the hosts get; 0 if they have too few slots."""
    try:
        return sum(workers_by_host([one.host for one in transports], scaling).values()) if transports else 0
    except ResourcesError:
        return 0
