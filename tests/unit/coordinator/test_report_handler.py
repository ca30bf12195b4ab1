"""Reports of ranks, in a real run directory and without ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distrain import wire
from distrain.api.config import CheckpointConfig
from distrain.api.observer import AttemptBegan
from distrain.coordinator.memory_rounds import MemoryRounds
from distrain.coordinator.observers import Observers
from distrain.coordinator.report_handler import ReportHandler
from distrain.coordinator.store.local_store import LocalStore
from distrain.decisions.run_status import RunStatus
from distrain.hosts.world import RankPlan, WorldPlan


class NoValidations:
    """A run without a validation function."""

    changed: Any = None

    def awaits(self, saved: object) -> bool:
        return False


def handler_of(store: LocalStore, sent: list[Any], missing_rank_s: float = 60.0) -> ReportHandler:
    """Return the handler of two ranks, which have entered train_func."""
    plans = (RankPlan(rank=rank, host="a", local_rank=rank, local_world_size=2, node_rank=0) for rank in range(2))
    plan = WorldPlan(ranks=tuple(plans))
    observers = Observers(RunStatus("/runs/run", started=0.0))
    handler = ReportHandler(
        store,
        CheckpointConfig(num_to_keep=1, missing_rank_s=missing_rank_s),
        observers,
        send=sent.append,
        upload=sent.append,
        on_commit=lambda path: None,
        validations=NoValidations(),  # type: ignore[arg-type]
        memory=MemoryRounds(
            store,
            CheckpointConfig(),
            send=lambda host, message: sent.append(message),
            upload=lambda host, order: None,
            plan=lambda: plan,
            racks={},
            storage_of=lambda host: "",
            is_training=lambda: True,
            on_change=lambda: None,
        ),
    )
    observers.tell(AttemptBegan(0, ["localhost"] * 2, 0.0))
    handler.begin(0, 2)
    for rank in range(2):
        handler.handle(wire.Running(attempt=0, rank=rank))
    return handler


def report(handler: ReportHandler, rank: int, number: int, *files: str) -> None:
    """report() with the n-th checkpoint of the rank."""
    files_of = {"files": list(files), "folder": "/source"}
    handler.handle(wire.Reported(attempt=0, rank=rank, index=number, ordinal=number, body=b"{}", **files_of))


def store_files(handler: ReportHandler, order: wire.CopyFiles) -> None:
    """Do what the rank of this order does."""
    for file in order.files:
        Path(order.directory, file).write_bytes(b"x")
    files = [(file, 1, 0) for file in order.files]
    handler.handle(wire.FilesCopied(attempt=0, rank=order.rank, ordinal=order.ordinal, files=files, skipped=[]))


@pytest.mark.parametrize("end", ["", "damaged", "refused"])
@pytest.mark.parametrize("hashed_first", [True, False])
def test_a_checkpoint_that_one_rank_writes_to_memory_and_another_to_storage_is_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], end: str, hashed_first: bool
) -> None:
    store, sent = LocalStore(tmp_path / "run"), []
    handler = handler_of(store, sent)
    report(handler, 0, 1, "shard-0")
    facts = {"shard-1": [1, 7]}
    in_memory = {"files": ["shard-1"], "folder": "/memory", "in_memory": True, "waits": False, "facts": facts}
    handler.handle(wire.Reported(attempt=0, rank=1, index=1, ordinal=1, body=b"{}", **in_memory))
    [order], [hashing] = only(wire.CopyFiles, sent), only(wire.HashFiles, sent)
    assert hashing.facts == facts
    answer = wire.FilesCopied(attempt=0, rank=1, ordinal=1, files=[("shard-1", 1, 7)], skipped=[])
    if hashed_first:
        handler.handle(answer)
    store_files(handler, order)
    if not hashed_first:
        handler.handle(answer)
    [upload] = only(wire.Upload, sent)
    assert (upload.source, upload.files, upload.others, upload.facts) == ("/memory", ["shard-1"], [], {})
    assert not store.committed
    assert handler.awaits_uploads()
    handler.host_lost([1])
    assert not handler.awaits_uploads()
    Path(upload.directory, "shard-1").write_bytes(b"x")
    if end == "refused":
        handler.handle(replace(answer, files=[], failed="Input/output error"))
    else:
        handler.handle(replace(answer, files=[("shard-1", 1, 7 + (end == "damaged"))]))
    store.close()
    assert [saved.is_in_memory for saved in store.committed] == ([] if end else [False])
    assert [bool(done.path) for done in only(wire.CommitDone, sent)] == [not end] * 2
    if end:
        assert "the checkpoint of report 1 is dropped, as rank 1 could not store its part: " in capsys.readouterr().err
    assert not handler._assembly._committing


def only(kind: type[Any], sent: list[Any]) -> list[Any]:
    return [message for message in sent if isinstance(message, kind)]


@pytest.mark.parametrize("first", [1, 2])
def test_only_checkpoints_that_lack_files_of_a_slow_rank_are_given_up(tmp_path: Path, first: int) -> None:
    """It was not waited for. ``first``: its first report with a checkpoint."""
    store, sent = LocalStore(tmp_path / "run"), []
    handler = handler_of(store, sent, missing_rank_s=0.0)
    report(handler, 0, 1, "shard-0")
    store_files(handler, only(wire.CopyFiles, sent)[-1])
    handler.tick()
    assert [saved.silent for saved in store.committed] == [(1,)]
    for index in range(1, first):
        handler.handle(wire.Reported(attempt=0, rank=1, index=index, ordinal=None, body=b"{}"))
    report(handler, 1, first, "shard-1")
    assert [saved.step for saved in store.committed] == list(range(1, first))
    store.close()
