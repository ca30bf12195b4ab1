"""Parts of checkpoints in the memory of a host, and report() that writes them. The test plays agent and coordinator."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import subprocess
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import distrain
from distrain import Checkpoint, CheckpointUploadMode, wire
from distrain.errors import CheckpointError
from distrain.system import scratch
from distrain.worker.reporting import memory_part
from distrain.worker.reporting.memory_part import MemoryParts, Part, is_short
from tests.conftest import CHANGES, REFUSED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.worker.conftest import Worker

MEMORY = CheckpointUploadMode.MEMORY


def free(part: Path, number: int) -> None:
    """Free a part as the agent does."""
    part.rename(part.with_name(f"free-{number}"))


def tensors(value: float, count: int = 1000) -> Checkpoint:
    return Checkpoint.from_dict({"x": torch.full((count,), float(value))})


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory in memory."""
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scratch, "scratch_directory", lambda: None)
            patch.setattr("tempfile.tempdir", "/dev/shm")
            path = stack.enter_context(scratch.temporary_directory(""))
        yield Path(path) / "rank_1"


# -- parts -----------------------------------------------------------------------------------------------------------


def test_pages_are_used_again_and_nothing_grows(home: Path) -> None:
    parts, seen, used = MemoryParts(home), set(), []
    for ordinal in range(1, 9):
        part = parts.write(f"0-{ordinal}", tensors(ordinal, 100_000))
        assert (part.folder, part.copy_from_gpu) == (home / f"0-{ordinal}", None)
        assert sorted(part.files) == ["dict_checkpoint.bin", "dict_checkpoint.pkl"]
        assert Checkpoint(part.folder).to_dict()["x"].unique().tolist() == [ordinal]
        seen.add((part.folder / "dict_checkpoint.bin").stat().st_ino)
        used.append(sum(path.stat().st_blocks for path in home.rglob("*")))
        if ordinal > 1:
            free(home / f"0-{ordinal - 1}", ordinal)
    assert len(seen) == 2
    assert len(parts._buffers) == 2
    assert set(used[2:]) == {used[1]}


def test_a_file_that_is_read_through_another_link_keeps_its_bytes(home: Path) -> None:
    parts = MemoryParts(home)
    part = parts.write("0-1", tensors(1))
    gathered = home / "gathered"
    gathered.mkdir()
    for file in part.files:
        os.link(part.folder / file, gathered / file)
    free(part.folder, 1)
    again = parts.write("0-2", tensors(2))
    assert Checkpoint(gathered).to_dict()["x"][0] == 1
    assert Checkpoint(again.folder).to_dict()["x"][0] == 2
    for file in part.files:
        (gathered / file).unlink()
    free(again.folder, 2)
    parts.write("0-3", tensors(3, 2000))
    assert len(parts._buffers) == 1


def test_memory_that_cannot_be_used_counts_as_full(home: Path) -> None:
    home.touch()
    with pytest.raises(OSError, match="cannot be made") as caught:
        MemoryParts(home).write("0-1", tensors(1))
    assert is_short(caught.value)


def test_a_file_that_is_written_meanwhile_is_an_error(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes may be of two steps."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a").write_bytes(b"x" * 100)
    for change in CHANGES.values():
        monkeypatch.setattr(memory_part, "_check_room", lambda needed, change=change: change(tmp_path / "deep" / "a"))
        with pytest.raises(OSError, match=REFUSED):
            MemoryParts(home).write("0-1", Checkpoint(tmp_path))
        (tmp_path / "deep" / "a").write_bytes(b"x" * 100)


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 5000])
@pytest.mark.parametrize("name", ["a", "deep/er/a"])
def test_what_is_told_is_what_was_written_whatever_the_part_before_had(
    home: Path, tmp_path: Path, name: str, size: int
) -> None:
    parts, source = MemoryParts(home), tmp_path / "source"
    for ordinal, body in enumerate([b"o" * 100, random.Random(size).randbytes(size), b"o" * 100], start=1):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(body)
        part = parts.write(f"0-{ordinal}", Checkpoint(source))
        assert (part.folder / name).read_bytes() == body
        assert part.facts == {name: [len(body), zlib.crc32(body)]}
        free(part.folder, ordinal)


def test_too_little_memory_is_noticed_before_it_is_taken(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = MemoryParts(home)
    free(parts.write("0-1", tensors(1)).folder, 1)
    monkeypatch.setattr(memory_part, "memory_free_bytes", lambda: memory_part._RESERVE + 1000)
    part = parts.write("0-2", tensors(2))  # in the pages that it has
    free(part.folder, 1)
    with pytest.raises(OSError, match="bytes of memory are needed") as caught:
        parts.write("0-3", tensors(3, 2000))
    assert is_short(caught.value)
    monkeypatch.setattr(memory_part, "memory_free_bytes", lambda: 1 << 40)
    monkeypatch.setattr(memory_part, "memory_use", lambda: (1000, 2000))
    with pytest.raises(OSError, match="bytes of memory are needed"):
        parts.write("0-3", tensors(3, 2000))


FULL = """
import sys
from pathlib import Path
import torch
from distrain import Checkpoint
from distrain.worker.reporting.memory_part import MemoryParts, is_short
parts = MemoryParts(Path(sys.argv[1], "rank_0"))
parts.write("0-1", Checkpoint.from_dict({"x": torch.ones(1 << 20)}))  # 4 MiB of 8
for value in ({"x": torch.ones(2 << 20)}, {"text": "x" * (8 << 20)}):
    try:
        parts.write("0-2", Checkpoint.from_dict(value))
    except OSError as error:
        assert is_short(error), error
        print("no room")
"""


def test_a_full_file_system_does_not_kill_the_process(tmp_path: Path) -> None:
    """A write to a page of mapped memory that cannot be had would."""
    inside = f'mount -t tmpfs -o size=8m tmpfs "{tmp_path}" && exec "{sys.executable}" -c "$0" "{tmp_path}"'
    mount = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount")
    done = subprocess.run(["unshare", "-rm", "sh", "-c", inside, FULL], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("no room\n" * 2, 0), done.stderr


# -- report() --------------------------------------------------------------------------------------------------------


@pytest.fixture
def worker(worker: Worker, home: Path) -> Worker:
    worker.session._memory, worker.session._prefers_memory = MemoryParts(home), False
    return worker


def report(checkpoint: Checkpoint | None = None, mode: CheckpointUploadMode = MEMORY, **options: Any) -> None:
    distrain.report({}, checkpoint=checkpoint or tensors(1), checkpoint_upload_mode=mode, **options)


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered"), ""),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "Cannot allocate memory"),
        (MemoryError(), "MemoryError()"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "CUDA out of memory. Tried to allocate 2 GiB"),
    ],
    ids=repr,
)
def test_only_a_lack_of_memory_is_told_as_one(
    worker: Worker, home: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, short: str
) -> None:
    def copy() -> None:
        raise error

    monkeypatch.setattr(MemoryParts, "write", lambda self, name, checkpoint: Part(home / name, ["a"], copy))
    report()
    worker.session.finish_copy_from_gpu()
    said = worker.said()
    while len(said) < 2:
        said += [frame.message() for frame in worker.coordinator.wait(10)]
    if short:
        assert isinstance(said[1], wire.PartWritten)
        assert said[1].failed == short
        return
    assert isinstance(said[1], wire.FilesCopied)
    worker.coordinator.send(wire.FilesStored(attempt=2, rank=1, ordinal=1, failed=said[1].failed))
    with pytest.raises(CheckpointError, match=f"could not be stored: {type(error).__name__}: .*{error.args[-1]}"):
        report()


def test_without_an_agent_it_is_stored_and_said_once(worker: Worker, capsys: pytest.CaptureFixture[str]) -> None:
    worker.session._memory = None
    for ordinal in (1, 2):
        worker.coordinator.send(wire.FilesStored(attempt=2, rank=1, ordinal=ordinal))
    for _ in range(2):
        worker.session._uploading.clear()
        worker.session._store = lambda ordinal, folder, files: None  # type: ignore[method-assign]
        report()
    assert [(said.in_memory, said.waits) for said in worker.said()] == [(False, True)] * 2
    assert capsys.readouterr().err.count("CheckpointUploadMode.SYNC") == 1


def test_a_function_that_stores_it_is_refused() -> None:
    with pytest.raises(ValueError, match=r"leave out CheckpointUploadMode\.MEMORY"):
        report(checkpoint_upload_fn=lambda checkpoint, name: checkpoint)
