"""Checkpoints in the memory of hosts, with a real run directory and agents that a test plays."""

from __future__ import annotations

import itertools
import json
import math
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distrain import CheckpointConfig, wire
from distrain.coordinator.memory_rounds import MemoryRounds
from distrain.coordinator.store.local_store import LocalStore
from distrain.hosts.world import RankPlan, WorldPlan
from distrain.storage.commit import Commit, CommittedFile, MemoryRound
from distrain.storage.file_transfer import hash_files
from distrain.storage.lone_store import store_alone
from distrain.storage.retention import best_first

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from distrain.storage.records import CommittedCheckpoint


def plan_of(*hosts: str) -> WorldPlan:
    ranks = (
        RankPlan(rank=rank, host=host, local_rank=0, local_world_size=1, node_rank=rank)
        for rank, host in enumerate(hosts)
    )
    return WorldPlan(ranks=tuple(ranks))


class Run:
    """A run with one rank on each host."""

    def __init__(self, folder: Path, *hosts: str, **config: Any) -> None:
        self.folder, self.hosts = folder, hosts
        self.sent: list[tuple[str, Any]] = []
        self.orders: list[tuple[str, wire.Upload]] = []
        self.chosen: list[CommittedCheckpoint | None] = []
        self.store = LocalStore(folder / "run")
        self.store.metadata = {"experiment": 1}
        plan = plan_of(*hosts)
        self.memory = MemoryRounds(
            self.store,
            CheckpointConfig(**{"storage_every_s": 1000.0, **config}),
            send=lambda host, message: self.sent.append((host, message)),
            upload=lambda host, order: self.orders.append((host, order)),
            plan=lambda: plan,
            racks={},
            storage_of=lambda host: str(self.store.location),
            is_training=lambda: True,
            on_change=self.note_change,
        )
        self.memory.begin(0, hosts, self.chosen.append)

    def note_change(self) -> None:
        """Do nothing."""

    def commit(
        self,
        number: int,
        name: str | None = None,
        metrics: dict[str, Any] | None = None,
        *,
        keeps_start: bool = False,
        silent: tuple[int, ...] = (),
        step: int = 0,
    ) -> str:
        reports, files = {}, []
        for rank in range(len(self.hosts)):
            part = self.folder / f"part_{rank}_{number}"
            part.mkdir()
            (part / f"file_{rank}").write_text(f"{number}")
            reports[rank] = wire.Reported(attempt=0, rank=rank, index=number, ordinal=number, folder=str(part))
            files += [CommittedFile(path, rank, size, crc) for path, size, crc in hash_files(part, [f"file_{rank}"])]
        saved: list[CommittedCheckpoint] = []
        self.store.commit(
            0,
            Commit(number, tuple(files), tuple(reports), metrics or {}, world_size=len(self.hosts), silent=silent),
            name=name,
            step=step,
            validation={},
            to_memory=lambda new: self.memory.publish(reports, new, keeps_start=keeps_start),
            then=lambda new: (self.sent.append(("rank", new)), saved.append(new)),  # type: ignore[arg-type]
        )
        assert saved[0].is_in_memory
        return saved[0].path.name

    def only(self, kind: type[Any]) -> list[tuple[str, Any]]:
        return [(host, message) for host, message in self.sent if isinstance(message, kind)]

    @property
    def kept(self) -> list[str]:
        return list(self.only(wire.KeepRound)[-1][1].keep)

    def copied(self, name: str) -> None:
        for host in self.hosts:
            copies = self.folder / f"copies_{host}"
            self.memory.handle(host, wire.RoundCopied(name=name, folder=str(copies)))

    def upload_all(self, *, damaged: str = "") -> None:
        """Do what the uploaders do; one of them reads other bytes from a directory."""
        while self.orders:
            _, order = self.orders.pop(0)
            source, is_damaged = Path(order.source), order.source == damaged
            for file in order.files:
                Path(order.directory, file).write_bytes((source / file).read_bytes())
            files = [(name, size, crc + is_damaged) for name, size, crc in hash_files(source, order.files)]
            answer = wire.FilesCopied(attempt=0, rank=order.rank, ordinal=order.ordinal, files=files, skipped=[])
            assert self.memory.stored(answer)

    def gathered(self, failed: str | None = None, *, on: str = "") -> None:
        for host, order in self.only(wire.GatherRound)[-len(self.hosts) :]:
            why = failed if host == on else None
            name = MemoryRound.decoded(order.body).name
            self.memory.handle(host, wire.RoundGathered(attempt=1, name=name, folder="/gathered", failed=why))


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path, "a", "b")
    yield run
    run.store.close()


def test_the_hosts_free_old_parts_before_the_ranks_go_on(two: Run) -> None:
    name = two.commit(1)
    kinds = [type(message).__name__ for _, message in two.sent]
    assert kinds == ["KeepRound", "KeepRound", "CommittedCheckpoint", "CopyRound", "CopyRound"]
    assert name == "checkpoint_000000"
    assert two.only(wire.KeepRound)[0][1].run == str(two.store.location)
    assert not (two.store.paths.root / name).exists()


def test_one_round_is_copied_at_a_time_and_then_the_newest(two: Run) -> None:
    first, second, third = (two.commit(number) for number in (1, 2, 3))
    assert {message.name for _, message in two.only(wire.CopyRound)} == {first}
    assert two.kept == [first, second, third]
    two.copied(first)
    assert two.only(wire.CopyRound)[-1][1].name == third
    fourth = two.commit(4)
    assert two.kept == [first, third, fourth]  # the safe one, the one under way, the newest
    two.copied(third)
    two.commit(5)
    assert first not in two.kept


def test_copies_go_on_after_the_copied_round_was_given_up(two: Run) -> None:
    first = two.commit(1)
    two.memory.begin(1, two.hosts, two.chosen.append)
    two.gathered("it is damaged", on="b")
    assert two.chosen == [None]
    second = two.commit(2)
    two.copied(first)
    assert two.only(wire.CopyRound)[-1][1].name == second


def test_many_rounds_leave_few_records(two: Run) -> None:
    for number in range(1, 1001):
        two.copied(two.commit(number))
        two.sent = two.sent[-10:]
    assert len(two.store.committed) <= 4
    assert two.store.committed[-1].path.name == "checkpoint_000999"


def test_rounds_of_one_name_are_told_apart(two: Run) -> None:
    assert [two.commit(1, "last"), two.commit(2, "last")] == ["last", "last-1"]


def test_the_start_of_an_attempt_is_kept_while_ranks_may_read_it(tmp_path: Path) -> None:
    run = Run(tmp_path, "a")
    start = run.commit(1)
    run.memory.begin(1, run.hosts, run.chosen.append)
    run.gathered()
    assert [saved.path.name for saved in run.chosen if saved] == [start]
    for number in (2, 3, 4):
        run.commit(number, keeps_start=True)
    assert start in run.kept
    run.commit(5)
    assert start not in run.kept
    run.store.close()


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
    run.memory.begin(1, run.hosts, run.chosen.append)
    run.gathered("no intact copy", on="b")
    assert MemoryRound.decoded(run.only(wire.GatherRound)[-1][1].body).name == "checkpoint_000001"
    assert not run.chosen
    run.gathered("no intact copy", on="a")
    assert [saved.path.name for saved in run.chosen if saved] == [stored]
    run.store.close()
    said = capsys.readouterr().err
    assert "checkpoint_000002 in memory cannot be used: no intact copy; checkpoint_000001 in memory is used" in said
    assert "checkpoint_000001 in memory cannot be used: no intact copy; checkpoint_000000 on storage is used" in said


def test_every_restart_compares_the_bytes_again(two: Run) -> None:
    two.commit(1)
    for attempt in (1, 2):
        two.memory.begin(attempt, two.hosts, two.chosen.append)
        assert len(two.only(wire.GatherRound)) == 2 * attempt
        two.gathered()
    assert len(two.chosen) == 2


def test_a_lost_host_ends_the_waiting_for_it(two: Run) -> None:
    two.commit(1)
    two.memory.begin(1, two.hosts, two.chosen.append)
    two.memory.handle("a", wire.RoundGathered(attempt=1, name="checkpoint_000000", folder="/gathered"))
    two.memory.lost("b")
    assert not two.memory.is_busy
    assert not two.chosen  # the machine ends the attempt, and nothing is given up
    two.memory.begin(2, ["a"], two.chosen.append)
    two.memory.handle("a", wire.RoundGathered(attempt=2, name="checkpoint_000000", folder="/gathered"))
    assert [saved.path.name for saved in two.chosen if saved] == ["checkpoint_000000"]


def test_reads_are_passed_on_and_refused_for_a_lost_host(two: Run) -> None:
    first, second, third = (
        wire.ReadPart(name="x", rank=1, file="f", offset=0, size=1, host="b", reader="a", number=number)
        for number in (1, 2, 3)
    )
    two.memory.handle("a", first)
    assert two.sent[-1] == ("b", first)
    answer = wire.PartRead(reader="a", number=1, body=b"1")
    two.memory.handle("b", answer)
    assert two.sent[-1] == ("a", answer)
    two.memory.handle("a", second)
    two.memory.lost("b")  # while it reads
    two.memory.handle("a", third)
    refused = [(host, message.number, message.failed) for host, message in two.only(wire.PartRead)[1:]]
    assert refused == [("a", 2, "host b is lost"), ("a", 3, "host b is lost")]


def test_a_stored_round_is_a_checkpoint_like_any_other(two: Run) -> None:
    name = two.commit(1)
    two.copied(name)
    two.memory.store_newest()
    assert two.memory.is_storing
    two.upload_all()
    assert not two.memory.is_storing
    saved = two.store.committed[0]
    assert not saved.is_in_memory
    manifest = json.loads((two.store.paths.root / name / ".manifest.json").read_text())
    assert (manifest["index"], manifest["name"]) == (0, name)
    two.memory.close()
    assert two.store.committed == [saved]
    kept = MemoryRound.decoded(two.only(wire.KeepRound)[0][1].body)
    assert ".metadata.json" not in kept.manifest["files"]


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
    assert not two.store.committed[0].is_in_memory


def test_without_an_intact_copy_the_round_before_is_stored(tmp_path: Path) -> None:
    run = Run(tmp_path, "a")
    first, second = run.commit(1), run.commit(2)
    run.memory.store_newest()
    run.upload_all(damaged=str(tmp_path / "part_0_2"))
    run.memory.close()
    assert [saved.path.name for saved in run.store.committed] == [first]
    assert not (run.store.paths.root / second).exists()
    run.store.close()


def test_a_new_attempt_stores_into_another_directory(two: Run) -> None:
    two.copied(two.commit(1))
    two.memory.store_newest()
    before = {order.directory for _, order in two.orders}
    two.orders.clear()
    two.memory.begin(1, two.hosts, two.chosen.append)
    two.gathered()
    two.memory.store_or_copy()
    assert two.orders
    assert before.isdisjoint({order.directory for _, order in two.orders})


def test_a_round_is_stored_from_time_to_time(tmp_path: Path) -> None:
    run = Run(tmp_path, "a", storage_every_s=0.0)
    assert run.memory.deadline() is None
    run.commit(1)
    assert run.orders
    run.upload_all()
    assert not run.store.committed[0].is_in_memory
    run.store.close()


def test_the_newest_round_is_stored_at_the_end_also_after_an_older_one(tmp_path: Path) -> None:
    run = Run(tmp_path, "a")
    run.commit(1)
    run.memory.store_newest()
    run.commit(2)
    newest = run.commit(3)
    run.memory.store_last()
    run.upload_all()
    assert not run.memory.is_storing
    run.memory.close()
    assert run.store.latest is not None
    assert run.store.latest.path.name == newest
    run.store.close()


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
    run.memory.store_last()
    run.upload_all()
    assert not run.memory.is_storing
    run.memory.close()
    metrics = [{"acc": acc} for acc in scores]
    wanted = {*best_first(metrics, config)[: number or 1], len(scores) - 1}
    assert wanted <= {saved.index for saved in run.store.committed}
    run.store.close()


def test_only_what_leaves_memory_is_stored_before_the_end(tmp_path: Path) -> None:
    run = Run(tmp_path, "a", num_to_keep=1, checkpoint_score_attribute="acc")
    for step in range(1, 101):
        run.commit(step, metrics={"acc": step})
        run.upload_all()
    assert not [saved for saved in run.store.committed if not saved.is_in_memory]
    run.store.close()


def test_the_best_survives_when_memory_is_short(tmp_path: Path) -> None:
    run = Run(tmp_path, "a", num_to_keep=1, checkpoint_score_attribute="acc")
    best = run.commit(1, metrics={"acc": 2})
    run.memory.short_of_memory(0, "it is full")
    run.memory.free_all()
    assert run.kept == [best]
    run.memory.store_last()
    run.upload_all()
    assert [saved.path.name for saved in run.store.committed if not saved.is_in_memory] == [best]
    run.store.close()


def test_a_best_one_that_the_storage_refuses_is_not_tried_at_every_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, "a", num_to_keep=1, checkpoint_score_attribute="acc")
    best = run.commit(1, metrics={"acc": 2})
    run.commit(2, metrics={"acc": 1})
    fail_to_store(run, "[Errno 5] Input/output error: '/storage/checkpoint/file_0'")
    for step in range(3, 9):
        run.commit(step, metrics={"acc": 1})
        assert best in run.kept
    assert not run.orders
    assert capsys.readouterr().err.count("it stays in memory") == 1
    run.memory.store_last()
    run.upload_all()
    assert {best, "checkpoint_000007"} == {saved.path.name for saved in run.store.committed if not saved.is_in_memory}
    run.store.close()


def test_every_third_round_is_copied_to_the_other_host(tmp_path: Path) -> None:
    run = Run(tmp_path, "a", "b", memory_every=3)
    names = [run.commit(1)]
    run.copied(names[0])
    for number in range(2, 8):
        names.append(run.commit(number))
        if number % 3 == 1:
            run.copied(names[-1])
    assert [message.name for host, message in run.only(wire.CopyRound) if host == "a"] == [names[0], names[3], names[6]]
    run.memory.begin(1, run.hosts, run.chosen.append)
    run.gathered()
    assert run.only(wire.CopyRound)[-1][1].name == names[6]
    assert run.commit(8) == run.only(wire.CopyRound)[-1][1].name  # a new host may have none
    run.store.close()


def fail_to_store(run: Run, why: str) -> None:
    _, order = run.orders.pop(0)
    answer = wire.FilesCopied(attempt=0, rank=order.rank, ordinal=order.ordinal, files=[], skipped=[], failed=why)
    assert run.memory.stored(answer)


def test_an_error_of_the_storage_costs_no_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path, "a")
    failures: list[str] = []
    run.store.on_failure = failures.append
    names = [run.commit(1), run.commit(2)]
    run.memory.store_newest()
    fail_to_store(run, "[Errno 5] Input/output error: '/storage/checkpoint/file_0'")
    assert [saved.path.name for saved in run.store.committed] == names
    assert not failures
    assert "it stays in memory" in capsys.readouterr().err
    assert run.memory.deadline() is not None  # it is tried again
    run.memory.store_newest()
    fail_to_store(run, "[Errno 28] No space left on device: '/storage/checkpoint/file_0'")
    run.memory.store_last()
    for _ in range(3):  # at the end of the run, it is tried again at once
        assert len(failures) == 1
        fail_to_store(run, "[Errno 5] Input/output error: '/storage/checkpoint/file_0'")
    assert [saved.path.name for saved in run.store.committed] == names
    assert ["free some space" in text for text in failures] == [True, False]
    run.store.close()


def test_a_part_that_is_gone_is_not_an_error_of_the_storage(tmp_path: Path) -> None:
    run = Run(tmp_path, "a")
    first = run.commit(1)
    run.commit(2)
    run.memory.store_newest()
    fail_to_store(run, f"[Errno 2] No such file or directory: '{tmp_path}/part_0_2/file_0'")
    assert [saved.path.name for saved in run.store.committed] == [first]
    run.upload_all()
    assert not run.store.committed[0].is_in_memory
    run.store.close()


def test_a_copy_that_a_lost_host_owes_does_not_hold_up_the_next_ones(tmp_path: Path) -> None:
    run = Run(tmp_path, "a", "b", "c")
    name = run.commit(1)
    run.memory.handle("c", wire.RoundCopied(name=name, folder="/copies"))
    run.memory.lost("b")
    run.memory.begin(1, ["a", "c"], run.chosen.append)
    assert run.memory.deadline() is not None
    run.store.close()


def test_a_name_of_the_user_stands_for_one_round_at_a_time(two: Run) -> None:
    seen = [two.commit(1, "last")]
    two.store.committed.clear()  # after a rollback to a checkpoint before it
    seen.append(two.commit(2, "last"))
    assert seen == ["last", "last-1"]


def test_rounds_that_were_disowned_are_dropped(two: Run) -> None:
    first, second = two.commit(1), two.commit(2)
    two.store.committed.pop()
    two.memory.drop_others()
    assert two.kept == [first]
    assert second not in two.kept


def test_one_host_that_is_left_keeps_the_round_before(two: Run) -> None:
    two.copied(two.commit(1))
    two.memory.begin(1, ["a"], two.chosen.append)
    two.commit(2)
    assert two.kept == ["checkpoint_000000", "checkpoint_000001"]
    two.commit(3)
    assert two.kept == ["checkpoint_000001", "checkpoint_000002"]


def test_nothing_is_kept_once_memory_is_short_and_a_checkpoint_is_on_storage(two: Run) -> None:
    two.commit(1)
    two.memory.short_of_memory(0, "it is full")
    two.memory.free_all()
    assert two.kept == []
    assert not two.store.committed


# -- rounds that change while they are stored ------------------------------------------------------------------------


def on_disk(run: Run) -> list[str]:
    """Return the names of the checkpoints that a new start finds."""
    run.memory.close()
    run.store.close()
    store = LocalStore(run.folder / "run")
    store.close()
    return [saved.path.name for saved in store.committed]


def later(run: Run, monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Have publications take place when the test calls what this returns."""
    publications: list[Callable[[], None]] = []
    publish = run.store.publish
    monkeypatch.setattr(run.store, "publish", lambda new: publications.append(lambda: publish(new)))
    return publications


@pytest.mark.parametrize("stage", ["uploading", "publishing"])
@pytest.mark.parametrize("cause", ["disowned", "suspect"])
def test_a_round_that_is_given_up_while_it_is_stored_is_never_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, cause: str
) -> None:
    run = Run(tmp_path, "a")
    first = run.commit(1)
    run.memory.store_newest()
    run.upload_all()
    second = run.commit(2, silent=(1,))
    if cause == "suspect":
        assert run.store.roll_back({"loader": 2}) == ""
    publications = later(run, monkeypatch)
    run.memory.store_newest()
    if stage == "publishing":
        run.upload_all()
        assert run.memory.is_settling  # no attempt starts before it is known what is on storage
    if cause == "disowned":
        run.store.disown(1, after=0)
    else:
        assert run.store.roll_back({"loader": 2}) == second
    run.memory.drop_others()
    assert run.memory.is_storing is (stage == "publishing")
    run.upload_all()
    for publish in publications:
        publish()
    assert [saved.path.name for saved in run.store.committed] == [first]
    assert not run.memory.is_storing
    assert on_disk(run) == [first]


def test_what_is_noted_of_a_round_while_it_is_stored_is_in_its_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, "a")
    name = run.commit(1)
    run.store.roll_back({"loader": 1})
    publications = later(run, monkeypatch)
    run.memory.store_newest()
    run.upload_all()
    run.store.add_validation(run.store.committed[0], "VALIDATED", {"loss": 0.5})
    run.store.roll_back({"other": 2})
    publications[0]()
    manifest = json.loads((run.store.paths.root / name / ".manifest.json").read_text())
    assert manifest["skip_to"] == run.store.committed[0].skip_to == {"loader": 1, "other": 2}
    assert manifest["metrics"] == {"loss": 0.5}
    assert manifest["validation"] == {"status": "VALIDATED", "metrics": ["loss"]}
    run.store.close()


def test_a_rollback_tells_the_hosts_up_to_where_rows_are_left_out(two: Run) -> None:
    two.commit(1)
    two.store.roll_back({"loader": 1})
    two.memory.drop_others()
    for _, message in two.only(wire.KeepRound)[-2:]:
        assert MemoryRound.decoded(message.body).manifest["skip_to"] == {"loader": 1}


def test_what_is_only_in_memory_is_told_to_no_host_without_it(two: Run) -> None:
    two.memory.drop_others()
    assert not two.only(wire.KeepRound)


def test_checkpoints_are_in_the_order_of_their_reports_however_long_they_take_to_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for order in itertools.permutations(range(3)):
        run = Run(tmp_path / "".join(map(str, order)), "a")
        publications = later(run, monkeypatch)
        names = []
        for number in range(1, 7):
            if number % 2:
                folder = run.store.staging_directory(0, number)
                (folder / "file").write_text("x")
                files = tuple(CommittedFile(*one[:1], 0, *one[1:]) for one in hash_files(folder, ["file"]))
                run.store.commit(0, Commit(number, files, (0,), {}), step=number, then=lambda saved: None)
                names.append(f"checkpoint_{number - 1:06}")
            else:
                names.append(run.commit(number, step=number))
        for place in order:
            publications[place]()
            committed = run.store.committed
            assert [saved.index for saved in committed] == sorted(saved.index for saved in committed)
            assert run.store.latest is not None
            assert run.store.latest.path.name == names[-1]
        run.memory.store_last()
        run.upload_all()
        publications[-1]()
        assert on_disk(run)[-1] == names[-1]


# -- copies ----------------------------------------------------------------------------------


def test_rounds_are_copied_while_one_is_stored(two: Run) -> None:
    first = two.commit(1)
    two.memory.store_newest()
    two.copied(first)
    second = two.commit(2)
    assert two.only(wire.CopyRound)[-1][1].name == second
    two.copied(second)
    third = two.commit(3)
    assert two.kept == [first, second, third]  # on its way to storage, on two hosts, the newest
    two.upload_all()
    assert not two.store.committed[0].is_in_memory


def test_a_round_that_is_due_is_stored_while_another_is_copied(tmp_path: Path) -> None:
    run = Run(tmp_path, "a", "b", storage_every_s=0.0)
    name = run.commit(1)
    assert run.orders
    assert run.only(wire.CopyRound)[-1][1].name == name
    run.store.close()


# -- the end of a run ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["uploading", "copied", "not even begun"])
def test_a_host_that_is_lost_at_the_end_costs_its_work_unless_there_is_a_copy(tmp_path: Path, stage: str) -> None:
    run = Run(tmp_path, "a", "b")
    name = run.commit(1)
    if stage == "copied":
        run.copied(name)
        (copy := tmp_path / "copies_a" / "rank_1").mkdir(parents=True)
        (copy / "file_1").write_text("1")
    if stage != "not even begun":
        run.memory.store_last()
        run.orders = [(host, order) for host, order in run.orders if host == "a"]
    run.memory.lost("b")
    run.memory.store_last()
    run.upload_all()
    assert not run.memory.is_storing
    latest = run.store.latest
    if stage == "copied":
        assert latest is not None
        assert not latest.is_in_memory
        assert run.memory.lost_work is None
    else:
        assert latest is None
        assert run.memory.lost_work == (1, f"{name} was only in memory, and no host has intact files of rank 1")
        run.memory.begin(1, ["a"], run.chosen.append)
        assert run.memory.lost_work is None
    run.store.close()


def test_what_agents_have_stored_by_themselves_is_a_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path, "a")
    run.commit(1)
    name = run.commit(2)
    run.store.roll_back({"loader": 1})
    kept = MemoryRound.decoded(run.only(wire.KeepRound)[-1][1].body)  # without the rollback
    homes = {0: tmp_path / "part_0_2"}
    may_write = threading.Event()
    may_write.set()
    assert store_alone(tmp_path / "run", kept, "a", homes, may_write, time.monotonic() + 10.0, set())
    run.memory.lost("a")
    run.memory.store_last()
    assert not run.memory.is_storing
    assert run.memory.lost_work is None
    assert [(saved.path.name, saved.is_in_memory) for saved in run.store.committed][-1] == (name, False)
    manifest = json.loads((tmp_path / "run" / name / ".manifest.json").read_text())
    assert manifest["skip_to"] == {"loader": 1}
    assert not list((tmp_path / "run").glob(".memory-*"))
    assert on_disk(run) == [name]


def test_what_agents_have_stored_of_a_round_that_was_given_up_is_deleted(tmp_path: Path) -> None:
    run = Run(tmp_path, "a")
    run.commit(1, silent=(1,))
    kept = MemoryRound.decoded(run.only(wire.KeepRound)[-1][1].body)
    run.store.disown(1, after=-1)
    run.memory.drop_others()
    may_write = threading.Event()
    may_write.set()
    assert store_alone(
        tmp_path / "run", kept, "a", {0: tmp_path / "part_0_1"}, may_write, time.monotonic() + 10.0, set()
    )
    assert on_disk(run) == []


def test_an_uploader_that_dies_at_the_end_costs_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, "a")
    name = run.commit(1)
    run.memory.store_last()
    fail_to_store(run, f"the uploader has died (exit code -9); its files may still be in {tmp_path}/part_0_1")
    run.upload_all()
    assert [(saved.path.name, saved.is_in_memory) for saved in run.store.committed] == [(name, False)]
    run.store.close()
