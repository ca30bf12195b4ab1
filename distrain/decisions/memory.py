"""Which checkpoints stay in the memory of the hosts, and which host copies which part. Runs in: coordinator.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence


def copy_hosts(hosts: Sequence[str], racks: Mapping[str, str]) -> dict[str, str]:
    """Return for each host the one that copies its parts: the next in the ring, of another rack if there is one.

    The hosts of a rack are spread over those of the others.
    """
    found, in_rack = {}, Counter[str]()
    for number, host in enumerate(hosts):
        rack = racks.get(host, "")
        elsewhere = [other for other in hosts if racks.get(other, "") != rack]
        found[host] = elsewhere[in_rack[rack] % len(elsewhere)] if elsewhere else hosts[(number + 1) % len(hosts)]
        in_rack[rack] += 1
    return {host: "" if copy == host else copy for host, copy in found.items()}


def to_keep(rounds: Sequence[str], *, safe: str, needed: Collection[str]) -> set[str]:
    """Return which rounds are kept, given their names in the order of their commits.

    safe: the newest one of which every host's parts are on another host, too; "" if there is none. needed: others that
    are read, copied or stored, or have to be stored.
    """
    spare = [safe] if safe in rounds else rounds[-2:-1]
    return {*rounds[-1:], *spare, *needed}
