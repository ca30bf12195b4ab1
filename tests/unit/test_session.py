"""The worker's side of reports, over real pipes; the coordinator's side is played by the test."""

from __future__ import annotations

import enum
import json
import math
import os
import tempfile
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import distrain
from distrain import wire
from distrain.channel import Channel
from distrain.checkpoint import Checkpoint
from distrain.context import TrainContext
from distrain.errors import CheckpointError
from distrain.session import Session

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Worker:
    """A session and the other end of its channel."""

    def __init__(self, root: Path) -> None:
        (read_down, write_down), (read_up, write_up) = os.pipe(), os.pipe()
        context = TrainContext(
            world_rank=1, world_size=4, local_rank=1, local_world_size=2, node_rank=0, run_name="run",
            storage_path=str(root / "runs"), attempt=2, devices=(),
        )  # fmt: skip
        self.channel = Channel(read_down, write_up)
        self.coordinator = Channel(read_up, write_down)
        self.session = Session(self.channel, context, None)

    def grants(self, ordinal: int, directory: Path, *files: str, refused: str | None = None) -> None:
        grant = wire.Grant(
            attempt=2, rank=1, ordinal=ordinal, directory=str(directory), files=list(files), refused=refused
        )
        self.coordinator.send(grant)

    def said(self) -> list[Any]:
        return [frame.message() for frame in self.coordinator.receive()]


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    made = Worker(tmp_path)
    monkeypatch.setattr(Session, "current", made.session)
    yield made
    made.channel.close()
    made.coordinator.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "checkpoint"
    root.mkdir()
    (root / "model.pt").write_bytes(b"weights")
    (root / "rng-1.bin").write_bytes(b"state")
    return root


def reported(worker: Worker, metrics: dict[Any, Any]) -> Any:
    """The metrics as the coordinator gets them."""
    distrain.report(metrics)
    [message] = worker.said()
    return json.loads(message.body)


# -- metrics ---------------------------------------------------------------------------------------------------------


class Color(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1),
        (True, True),
        (None, None),
        ("text", "text"),
        ((1, 2), [1, 2]),
        ({"a": {"b": [1]}}, {"a": {"b": [1]}}),
        (Color.RED, 1),
        (np.float64(0.5), 0.5),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array(0.5), 0.5),
        (np.array([7]), 7),
        ({"deep": [np.float32(2)]}, {"deep": [2.0]}),
    ],
)
def test_what_can_be_recorded_becomes_plain(worker: Worker, value: Any, expected: Any) -> None:
    got = reported(worker, {"value": value})["value"]
    assert got == expected
    assert type(got) is type(expected)


@pytest.mark.parametrize("value", [math.nan, math.inf, np.float32("nan")])
def test_non_finite_numbers_can_be_reported(worker: Worker, value: float) -> None:
    assert repr(reported(worker, {"value": value})["value"]) == repr(float(value))


def test_number_keys_become_strings(worker: Worker) -> None:
    assert reported(worker, {"per_class": {0: 0.5, 1: 0.6}}) == {"per_class": {"0": 0.5, "1": 0.6}}


@pytest.mark.parametrize(
    ("metrics", "error", "words"),
    [
        ({"a": {"b": np.zeros(3)}}, ValueError, r"metrics\['a'\]\['b'\] .*shape \(3,\).*mean"),
        ({"a": [1, object()]}, TypeError, r"metrics\['a'\]\[1\] is a builtins.object"),
        ({"a": {1, 2}}, TypeError, "cannot be recorded"),
        ({(1, 2): 3}, TypeError, r"has the key \(1, 2\)"),
        ([("loss", 1)], TypeError, "takes a dict"),
    ],
)
def test_what_cannot_be_recorded_is_named(worker: Worker, metrics: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        distrain.report(metrics)
    assert worker.said() == []


def test_a_refused_report_does_not_count(worker: Worker) -> None:
    with pytest.raises(TypeError):
        distrain.report({"a": object()})
    distrain.report({})
    [message] = worker.said()
    assert message.index == 1


def test_reports_are_counted_and_carry_rank_and_attempt(worker: Worker) -> None:
    for _ in range(3):
        distrain.report({})
    said = worker.said()
    assert [message.index for message in said] == [1, 2, 3]
    assert {(message.rank, message.attempt, message.ordinal) for message in said} == {(1, 2, None)}


# -- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_announced_then_copied_as_granted(worker: Worker, folder: Path, tmp_path: Path) -> None:
    worker.grants(1, tmp_path / "staging", "rng-1.bin")
    distrain.report({"loss": 1}, Checkpoint(folder))
    announced, delivered = worker.said()
    assert (announced.ordinal, announced.files) == (1, [["model.pt", 7], ["rng-1.bin", 5]])
    assert delivered.files == [["rng-1.bin", 5, zlib.crc32(b"state")]]
    assert delivered.skipped == [["model.pt", 7, zlib.crc32(b"weights")]]
    assert os.listdir(tmp_path / "staging") == ["rng-1.bin"]


def test_ordinals_count_checkpoints_only(worker: Worker, folder: Path, tmp_path: Path) -> None:
    ordinals = []
    for ordinal in (1, 2):
        distrain.report({})
        worker.grants(ordinal, tmp_path / "staging")
        distrain.report({}, Checkpoint(folder))
        ordinals += [(m.index, m.ordinal) for m in worker.said() if isinstance(m, wire.Reported) and m.ordinal]
    assert ordinals == [(2, 1), (4, 2)]


def test_a_refusal_is_raised_with_its_reason(worker: Worker, folder: Path, tmp_path: Path) -> None:
    worker.grants(1, tmp_path, refused="too late")
    with pytest.raises(CheckpointError, match="too late"):
        distrain.report({}, Checkpoint(folder))


def test_a_dict_checkpoint_is_delivered_as_a_file(worker: Worker, tmp_path: Path) -> None:
    worker.grants(1, tmp_path / "staging", "dict_checkpoint.pkl")
    distrain.report({}, Checkpoint.from_dict({"epoch": 3}))
    assert Checkpoint(tmp_path / "staging").to_dict()["epoch"] == 3


def test_get_checkpoint_is_the_latest_committed_one(worker: Worker, tmp_path: Path) -> None:
    assert distrain.get_checkpoint() is None
    worker.coordinator.send(wire.Committed(attempt=2, rank=1, ordinal=1, path=str(tmp_path)))
    checkpoint = distrain.get_checkpoint()
    assert checkpoint is not None
    assert checkpoint.path == str(tmp_path)


def test_a_path_is_no_checkpoint_and_the_fix_is_named(worker: Worker, folder: Path) -> None:
    with pytest.raises(TypeError, match=r"Checkpoint\.from_directory\(path\)"):
        distrain.report({}, str(folder))  # type: ignore[arg-type]


def test_a_missing_directory_is_an_error(worker: Worker, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        distrain.report({}, Checkpoint(tmp_path / "gone"))


@pytest.mark.usefixtures("worker")
def test_the_whole_temporary_folder_is_refused_with_the_fix() -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint_dir = tempfile\.mkdtemp\(\)"):
        distrain.report({}, Checkpoint(tempfile.gettempdir()))


def test_a_folder_around_the_run_is_refused(worker: Worker, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with pytest.raises(CheckpointError, match="copied into itself"):
        distrain.report({}, Checkpoint(tmp_path / "runs"))


# -- outside ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["report", "get_context", "get_checkpoint"])
def test_outside_of_a_worker_the_error_says_where_to_call(call: str) -> None:
    arguments = [{}] if call == "report" else []
    with pytest.raises(RuntimeError, match=rf"distrain.{call}\(\) only works inside a worker"):
        getattr(distrain, call)(*arguments)


@pytest.mark.usefixtures("worker")
def test_the_context_says_who_this_is() -> None:
    context = distrain.get_context()
    assert (context.get_world_rank(), context.get_world_size()) == (1, 4)
    assert (context.get_local_rank(), context.get_local_world_size(), context.get_node_rank()) == (1, 2, 0)
    assert context.get_experiment_name() == "run"
