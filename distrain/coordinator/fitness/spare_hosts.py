"""Spare hosts instead of those that were bad in earlier runs or in a deep check. Runs in: coordinator."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from distrain.coordinator.run.run import workers_by_host
from distrain.errors import LaunchError, ResourcesError
from distrain.storage.host_records import HostRecords
from distrain.system.log import warn

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from distrain.api.config import ScalingConfig
    from distrain.coordinator.connection.transport import Transport
    from distrain.coordinator.host_check import HostFacts
    from distrain.decisions.host_checks import Finding


def note_check(hosts: Mapping[str, HostFacts], findings: Sequence[Finding]) -> None:
    """Remember the results of a deep check, and the hosts that it has found to be slow."""
    records = HostRecords()
    try:
        for name, one in ((name, facts.fitness) for name, facts in hosts.items() if facts.fitness is not None):
            records.add(name, "check", kind=one.kind, results={**one.judged(), **one.best_link()})
            if one.is_slow:
                text = next(finding.text for finding in findings if finding.host == name)
                records.add(name, "slow", text=text.partition(";")[0], run="distrain check --deep")
    except OSError as error:
        warn(f"the results of this check are not kept in {records.folder}: {error}")


def with_bad_hosts_last(transports: Sequence[Transport], scaling: ScalingConfig) -> Sequence[Transport]:
    """Warn of hosts that were bad lately. Make them spare hosts, if the others have slots for all workers."""
    records = HostRecords()
    bad = {one.host.name: found for one in transports if (found := records.latest_trouble(one.host.name)) is not None}
    good = [one for one in transports if one.host.name not in bad]
    is_enough = bool(bad) and _have_slots(good, scaling, most=True)
    for host, trouble in bad.items():
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(trouble["time"]))
        where = f" in {trouble['run']}" if trouble.get("run") else ""
        use = "used only if another host is lost" if is_enough else "used, because there is no spare host"
        warn(f"{host} was bad at {when}{where} ({trouble['what']}), and is {use}; `distrain hosts` lists such hosts")
    return [*good, *(one for one in transports if one.host.name in bad)] if is_enough else transports


def without_bad_hosts(
    transports: Sequence[Transport],
    scaling: ScalingConfig,
    findings: Sequence[Finding],
    hosts: Mapping[str, HostFacts],
) -> Sequence[Transport]:
    """Return the hosts that are left after a deep check, or all if they are too few. Say what was found.

    Raises LaunchError if there are too few hosts that can train.
    """
    fatal = {finding.host for finding in findings if finding.is_fatal}
    slow = {name for name, facts in hosts.items() if facts.fitness is not None and facts.fitness.is_slow}
    for bad in (fatal | slow, fatal):
        left = [one for one in transports if one.host.name not in bad]
        if _have_slots(left, scaling):
            _say(findings, left_out=bad)
            return left
    problems = "\n".join(f"    {finding.host}: {finding.text}" for finding in findings if finding.is_fatal)
    raise LaunchError(f"too few hosts are fit for this run, as the deep check has found:\n{problems}")


def _say(findings: Sequence[Finding], left_out: Collection[str]) -> None:
    for finding in findings:
        use = "; the run does not use this host" if finding.host in left_out else ""
        warn(f"{finding.host}: {finding.text}{use}")


def _have_slots(transports: Sequence[Transport], scaling: ScalingConfig, *, most: bool = False) -> bool:
    """Tell if the hosts have slots for all workers, or (``most``) for the most that are wanted."""
    try:
        shares = workers_by_host([one.host for one in transports], scaling)
    except ResourcesError:
        return False
    return bool(transports) and (not most or sum(shares.values()) >= scaling.max_workers)
