"""The executor of the coordinator's orders: every order is answered."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from distrain import wire
from distrain.storage.file_transfer import states_of
from distrain.system.remote_path import RemotePath
from distrain.transfer.executor import StorageExecutor
from tests.conftest import CHANGES, REFUSED

if TYPE_CHECKING:
    from collections.abc import Callable
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


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("is_remote", [False, True])
@pytest.mark.parametrize("owned", [True, False])
def test_files_of_another_step_are_refused(
    tmp_path: Path, change: Callable[[Path], object], is_remote: bool, owned: bool
) -> None:
    source, run = tmp_path / "source", RemotePath("memory://run") if is_remote else None
    (source / "deep").mkdir(parents=True)
    for name in ("a", "deep/b"):
        (source / name).write_bytes(b"x" * 100)
    files, others = (["a", "deep/b"], []) if owned else (["a"], ["deep/b"])
    order = wire.Upload(
        attempt=0,
        rank=1,
        ordinal=2,
        source=str(source),
        directory="checkpoint" if is_remote else str(tmp_path / "new"),
        files=files,
        others=others,
        facts=states_of(source, ["a", "deep/b"]),
    )
    for failed in (False, True):
        answer = StorageExecutor(run).do(order)
        assert isinstance(answer, wire.FilesCopied)
        assert bool(answer.failed) == failed
        if not failed:
            change(source / "deep" / "b")
    assert re.search(REFUSED, str(answer.failed))
    assert "deep/b" in str(answer.failed)
