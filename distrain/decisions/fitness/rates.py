"""Rules for the measurements of hosts, by which a result counts as slow. Runs in: coordinator.

A result is compared with the median of all hosts of the same kind, and with the median of the host's own earlier
results. Whatever looks slow is measured again, and the better result counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

from distrain.system.text import count

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

Results: TypeAlias = dict[str, float]
"""Measurements, by the names of :data:`RULES`."""
Key = TypeVar("Key")

_SLACK_US = 300.0
"""Added to latencies before they are compared: small differences say nothing."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One measurement. least: the share of the median below which a result counts as slow."""

    name: str
    unit: str
    least: float
    cure: str

    def speed(self, value: float) -> float:
        """Return what is higher for better results."""
        return 1 / (value + _SLACK_US) if self.unit == "µs" else value

    def median_of_others(self, values: Sequence[float]) -> float:
        """Return the median of a slow one's peers. ``values``: its own, too."""
        return sorted(values, key=self.speed)[min((len(values) + 1) // 2, len(values) - 1)]


_CPU = "look there for other programs, a CPU limit of a container, and heat or a power limit (turbostat)"
_GPU = "look there with nvidia-smi -q -d PERFORMANCE for heat, a power limit, and other programs"
_DISK = "look there for other programs that use it (iostat -x 1), and for errors in dmesg"
_NETWORK = "look at cables and ports (ethtool -S, ibstat), at routes, and for other programs that use the network"
RULES = {
    "cpus": Rule("CPUs", "", 1.0, "look there for a CPU limit of a container or of a control group (cpu.max)"),
    "cpu": Rule("CPU", "TFLOP/s", 0.7, _CPU),
    "gpu": Rule("GPU", "TFLOP/s", 0.7, _GPU),
    "memory": Rule("memory", "GB/s", 0.6, "look there for other programs, and for missing or faulty memory modules"),
    "disk_write": Rule("disk write", "MB/s", 0.1, _DISK),
    "disk_read": Rule("disk read", "MB/s", 0.1, _DISK),
    "shm": Rule("shared memory", "GB/s", 0.5, "look there for other programs, and for memory that is swapped"),
    "all_reduce": Rule("all_reduce", "GB/s", 0.6, _NETWORK),
    "send": Rule("send", "GB/s", 0.6, _NETWORK),
    "latency": Rule("latency", "µs", 1 / 3, _NETWORK),
}
"""By name: what is measured on each host alone; ``cpus``, of which a limit may allow fewer than there are; and the last
three between two hosts, ``send`` in the slower direction. Disks are shared with others, and vary most."""
OF_PAIR = ("all_reduce", "send", "latency")
_OF_CPU = ("cpu", "memory", "shm")


class Slow(NamedTuple):
    """A result that counts as slow.

    name: one of :data:`RULES`. text: such as ``memory 4 GB/s, 40% of the median of 3 others (10)``. is_doubtful: other
    programs may be the cause, because it depends on the CPUs, or is above half of its limit.
    """

    name: str
    value: float
    text: str
    is_doubtful: bool


def slow_results(
    results: Mapping[Key, Results],
    kinds: Mapping[Key, str],
    busy: Collection[Key],
) -> dict[Key, list[Slow]]:
    """Return the slow results of each host, or pair of hosts, that has any.

    kinds: what must be equal for a comparison, such as the model of the CPUs. busy: those that other programs disturb.

    >>> results = {"a": {"memory": 4.0}, "b": {"memory": 10.0}, "c": {"memory": 10.0}}
    >>> found = slow_results(results, dict.fromkeys(results, ""), [])
    >>> found["a"][0].text
    'memory 4 GB/s, 40% of the median of 2 others (10)'
    """
    flat = [
        (key, name, value, (name, "" if name in OF_PAIR else kinds[key]))
        for key, own in results.items()
        for name, value in own.items()
    ]
    values: dict[tuple[str, str], list[float]] = {}
    for _, _, value, group in flat:
        values.setdefault(group, []).append(value)
    medians = {group: RULES[group[0]].median_of_others(several) for group, several in values.items()}
    found: dict[Key, list[Slow]] = {}
    for key, name, value, group in flat:
        rule, middle = RULES[name], medians[group]
        share = rule.speed(value) / rule.speed(middle) if middle else 0.0
        if share < rule.least:
            ratio = f"{value / middle:.1f} times" if value > middle else f"{value / (middle or 1):.0%} of"
            against = f"the median of {count(len(values[group]) - 1, 'other')} ({shown(middle)})"
            text = f"{rule.name} {shown(value)} {rule.unit}".rstrip() + f", {ratio} {against}"
            is_doubtful = key in busy and (name in _OF_CPU or share > rule.least / 2)
            found.setdefault(key, []).append(Slow(name, value, text, is_doubtful))
    return found


def keep_better(results: Results, others: Results) -> None:
    """Add measurements to others. Where there are two, the better one stays."""
    for name, value in others.items():
        results[name] = max(value, results.get(name, value), key=RULES[name].speed)


def shown(value: float) -> str:
    """Return a result with three digits.

    >>> shown(0.03456), shown(1234.5)
    ('0.0346', '1234')
    """
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
