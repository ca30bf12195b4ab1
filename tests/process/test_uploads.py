"""Ray's report() options: upload modes, directory names and upload functions, and when report() returns."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import distrain
from distrain import Checkpoint, CheckpointError, CheckpointUploadMode, WorkerGroupError
from distrain.worker.session import MOST_UPLOADS
from tests.conftest import wait_until
from tests.process.conftest import (
    Fit,
    assert_no_half_checkpoint,
    files_of,
)

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

ASYNC, NO_UPLOAD, SYNC = CheckpointUploadMode.ASYNC, CheckpointUploadMode.NO_UPLOAD, CheckpointUploadMode.SYNC


def folder_with(text: str, name: str = "model.txt") -> str:
    folder = tempfile.mkdtemp()
    Path(folder, name).write_text(text)
    return folder


def rank() -> int:
    return distrain.get_context().get_world_rank()


def names(run: str) -> list[str]:
    return [path.name for path in sorted(Path(run).iterdir()) if (path / ".manifest.json").exists()]


# -- what is left of the local files ---------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("mode", "delete", "deletes"),
    [(SYNC, None, False), (SYNC, True, True), (ASYNC, None, True), (ASYNC, False, False)],
)
def test_the_local_files_are_deleted_if_asked_for(
    fit: Fit, workers: int, mode: CheckpointUploadMode, delete: bool | None, deletes: bool
) -> None:
    def train() -> list[str]:
        folders = []
        for epoch in range(2):
            folders.append(folder_with(f"epoch {epoch}", f"part-{rank()}.txt"))
            distrain.report(
                {"epoch": epoch},
                checkpoint=Checkpoint.from_directory(folders[-1]),
                checkpoint_upload_mode=mode,
                delete_local_checkpoint_after_upload=delete,
            )
        return folders

    result = fit(train, workers=workers)
    assert [os.path.exists(folder) for folder in result.return_value] == [not deletes] * 2
    assert [files_of(checkpoint) for checkpoint, _ in result.best_checkpoints] == [
        {f"part-{number}.txt": f"epoch {epoch}" for number in range(max(workers, 1))} for epoch in range(2)
    ]
    assert_no_half_checkpoint(fit.storage)


def report_a_shared_directory(config: dict[str, Any]) -> None:
    """Each rank has written its file before the first one reports; the last one reports when the first has gone on."""
    shared, first_is_done = Path(config["shared"]), Path(config["shared"] + ".done")
    shared.mkdir(exist_ok=True)
    Path(shared, f"part-{rank()}.txt").write_text(f"of {rank()}")
    distrain.collective.barrier()
    while rank() == 1 and not first_is_done.exists():
        time.sleep(0.001)
    distrain.report(
        {}, Checkpoint(shared), checkpoint_upload_mode=config["mode"], delete_local_checkpoint_after_upload=True
    )
    first_is_done.touch()


@pytest.mark.parametrize("mode", [SYNC, ASYNC])
def test_a_directory_that_ranks_share_is_deleted_when_all_have_stored_it(
    any_fit: Fit, tmp_path: Path, mode: CheckpointUploadMode
) -> None:
    shared = tmp_path / "shared"
    result = any_fit(report_a_shared_directory, {"shared": str(shared), "mode": mode})
    assert files_of(result.checkpoint) == {"part-0.txt": "of 0", "part-1.txt": "of 1"}
    assert all(path.stat().st_nlink == 1 for path in Path(result.checkpoint.path).iterdir())  # type: ignore[union-attr]
    assert not shared.exists()
    assert_no_half_checkpoint(any_fit.storage)


# -- ASYNC -----------------------------------------------------------------------------------------------------------


def report_async(text: str) -> None:
    distrain.report({}, checkpoint=Checkpoint(folder_with(text)), checkpoint_upload_mode=ASYNC)


def report_and_stop_the_uploader() -> psutil.Process:
    """Once a first checkpoint is stored, so that there is one."""
    report_async("first")
    while distrain.get_checkpoint() is None:
        time.sleep(0.001)
    agent = psutil.Process().parent().parent()  # type: ignore[union-attr]
    assert agent is not None
    (uploader,) = (process for process in agent.children() if "uploader" in process.cmdline())
    uploader.suspend()
    return uploader


def test_async_reports_return_before_the_files_are_stored_and_are_bounded(fit: Fit) -> None:
    def train() -> list[float]:
        uploader = report_and_stop_the_uploader()
        for number in range(MOST_UPLOADS):
            report_async(f"{number}")
        waker = threading.Timer(0.5, uploader.resume)
        waker.start()
        began = time.monotonic()
        report_async("one too many")
        return [time.monotonic() - began]

    result = fit(train, workers=1)
    assert result.return_value[0] > 0.3
    assert files_of(result.checkpoint) == {"model.txt": "one too many"}
    assert len(result.best_checkpoints) == MOST_UPLOADS + 2


def is_deleted(folder: str) -> None:
    shutil.rmtree(folder)


def is_written_again(folder: str) -> None:
    Path(folder, "model.txt").write_text("two")


@pytest.mark.parametrize(
    ("what_happens", "said"),
    [
        (is_deleted, r"a checkpoint of this rank could not be stored: .*No such file"),
        (is_written_again, r"model\.txt was written or replaced .* a directory of its own"),
    ],
)
def test_an_upload_that_fails_is_raised_by_a_later_call(
    any_fit: Fit, what_happens: Callable[[str], None], said: str
) -> None:
    def train() -> None:
        uploader = report_and_stop_the_uploader()
        folder = folder_with("one")
        distrain.report({}, Checkpoint(folder), checkpoint_upload_mode=ASYNC)
        what_happens(folder)
        uploader.resume()
        while True:
            distrain.report({})
            time.sleep(0.001)

    with pytest.raises(WorkerGroupError, match=said) as raised:
        any_fit(train, workers=1)
    assert isinstance(raised.value.worker_failures[0], CheckpointError)
    assert files_of(raised.value.result.checkpoint) == {"model.txt": "first"}


# -- names -----------------------------------------------------------------------------------------------------------


def test_checkpoints_may_have_names_and_keep_their_order(any_fit: Fit) -> None:
    def train() -> None:
        for name in ("zebra", None, "ape", "zebra"):
            distrain.report({"name": name}, checkpoint=Checkpoint(folder_with(str(name))), checkpoint_dir_name=name)

    result = any_fit(train)
    assert names(result.path) == ["ape", "checkpoint_000001", "zebra", "zebra-2"]
    again = distrain.Result.from_path(result.path)
    for found in (result, again):
        assert [(Path(c.path).name, m["name"]) for c, m in found.best_checkpoints] == [
            ("zebra", "zebra"),
            ("checkpoint_000001", None),
            ("ape", "ape"),
            ("zebra-2", "zebra"),
        ]
    assert files_of(Checkpoint(f"{result.path}/zebra")) == {"model.txt": "zebra"}


# -- stored by the user ----------------------------------------------------------------------------------------------


def in_place(name: str) -> Path:
    return Path(distrain.get_context().get_storage().build_checkpoint_path_from_name(name))


def test_no_upload_makes_a_checkpoint_of_what_is_there(any_fit: Fit) -> None:
    def train() -> str:
        for epoch in range(2):
            folder = in_place(f"epoch-{epoch}")
            (folder / "parts").mkdir(parents=True, exist_ok=True)
            (folder / "parts" / f"{rank()}.txt").write_text(f"{epoch}")
            distrain.collective.barrier()
            distrain.report({"epoch": epoch}, Checkpoint(folder), checkpoint_upload_mode=NO_UPLOAD)
        return str(folder)

    result = any_fit(train)
    assert names(result.path) == ["epoch-0", "epoch-1"]
    assert result.checkpoint is not None
    assert result.checkpoint.path == result.return_value
    assert files_of(result.checkpoint) == {"parts/0.txt": "1", "parts/1.txt": "1"}
    manifest = json.loads(Path(result.path, "epoch-1", ".manifest.json").read_text())
    assert manifest["files"].keys() == {"parts/0.txt", "parts/1.txt"}
    assert_no_half_checkpoint(any_fit.storage)


def test_an_upload_function_stores_by_itself(any_fit: Fit) -> None:
    def store(checkpoint: Checkpoint, name: str) -> Checkpoint:
        return Checkpoint(checkpoint.to_directory(in_place(name)))

    def train() -> None:
        for name in ("mine", None):
            if rank() == 0:
                checkpoint = Checkpoint(folder_with("x"))
                distrain.report({}, checkpoint, checkpoint_dir_name=name, checkpoint_upload_fn=store)
            else:
                distrain.report({})

    result = any_fit(train)
    first, second = names(result.path)
    assert first.startswith("checkpoint_")
    assert second == "mine"
    assert files_of(result.checkpoint) == {"model.txt": "x"}


# -- whoever is killed -----------------------------------------------------------------------------------------------


KILLED = """
import os, signal, sys
import psutil
import distrain
from distrain import Checkpoint, CheckpointUploadMode, DataParallelTrainer, RunConfig

def train():
    handle = Checkpoint.from_dict({"weights": b"x" * 1000})
    for _ in range(2):
        distrain.report({}, checkpoint=handle, checkpoint_upload_mode=CheckpointUploadMode.ASYNC)
    handle.to_directory()
    with handle.as_directory():
        with open(sys.argv[3], "w") as made:  # what is printed may be lost with the agent
            print(sorted(os.listdir(os.environ["TMPDIR"])), file=made)
        for process in psutil.Process().parents()[: int(sys.argv[2])][::-1]:
            process.kill()
        os.kill(os.getpid(), signal.SIGKILL)

DataParallelTrainer(train, run_config=RunConfig(storage_path=sys.argv[1])).fit()
"""


@pytest.mark.sample(2)
@pytest.mark.parametrize("above", [0, 1, 2, 3], ids=["worker", "forkserver", "agent", "guard"])
def test_whoever_is_killed_no_temporary_files_are_left(
    user_script: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, above: int
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    arguments = [str(tmp_path / "runs"), str(above), str(tmp_path / "made")]
    done = user_script(KILLED, *arguments, env={**os.environ, "TMPDIR": str(temporary)})
    assert "distrain: training failed" in done.stderr
    assert (tmp_path / "made").read_text().startswith("['distrain-run-")
    wait_until(lambda: not list(temporary.iterdir()), timeout_s=5.0, what="all temporary files are gone")
