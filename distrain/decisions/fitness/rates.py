"""Rules for the measurements of hosts, by which a result counts as slow. Runs in: coordinator.

A result is compared with the median of the other hosts of the same kind, and with the median of the host's own earlier
results. Whatever looks slow is measured again, and the better result counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median, median_high
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

LEAST_HISTORY = 3
"""Earlier results that a host needs before its own median counts."""
MOST_BUSY = 0.15
"""Share of the CPU time that other programs may use; if it is more, results that depend on CPUs are not judged."""
LEAST_SHM_BYTES = 256 << 20
"""Size of /dev/shm below which DataLoader workers are likely to fail."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One measurement.

    least: the share of the median below which a result counts as slow. For a latency, whose lower values are better,
    the median is divided by it, and slack is added (both in ``unit``).
    """

    name: str
    unit: str
    least: float
    cure: str
    is_latency: bool = False
    slack: float = 0.0

    def is_slow(self, value: float, reference: float, *, is_busy: bool) -> bool:
        least = self.least / 2 if is_busy else self.least
        if self.is_latency:
            return value > reference / least + self.slack
        return value < least * reference

    def better(self, one: float, other: float | None) -> float:
        """Return the better one of two results."""
        return one if other is None else (min if self.is_latency else max)(one, other)


_CPU = "look there for other programs, a CPU limit of a container, and heat or a power limit (turbostat)"
_GPU = "look there with nvidia-smi -q -d PERFORMANCE for heat, a power limit, and other programs"
_DISK = "look there for other programs that use it (iostat -x 1), and for errors in dmesg"
_NETWORK = "look at cables and ports (ethtool -S, ibstat), at routes, and for other programs that use the network"
OF_HOST = {
    "cpus": Rule("CPUs", "", 1.0, "look there for a CPU limit of a container or of a control group (cpu.max)"),
    "cpu": Rule("CPU", "TFLOP/s", 0.7, _CPU),
    "gpu": Rule("GPU", "TFLOP/s", 0.7, _GPU),
    "memory": Rule("memory", "GB/s", 0.6, "look there for other programs, and for missing or faulty memory modules"),
    "disk_write": Rule("disk write", "MB/s", 0.1, _DISK),
    "disk_read": Rule("disk read", "MB/s", 0.1, _DISK),
    "shm": Rule("shared memory", "GB/s", 0.5, "look there for other programs, and for memory that is swapped"),
}
"""By name: what is measured on each host alone; and ``cpus``, of which a limit may allow fewer than there are.
Disks are shared with others, and vary most."""
OF_PAIR = {
    "all_reduce": Rule("all_reduce", "GB/s", 0.6, _NETWORK),
    "send": Rule("send", "GB/s", 0.6, _NETWORK),
    "latency": Rule("latency", "µs", 0.33, _NETWORK, is_latency=True, slack=300.0),
}
"""By name: what is measured between two hosts. send: in the slower direction."""
RULES = OF_HOST | OF_PAIR


@dataclass(frozen=True, slots=True)
class Slow:
    """A result that counts as slow. name: one of :data:`RULES`. against: what it was compared with, in words."""

    name: str
    value: float
    reference: float
    against: str

    @property
    def rule(self) -> Rule:
        return RULES[self.name]

    def __str__(self) -> str:
        ratio = self.value / self.reference
        times = f"{ratio:.1f} times" if self.rule.is_latency else f"{ratio:.0%} of"
        compared = f"{times} {self.against} ({shown(self.reference)})"
        return f"{self.rule.name} {shown(self.value)} {self.rule.unit}".rstrip() + f", {compared}"


def slow_result(
    name: str, value: float, others: Sequence[float], own: Sequence[float], *, is_busy: bool = False
) -> Slow | None:
    """Return why a result counts as slow, or None.

    name: one of :data:`RULES`. others: results of others of the same kind. own: earlier results. is_busy: other
    programs have disturbed it, so that only half of the limit counts.

    >>> str(slow_result("memory", 4.0, [10.0, 11.0, 10.5], []))
    'memory 4 GB/s, 38% of the median of 3 others (10.5)'
    """
    rule = RULES[name]
    if others and rule.is_slow(
        value, reference := (median if rule.is_latency else median_high)(others), is_busy=is_busy
    ):
        return Slow(name, value, reference, f"the median of {len(others)} other{'s' * (len(others) > 1)}")
    if len(own) >= LEAST_HISTORY and rule.is_slow(value, reference := median(own), is_busy=is_busy):
        return Slow(name, value, reference, f"its own median of {len(own)} checks")
    return None


def slow_hosts(
    results: Mapping[str, Mapping[str, float]],
    kinds: Mapping[str, str],
    history: Mapping[str, Iterable[Mapping[str, float]]],
) -> dict[str, list[Slow]]:
    """Return the slow results of each host that has any.

    results: by host, then by name as in :data:`OF_HOST`. kinds: by host, what must be equal for a comparison, such as
    the model of its CPUs. history: by host, its earlier results under the same kind.
    """
    found: dict[str, list[Slow]] = {}
    for host, own in results.items():
        peers = [other for name, other in results.items() if name != host and kinds[name] == kinds[host]]
        for name, value in own.items():
            others = [other[name] for other in peers if name in other]
            earlier = [before[name] for before in history.get(host, ()) if name in before]
            if name in OF_HOST and (slow := slow_result(name, value, others, earlier)) is not None:
                found.setdefault(host, []).append(slow)
    return found


def slow_pairs(
    results: Mapping[tuple[str, str], Mapping[str, float]],
    history: Mapping[str, Iterable[Mapping[str, float]]],
    busy: Collection[str] = (),
) -> dict[tuple[str, str], Slow | None]:
    """Return the slow pairs of hosts, each with its worst result; None for a pair that has none.

    history: by host, earlier results of its best pair. A pair is compared with those of the slower host.
    busy: hosts that run other programs.
    """
    found: dict[tuple[str, str], Slow | None] = {}
    for pair, own in results.items():
        if not own:
            found[pair] = None
        for name, value in own.items():
            others = [other[name] for key, other in results.items() if key != pair and name in other]
            before = [[one[name] for one in history.get(host, ()) if name in one] for host in pair]
            rule = RULES[name]
            slower = max(before, key=lambda past: median(past or [0.0]) * (1 if rule.is_latency else -1))
            if (slow := slow_result(name, value, others, slower, is_busy=not {*pair}.isdisjoint(busy))) is not None:
                found.setdefault(pair, slow)
    return found


def shown(value: float) -> str:
    """Return a result with three digits.

    >>> shown(0.03456), shown(1234.5)
    ('0.0346', '1234')
    """
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
