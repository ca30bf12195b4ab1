"""Which checkpoints stay in the memory of the hosts, and which host copies which part. Runs in: coordinator.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from distrain.storage.commit import MemoryRound


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


@dataclass(slots=True)
class KeptRounds:
    """The rounds that are kept, by name, in the order of their commits.

    safe: the newest one of which every host's parts are on another host, too. copying, storing: those that are being
    copied or stored. start: the one that ranks may still read as the start of the attempt. best: those that
    num_to_keep keeps because of their score, and that are not on storage yet.
    """

    rounds: dict[str, MemoryRound] = field(default_factory=dict)
    safe: str = ""
    copying: str = ""
    storing: str = ""
    start: str = ""
    best: Collection[str] = ()

    @property
    def newest(self) -> MemoryRound | None:
        """The last one to be committed."""
        return next(reversed(self.rounds.values()), None)

    def add(self, new: MemoryRound, known: Collection[str]) -> None:
        """Add a round that was committed, and drop those that nobody needs, or that are not among the ``known``."""
        self.rounds = {name: kept for name, kept in self.rounds.items() if name in known} | {new.name: new}
        names = list(self.rounds)
        spare = self.safe if self.safe in self.rounds else names[-2] if len(names) > 1 else ""
        self._keep({new.name, spare, self.start, self.copying, self.storing, *self.best})

    def drop(self, names: Iterable[str]) -> None:
        """Drop rounds that are not to be used."""
        self._keep(self.rounds.keys() - set(names))

    def _keep(self, names: Iterable[str]) -> None:
        kept = set(names)
        self.rounds = {name: each for name, each in self.rounds.items() if name in kept}
        self.safe = self.safe if self.safe in kept else ""
