"""Which files of a shared directory become a rank's checkpoint, and whether they are whole."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from distrain import Checkpoint
from distrain.errors import CheckpointError
from distrain.worker.reporting import written_files
from distrain.worker.reporting.written_files import WrittenFiles


@pytest.fixture(autouse=True)
def scratch(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("scratch")))


@pytest.fixture(params=["the kernel tells", "the kernel does not tell"])
def knows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "the kernel does not tell":
        monkeypatch.setattr(written_files, "_watch", lambda folder: None)
    return request.param == "the kernel tells"


def taken(watched: WrittenFiles) -> dict[str, bytes]:
    """Return the files of the checkpoint of the whole directory."""
    part = watched.own_part(Checkpoint(watched.folder))
    assert part is not None
    return {path.name: path.read_bytes() for path in Path(part.path).rglob("*")}


def write_elsewhere(code: str, *arguments: object) -> None:
    code = f"import sys; from pathlib import Path; {code}"
    subprocess.run([sys.executable, "-c", code, *map(str, arguments)], check=True)


def test_files_that_the_rank_writes_are_taken(tmp_path: Path, knows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "before").write_text("old")
    (tmp_path / "rewritten").write_text("old")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("before")
    os.mkfifo(tmp_path / "pipe")
    time.sleep(0.02)  # the clock of files advances
    watched = WrittenFiles(str(tmp_path))
    (tmp_path / "rewritten").write_text("new")
    (tmp_path / "folder" / "inner").write_text("not at the top")
    (tmp_path / "gone").write_text("deleted")
    (tmp_path / "gone").unlink()
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / "a line\nand ü").write_bytes(b"odd")
    (tmp_path / "folder" / "moved").write_text("moved")
    (tmp_path / "folder" / "moved").rename(tmp_path / "moved")
    torch.save({"weight": torch.ones(3)}, tmp_path / "model.pt")  # written by C++
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(tmp_path)
        server.bind("socket")
        found = taken(watched)
    assert set(found) == {"rewritten", ".hidden", "a line\nand ü", "moved", "model.pt"}
    assert found["rewritten"] == b"new"
    (tmp_path / "later").write_text("later")
    assert set(taken(watched)) == {*found, "later"}
    assert watched.own_part(Checkpoint(tmp_path / "folder")) is None


def test_when_others_write_too_much_to_be_told_apart_new_files_are_taken(tmp_path: Path) -> None:
    (tmp_path / "before").touch()
    time.sleep(0.02)
    watched = WrittenFiles(str(tmp_path))
    (tmp_path / "own").write_text("own")
    write_elsewhere(
        "[(file.touch(), file.unlink()) for n in range(17_000) for file in [Path(sys.argv[1], str(n))]]", tmp_path
    )
    found = taken(watched)
    assert "own" in found
    assert "before" not in found


def test_no_copy_is_torn_while_another_rank_writes_the_same_file(tmp_path: Path) -> None:
    """Every copy is one of the values that were written, as a whole."""
    watched, path = WrittenFiles(str(tmp_path)), tmp_path / "model"
    code = """
import pickle, sys, torch; from pathlib import Path
path, n = sys.argv[1], 0
while True:
    value = torch.full((500_000,), float(n)); n += 1
    Path(path).write_bytes(pickle.dumps(value))
"""
    path.write_bytes(pickle.dumps(torch.zeros(500_000)))
    other = subprocess.Popen([sys.executable, "-c", code, str(path)])
    try:
        seen = set()
        deadline = time.monotonic() + 20
        while len(seen) < 4 and time.monotonic() < deadline:
            part = watched.own_part(Checkpoint(tmp_path))
            assert part is not None
            value = pickle.loads(Path(part.path, "model").read_bytes())
            assert len(value.unique()) == 1
            seen.add(float(value[0]))
        assert len(seen) == 4
    finally:
        other.kill()
        other.wait()


def test_ranks_that_save_at_once_do_not_mix_their_bytes(tmp_path: Path) -> None:
    code = """
import sys, torch
from distrain.torch.config import save_in_one_step
folder, rank = sys.argv[1], int(sys.argv[2])
save_in_one_step(folder)
for _ in range(20):
    torch.save(torch.full((300_000,), float(rank)), folder + "/model")
"""
    ranks = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(rank)]) for rank in range(2)]
    seen = set()
    while any(rank.poll() is None for rank in ranks):
        if (tmp_path / "model").exists():
            seen.add(tuple(torch.load(tmp_path / "model", weights_only=True).unique().tolist()))
        time.sleep(0.001)
    assert seen == {(0.0,), (1.0,)}
    assert os.listdir(tmp_path) == ["model"]


def test_a_file_that_two_have_written_at_once_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written_files, "PATIENCE_S", 0.1)
    watched, path = WrittenFiles(str(tmp_path)), tmp_path / "model"
    torch.save(torch.zeros(1000), path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="ranks have written it at once"):
        watched.own_part(Checkpoint(tmp_path))
