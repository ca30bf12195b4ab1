"""Checkpoints of ranks, in a real run directory and without ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distrain import wire
from distrain.api.config import CheckpointConfig
from distrain.coordinator.checkpoint_desk import CheckpointDesk
from distrain.coordinator.store.local_store import LocalStore
from distrain.decisions.checkpoints.actions import Store, Tick
from distrain.decisions.checkpoints.life import Checkpoints
from distrain.decisions.checkpoints.site import Site
from distrain.decisions.events import AttemptStarts, HostLost, SendMessage, ShowLine
from distrain.decisions.hearing import Parts
from distrain.hosts.world import RankPlan, WorldPlan
from distrain.system.log import warn
from distrain.system.loop import PausableClock


class Handler:
    """A desk whose run has two ranks, which have entered train_func."""

    def __init__(self, store: LocalStore, sent: list[Any], missing_rank_s: float = 60.0) -> None:
        plans = (
            RankPlan(rank=rank, host="ab"[rank], local_rank=0, local_world_size=1, node_rank=rank) for rank in range(2)
        )
        plan = WorldPlan(ranks=tuple(plans))
        config = CheckpointConfig(num_to_keep=1, missing_rank_s=missing_rank_s)
        self.checkpoints = Checkpoints(store.ledger, Site(config, store.location, is_remote=False, plan=plan))
        parts = Parts()
        desk = CheckpointDesk(self.checkpoints, PausableClock(), flush=lambda: None, do=parts.tell)
        parts.add(store)
        parts.add_handlers(
            {
                SendMessage: lambda _, action: sent.append(action.message),
                Store: lambda _, action: sent.append(action.order),
                ShowLine: lambda _, line: warn(line.text),
            }
        )
        self.handle = desk.handle
        self.handle(AttemptStarts(0, plan))
        for rank in range(2):
            self.handle(wire.Running(attempt=0, rank=rank))


def report(handler: Handler, rank: int, number: int, *files: str) -> None:
    """report() with the n-th checkpoint of the rank."""
    files_of = {"files": list(files), "folder": "/source"}
    handler.handle(wire.Reported(attempt=0, rank=rank, index=number, has_checkpoint=True, body=b"{}", **files_of))


def store_files(handler: Handler, order: wire.CopyFiles) -> None:
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
    handler = Handler(store, sent)
    report(handler, 0, 1, "shard-0")
    facts = {"shard-1": [1, 7]}
    in_memory = {"files": ["shard-1"], "folder": "/memory", "in_memory": True, "waits": False, "facts": facts}
    handler.handle(wire.Reported(attempt=0, rank=1, index=1, has_checkpoint=True, body=b"{}", **in_memory))
    [order], [hashing] = only(wire.CopyFiles, sent), only(wire.Upload, sent)
    assert hashing.facts == facts
    answer = wire.FilesCopied(attempt=0, rank=1, ordinal=1, files=[("shard-1", 1, 7)], skipped=[])
    if hashed_first:
        handler.handle(answer)
    store_files(handler, order)
    if not hashed_first:
        handler.handle(answer)
    [_, upload] = only(wire.Upload, sent)
    assert (upload.source, upload.files, upload.others, upload.facts) == ("/memory", ["shard-1"], [], {})
    assert not store.ledger.all
    assert handler.checkpoints.assembly.awaits_uploads()
    handler.handle(HostLost("b", "it is gone"))
    assert not handler.checkpoints.assembly.awaits_uploads()
    Path(upload.directory, "shard-1").write_bytes(b"x")
    if end == "refused":
        handler.handle(replace(answer, files=[], failed="Input/output error"))
    else:
        handler.handle(replace(answer, files=[("shard-1", 1, 7 + (end == "damaged"))]))
    store.close()
    assert [saved.is_in_memory for saved in store.ledger.all] == ([] if end else [False])
    assert [bool(done.path) for done in only(wire.CommitDone, sent)] == [not end] * 2
    if end:
        assert "the checkpoint of report 1 is dropped, as rank 1 could not store its part: " in capsys.readouterr().err
    assert not handler.checkpoints.assembly._committing


def only(kind: type[Any], sent: list[Any]) -> list[Any]:
    return [message for message in sent if isinstance(message, kind)]


@pytest.mark.parametrize("first", [1, 2])
def test_only_checkpoints_that_lack_files_of_a_slow_rank_are_given_up(tmp_path: Path, first: int) -> None:
    """It was not waited for. ``first``: its first report with a checkpoint."""
    store, sent = LocalStore(tmp_path / "run"), []
    handler = Handler(store, sent, missing_rank_s=0.0)
    report(handler, 0, 1, "shard-0")
    store_files(handler, only(wire.CopyFiles, sent)[-1])
    handler.handle(Tick())
    assert [saved.silent for saved in store.ledger.all] == [(1,)]
    for index in range(1, first):
        handler.handle(wire.Reported(attempt=0, rank=1, index=index, body=b"{}"))
    report(handler, 1, first, "shard-1")
    assert [saved.step for saved in store.ledger.all] == list(range(1, first))
    store.close()


def test_files_that_come_while_a_checkpoint_is_committed_without_them_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, sent, commits = LocalStore(tmp_path / "run"), [], []
    publish = store.publish
    monkeypatch.setattr(store, "publish", commits.append)
    handler = Handler(store, sent, missing_rank_s=0.0)
    report(handler, 0, 1, "shard-0")
    store_files(handler, only(wire.CopyFiles, sent)[-1])
    handler.handle(Tick())
    report(handler, 1, 1, "shard-1")
    [commit] = commits
    publish(commit)
    assert store.ledger.all == []
    store.close()
