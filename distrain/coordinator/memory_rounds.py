"""Checkpoints in the memory of the hosts: committed, copied, gathered for a restart, and stored. Runs in: coordinator.

:class:`~distrain.coordinator.report_handler.ReportHandler` assembles them as all others. Their files are kept by the
agents (:mod:`distrain.agent.memory_keeper`), which carry out the orders that are given here.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from distrain import wire
from distrain.coordinator.store.run_store import Publication
from distrain.decisions.memory import copy_hosts, to_keep
from distrain.storage.commit import MemoryPart, MemoryRound
from distrain.storage.files import advice_on
from distrain.storage.retention import best_first
from distrain.system.log import warn
from distrain.system.text import is_full_disk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from distrain.api.config import CheckpointConfig
    from distrain.coordinator.store.run_store import RunStore
    from distrain.hosts.world import WorldPlan
    from distrain.storage.records import CommittedCheckpoint
    from distrain.system.remote_path import RemotePath

    Answer = Callable[[wire.RoundGathered], None]


_MANY_FAILURES = 3
"""Copies, or tries to store at the end, that fail in a row before the user is told: a lost helper costs one."""


@dataclass(slots=True)
class _Storing:
    """A round on its way to storage. unstored: the ranks whose parts are missing.

    ordinal: a number below 0 that names the files of this round among those of checkpoints that ranks report. Another
    try has another one: an uploader may still be writing for the last one.
    """

    kept: MemoryRound
    began: float
    ordinal: int
    directory: str = ""
    unstored: set[int] = field(default_factory=set)
    sources: dict[int, tuple[str, str]] = field(default_factory=dict)
    """By rank: the host that is storing its part, and the directory there."""
    damaged: set[tuple[int, str]] = field(default_factory=set)
    """Ranks, and the hosts on which their parts are damaged."""


@dataclass(eq=False)
class MemoryRounds:
    """The rounds of one run.

    config: which rounds are kept, how often one is copied, and how often one is stored.
    send: sends a message to a host. upload: has files that are on a host stored. plan: of the latest attempt.
    racks: by host. storage_of: the run directory as a host sees it; empty if it does not. is_training: tells if the
    hosts have all that they need for uploads. on_change: called when a round is stored, or is found to be damaged.
    """

    store: RunStore
    config: CheckpointConfig
    send: Callable[[str, wire.Message], None]
    upload: Callable[[str, wire.Upload], None]
    plan: Callable[[], WorldPlan | None]
    racks: Mapping[str, str]
    storage_of: Callable[[str], str]
    is_training: Callable[[], bool]
    on_change: Callable[[], None]

    def __post_init__(self) -> None:
        self.is_off = False
        """True once a host was short of memory."""
        self._copy_at = 0
        """The first index of a round that is copied next."""
        self._attempt = -1
        self._hosts: list[str] = []
        self._rounds: dict[str, MemoryRound] = {}
        """Those that are kept, by name, in the order of their commits."""
        self._safe = self._copying = self._start = ""
        """The newest round of which every host's parts are on another host, too, the one that is being copied, and the
        one that ranks may still read as the start of the attempt."""
        self._copying_hosts: set[str] = set()
        """The hosts that copy their parts of a round now."""
        self._copy_folders: dict[str, dict[str, str]] = {}
        """By round and host: the directory with the copies that it has."""
        self._reads: dict[tuple[str, int], str] = {}
        """By reader and number: the host that has been asked for bytes."""
        self._storing: _Storing | None = None
        self._tries = 0
        self._failed_tries = 0
        """Tries in a row that the storage has refused."""
        self._store_at: float | None = None
        """When the newest round has to be stored."""
        self._gathered: dict[tuple[str, str], str] = {}
        """By host and round: the directory for readers."""
        self._asking: dict[tuple[str, str], list[Answer]] = {}
        """By host and round: who waits for that directory."""
        self._notes: set[tuple[str, str]] = set()
        """By round: what was said about damaged or lost files. All hosts say the same of a lost one."""
        self._failed_copies = 0
        """Copies in a row that have failed."""
        self._is_ending = False
        self._lost: tuple[int, int, str] | None = None
        """The index of the last round that could not be stored, the rank whose part is lost, and how."""

    @property
    def lost_work(self) -> tuple[int, str] | None:
        """The rank whose part of the newest checkpoint is lost, and how. None if a later checkpoint is kept."""
        latest = self.store.latest
        return None if self._lost is None or (latest and latest.index > self._lost[0]) else self._lost[1:]

    @property
    def is_busy(self) -> bool:
        """True while a rank may wait for files."""
        return bool(self._asking)

    @property
    def is_storing(self) -> bool:
        """True while a round is being stored, unless the storage has failed to take it."""
        return self._storing is not None and (bool(self._storing.directory) or not self.store.is_idle)

    @property
    def is_settling(self) -> bool:
        """True once the files of a round are stored, or cannot be. Nothing may start until the rest is done."""
        return self._storing is not None and bool(self._storing.directory) and not self._storing.unstored

    def has(self, path: str | None) -> bool:
        """Return whether the checkpoint ``path`` is one in memory."""
        return any(str(saved.path) == path for saved in self.store.committed if saved.is_in_memory)

    def handle(self, host: str, message: wire.Message) -> None:
        """Handle an answer of an agent."""
        match message:
            case wire.RoundCopied():
                self._on_copied(host, message)
            case wire.RoundGathered():
                self._on_gathered(host, message)
            case wire.ReadPart(host=owner, reader=reader, number=number):
                self._reads[reader, number] = owner
                if owner in self._hosts:
                    self.send(owner, message)
                else:
                    self._refuse_reads()
            case wire.PartRead(reader=reader, number=number):
                if self._reads.pop((reader, number), None):
                    self.send(reader, message)

    def _refuse_reads(self) -> None:
        """Answer those who wait for bytes of a host that is no longer there."""
        for (reader, number), owner in list(self._reads.items()):
            if owner not in self._hosts:
                del self._reads[reader, number]
                self.send(reader, wire.PartRead(reader=reader, number=number, failed=f"host {owner} is lost"))

    def _host_of(self, rank: int) -> str:
        plan = self.plan()
        assert plan is not None
        return plan.ranks[rank].host

    # -- commits --------------------------------------------------------------------------------------------------

    def hash(self, report: wire.Reported, files: Sequence[str]) -> None:
        """Have the files of a part hashed, which is all that there is to do with them."""
        self.send(
            self._host_of(report.rank),
            wire.HashFiles(
                attempt=report.attempt,
                rank=report.rank,
                ordinal=report.index,
                folder=report.folder,
                files=list(files),
                facts=report.facts or {},
            ),
        )

    def publish(self, reports: Mapping[int, wire.Reported], new: Publication, *, keeps_start: bool) -> None:
        """Commit a checkpoint whose files are all in memory.

        keeps_start: ranks may still read the checkpoint that the attempt has started from.
        """
        plan = self.plan()
        assert plan is not None
        copies = copy_hosts(plan.hosts, self.racks)
        manifest, known = new.manifest, {saved.path.name for saved in self.store.committed}
        name = manifest["name"] or self.store.new_name(manifest["index"])
        if name in {*known, *self._rounds, self._storing_name}:  # another one by that name may be somewhere
            name = f"{name}-{manifest['index']}"
        manifest["name"] = name
        hosts = {rank: plan.ranks[rank].host for rank in reports}
        parts = {rank: MemoryPart(hosts[rank], of.folder, copies[hosts[rank]]) for rank, of in reports.items()}
        kept = MemoryRound(name, manifest, dict(self.store.metadata), dict(new.positions), parts)
        if not keeps_start:
            self._start = ""
        self._drop(self._rounds.keys() - known)
        self._rounds[name] = kept
        needed = [self._start, self._copying, self._storing_name, *(saved.path.name for saved in self._best())]
        self._drop(self._rounds.keys() - to_keep(list(self._rounds), safe=self._safe, needed=needed))
        self._tell_hosts(kept)
        self._store_at = self._store_at or time.monotonic() + self.config.storage_every_s
        new.done(self.store.location / name)
        self.store_or_copy()

    def _drop(self, names: Iterable[str]) -> None:
        for name in names:
            self._rounds.pop(name, None)

    @property
    def _storing_name(self) -> str:
        return self._storing.kept.name if self._storing else ""

    @property
    def _newest(self) -> MemoryRound | None:
        return next(reversed(self._rounds.values()), None)

    def _tell_hosts(self, new: MemoryRound | None = None) -> None:
        """Tell the hosts what they keep, and forget what they no longer do."""
        known, body = list(self._rounds), new.encoded() if new else b""
        for host in self._hosts:
            self.send(host, wire.KeepRound(host=host, keep=known, run=self.storage_of(host), body=body))
        self.store.forget_memory(known)
        self._copy_folders = {name: of for name, of in self._copy_folders.items() if name in known}
        self._gathered = {key: folder for key, folder in self._gathered.items() if key[1] in known}

    def short_of_memory(self, rank: int, why: str) -> None:
        """Note that the host of a rank has no room for a part: further checkpoints of the run go to storage."""
        if not self.is_off:
            self.is_off = True
            warn(f"{self._host_of(rank)} cannot keep checkpoints in memory: {why}; from now on, they go to storage")

    def drop_others(self) -> None:
        """Drop the rounds from which the run will not continue, and tell the hosts what is new about the others.

        If one of them is being stored, that stops. If its files are complete already, its manifest says what is wrong.
        """
        if self._rounds:
            self._drop(self._rounds.keys() - {saved.path.name for saved in self.store.committed if saved.is_in_memory})
            if self._storing_name not in self._rounds and not self.is_settling:
                self._end_storing()
            self._tell_hosts(self._newest)

    def free_all(self) -> None:
        """Drop all rounds: memory is short, and a newer checkpoint is on storage."""
        if self._storing is None:
            self.store.forget_memory([saved.path.name for saved in self._best()])
            self.drop_others()
            self.store_or_copy()

    def _best(self) -> list[CommittedCheckpoint]:
        """Return the rounds that are not on storage, but have to be: ``num_to_keep`` keeps them by their score."""
        saved, rule = self.store.committed, self.config
        if rule.checkpoint_score_attribute is None:
            return []
        best = best_first([each.metrics for each in saved], rule)[: rule.num_to_keep or 1]
        return [saved[n] for n in best if saved[n].is_in_memory]

    # -- copies on other hosts ------------------------------------------------------------------------------------

    def store_or_copy(self) -> None:
        """Store the newest round if that is due, and copy it if it has no copy. Do one at a time, so that few are kept.

        A round that ``num_to_keep`` keeps is stored as soon as there is a newer one: only the newest is safe in memory.
        """
        newest = self._newest
        is_due = self._store_at is not None and time.monotonic() >= self._store_at and self.is_training()
        if self._is_ending or is_due:
            self.store_newest()
        elif self.is_training() and not self._failed_tries:
            for saved in [saved for saved in self._best() if saved is not self.store.latest][:1]:
                self._store_round(saved)
        if newest is None or newest.index < self._copy_at:
            return
        if not self._copying_hosts and newest.name not in self._copy_folders:
            self._copy_at = newest.index + (self.config.memory_every or 1)
            self._copy_folders[newest.name] = {}
            self._copying_hosts = {part.copy for part in newest.parts.values() if part.copy in self._hosts}
            self._copying = newest.name if self._copying_hosts else ""
            for host in self._copying_hosts:
                self.send(host, wire.CopyRound(name=newest.name))

    def _on_copied(self, host: str, message: wire.RoundCopied) -> None:
        if host not in self._copying_hosts or message.name != self._copying:
            return
        if message.failed is not None:
            self._failed_copies += 1
            if self._failed_copies == _MANY_FAILURES:
                warn(f"host {host} cannot copy checkpoints in memory of other hosts: {message.failed}")
            self.store.append_event("memory_damage", name=message.name, host=host, text=message.failed)
        elif message.name in self._copy_folders:
            self._copy_folders[message.name][host] = message.folder
        self._end_copy(host)

    def _end_copy(self, host: str) -> None:
        self._copying_hosts.discard(host)
        if self._copying_hosts:
            return
        name, self._copying = self._copying, ""
        kept, there = self._rounds.get(name), self._copy_folders.get(name, {})
        if kept is not None and {part.copy for part in kept.parts.values()} <= there.keys():
            self._safe, self._failed_copies = kept.name, 0
        self.store_or_copy()

    def lost(self, host: str) -> None:
        """Note that a host is lost, and what it has in memory."""
        if host in self._hosts:
            self._hosts.remove(host)
        self._refuse_reads()
        if host in self._copying_hosts:
            self._end_copy(host)
        for key in [key for key in self._asking if key[0] == host]:
            del self._asking[key]  # the attempt ends, and the next one asks the hosts that are left
        if self._storing is not None:
            self._store_parts({rank for rank, source in self._storing.sources.items() if source[0] == host})

    # -- the start of an attempt ----------------------------------------------------------------------------------

    def begin(self, attempt: int, hosts: Sequence[str], then: Callable[[CommittedCheckpoint | None], None]) -> bool:
        """Have every host gather the newest checkpoint, if that is in memory; else return False.

        ``then`` is called with the newest one that could be gathered, or is on storage; None if there is none.
        """
        self._attempt, self._hosts, self._copy_at = attempt, list(hosts), 0
        self._is_ending, self._lost = False, None
        self._refuse_reads()
        if self._copying_hosts:  # nobody hears the answers
            self._copying_hosts.clear()
            self._copy_folders.pop(self._copying, None)
        self._copying = self._start = ""
        if len(hosts) == 1:
            self._safe = ""
        self._asking.clear()
        self._gathered.clear()  # every byte is compared again
        if not self.is_settling:  # the answers to earlier orders are ignored
            self._end_storing()
        latest = self.store.latest
        if latest is None or not latest.is_in_memory:
            return False
        name = self._start = latest.path.name
        failures: dict[str, str] = {}
        waiting = set(hosts)

        def answered(host: str, answer: wire.RoundGathered) -> None:
            waiting.discard(host)
            if answer.failed is not None:
                failures[host] = answer.failed
            if waiting or self._attempt != attempt or self._is_ending:
                return
            if failures:
                self._give_up(name, " and ".join(dict.fromkeys(failures.values())), try_again)
            else:
                then(self.store.latest)

        def try_again() -> None:
            if self._attempt == attempt and not self._is_ending and not self.begin(attempt, hosts, then):
                then(self.store.latest)

        for host in hosts:
            self._gather(host, name, partial(answered, host))
        return True

    def _give_up(self, name: str, why: str, then: Callable[[], None]) -> None:
        """Drop a round that cannot be used, and say what is used instead, unless agents have stored it meanwhile."""

        def adopted() -> None:
            is_lost = self.has(str(self.store.location / name))
            self._drop([name])
            self._tell_hosts()
            if is_lost:
                latest = self.store.latest
                instead = "there is no other one"
                if latest is not None:
                    where = "in memory" if latest.is_in_memory else "on storage"
                    instead = f"{latest.path.name} {where} is used instead"
                warn(f"{name} in memory cannot be used: {why}; {instead}")
                self.store.append_event("memory_checkpoint_lost", name=name, why=why)
            then()

        self.store.adopt(adopted)

    def fetch(self, host: str, path: str, then: Callable[[str, str | None], None]) -> None:
        """Call ``then`` with the directory in which a host has a round for readers, and with why it has none."""
        self._gather(host, path.rpartition("/")[2], lambda answer: then(answer.folder, answer.failed))

    def _gather(self, host: str, name: str, then: Answer) -> None:
        if folder := self._gathered.get((host, name)):
            then(wire.RoundGathered(attempt=self._attempt, name=name, folder=folder))
            return
        waiting = self._asking.setdefault((host, name), [])
        waiting.append(then)
        if len(waiting) == 1:
            self.send(host, wire.GatherRound(attempt=self._attempt, host=host, body=self._rounds[name].encoded()))

    def _on_gathered(self, host: str, answer: wire.RoundGathered) -> None:
        for note in [note for note in answer.notes if (answer.name, note) not in self._notes]:
            self._notes.add((answer.name, note))
            warn(f"{answer.name} in memory: {note}")
            self.store.append_event("memory_damage", name=answer.name, host=host, text=note)
        if answer.failed is None:
            self._gathered[host, answer.name] = answer.folder
        for then in self._asking.pop((host, answer.name), ()):
            then(answer)

    # -- storage --------------------------------------------------------------------------------------------------

    def deadline(self) -> float | None:
        """Return when :meth:`store_or_copy` has something to do."""
        return None if self._storing or not self.is_training() else self._store_at

    def store_newest(self) -> None:
        """Store the newest round. If it is stored already, store one that ``num_to_keep`` keeps."""
        self._store_at = None
        for saved in [saved for saved in (self.store.latest, *self._best()) if saved and saved.is_in_memory][:1]:
            self._store_round(saved)

    def _store_round(self, saved: CommittedCheckpoint) -> None:
        """Store a round, unless another one is being stored."""
        if self._storing is not None:
            return
        kept = self._rounds[saved.path.name]
        self._tries += 1
        storing = self._storing = _Storing(kept, time.monotonic(), -self._tries)
        self.store.prepare(
            kept.manifest["attempt"], storing.ordinal, name=kept.name, then=partial(self._store_all, storing)
        )

    def store_last(self) -> None:
        """Store the newest round, after one that is being stored: the run ends."""
        self._is_ending = True
        self.store_or_copy()

    def close(self) -> None:
        """Forget what is only in memory: the hosts end."""
        if (latest := self.store.latest) is not None and latest.is_in_memory:
            warn(f"{latest.path.name} was only in memory, and is lost")
        self.store.forget_memory()

    def _store_all(self, storing: _Storing, directory: str) -> None:
        storing.directory, storing.unstored = directory, set(storing.kept.parts)
        if storing is self._storing:
            self._store_parts(storing.unstored)

    def _store_parts(self, ranks: set[int]) -> None:
        """Have parts stored, from the copy if their host has them no longer."""
        storing = self._storing
        if storing is None or not storing.directory:
            return
        kept = storing.kept
        for rank in sorted(ranks & storing.unstored):
            part = kept.parts[rank]
            places = {part.host: part.folder}
            if copies := self._copy_folders.get(kept.name, {}).get(part.copy):
                places[part.copy] = f"{copies}/rank_{rank}"
            usable = [host for host in places if host in self._hosts and (rank, host) not in storing.damaged]
            if not usable:
                self._cannot_store(storing, rank)
                return
            host, source = storing.sources[rank] = usable[0], places[usable[0]]
            order = wire.Upload(
                attempt=self._attempt,
                rank=rank,
                ordinal=storing.ordinal,
                source=source,
                files=list(kept.files[rank]),
                others=[],
                directory=storing.directory,
            )
            self.upload(host, order)

    def stored(self, message: wire.FilesCopied) -> bool:
        """Handle an answer about files. Return False if they are not those of a round that is being stored."""
        storing = self._storing
        if message.ordinal >= 0:
            return False
        if storing is None or message.ordinal != storing.ordinal or message.rank not in storing.unstored:
            return True
        rank, (host, source) = message.rank, storing.sources[message.rank]
        expected = storing.kept.files[rank]
        damage = message.failed if message.failed and f"{source}/" in message.failed else ""
        for name, length, crc in message.files:
            if expected[name] != (length, crc):
                damage = f"{name} has the checksum {crc:08x} instead of {expected[name][1]:08x}"
        if damage:
            warn(f"{storing.kept.name} in memory, files of rank {rank} on {host}: {damage}")
            storing.damaged.add((rank, host))
            self._store_parts({rank})
        elif message.failed is not None:
            self._storage_fails(f"rank {rank}: {message.failed}")
        else:
            storing.unstored.discard(rank)
            if not storing.unstored:
                self._publish(storing)
        return True

    def _cannot_store(self, storing: _Storing, rank: int) -> None:
        """Store the round before instead."""
        name, index, why = storing.kept.name, storing.kept.index, f"no host has intact files of rank {rank}"
        storing.unstored.clear()

        def given_up() -> None:
            if not any(saved.index == index for saved in self.store.committed):
                self._lost = max(self._lost or (-1, -1, ""), (index, rank, f"{name} was only in memory, and {why}"))
            self._end_storing()
            self.on_change()
            self.store_newest()

        self._give_up(name, why, given_up)

    def _storage_fails(self, why: object) -> None:
        """Keep the round, and try again later, unless the disk is full. At the end of the run, try at once."""
        assert self._storing is not None
        text = f"cannot write {self._storing.kept.name} to {self.store.location}: {why}"
        self._failed_tries += 1
        self._end_storing()
        self._store_at = time.monotonic() + self.config.storage_every_s
        if is_full_disk(text) or (self._is_ending and self._failed_tries >= _MANY_FAILURES):
            self._failed_tries = 0
            self.store.on_failure(f"{text}{advice_on(text)}")
        elif self._is_ending:
            self.store_newest()
        else:
            warn(f"{text}; it stays in memory, and the next one is written in {self.config.storage_every_s:g} s")

    def _end_storing(self) -> None:
        """Forget the round that is being stored. If it is not stored, the newest one is due now."""
        if self._storing is not None:
            self._storing, self._store_at = None, time.monotonic()

    def _publish(self, storing: _Storing) -> None:
        kept = storing.kept

        def done(path: Path | RemotePath) -> None:
            self._end_storing()
            self._failed_tries = 0
            self.store.note_stored(kept.manifest, manifest, path)
            took_s = round(time.monotonic() - storing.began, 3)
            self.store.append_event("stored", name=path.name, index=kept.index, seconds=took_s)
            self._store_at = time.monotonic() + self.config.storage_every_s
            self.on_change()
            self.store_or_copy()

        manifest = {**kept.manifest, "files": dict(kept.manifest["files"])}  # the store adds the metadata to them
        self.store.publish(
            Publication(storing.ordinal, None, manifest, kept.positions, done, failed=self._storage_fails)
        )
