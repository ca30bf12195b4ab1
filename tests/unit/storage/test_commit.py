"""How the positions of all ranks become those of a checkpoint, and how they are stored and read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from distrain import wire
from distrain.coordinator.store.local_store import LocalStore
from distrain.storage.checkpoint import METADATA_FILE, POSITIONS, Checkpoint
from distrain.storage.commit import Commit, file_entry, merged_positions, other_data
from distrain.storage.records import damage_of
from distrain.system.remote_path import RemotePath
from distrain.transfer.executor import StorageExecutor
from tests.unit.conftest import commit_now

if TYPE_CHECKING:
    from pathlib import Path

OLD, NEW = {"train": {"0": {"rows": 1}}}, {"train": {"0": {"rows": 8}}}


@pytest.mark.parametrize(
    ("by_rank", "merged"),
    [
        ({}, {}),
        ({0: {}, 1: {}}, {}),
        ({0: {"a": 1}, 1: {"a": 1}}, {"a": {"0": 1}}),
        ({3: {"a": 2}, 0: {"a": 1}, 1: {"a": 1}}, {"a": {"0": 1, "3": 2}}),
        ({2: {"a": 1, "b": 5}, 4: {"b": 5}, 7: {"a": 2}, 8: {"a": 1}}, {"a": {"2": 1, "7": 2, "8": 1}, "b": {"2": 5}}),
    ],
)
def test_only_ranks_that_differ_from_the_one_below_have_an_entry(
    by_rank: dict[int, dict[str, Any]], merged: dict[str, Any]
) -> None:
    assert merged_positions(by_rank) == merged


def test_ranks_that_read_other_data_are_named() -> None:
    def position(rows: int, ranks: int = 2) -> dict[str, Any]:
        return {"epoch": 0, "data": {"rows": rows}, "ranks": ranks}

    assert other_data({0: {"a": position(1)}, 1: {"a": position(1)}}) is None
    assert other_data({0: {"a": {"epoch": 0}}, 1: {"a": position(1)}}) is None  # rank 0 has not begun
    assert other_data({0: {"a": position(1, ranks=1)}, 1: {"a": position(2, ranks=1)}}) is None
    warning = other_data({0: {"a": position(1)}, 1: {"a": position(2)}})
    assert warning is not None
    assert "'a' is not the same on all ranks: rank 0 reads {'rows': 1}, and rank 1 reads {'rows': 2}" in warning
    streams = {rank: {"a": {"epoch": 0, "data": {}, "first rows": {"x": rank}, "ranks": 2}} for rank in (0, 1)}
    assert "rank 0 reads {'x': 0}, and rank 1 reads {'x': 1}; some rows come twice, or never." in str(
        other_data(streams)
    )


def files_of(folder: Path) -> dict[str, Any]:
    return {path.name: file_entry(path.stat().st_size, 0, rank=0) for path in folder.iterdir()}


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("positions", [None, NEW])
def test_positions_replace_old_ones_in_the_metadata(tmp_path: Path, in_place: bool, positions: Any) -> None:
    store = LocalStore(tmp_path / "run")
    store.metadata = {"run": 1}
    folder = store.staging_directory("0-1") if not in_place else tmp_path / "run" / "checkpoint_000000"
    folder.mkdir(exist_ok=True)
    (folder / METADATA_FILE).write_text(json.dumps({POSITIONS: OLD, "mine": 1}))
    commit = Commit(1, files_of(folder), (0,), {})
    saved = commit_now(store, commit, folder=str(folder) if in_place else None, positions=positions)
    checkpoint = saved.checkpoint
    assert checkpoint.get_metadata() == {POSITIONS: positions or OLD, "mine": 1, "run": 1}
    assert damage_of(store.paths.root / saved.path.name) is None
    checkpoint.set_metadata({"other": 2})
    assert checkpoint.get_metadata() == {POSITIONS: positions or OLD, "other": 2}
    checkpoint.set_metadata({POSITIONS: {}})
    assert checkpoint.get_metadata() == {POSITIONS: {}}
    store.close()


def test_a_remote_checkpoint_gets_the_positions_too(tmp_path: Path) -> None:
    from fsspec.implementations.local import LocalFileSystem

    run = RemotePath(str(tmp_path), LocalFileSystem())
    (tmp_path / "checkpoint_000000").mkdir()
    executor = StorageExecutor(run)
    executor._opened = wire.OpenStorage(url=run.url, filesystem="", spool="")
    order = wire.PublishCheckpoint(
        directory="checkpoint_000000", manifest={"files": {}}, metadata={"run": 1}, positions=NEW
    )
    assert executor.do(order) == wire.OrderDone()
    assert Checkpoint(tmp_path / "checkpoint_000000").get_metadata() == {"run": 1, POSITIONS: NEW}
