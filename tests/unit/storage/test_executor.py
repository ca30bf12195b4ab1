"""Orders to the one who stores elsewhere: every one is answered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from distrain import wire
from distrain.storage.executor import StorageExecutor
from distrain.system.remote_path import RemotePath

if TYPE_CHECKING:
    from pathlib import Path

ORDERS = [
    wire.PublishCheckpoint(token=7, directory="checkpoint_000003", manifest={"files": {}}, metadata={}),
    wire.UpdateManifest(token=7, directory="checkpoint_000003", fields={}),
    wire.DeleteCheckpoints(token=7, directories=["checkpoint_000003"]),
    wire.MirrorRecords(token=7),
]


class _Broken(MemoryFileSystem):  # type: ignore[misc]
    """One whose authors have not thought of everything."""

    cachable = False

    def invalidate_cache(self, path: str | None = None) -> None:
        raise KeyError("no such bucket")


@pytest.fixture
def keeper(tmp_path: Path) -> StorageExecutor:
    (tmp_path / "run.json").write_text("{}")
    keeper = StorageExecutor(RemotePath("run", _Broken()))
    keeper._opened = wire.OpenStorage(url="run", filesystem="", spool=str(tmp_path))
    return keeper


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_an_order_that_raises_anything_is_answered_by_its_name_and_the_cause(
    keeper: StorageExecutor, order: Any
) -> None:
    answer = keeper.do(order)
    assert isinstance(answer, wire.OrderDone)
    assert (answer.token, answer.failed) == (7, f"{type(order).__name__}: KeyError: 'no such bucket'")


def test_an_upload_that_raises_anything_says_where_its_files_are(keeper: StorageExecutor) -> None:
    order = wire.Upload(
        attempt=0, rank=1, ordinal=2, source="/mine", directory="checkpoint_000003", files=["a"], others=[]
    )
    answer = keeper.do(order)
    assert isinstance(answer, wire.FilesCopied)
    assert answer.failed is not None
    assert "KeyError" in answer.failed
    assert "/mine" in answer.failed
