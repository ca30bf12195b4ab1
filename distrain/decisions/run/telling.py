"""The texts about missing hosts, and about the end of an attempt. Runs in: coordinator.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distrain.decisions.blame import culprit_first, finished_early
from distrain.system.stacks import raised_at
from distrain.system.text import count, name_hosts, name_ranks, on_host

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from distrain.decisions.events import HangDetected, RunRequest
    from distrain.decisions.run.host_pool import HostPool
    from distrain.errors import RankFailure
    from distrain.hosts.world import WorldPlan

_CROWD = 8
"""Workers for each CPU of a host from which on a warning says that this is slow."""


def missing_hosts(pool: HostPool, request: RunRequest, *, has_restarted: bool) -> str:
    """Say why there are too few hosts for an attempt."""
    losses = pool.describe_losses()
    if not has_restarted:
        return losses
    wait_s = request.failure_config.host_wait_s
    slots = sum(host.slots or 0 for host in pool.connected)
    when = f"within {wait_s:g} s" if wait_s else "at once"
    lost = name_hosts(pool.losses)
    return (
        f"{losses}\n"
        f"{lost} did not come back {when} (FailureConfig.host_wait_s), and the other hosts have {slots} slots for "
        f"{request.scaling.min_workers} workers. Repair {lost}, or give the run spare slots or num_workers=(min, max)"
    )


def lost_host_error(losses: str, *, may_restart: bool) -> str | None:
    """Return the text of the error for a run that lost hosts and does not restart; None if it lost none."""
    if not losses or may_restart:
        return losses or None
    return (
        f"{losses}\nFailureConfig(max_failures=1) lets a run continue once: on spare slots, on fewer hosts with "
        "num_workers=(min, max), or when the host is back"
    )


def changed_plan(before: WorldPlan | None, plan: WorldPlan, pool: HostPool, most: int) -> str:
    """Say how the plan differs from that of the attempt before, or from what the user expects; else, return ""."""
    expected = (before.hosts, before.world_size) if before else (plan.hosts, most)
    missing = dict.fromkeys([*pool.losses, *pool.slow])  # a lost one may be slow to return
    if (plan.hosts, plan.world_size) == expected and not (before is None and missing):
        return ""
    without = f", without {name_hosts(missing)}" if missing else ""
    reasons = [f"    {line}" for line in pool.describe_losses().splitlines()] if before is None else []
    return "\n".join([f"{plan.world_size} workers on {name_hosts(plan.hosts)}{without}", *reasons])


def crowded_hosts(plan: WorldPlan, pool: HostPool) -> Iterator[str]:
    """Warn of hosts with far more workers than CPUs."""
    for host in pool.connected:
        if (workers := len(plan.on(host.name))) > _CROWD * host.cpus:
            yield f"{host.name}: {workers} workers share {count(host.cpus, 'CPU')}; fewer train faster"


def failed_attempt(
    failures: Sequence[RankFailure], hung: HangDetected | None, finished: Collection[int], log_folder: str
) -> str:
    """Say why an attempt has failed.

    log_folder: where the logs of its ranks are, in the run directory; "" if they have none.
    """
    if not failures:
        assert hung is not None
        why = hung.deadlock or f"no rank has made progress for {hung.after_s:g} s"
        return "\n    ".join([why, *hung.where])
    if early := finished_early(failures, finished):
        return early
    culprit = culprit_first(failures)[0]
    if not culprit.lost:
        place = raised_at(culprit.traceback)
        how = f"failed: {culprit.summary}" if culprit.kind == "exception" else culprit.summary
        log = f"; its log: {log_folder}/rank_{culprit.rank}.log" if log_folder else ""
        return f"rank {culprit.rank}{on_host(culprit.host)} {how}{f' ({place})' if place else ''}{log}"
    losses: dict[str, list[RankFailure]] = {}
    for failure in failures:
        if failure.lost:
            losses.setdefault(failure.summary, []).append(failure)
    return "; ".join(_describe_loss(summary, lost) for summary, lost in losses.items())


def _describe_loss(summary: str, lost: Sequence[RankFailure]) -> str:
    """Describe the loss of ranks, perhaps of several hosts, for the same reason."""
    ranks, hosts = name_ranks([failure.rank for failure in lost]), name_hosts(dict.fromkeys(f.host for f in lost))
    return f"{ranks} on {hosts} {'were' if len(lost) > 1 else 'was'} {summary}"
