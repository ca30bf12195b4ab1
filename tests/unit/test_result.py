"""Result: made from the store, and read back from a run directory."""

from __future__ import annotations

import json
import math
import pickle
import random
import re
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from distrain.api.config import CheckpointConfig
from distrain.api.result import Result, make_result, pickle_or_none
from distrain.coordinator.run.trainer import DataParallelTrainer
from distrain.coordinator.store.local_store import LocalStore
from distrain.errors import ControllerError, StorageError, WorkerGroupError
from distrain.storage.commit import Commit, CommittedCheckpoint
from distrain.storage.lines import read_metrics
from distrain.storage.paths import RunPaths, choose_run
from distrain.storage.run_lock import RemoteLock, is_in_use
from distrain.storage.runs import details
from distrain.system.remote_path import RemotePath
from distrain.worker.job.job import unpickle_return_value
from tests.unit.conftest import commit_now, delete_oldest, perform

Write = Callable[..., Path]


@pytest.fixture
def write_run(tmp_path: Path) -> Write:
    """Write a run directory as the coordinator does."""

    def write(
        reports: list[dict[str, Any]],
        checkpoints: list[dict[str, Any]] | None = None,
        config: CheckpointConfig | None = None,
        rank: int = 0,
    ) -> Path:
        store = LocalStore(tmp_path / "run")
        store.write_manifest({"status": "finished", "checkpoint_config": asdict(config or CheckpointConfig())})
        for index, metrics in enumerate(reports, start=1):
            store.append_metrics({"time": 1.0, "attempt": 0, "rank": rank, "index": index}, metrics)
        for ordinal, metrics in enumerate(checkpoints or [], start=1):
            store.staging_directory(f"0-{ordinal}")
            commit_now(store, Commit(ordinal, {}, (0,), metrics))
        store.close()
        return tmp_path / "run"

    return write


def scores(result: Result) -> list[Any]:
    return [metrics["loss"] for _, metrics in result.best_checkpoints]


# -- read back -------------------------------------------------------------------------------------------------------


def test_a_result_is_read_back(write_run: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    result = Result.from_path(root := write_run([]))
    assert (result.metrics, result.checkpoint, result.best_checkpoints, result.error) == (None, None, [], None)
    assert result.metrics_dataframe is None
    with pytest.raises(RuntimeError, match="there is no checkpoint in"):
        result.get_best_checkpoint("loss", "max")
    write_run([{"loss": 2}, {"loss": math.inf}], [{"loss": 1}, {"loss": 2}])
    write_run([{"loss": 7}], rank=1)
    monkeypatch.setenv("HOME", str(root.parent))
    result = Result.from_path("~/run")
    assert (result.path, result.metrics) == (str(root), {"loss": math.inf})
    assert result.checkpoint is not None
    assert result.checkpoint.path == str(root / "checkpoint_000001")
    assert result.filesystem.exists(result.path)
    with pytest.raises(StorageError, match=r"is not a run directory: it has no run\.json"):
        Result.from_path(root.parent)


def test_error_and_return_value_come_back(write_run: Write) -> None:
    root = write_run([])
    error = WorkerGroupError("rank 1 failed", worker_failures={1: ValueError("boom")}, culprit=1)
    RunPaths(root).error_pickle.write_bytes(pickle.dumps(error))
    RunPaths(root).return_value.write_bytes(pickle.dumps({"answer": 42}))
    result = Result.from_path(root)
    assert isinstance(result.error, WorkerGroupError)
    assert result.error.culprit == 1
    assert repr(result.error.worker_failures) == "{1: ValueError('boom')}"
    assert result.return_value == {"answer": 42}


# -- made ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "losses", "kept"),
    [
        (CheckpointConfig(checkpoint_score_attribute="loss", checkpoint_score_order="max"), (2, 3, 1), [1, 2, 3]),
        (CheckpointConfig(), (2, 3, 1), [2, 3, 1]),
        # The latest is there only for a resume.
        (CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="loss", checkpoint_score_order="max"), (3, 1), [3]),
    ],
)
def test_the_best_checkpoint_is_the_last_of_the_list(
    config: CheckpointConfig, losses: tuple[float, ...], kept: list[float]
) -> None:
    committed = [CommittedCheckpoint(Path(f"/run/checkpoint_{n:06d}"), {"loss": x}) for n, x in enumerate(losses)]
    assert scores(make_result(Path("/run"), committed, config, last=None)) == kept


VALUES = (1.0, math.nan, -math.inf, "text", None, [math.nan], {"loss": math.nan})


@pytest.mark.parametrize("seed", range(20))
def test_the_metrics_of_a_validation_belong_to_the_report_that_asked_for_it(tmp_path: Path, seed: int) -> None:
    """Whatever their values and names are, in fit() and afterwards."""
    dice = random.Random(seed)
    store, lines = LocalStore(tmp_path / "run"), []
    store.write_manifest({"status": "finished", "checkpoint_config": asdict(CheckpointConfig())})
    expected: dict[str, Any] = {}
    for attempt, index in [(0, 1), (0, 2), (1, 1), (1, 2)]:
        expected = {name: dice.choice(VALUES) for name in dice.sample(["loss", "a", "b"], 2)}
        lines.append({"time": 1.0, "attempt": attempt, "rank": 0, "index": index, "metrics": dict(expected)})
        store.append_metrics({**lines[-1], "metrics": {}}, expected)
        if dice.random() < 0.7:
            store.staging_directory(f"{attempt}-{index}")
            validation = {"overrides": "", "timeout_s": None, "report": [attempt, index]}
            of_checkpoint = dice.choice([dict(expected), {"loss": 7.0, "other": 8.0}])  # that of another rank
            saved = commit_now(store, Commit(index, {}, (0,), of_checkpoint), attempt, validation=validation)
            validated = {name: dice.choice(VALUES) for name in dice.sample(["loss", "a", "accuracy"], 2)}
            perform(store)
            store.ledger.validated(saved, "VALIDATED", validated)
            expected = {**expected, **validated}
    result = make_result(Path("/run"), store.ledger.all, CheckpointConfig(), last=lines[-1])
    best = [metrics for _, metrics in result.best_checkpoints]
    store.close()
    again = Result.from_path(tmp_path / "run")
    assert repr(result.metrics) == repr(again.metrics) == repr(expected)
    assert repr([metrics for _, metrics in again.best_checkpoints]) == repr(best)


# -- the table -------------------------------------------------------------------------------------------------------


def test_the_dataframe_has_exact_integers_and_no_name_twice(write_run: Write) -> None:
    large = 2**60 + 1
    frame = Result.from_path(write_run([{"tokens": large, "x": 1.5}, {"x": large, "y": 2**63}])).metrics_dataframe
    assert frame is not None
    assert frame["tokens"].dtype == "Int64"
    assert [[*frame[name].dropna()] for name in frame] == [[large], [1.5, large], [2**63]]
    twice = Result.from_path(write_run([{"a/b": 1, "a": {"b": 2}}]))
    with pytest.raises(ValueError, match="two metrics of a report are named 'a/b': one in a dict, one with a '/'"):
        _ = twice.metrics_dataframe


def test_without_pandas_the_error_says_what_to_install(write_run: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    result = Result.from_path(write_run([{"loss": 1}]))
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        _ = result.metrics_dataframe


# -- the rest --------------------------------------------------------------------------------------------------------


def test_repr_is_readable() -> None:
    text = repr(Result(metrics={"loss": 1}, checkpoint=None, path="/run"))
    assert "path='/run'" in text
    assert "metrics={'loss': 1}" in text
    assert "error" not in text


def test_what_cannot_be_pickled_or_unpickled_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert pickle_or_none(sys._getframe()) is None
    assert pickle.loads(pickle_or_none({"a": 1}) or b"") == {"a": 1}
    assert unpickle_return_value(b"cno_such_module\nname\n.") is None
    assert "the return value cannot be unpickled in this process (ModuleNotFoundError" in capsys.readouterr().err


# -- the best checkpoint ---------------------------------------------------------------------------------------------

LOSSES: list[dict[str, Any]] = [{"loss": 2.0, "eval": {"acc": 0.1}}, {"loss": math.nan}, {"loss": 1.0}, {"x": 1}]


@pytest.mark.parametrize(
    ("metric", "mode", "best"), [("loss", "min", 2), ("loss", "max", 0), ("eval/acc", "min", 0), ("x", "max", 3)]
)
def test_the_best_checkpoint_by_any_metric(write_run: Write, metric: str, mode: str, best: int) -> None:
    result = Result.from_path(write_run([], LOSSES))
    assert Path(result.get_best_checkpoint(metric, mode).path).name == f"checkpoint_00000{best}"


def test_a_best_checkpoint_that_cannot_be_had_is_explained(write_run: Write) -> None:
    result = Result.from_path(write_run([], LOSSES))
    with pytest.raises(ValueError, match='must be "max" or "min"'):
        result.get_best_checkpoint("loss", "best")
    with pytest.raises(RuntimeError, match="value for metric 'acc'; known metrics: eval/acc, loss, x"):
        result.get_best_checkpoint("acc", "max")


def test_a_checkpoint_that_is_deleted_meanwhile_is_no_damage(
    write_run: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run([], [{"loss": 2}])
    store = LocalStore(tmp_path / "run")

    def as_the_run_goes_on(folder: Path, run: Path) -> list[str]:
        monkeypatch.undo()
        found = details.list_names(folder, run)
        store.staging_directory("0-1")
        commit_now(store, Commit(1, {}, (0,), {"loss": 1}))
        delete_oldest(store)
        return found

    monkeypatch.setattr(details, "list_names", as_the_run_goes_on)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert scores(Result.from_path(tmp_path / "run")) == [1]
    store.close()


@pytest.mark.parametrize("damage", [b"\0" * 40, b"{", b"[]", b'{"rank": 0}', b"\xff\xfe"])
def test_a_damaged_line_of_the_metrics_is_named_and_the_others_are_not_lost(write_run: Write, damage: bytes) -> None:
    root = write_run([{"loss": 2}, {"loss": 1}])
    lines = (root / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (root / "metrics.jsonl").write_bytes(b"".join([lines[0], damage, b"\n", lines[1], b'{"torn']))
    named = f"skipped line 2 of {root / 'metrics.jsonl'}: it cannot be parsed"
    with pytest.warns(UserWarning, match=re.escape(named)) as warned:
        assert [record["metrics"] for record in read_metrics(root / "metrics.jsonl")] == [{"loss": 2}, {"loss": 1}]
    assert len(warned) == 1


DAMAGED = [
    b"{",
    b"{}",
    b'{"status": ["finished"]}',
    b'{"status": "failed", "attempts": [{}]}',
    b'{"status": "failed", "checkpoint_config": []}',
    b'{"status": "failed", "run_id": 7}',
]


@pytest.mark.parametrize("text", DAMAGED)
@pytest.mark.parametrize(
    "read", [Result.from_path, DataParallelTrainer.can_restore, lambda run: choose_run(run.parent, run.name)]
)
def test_a_run_manifest_that_cannot_be_understood_is_named(
    tmp_path: Path, text: bytes, read: Callable[[Path], Any]
) -> None:
    (tmp_path / "run.json").write_bytes(text)
    named = re.escape(f"{tmp_path / 'run.json'} is damaged, or another program's (")
    with pytest.raises(StorageError, match=named + ".*move it away.*another name"):
        read(tmp_path)


def test_a_checkpoint_config_of_another_version_is_read_as_far_as_it_is_known(write_run: Write) -> None:
    root = write_run([])
    manifest = {"status": "finished", "checkpoint_config": {"num_to_keep": 2, "of_the_future": 1}}
    (root / "run.json").write_text(json.dumps(manifest))
    assert Result.from_path(root).metrics is None
    (root / "run.json").write_text(json.dumps({"status": "finished", "checkpoint_config": {"num_to_keep": "x"}}))
    with pytest.raises(StorageError, match=r"run.json is damaged: num_to_keep"):
        Result.from_path(root)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"{}"])
def test_a_damaged_account_of_the_failure_is_named(write_run: Write, text: bytes) -> None:
    root = write_run([])
    (root / "error.json").write_bytes(text)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        error = str(Result.from_path(root).error)
    assert error == f"the run failed, but {root / 'error.json'}, which says why, cannot be read"
    assert [str(one.message) for one in warned if "error.json cannot be read: " not in str(one.message)] == []


def test_a_run_that_says_that_it_is_running_and_holds_no_lock_has_died(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    store.write_manifest({"status": "running", "run_id": "id", "attempts": []})
    assert Result.from_path(tmp_path / "run").error is None
    store.close()
    error = Result.from_path(tmp_path / "run").error
    assert isinstance(error, ControllerError)
    assert str(error).startswith("the process that called fit() was killed, or its machine crashed: ")
    LocalStore(tmp_path / "run").close()  # looking has not taken the lock


def test_a_lock_gets_old_from_its_first_moment_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when its owner, on another machine, dies before its first heartbeat; and when somebody deletes it."""
    run = RemotePath("/run", MemoryFileSystem())
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    (run / "run.json").write_bytes(b'{"status": "running"}')
    RemoteLock.take(run)
    monkeypatch.setattr("distrain.storage.run_lock._machine", lambda: "")
    now = time.time()
    for later_s, in_use in ((300.0, True), (3600.0, False)):
        monkeypatch.setattr(time, "time", lambda later_s=later_s: now + later_s)
        assert is_in_use(run) is in_use
    (run / ".lock" / "000001").remove()
    assert not is_in_use(run)


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"released": false}'])
def test_a_damaged_lock_elsewhere_is_named(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    run = RemotePath("/run", MemoryFileSystem())
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    (run / ".lock" / "000001").write_bytes(text)
    for look in (RemoteLock.take, is_in_use):
        with pytest.raises(StorageError, match=r"the lock /run/.lock/000001 is damaged .*delete it"):
            look(run)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"metrics": 7}', '{"metrics": {}, "validation": 7}'])
def test_a_damaged_checkpoint_is_passed_over(write_run: Write, text: str) -> None:
    root = write_run([], [{"loss": 2}, {"loss": 1}])
    (root / "checkpoint_000001" / ".manifest.json").write_text(text)
    with pytest.warns(UserWarning, match="skipped a checkpoint: .*checkpoint_000001 is damaged"):
        assert scores(Result.from_path(root)) == [2]
