"""Spare hosts instead of those that were bad lately, or in a deep check. Runs in: coordinator."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from distrain.coordinator.run.run import workers_by_host
from distrain.errors import LaunchError, ResourcesError
from distrain.storage.host_records import HostRecords, change_records, read_records
from distrain.system.log import warn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distrain.api.config import ScalingConfig
    from distrain.coordinator.connection.transport import Transport
    from distrain.coordinator.host_check import HostFacts
    from distrain.decisions.host_checks import Finding


def note_check(hosts: Mapping[str, HostFacts]) -> None:
    """Remember the hosts that a deep check has found to be slow."""
    for host, why in ((host, facts.fitness.slow) for host, facts in hosts.items() if facts.fitness.slow):
        text = why.partition(";")[0]
        change_records(partial(HostRecords.add_trouble, host=host, what="slow", text=text, run="distrain check --deep"))


def with_bad_hosts_last(transports: Sequence[Transport], scaling: ScalingConfig) -> Sequence[Transport]:
    """Warn of hosts that were bad lately. Make them spare hosts, if the others have slots for all workers."""
    troubles = read_records().bad_hosts()
    bad = [one for one in transports if one.host.name in troubles]
    good = [one for one in transports if one.host.name not in troubles]
    is_enough = _slots_used(good, scaling) >= scaling.max_workers
    for host in (one.host.name for one in bad):
        use = "it is now a spare host" if is_enough else "it is used because there is no other host"
        where = f"{troubles[host]['run']} ({troubles[host]['what']})"
        warn(f"{host} had problems in {where}; {use}. `distrain hosts` lists such hosts")
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
