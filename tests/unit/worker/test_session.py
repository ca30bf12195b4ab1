"""The worker's side of reports, over real pipes; the coordinator's side is played by the test."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import re
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import distrain
from distrain import CheckpointUploadMode, collective, session, wire
from distrain.api import current
from distrain.api.context import TrainContext
from distrain.errors import CheckpointError
from distrain.storage.checkpoint import Checkpoint
from distrain.worker.reporting.checks import is_kept
from distrain.worker.session import Session

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.unit.worker.conftest import Worker


def failed_calls(said: list[Any]) -> list[tuple[int, int | None]]:
    """Numbers of calls of report() that have raised, and if they had a checkpoint; nothing else was said."""
    assert all(message.failed for message in said)
    return [(message.index, message.has_checkpoint) for message in said]


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


def test_methods_of_the_context_are_functions_as_in_ray_air(worker: Worker) -> None:
    assert session.get_world_rank() == session.get_context().get_world_rank()
    assert session.get_trial_name is session.get_trial_name
    with pytest.raises(AttributeError, match="has no attribute 'get_nothing'"):
        session.get_nothing()  # type: ignore[attr-defined]


CALLS = {
    "report()": lambda: distrain.report({}),
    "should_stop()": distrain.should_stop,
    "get_all_reported_checkpoints()": lambda: distrain.get_context() and distrain.get_all_reported_checkpoints(),
    "barrier()": collective.barrier,
}


def test_a_child_that_was_forked_while_another_thread_reads_messages_gets_an_answer(worker: Worker) -> None:
    """Every call looks for the worker's process before it takes the lock, which nobody frees in the child."""
    distrain.get_checkpoint()
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with worker.session._lock:
            held.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    if not (child := os.fork()):
        signal.alarm(10)
        for name, call in CALLS.items():
            with pytest.raises(RuntimeError, match=rf"^{re.escape(name)} was called in a child process"):
                call()
        distrain.get_checkpoint()
        worker.session.poll()
        os._exit(0)
    over.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


# -- metrics ---------------------------------------------------------------------------------------------------------


class Color(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1),
        ("\udcff \ud800 é", "\\udcff \\ud800 é"),
        ({"a": {"b": [1]}}, {"a": {"b": [1]}}),
        (Color.RED, 1),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.array(0.5), 0.5),
        ({"deep": [np.float32(2)]}, {"deep": [2.0]}),
    ],
)
def test_what_can_be_recorded_becomes_plain(worker: Worker, value: Any, expected: Any) -> None:
    got = reported(worker, {"value": value})["value"]
    assert got == expected
    assert type(got) is type(expected)


CIRCULAR: dict[str, Any] = {}
CIRCULAR["self"] = [CIRCULAR]


@pytest.mark.parametrize(
    ("metrics", "error", "words"),
    [
        ({"a": {"b": np.zeros(3)}}, ValueError, r"metrics\['a'\]\['b'\] .*shape \(3,\).*mean"),
        ({"a": [1, object()]}, TypeError, r"metrics\['a'\]\[1\] is a builtins.object"),
        ({"a": {1, 2}}, TypeError, "cannot be recorded"),
        ({(1, 2): 3}, TypeError, r"has the key \(1, 2\)"),
        ([("loss", 1)], TypeError, "takes a dict"),
        ({"a": CIRCULAR}, ValueError, r"metrics\['a'\]\['self'\]\[0\]\['self'\].* contain itself"),
    ],
)
def test_what_cannot_be_recorded_is_named(worker: Worker, metrics: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        distrain.report(metrics)
    assert len(failed_calls(worker.said())) == 1


# -- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_path_is_no_checkpoint_and_the_fix_is_named(worker: Worker, folder: Path) -> None:
    with pytest.raises(TypeError, match=r"Checkpoint\.from_directory\(path\)"):
        distrain.report({}, str(folder))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [".manifest.json", "sub/.manifest.json", ".pending.json"])
@pytest.mark.parametrize("text", ["not JSON", '{"name": "an app"}', "[1]"])
def test_a_file_with_a_name_of_ours_is_refused(worker: Worker, folder: Path, name: str, text: str) -> None:
    (folder / "sub").mkdir()
    (folder / name).write_text(text)
    with pytest.raises(CheckpointError, match=rf"{name}: distrain writes its own"):
        distrain.report({}, checkpoint=Checkpoint(folder))
    assert len(failed_calls(worker.said())) == 1


@pytest.mark.parametrize("option", ["NO_UPLOAD", "checkpoint_upload_fn"])
def test_an_option_that_needs_the_storage_is_refused_where_it_is_not_seen(
    worker: Worker, folder: Path, option: str
) -> None:
    session = worker.session
    session.context = dataclasses.replace(session.context, sees_storage=False)
    options: dict[str, Any] = {
        "NO_UPLOAD": {"checkpoint_upload_mode": CheckpointUploadMode.NO_UPLOAD},
        "checkpoint_upload_fn": {"checkpoint_upload_fn": lambda checkpoint, name: pytest.fail("it was called")},
    }
    with pytest.raises(ValueError, match=rf"{option} needs the run directory .*/run, which this host does not see"):
        distrain.report({}, Checkpoint(folder), **options[option])
    assert len(failed_calls(worker.said())) == 1


# -- what report() refuses -------------------------------------------------------------------------------------------


def test_options_of_a_checkpoint_that_cannot_be_meant_are_refused(worker: Worker, folder: Path) -> None:
    run = Path(worker.session.context.get_trial_dir())
    (run / "logs").mkdir(parents=True)
    (run / "committed").mkdir()
    (run / "committed" / ".manifest.json").touch()
    in_place = {"checkpoint_upload_mode": CheckpointUploadMode.NO_UPLOAD}
    refused: list[tuple[Path, dict[str, Any], type[Exception], str]] = [
        (folder, in_place, ValueError, "must be a directory in the run directory"),
        (run / "logs", in_place, ValueError, "something else of that name"),
        (run / "committed", in_place, ValueError, "is a committed checkpoint already"),
        (folder, {"checkpoint_upload_fn": lambda *_: None}, TypeError, "must return the Checkpoint that it has stored"),
        (folder, {"checkpoint_dir_name": "run.json"}, ValueError, "something else of that name"),
        (folder, {"checkpoint_dir_name": 5}, TypeError, "checkpoint_dir_name must be a"),
        (folder, {"delete_local_checkpoint_after_upload": "no"}, TypeError, "must be True or False or None"),
        (Path.home(), {}, CheckpointError, "shared directory"),
        (run.parent, {}, CheckpointError, "contains the run directory"),
    ]
    for path, options, kind, text in refused:
        with pytest.raises(kind, match=text):
            distrain.report({}, Checkpoint(path), **options)


def test_directories_that_somebody_needs_are_never_deleted(
    worker: Worker, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = worker.session.context
    run = Path(context.get_trial_dir())
    (run / "mine").mkdir(parents=True)
    (run / "checkpoint_000000" / "model").mkdir(parents=True)
    (run / "checkpoint_000000" / ".manifest.json").touch()
    (tmp_path / "link").symlink_to(run / "checkpoint_000000" / "model")
    kept = [run / "mine", run / "checkpoint_000000", run / "checkpoint_000000" / "model", tmp_path / "link", run.parent]
    assert all(is_kept(Checkpoint(path), context) for path in kept)
    assert not is_kept(Checkpoint(folder), context)
    monkeypatch.chdir(folder)
    assert is_kept(Checkpoint(folder), context)


# -- local files -----------------------------------------------------------------------------------------------------


def report_and_delete(worker: Worker, folder: Path, target: Path, ordinal: int = 1) -> None:
    worker.orders_copy(ordinal, target, "model.pt", "rng-1.bin")
    distrain.report({}, Checkpoint(folder), delete_local_checkpoint_after_upload=True)


def test_local_files_stay_until_they_are_committed_and_the_rank_is_done(
    worker: Worker, folder: Path, tmp_path: Path
) -> None:
    report_and_delete(worker, folder, tmp_path / "target")
    assert sorted(os.listdir(folder)) == ["model.pt", "rng-1.bin"]
    worker.commits(1, tmp_path)
    worker.lists_checkpoints()
    distrain.get_checkpoint()
    assert folder.exists()  # train_func may just be writing the next checkpoint into it
    worker.session.wait_for_commits()
    assert not folder.exists()
    assert sorted(os.listdir(tmp_path / "target")) == ["model.pt", "rng-1.bin"]


def test_local_files_that_could_not_be_stored_stay(worker: Worker, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "target").write_text("no directory")
    with pytest.raises(OSError, match="target"):
        report_and_delete(worker, folder, tmp_path / "target")
    assert worker.said()[-1].failed
    worker.session.wait_for_commits()  # for nothing
    assert sorted(os.listdir(folder)) == ["model.pt", "rng-1.bin"]


# -- what is refused -------------------------------------------------------------------------------------------------


def test_a_validation_argument_that_cannot_be_pickled_is_named_and_nothing_is_reported(
    worker: Worker, folder: Path
) -> None:
    worker.session.context = dataclasses.replace(worker.session.context, validates=True)
    task = distrain.ValidationTaskConfig(fn_kwargs={"batches": 3, "lock": threading.Lock()})
    with pytest.raises(TypeError, match=r"fn_kwargs\['lock'\] \(_thread\.lock\) cannot be pickled: "):
        distrain.report({}, Checkpoint(folder), validation=task)
    assert len(failed_calls(worker.said())) == 1


# -- collectives -----------------------------------------------------------------------------------------------------


class InterruptedLine:
    """A line within whose send() a signal handler runs."""

    at_end = False
    has_uploader = False

    def __init__(self) -> None:
        self.handler: Any = lambda: None
        self.heard: list[BaseException] = []
        self.sent: list[wire.FromWorker] = []

    def send(self, message: wire.FromWorker) -> None:
        self.sent.append(message)
        try:
            self.handler()
        except Exception as error:
            self.heard.append(error)

    def receive(self) -> Sequence[wire.Frame]:
        return []

    wait = receive


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (collective.barrier, "barrier()"),
        (lambda: collective.broadcast_from_rank_zero(1), "broadcast_from_rank_zero()"),
        (lambda: distrain.report({}), "report()"),
    ],
)
def test_a_signal_handler_within_report_gets_an_error_instead_of_waiting_for_ever(
    monkeypatch: pytest.MonkeyPatch, worker: Worker, call: Any, name: str
) -> None:
    line = InterruptedLine()
    line.handler = call
    monkeypatch.setattr(current, "session", Session(line, worker.session.context, None))
    distrain.report({"loss": 1})
    [error] = line.heard
    assert type(error) is RuntimeError
    assert str(error).startswith(f"{name} was called while report() runs in the same thread")
    assert [type(message) for message in line.sent] == [wire.Reported]


# -- outside ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["report", "get_context", "get_checkpoint"])
def test_outside_of_a_worker_the_error_says_where_to_call(call: str) -> None:
    arguments = [{}] if call == "report" else []
    with pytest.raises(RuntimeError, match=rf"distrain.{call}\(\) only works inside a worker"):
        getattr(distrain, call)(*arguments)


# -- names of Ray AIR ------------------------------------------------------------------------------------------------

CONTEXT = TrainContext(
    world_rank=3, world_size=8, local_rank=1, local_world_size=2, node_rank=1, run_name="run", storage_path="/runs",
    attempt=0, devices=(), run_id="f00", metadata={"a": {"b": 1}}, resources={"GPU": 0.5},
)  # fmt: skip


def test_the_context_and_the_functions_of_air_agree(monkeypatch: pytest.MonkeyPatch, worker: Worker) -> None:
    monkeypatch.setattr(current, "session", Session(worker.channel, CONTEXT, None))
    expected = {
        "world_rank": 3, "world_size": 8, "local_rank": 1, "local_world_size": 2, "node_rank": 1,
        "experiment_name": "run", "trial_name": "run", "trial_id": "f00", "trial_dir": "/runs/run",
        "trial_resources": {"GPU": 0.5},
    }  # fmt: skip
    for name, value in expected.items():
        assert getattr(session, f"get_{name}")() == getattr(CONTEXT, f"get_{name}")() == value
