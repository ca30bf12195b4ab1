"""The executor of the coordinator's orders: every order is answered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from distrain import wire
from distrain.system.remote_path import RemotePath
from distrain.transfer.executor import StorageExecutor

if TYPE_CHECKING:
    from pathlib import Path

ORDERS = [
    wire.PublishCheckpoint(directory="checkpoint_000003", manifest={"files": {}}, metadata={}, positions={}),
    wire.UpdateManifest(directory="checkpoint_000003", fields={}),
    wire.DeleteCheckpoints(directories=["checkpoint_000003"]),
    wire.MirrorRecords(),
]


class _Broken(MemoryFileSystem):  # type: ignore[misc]
    """One whose authors have not thought of everything."""

    cachable = False

    def invalidate_cache(self, path: str | None = None) -> None:
        raise KeyError("no such bucket")


@pytest.fixture
def executor(tmp_path: Path) -> StorageExecutor:
    (tmp_path / "run.json").write_text("{}")
    executor = StorageExecutor(RemotePath("run", _Broken()))
    executor._opened = wire.OpenStorage(url="run", filesystem="", spool=str(tmp_path))
    return executor


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_an_order_that_raises_anything_is_answered_by_its_name_and_the_cause(
    executor: StorageExecutor, order: Any
) -> None:
    answer = executor.do(order)
    assert isinstance(answer, wire.OrderDone)
    assert answer.failed == f"{type(order).__name__}: KeyError: 'no such bucket'"


def test_an_upload_that_raises_anything_says_where_its_files_are(executor: StorageExecutor) -> None:
    order = wire.Upload(
        attempt=0, rank=1, ordinal=2, source="/mine", directory="checkpoint_000003", files=["a"], others=[]
    )
    answer = executor.do(order)
    assert isinstance(answer, wire.FilesCopied)
    assert answer.failed is not None
    assert "KeyError" in answer.failed
    assert "/mine" in answer.failed
