"""Checkpoints in the memory of the hosts: which are kept, copied, gathered for a restart, and stored.

Runs in: coordinator.

Pure: no I/O, no clock. Their files are kept by the agents (:mod:`distrain.agent.memory_keeper`), which carry out the
orders that are given here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from distrain import wire
from distrain.decisions.checkpoints.actions import (
    MakeDirectory,
    Publish,
    Record,
    RunEnds,
    StorageFails,
    Store,
    StoreLast,
)
from distrain.decisions.events import SendMessage, ShowLine
from distrain.decisions.hearing import hears
from distrain.storage.commit import MemoryPart, MemoryRound
from distrain.storage.names import METADATA_FILE
from distrain.system.text import advice_on, is_full_disk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from distrain.decisions.checkpoints.actions import Action
    from distrain.decisions.checkpoints.ledger import Ledger
    from distrain.decisions.checkpoints.site import Site
    from distrain.hosts.world import WorldPlan
    from distrain.storage.commit import CommittedCheckpoint
    from distrain.system.remote_path import RemotePath

    Answer = Callable[[str, str | None], None]

_MANY_FAILURES = 3
"""Copies, or tries to store at the end, that fail in a row before the user is told: a lost helper costs one."""


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


@dataclass(slots=True, eq=False)
class _Kept:
    """A round that is in memory.

    copies: by host, the directory with the copies that it has; None if no host was asked to copy.
    """

    round: MemoryRound
    copies: dict[str, str] | None = None
    is_safe: bool = False
    """True once every host's parts are on another host, too."""


@dataclass(slots=True, eq=False)
class _Storing:
    """A round on its way to storage. unstored: the ranks whose parts are missing.

    number: counted from 1. Another try has another one: an uploader may still be writing for the last one.
    """

    round: MemoryRound
    began: float
    number: int
    directory: str = ""
    unstored: set[int] = field(default_factory=set)
    sources: dict[int, tuple[str, str]] = field(default_factory=dict)
    """By rank: the host that is storing its part, and the directory there."""
    damaged: set[tuple[int, str]] = field(default_factory=set)
    """Ranks, and the hosts on which their parts are damaged."""

    @property
    def key(self) -> str:
        """The key of its directory."""
        return f"memory-{self.number}"


class Rounds:
    """The rounds of one run.

    site: what is known about the run and its hosts. on_change: called when a round is stored, or is found to be
    damaged.
    """

    def __init__(self, ledger: Ledger, site: Site, emit: Callable[[Action], None], on_change: Callable[[], None]):
        self.ledger, self.site, self.config = ledger, site, site.config
        self._emit, self._on_change = emit, on_change
        self.is_off = False
        """True once a host was short of memory."""
        self.now = 0.0
        self._attempt = -1
        self._plan: WorldPlan
        self._hosts: list[str] = []
        self._kept: dict[str, _Kept] = {}
        """By name, in the order of the commits."""
        self._start = ""
        """The round that ranks may still read as the start of the attempt."""
        self._copy_at = 0
        """The first index of a round that is copied next."""
        self._copying = ""
        self._copying_hosts: set[str] = set()
        """The hosts that copy their parts of that round now."""
        self._failed_copies = 0
        """Copies in a row that have failed."""
        self._places: dict[str, tuple[str, int]] = {}
        """By host that has answered in this attempt: the address and port at which others get its files."""
        self._untold = Counter[str]()
        """By host, if there are several: how often it has not answered yet that it knows what it keeps."""
        self._when_told: list[Callable[[], None]] = []
        """Called when all hosts have answered."""
        self._asking: dict[tuple[str, str], list[Answer]] = {}
        """By host and round: who waits for files, in the order of the answers."""
        self._storing: _Storing | None = None
        self._tries = 0
        self._failed_tries = 0
        """Tries in a row that the storage has refused."""
        self._store_at: float | None = None
        """When the newest round has to be stored."""
        self._is_ending = False
        self._lost: tuple[int, int, str] | None = None
        """The index of the last round that could not be stored, the rank whose part is lost, and how."""

    @property
    def lost_work(self) -> tuple[int, str] | None:
        """The rank whose part of the newest checkpoint is lost, and how. None if a later checkpoint is kept."""
        latest = self.ledger.latest
        return None if self._lost is None or (latest and latest.index > self._lost[0]) else self._lost[1:]

    @property
    def safe(self) -> str:
        """The newest round of which every host's parts are on another host, too; "" if there is none."""
        return next((name for name, kept in reversed(self._kept.items()) if kept.is_safe), "")

    @property
    def is_busy(self) -> bool:
        """True while a rank may wait for files."""
        return any(self._asking.values())

    @property
    def is_storing(self) -> bool:
        """True while a round is being stored, unless the storage has failed to take it."""
        return self._storing is not None and (bool(self._storing.directory) or not self.site.is_idle())

    @property
    def is_settling(self) -> bool:
        """True once the files of a round are stored, or cannot be. Nothing may start until the rest is done."""
        return self._storing is not None and bool(self._storing.directory) and not self._storing.unstored

    def _send(self, host: str, message: wire.Message) -> None:
        self._emit(SendMessage(host, message))

    # -- commits --------------------------------------------------------------------------------------------------

    def commit(self, reports: Mapping[int, wire.Reported], new: Publish, *, keeps_start: bool) -> None:
        """Commit a checkpoint whose files are all in memory.

        keeps_start: ranks may still read the checkpoint that the attempt has started from.
        """
        copies, manifest = copy_hosts(self.site.plan.hosts, self.site.racks), new.manifest
        known = self.ledger.names
        name = manifest["name"] or self.site.new_name(manifest["index"])
        if name in {*known, *self._kept, self._storing_name}:  # another one by that name may be somewhere
            name = f"{name}-{manifest['index']}"
        manifest["name"] = name
        hosts = {rank: self.site.host_of(rank) for rank in reports}
        parts = {rank: MemoryPart(hosts[rank], of.folder, copies[hosts[rank]]) for rank, of in reports.items()}
        newest = MemoryRound(name, manifest, dict(self.site.metadata), dict(new.positions), parts)
        if not keeps_start:
            self._start = ""
        self._drop(self._kept.keys() - {*known, self._start})
        self._kept[name] = _Kept(newest)
        needed = {self._start, self._copying, self._storing_name, name}
        needed.update(asked for (_, asked), waiting in self._asking.items() if waiting)
        needed.update(saved.path.name for saved in self.ledger.best_in_memory(self.config))
        spare = [self.safe] if self.safe else list(self._kept)[-2:-1]
        self._drop(self._kept.keys() - {*needed, *spare})
        self._tell_hosts(newest)
        self._store_at = self._store_at or self.now + self.config.storage_every_s
        new.done(self.site.location / name)
        self.store_or_copy()

    def _drop(self, names: Iterable[str]) -> None:
        for name in names:
            self._kept.pop(name, None)

    @property
    def _storing_name(self) -> str:
        return self._storing.round.name if self._storing else ""

    def _tell_hosts(self, new: MemoryRound | None = None) -> None:
        """Tell the hosts what they keep, and forget what they no longer do."""
        known, body = list(self._kept), new.encoded() if new else b""
        token = self.site.token if len(self._hosts) > 1 else ""
        order = partial(wire.KeepRound, attempt=self._attempt, keep=known, body=body, token=token)
        for host in self._hosts:
            self._send(host, order(host=host, peer=self._plan.peer_of(host)))
        self._untold.update(self._hosts if token else ())
        self.ledger.forget_memory(known)

    @hears(wire.MemoryServed)
    def on_served(self, host: str, answer: wire.MemoryServed) -> None:
        """Note where other hosts get the files of a host."""
        self._places[host] = self._plan.address_of(host, answer.address), answer.port
        self._untold -= Counter([host])
        self._go_on_if_told()

    def _go_on_if_told(self) -> None:
        """Once all hosts know what they keep, do what waits for that; if nothing does, copy what needs it."""
        if not self._untold:
            waiting, self._when_told = self._when_told or [self.store_or_copy], []
            for then in waiting:
                then()

    def _once_told(self, then: Callable[[], None]) -> None:
        """Do something once all hosts know what they keep: before, they would not hand out its files."""
        if self._untold:
            self._when_told.append(then)
        else:
            then()

    def _peers(self, parts: Iterable[MemoryPart]) -> dict[str, tuple[str, int]]:
        """Return where to get these parts."""
        hosts = dict.fromkeys(host for part in parts for host in (part.host, part.copy))
        return {host: self._places[host] for host in hosts if host in self._places}

    def short_of_memory(self, rank: int, why: str) -> None:
        """Note that the host of a rank has no room for a part: further checkpoints of the run go to storage."""
        if not self.is_off:
            self.is_off = True
            host = self.site.host_of(rank)
            self._warn(f"{host} cannot keep checkpoints in memory: {why}; from now on, they go to storage")

    def _warn(self, text: str) -> None:
        self._emit(ShowLine(text))

    def drop_others(self) -> None:
        """Drop the rounds from which the run will not continue, and tell the hosts what is new about the others.

        If one of them is being stored, that stops. If its files are complete already, its manifest says what is wrong.
        """
        if self._kept:
            self._drop(self._kept.keys() - {saved.path.name for saved in self.ledger.all if saved.is_in_memory})
            if self._storing_name not in self._kept and not self.is_settling:
                self._end_storing()
            self._tell_hosts(next((kept.round for kept in reversed(self._kept.values())), None))

    def free_all(self) -> None:
        """Drop all rounds: memory is short, and a newer checkpoint is on storage."""
        if self._storing is None:
            self.ledger.forget_memory([saved.path.name for saved in self.ledger.best_in_memory(self.config)])
            self.drop_others()
            self.store_or_copy()

    # -- copies on other hosts ------------------------------------------------------------------------------------

    def store_or_copy(self) -> None:
        """Store the newest round if that is due, and copy it if it has no copy. Do one at a time, so that few are kept.

        A round that ``num_to_keep`` keeps is stored as soon as there is a newer one: only the newest is safe in memory.
        """
        newest = next(reversed(self._kept.values()), None)
        is_training = self.site.is_training()
        if self._is_ending or (is_training and self._store_at is not None and self.now >= self._store_at):
            self.store_newest()
        elif is_training and not self._failed_tries:
            best = self.ledger.best_in_memory(self.config)
            for saved in [saved for saved in best if saved is not self.ledger.latest][:1]:
                self._store(saved)
        if newest is None or newest.round.index < self._copy_at or self._copying or newest.copies is not None:
            return
        if self._untold:  # they would not hand out its files
            return
        self._copy_at = newest.round.index + (self.config.memory_every or 1)
        newest.copies = {}
        parts: dict[str, list[MemoryPart]] = {}
        for part in newest.round.parts.values():
            if part.copy in self._places:
                parts.setdefault(part.copy, []).append(part)
        self._copying_hosts, self._copying = {*parts}, newest.round.name if parts else ""
        for host in parts:
            order = partial(wire.FetchRound, attempt=self._attempt, name=self._copying, is_copy=True)
            self._send(host, order(peers=self._peers(parts[host])))

    @hears(wire.RoundDone)
    def on_done(self, host: str, answer: wire.RoundDone) -> None:
        """Handle the answer of a host that was to copy parts, or to provide a round."""
        (self._on_copied if answer.is_copy else self._on_gathered)(host, answer)

    def _on_copied(self, host: str, answer: wire.RoundDone) -> None:
        if host not in self._copying_hosts or answer.name != self._copying:
            return
        kept = self._kept.get(answer.name)
        if answer.failed is not None:
            self._failed_copies += 1
            if self._failed_copies == _MANY_FAILURES:
                self._warn(f"host {host} cannot copy checkpoints in memory of other hosts: {answer.failed}")
            self._emit(Record("memory_damage", {"name": answer.name, "host": host, "text": answer.failed}))
        elif kept is not None and kept.copies is not None:
            kept.copies[host] = answer.folder
        self._end_copy(host)

    def _end_copy(self, host: str) -> None:
        self._copying_hosts.discard(host)
        if self._copying_hosts:
            return
        name, self._copying = self._copying, ""
        kept = self._kept.get(name)
        if kept and {part.copy for part in kept.round.parts.values()} <= (kept.copies or {}).keys():
            kept.is_safe, self._failed_copies = True, 0
        self.store_or_copy()

    def lost(self, host: str) -> None:
        """Note that a host is lost, and what it has in memory."""
        if host in self._hosts:
            self._hosts.remove(host)
        self._places.pop(host, None)
        was_awaited = self._untold.pop(host, 0)
        if host in self._copying_hosts:
            self._end_copy(host)
        for key in [key for key in self._asking if key[0] == host]:
            del self._asking[key]  # the attempt ends, and the next one asks the hosts that are left
        if self._storing is not None:
            self._store_parts({rank for rank, source in self._storing.sources.items() if source[0] == host})
        if was_awaited:
            self._go_on_if_told()

    # -- the start of an attempt ----------------------------------------------------------------------------------

    def begin(self, attempt: int, hosts: Sequence[str], then: Callable[[], None]) -> bool:
        """Have every host gather the newest checkpoint, if that is in memory; else return False.

        ``then`` is called when the newest one that the ledger has could be gathered, or is on storage.
        """
        self._attempt, self._hosts, self._copy_at = attempt, list(hosts), 0
        self._is_ending, self._lost = False, None
        self._plan = self.site.plan
        self._places.clear()
        self._untold.clear()
        self._when_told.clear()
        if self._copying_hosts:  # nobody hears the answers
            self._copying_hosts.clear()
            if self._copying in self._kept:
                self._kept[self._copying].copies = None
        self._copying = self._start = ""
        self._asking.clear()
        for kept in self._kept.values():
            kept.is_safe &= len(hosts) > 1
        if not self.is_settling:  # the answers to earlier orders are ignored
            self._end_storing()
        latest = self.ledger.latest
        if latest is None or not latest.is_in_memory:
            return False
        name = self._start = latest.path.name
        failures: dict[str, str] = {}
        waiting = set(hosts)

        def answered(host: str, _: str, failed: str | None) -> None:
            waiting.discard(host)
            if failed is not None:
                failures[host] = failed
            if waiting or self._is_ending:
                return
            if failures:
                self._start = ""
                self._give_up(name, " and ".join(dict.fromkeys(failures.values())))
                try_again()
            else:
                then()

        def try_again() -> None:
            if not self._is_ending and not self.begin(attempt, hosts, then):
                then()

        def gather() -> None:
            if name not in self._kept:  # it was dropped meanwhile
                try_again()
                return
            for host, files in self._first_files(self._kept[name]).items():
                self.fetch(host, name, files, partial(answered, host))

        for kept in self._kept.values():
            self._tell_hosts(kept.round)
        self._once_told(gather)
        return True

    def _give_up(self, name: str, why: str) -> None:
        """Give up a round that cannot be used, and say what is used instead. It stays while ranks start from it."""
        is_lost = self.ledger.is_in_memory(str(self.site.location / name))
        self.ledger.forget_memory(self._kept.keys() - {name})
        self._drop({name} - {self._start})
        self._tell_hosts()
        if is_lost:
            latest = self.ledger.latest
            instead = "there is no other one"
            if latest is not None:
                where = "in memory" if latest.is_in_memory else "on storage"
                instead = f"{latest.path.name} {where} is used instead"
            self._warn(f"{name} in memory cannot be used: {why}; {instead}")
            self._emit(Record("memory_checkpoint_lost", {"name": name, "why": why}))

    def _first_files(self, kept: _Kept) -> dict[str, list[str] | None]:
        """Return by host the files that it gets before its ranks start; None: all. It gets others when ranks read them.

        They are what ``restore()`` reads: those of its ranks, or of the lowest rank if one of them has none. So each
        file is found to be intact on some host. Copies are compared, too. None also if hosts could not copy last time.
        """
        if self._failed_copies >= _MANY_FAILURES:
            return dict.fromkeys(self._hosts)
        files, plan = kept.round.files, self._plan
        lowest = next((rank for rank in sorted(files) if files[rank]), 0)
        needed = {
            host: {each.rank if files.get(each.rank) else lowest for each in plan.on(host)} for host in self._hosts
        }
        for rank, part in kept.round.parts.items():
            for host in {plan.ranks[rank % plan.world_size].host, *({part.copy} & (kept.copies or {}).keys())}:
                if host in needed:
                    needed[host].add(rank)
        return {host: [file for rank in ranks for file in files.get(rank, ())] for host, ranks in needed.items()}

    def has(self, path: str) -> bool:
        """Return whether ranks read a checkpoint from memory: those that start from it do even if it is given up."""
        name = path.rpartition("/")[2]
        is_stored = any(saved.path.name == name for saved in self.ledger.all if not saved.is_in_memory)
        return path == str(self.site.location / name) and name in self._kept and not is_stored

    def fetch(self, host: str, name: str, files: list[str] | None, then: Answer) -> None:
        """Call ``then`` with the directory in which a host has files of a round (None: all), or with why not."""
        self._asking.setdefault((host, name), []).append(then)
        parts, facts = self._kept[name].round.parts, self._kept[name].round.manifest["files"]
        needed = facts if files is None else facts.keys() & {METADATA_FILE, *files}

        def order() -> None:
            if host not in self._hosts:
                return
            peers = self._peers(parts[rank] for rank in {facts[file]["rank"] for file in needed})
            self._send(host, wire.FetchRound(attempt=self._attempt, name=name, files=files, peers=peers))

        self._once_told(order)

    def _on_gathered(self, host: str, answer: wire.RoundDone) -> None:
        for note in answer.notes:
            self._emit(ShowLine(f"{answer.name} in memory: {note}", once=True))
            self._emit(Record("memory_damage", {"name": answer.name, "host": host, "text": note}))
        if answer.failed is not None and self.site.is_training():  # the next start finds out if the round can be used
            self._failed_copies = max(self._failed_copies, _MANY_FAILURES)
        if waiting := self._asking.get((host, answer.name)):
            waiting.pop(0)(answer.folder, answer.failed)

    # -- storage --------------------------------------------------------------------------------------------------

    def deadline(self) -> float | None:
        """Return when :meth:`store_if_due` has something to do."""
        return None if self._storing or not self.site.is_training() else self._store_at

    def store_if_due(self) -> None:
        """Store the newest round, if the last one was stored long enough ago."""
        if (due := self.deadline()) is not None and self.now >= due:
            self.store_or_copy()

    def store_newest(self) -> None:
        """Store the newest round. If it is stored already, store one that ``num_to_keep`` keeps."""
        self._store_at = None
        chosen = (self.ledger.latest, *self.ledger.best_in_memory(self.config))
        for saved in [saved for saved in chosen if saved and saved.is_in_memory][:1]:
            self._store(saved)

    def _store(self, saved: CommittedCheckpoint) -> None:
        """Store a round, unless another one is being stored."""
        if self._storing is not None:
            return
        self._tries += 1
        kept = self._kept[saved.path.name].round
        storing = self._storing = _Storing(kept, self.now, self._tries)
        then = partial(self._store_all, storing)
        self._emit(MakeDirectory(storing.key, kept.name, then))

    @hears(StoreLast)
    def store_last(self, _: str, event: StoreLast) -> None:
        """Store the newest round, after one that is being stored: the run ends."""
        self._is_ending = True
        self.store_or_copy()

    @hears(RunEnds)
    def close(self, _: str, event: RunEnds) -> None:
        """Forget what is only in memory: the hosts end."""
        if (latest := self.ledger.latest) is not None and latest.is_in_memory:
            self._warn(f"{latest.path.name} was only in memory, and is lost")
        self.ledger.forget_memory()

    def _store_all(self, storing: _Storing, directory: str) -> None:
        storing.directory = directory
        storing.unstored = {rank for rank, files in storing.round.files.items() if files}
        if storing is self._storing and storing.unstored:
            self._store_parts(storing.unstored)
        elif storing is self._storing:
            self._publish(storing)

    def _store_parts(self, ranks: set[int]) -> None:
        """Have parts stored, from the copy if their host has them no longer."""
        storing = self._storing
        if storing is None or not storing.directory:
            return
        kept = self._kept.get(storing.round.name)
        for rank in sorted(ranks & storing.unstored):
            part = storing.round.parts[rank]
            places = {part.host: part.folder}
            if copies := kept and kept.copies and kept.copies.get(part.copy):
                places[part.copy] = f"{copies}/rank_{rank}"
            usable = [host for host in places if host in self._hosts and (rank, host) not in storing.damaged]
            if not usable:
                self._cannot_store(storing, rank)
                return
            host, source = storing.sources[rank] = usable[0], places[usable[0]]
            order = wire.Upload(
                attempt=self._attempt,
                rank=rank,
                storing=storing.number,
                source=source,
                files=list(storing.round.files[rank]),
                others=[],
                directory=storing.directory,
            )
            self._emit(Store(host, order))

    def on_stored(self, answer: wire.FilesCopied) -> None:
        """Handle an answer about files of a round, which may be one that is no longer being stored."""
        storing, rank = self._storing, answer.rank
        if storing is None or answer.storing != storing.number or rank not in storing.unstored:
            return
        host, source = storing.sources[rank]
        expected = storing.round.files[rank]
        damage = answer.failed if answer.failed and f"{source}/" in answer.failed else ""
        for name, length, crc in answer.files:
            if expected[name] != (length, crc):
                damage = f"{name} has the checksum {crc:08x} instead of {expected[name][1]:08x}"
        if damage:
            self._warn(f"{storing.round.name} in memory, files of rank {rank} on {host}: {damage}")
            storing.damaged.add((rank, host))
            self._store_parts({rank})
        elif answer.failed is not None:
            self._storage_fails(f"rank {rank}: {answer.failed}")
        else:
            storing.unstored.discard(rank)
            if not storing.unstored:
                self._publish(storing)

    def _cannot_store(self, storing: _Storing, rank: int) -> None:
        """Store the round before instead."""
        name, index, why = storing.round.name, storing.round.index, f"no host has intact files of rank {rank}"
        self._give_up(name, why)
        self._lost = max(self._lost or (-1, -1, ""), (index, rank, f"{name} was only in memory, and {why}"))
        self._end_storing()
        self._on_change()
        self.store_newest()

    def _storage_fails(self, why: object) -> None:
        """Keep the round, and try again later, unless the disk is full. At the end of the run, try at once."""
        assert self._storing is not None
        every_s = self.config.storage_every_s
        text = f"cannot write {self._storing.round.name} to {self.site.location}: {why}"
        self._failed_tries += 1
        self._end_storing()
        self._store_at = self.now + every_s
        if is_full_disk(text) or (self._is_ending and self._failed_tries >= _MANY_FAILURES):
            self._failed_tries = 0
            self._emit(StorageFails(f"{text}{advice_on(text)}"))
        elif self._is_ending:
            self.store_newest()
        else:
            self._warn(f"{text}; it stays in memory, and the next one is written in {every_s:g} s")

    def _end_storing(self) -> None:
        """Forget the round that is being stored. If it is not stored, the newest one is due now."""
        if self._storing is not None:
            self._storing, self._store_at = None, self.now

    def _publish(self, storing: _Storing) -> None:
        kept = storing.round
        manifest = {**kept.manifest, "files": dict(kept.manifest["files"])}  # the store adds the metadata to them

        def done(path: Path | RemotePath) -> None:
            self._end_storing()
            self._failed_tries = 0
            self.ledger.stored(kept.manifest, manifest, path, seconds=round(self.now - storing.began, 3))
            self._store_at = self.now + self.config.storage_every_s
            self._on_change()
            self.store_or_copy()

        self._emit(Publish(storing.key, None, manifest, kept.positions, done, self._storage_fails))
