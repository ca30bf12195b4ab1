"""Checkpoints in the memory of hosts, with a real run directory and agents that a test plays."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distrain import CheckpointConfig, wire
from distrain.coordinator.store.local_store import LocalStore
from distrain.decisions.checkpoints.actions import (
    MakeDirectory,
    Publish,
    RunEnds,
    StorageFails,
    Store,
    StoreLast,
)
from distrain.decisions.checkpoints.rounds import Rounds, copy_hosts
from distrain.decisions.checkpoints.site import Site
from distrain.decisions.events import SendMessage, ShowLine
from distrain.decisions.hearing import handlers_of
from distrain.hosts.world import RankPlan, WorldPlan
from distrain.storage.commit import Commit, CommittedCheckpoint, MemoryRound, committed, file_entry, new_manifest
from distrain.storage.file_transfer import hash_files
from distrain.storage.retention import best_first
from distrain.system.log import warn
from tests.unit.conftest import perform

if TYPE_CHECKING:
    from collections.abc import Iterator


def fail(why: object) -> None:
    raise OSError(why)


class Run:
    """A run with one rank on each host."""

    def __init__(self, folder: Path, *hosts: str, **config: Any) -> None:
        self.folder, self.hosts = folder, hosts
        self.sent: list[tuple[str, Any]] = []
        self.unserved: list[str] = []
        """The hosts that have to answer where others get their files."""
        self.orders: list[tuple[str, wire.Upload]] = []
        self.publications: list[Publish] | None = None
        """Those that take place later, if a test wants that."""
        self.chosen: list[CommittedCheckpoint | None] = []
        self.failures: list[str] = []
        self.store = LocalStore(folder / "run")
        self.ledger = self.store.ledger
        plans = (
            RankPlan(rank=n, host=host, local_rank=0, local_world_size=1, node_rank=n) for n, host in enumerate(hosts)
        )
        plan = WorldPlan(ranks=tuple(plans))
        config = {"storage_every_s": 1000.0, **config}
        site = Site(CheckpointConfig(**config), self.store.location, is_remote=False, plan=plan, token="x")
        self.memory = Rounds(self.ledger, site, self.do, lambda: None)
        perform(self.store)
        self.begin(0)

    def do(self, action: Any) -> None:
        """Carry an action out, at once."""
        match action:
            case SendMessage(host, message):
                self.sent.append((host, message))
                if isinstance(message, wire.KeepRound) and message.token:
                    self.unserved.append(host)
            case Store(host, order):
                self.orders.append((host, order))
            case MakeDirectory():
                self.store.prepare(action)
            case Publish() if self.publications is not None:
                self.publications.append(action)
            case Publish():
                self.store.publish(action)
            case StorageFails(why):
                self.failures.append(why)
            case ShowLine(text):
                warn(text)

    def begin(self, attempt: int, *hosts: str) -> None:
        self.attempt = attempt
        self.memory.begin(attempt, hosts or self.hosts, lambda: self.chosen.append(self.ledger.latest))
        self.serve()

    def serve(self) -> None:
        while self.unserved:
            self.answer(self.unserved.pop(), wire.MemoryServed(attempt=self.attempt, port=4711))

    def commit(
        self,
        number: int,
        name: str | None = None,
        metrics: dict[str, Any] | None = None,
        silent: tuple[int, ...] = (),
        empty: tuple[int, ...] = (),
    ) -> str:
        reports, files = {}, {}
        for rank in range(len(self.hosts)):
            part = self.folder / f"part_{rank}_{number}"
            part.mkdir()
            names = [] if rank in empty else [f"file_{rank}"]
            for file in names:
                (part / file).write_text(f"{number}")
            reports[rank] = wire.Reported(attempt=0, rank=rank, index=number, has_checkpoint=True, folder=str(part))
            files |= {path: file_entry(size, crc, rank) for path, size, crc in hash_files(part, names)}
        commit = Commit(number, files, tuple(reports), metrics or {}, world_size=len(self.hosts), silent=silent)
        index = self.ledger.take_index()
        manifest = new_manifest(commit, name=name, index=index, attempt=0, step=0, progress=None, time=0.0)
        saved: list[CommittedCheckpoint] = []

        def done(path: Any) -> None:
            saved.append(replace(committed(path, manifest), manifest=manifest))
            self.ledger.add(*saved)

        self.memory.commit(reports, Publish(number, None, manifest, {}, done, fail), keeps_start=False)
        self.serve()
        assert saved[0].is_in_memory
        return saved[0].path.name

    def answer(self, host: str, answer: Any) -> None:
        handlers_of(self.memory)[type(answer)](host, answer)

    def only(self, kind: type[Any]) -> list[tuple[str, Any]]:
        return [(host, message) for host, message in self.sent if isinstance(message, kind)]

    @property
    def kept(self) -> list[str]:
        return list(self.only(wire.KeepRound)[-1][1].keep)

    def copied(self, name: str) -> None:
        for host in self.hosts:
            copies = self.folder / f"copies_{host}"
            self.answer(host, wire.RoundDone(attempt=0, name=name, is_copy=True, folder=str(copies)))

    def upload_all(self, *, damaged: str = "") -> None:
        """Do what the uploaders do; one of them reads other bytes from a directory."""
        while self.orders:
            _, order = self.orders.pop(0)
            source, is_damaged = Path(order.source), order.source == damaged
            for file in order.files:
                Path(order.directory, file).write_bytes((source / file).read_bytes())
            files = [(name, size, crc + is_damaged) for name, size, crc in hash_files(source, order.files)]
            answer = wire.FilesCopied(attempt=0, rank=order.rank, storing=order.storing, files=files, skipped=[])
            self.memory.on_stored(answer)

    def gathered(self, failed: str | None = None, *, on: str = "") -> None:
        for host, order in self.only(wire.FetchRound)[-len(self.hosts) :]:
            why = failed if host == on else None
            self.answer(host, wire.RoundDone(attempt=1, name=order.name, folder="/gathered", failed=why))
        self.serve()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path, "a", "b")
    yield run
    run.store.close()


def test_the_copies_of_a_host_are_on_the_next_one_of_another_rack_if_there_is_one() -> None:
    assert copy_hosts(["a", "b", "c"], {}) == {"a": "b", "b": "c", "c": "a"}
    assert copy_hosts(["a"], {}) == {"a": ""}
    racks = {"a": "1", "b": "1", "c": "2", "d": "2"}
    assert copy_hosts(list("abcd"), racks) == {"a": "c", "b": "d", "c": "a", "d": "b"}
    assert copy_hosts(list("ab"), racks) == {"a": "b", "b": "a"}


def test_the_newest_round_is_kept_and_the_last_one_that_is_on_two_hosts_or_the_one_before(tmp_path: Path) -> None:
    one = Run(tmp_path / "one", "a")
    names = [one.commit(number) for number in (1, 2, 3)]
    assert one.kept == names[1:]
    one.store.close()
    two = Run(tmp_path / "two", "a", "b")
    first = two.commit(1)
    two.copied(first)
    second = two.commit(2)
    assert two.kept == [first, second]
    third = two.commit(3)  # the second one is being copied
    two.copied(second)
    assert two.commit(4) in two.kept
    assert first not in two.kept
    assert third in two.kept
    two.store.close()


def test_rounds_of_one_name_are_told_apart(two: Run) -> None:
    assert [two.commit(1, "last"), two.commit(2, "last")] == ["last", "last-1"]


def test_a_restart_falls_back_to_the_round_before_and_then_to_storage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, "a", "b")
    stored = run.commit(1)
    run.copied(stored)
    run.memory.store_newest()
    run.upload_all()
    run.commit(2)
    run.copied("checkpoint_000001")
    run.commit(3)
    run.begin(1)
    run.gathered("no intact copy", on="b")
    order = run.only(wire.FetchRound)[-1][1]
    assert order.name == "checkpoint_000001"
    assert [MemoryRound.decoded(told.body).name for _, told in run.only(wire.KeepRound)[-2:]] == [order.name] * 2
    assert order.peers == {"a": ("127.0.0.1", 4711), "b": ("127.0.0.1", 4711)}
    assert not run.chosen
    run.gathered("no intact copy", on="a")
    assert [saved.path.name for saved in run.chosen if saved] == [stored]
    run.store.close()
    said = capsys.readouterr().err
    assert "checkpoint_000002 in memory cannot be used: no intact copy; checkpoint_000001 in memory is used" in said
    assert "checkpoint_000001 in memory cannot be used: no intact copy; checkpoint_000000 on storage is used" in said


def test_hosts_first_get_what_restore_reads_and_more_when_a_rank_asks_for_it(tmp_path: Path) -> None:
    run = Run(tmp_path, "a", "b", "c")
    name = run.commit(1)
    run.begin(1)
    orders = [(host, order.files) for host, order in run.only(wire.FetchRound)[-3:]]
    assert orders == [("a", ["file_0"]), ("b", ["file_1"]), ("c", ["file_2"])]
    run.gathered()
    found: list[Any] = []
    asked: list[list[str] | None] = [["file_1", "file_2"], None, []]
    for files in asked:
        run.memory.fetch("b", name, files, lambda *answer: found.append(answer))
    assert [order.files for _, order in run.only(wire.FetchRound)[-3:]] == asked
    assert run.memory.is_busy
    for folder in ("/first", "/second", "/third"):
        run.answer("b", wire.RoundDone(attempt=1, name=name, folder=folder))
        assert found.pop() == (folder, None)
    assert not run.memory.is_busy
    run.store.close()


def test_hosts_that_could_not_get_files_get_all_before_the_next_start(two: Run) -> None:
    name = two.commit(1)
    two.begin(1)
    two.gathered()
    found: list[Any] = []
    two.memory.fetch("b", name, None, lambda *answer: found.append(answer))
    two.answer("b", wire.RoundDone(attempt=1, name=name, failed="timed out"))
    assert found == [("", "timed out")]
    two.begin(2)
    assert [order.files for _, order in two.only(wire.FetchRound)[-2:]] == [None] * 2


def test_a_lost_host_ends_the_waiting_for_it(two: Run) -> None:
    two.commit(1)
    two.begin(1)
    two.answer("a", wire.RoundDone(attempt=1, name="checkpoint_000000", folder="/gathered"))
    two.memory.lost("b")
    assert not two.memory.is_busy
    assert not two.chosen  # the machine ends the attempt, and nothing is given up
    two.begin(2, "a")
    two.answer("a", wire.RoundDone(attempt=2, name="checkpoint_000000", folder="/gathered"))
    assert [saved.path.name for saved in two.chosen if saved] == ["checkpoint_000000"]


@pytest.mark.parametrize("lost", [False, True])
def test_a_part_that_is_damaged_or_lost_is_stored_from_its_copy(two: Run, *, lost: bool) -> None:
    name = two.commit(1)
    two.copied(name)
    copy = two.folder / "copies_a" / "rank_1"
    copy.mkdir(parents=True)
    (copy / "file_1").write_text("1")
    if lost:
        two.memory.lost("b")
    two.memory.store_newest()
    two.upload_all(damaged="" if lost else str(two.folder / "part_1_1"))
    assert not two.ledger.all[0].is_in_memory


SCORES = [
    [0.1, 0.9, 0.5, 0.4, 0.3, 0.2],
    [0.9, 0.1],
    [0.5, 0.5, 0.5],
    [1.0, 2.0, 3.0, 4.0, 5.0],
    [5.0, 4.0, 3.0, 2.0, 1.0],
    [3.0, 1.0, math.nan, 2.0, 3.0, 0.0, math.inf, 7.0, -1.0],
    [math.nan, math.nan],
]


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("number", [None, 1, 2, 3])
@pytest.mark.parametrize("order", ["max", "min"])
@pytest.mark.parametrize("stores", ["at once", "late", "at the end"])
def test_the_best_are_on_storage_as_if_all_had_been_stored(
    tmp_path: Path, scores: list[float], number: int | None, order: Any, stores: str
) -> None:
    config = CheckpointConfig(num_to_keep=number, checkpoint_score_attribute="acc", checkpoint_score_order=order)
    run = Run(tmp_path, "a", num_to_keep=number, checkpoint_score_attribute="acc", checkpoint_score_order=order)
    for step, acc in enumerate(scores, start=1):
        run.commit(step, metrics={"acc": acc})
        assert len(run.kept) <= 3 + (number or 1)
        if stores == "at once" or (stores == "late" and step % 2):
            run.upload_all()
    run.answer("", StoreLast())
    run.upload_all()
    assert not run.memory.is_storing
    run.answer("", RunEnds())
    metrics = [{"acc": acc} for acc in scores]
    wanted = {*best_first(metrics, config)[: number or 1], len(scores) - 1}
    assert wanted <= {saved.index for saved in run.ledger.all}
    run.store.close()


def fail_to_store(run: Run, why: str) -> None:
    _, order = run.orders.pop(0)
    answer = wire.FilesCopied(attempt=0, rank=order.rank, storing=order.storing, files=[], skipped=[], failed=why)
    run.memory.on_stored(answer)


def test_an_error_of_the_storage_costs_no_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path, "a")
    names = [run.commit(1), run.commit(2)]
    run.memory.store_newest()
    fail_to_store(run, "[Errno 5] Input/output error: '/storage/checkpoint/file_0'")
    assert [saved.path.name for saved in run.ledger.all] == names
    assert not run.failures
    assert "it stays in memory" in capsys.readouterr().err
    assert run.memory.deadline() is not None  # it is tried again
    run.memory.store_newest()
    fail_to_store(run, "[Errno 28] No space left on device: '/storage/checkpoint/file_0'")
    run.answer("", StoreLast())
    for _ in range(3):  # at the end of the run, it is tried again at once
        assert len(run.failures) == 1
        fail_to_store(run, "[Errno 5] Input/output error: '/storage/checkpoint/file_0'")
    assert [saved.path.name for saved in run.ledger.all] == names
    assert ["free some space" in text for text in run.failures] == [True, False]
    run.store.close()


# -- rounds that change while they are stored ------------------------------------------------------------------------


def on_disk(run: Run) -> list[str]:
    """Return the names of the checkpoints that a new start finds."""
    run.answer("", RunEnds())
    run.store.close()
    store = LocalStore(run.folder / "run")
    store.close()
    return [saved.path.name for saved in store.ledger.all]


def test_a_lost_host_whose_ranks_have_no_files_costs_nothing(two: Run) -> None:
    name = two.commit(1, empty=(1,))
    two.memory.lost("b")
    two.memory.store_newest()
    two.upload_all()
    assert on_disk(two) == [name]


def test_ranks_that_start_from_a_round_can_read_it_after_it_is_given_up(two: Run) -> None:
    name = two.commit(1)
    path = str(two.ledger.all[-1].path)
    two.begin(1)
    for host in two.hosts:
        two.answer(host, wire.RoundDone(attempt=1, name=name, folder="/gathered"))
    assert [chosen and chosen.path.name for chosen in two.chosen] == [name]
    two.memory.lost("b")
    two.memory.store_newest()
    assert not two.ledger.all
    assert two.memory.has(path)
    two.commit(2)
    assert not two.memory.has(path)


@pytest.mark.parametrize("stage", ["uploading", "publishing"])
@pytest.mark.parametrize("cause", ["disowned", "suspect"])
def test_a_round_that_is_given_up_while_it_is_stored_is_never_used(tmp_path: Path, stage: str, cause: str) -> None:
    run = Run(tmp_path, "a")
    first = run.commit(1)
    run.memory.store_newest()
    run.upload_all()
    second = run.commit(2, silent=(1,))
    if cause == "suspect":
        assert run.ledger.roll_back({"loader": 2}) == ""
    run.publications = []
    run.memory.store_newest()
    if stage == "publishing":
        run.upload_all()
        assert run.memory.is_settling  # no attempt starts before it is known what is on storage
    if cause == "disowned":
        run.ledger.disown(1, after=0, first_step=0)
    else:
        assert run.ledger.roll_back({"loader": 2}) == second
    run.memory.drop_others()
    assert run.memory.is_storing is (stage == "publishing")
    run.upload_all()
    for new in run.publications:
        run.store.publish(new)
    assert [saved.path.name for saved in run.ledger.all] == [first]
    assert not run.memory.is_storing
    assert on_disk(run) == [first]


def test_a_rank_that_reads_at_once_gets_the_files_once_all_hosts_know_the_checkpoint(
    two: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(two, "serve", lambda: None)
        name = two.commit(1)
    answers: list[tuple[str, str | None]] = []
    two.memory.fetch("b", name, None, lambda folder, failed: answers.append((folder, failed)))
    assert not two.only(wire.FetchRound)
    two.serve()
    [order] = [order for host, order in two.only(wire.FetchRound) if not order.is_copy]
    assert order.peers.keys() == {"a", "b"}
    two.answer("b", wire.RoundDone(attempt=two.attempt, name=name, folder="/gathered"))
    assert answers == [("/gathered", None)]


def test_copies_are_made_although_a_host_is_lost_that_has_not_answered(tmp_path: Path) -> None:
    run = Run(tmp_path, "a", "b", "c")
    served, run.serve = run.serve, lambda: None  # type: ignore[method-assign]
    run.commit(1)
    run.unserved.remove("c")
    served()
    assert not run.only(wire.FetchRound)
    run.memory.lost("c")
    assert {host for host, order in run.only(wire.FetchRound) if order.is_copy} == {"a", "b"}
    run.store.close()
