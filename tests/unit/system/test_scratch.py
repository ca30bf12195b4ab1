"""The temporary directory of a host: who may use it, and when it goes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from distrain.system import scratch


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("DISTRAIN_SCRATCH", raising=False)


def claim_in_a_child() -> str:
    """Claim in a process that is dead when this returns."""
    read_fd, write_fd = os.pipe()
    if (child := os.fork()) == 0:
        os.write(write_fd, (scratch.claim() or "").encode())
        os._exit(0)
    os.waitpid(child, 0)
    path = os.read(read_fd, 4096).decode()
    os.close(read_fd)
    os.close(write_fd)
    return path


def test_what_nobody_holds_is_removed_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTRAIN_SCRATCH", "")  # restored afterwards
    (tmp_path / "of-the-user").mkdir()
    held, abandoned = scratch.claim(), claim_in_a_child()
    assert held is not None
    Path(abandoned, "checkpoint").mkdir()
    scratch.remove_abandoned()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([Path(held).name, "of-the-user"])


def test_only_who_has_the_same_tmpdir_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert scratch.scratch_directory() is None
    monkeypatch.setenv("DISTRAIN_SCRATCH", "")
    path = scratch.claim()
    assert scratch.scratch_directory() == path
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "elsewhere"))
    assert scratch.scratch_directory() is None


def test_without_a_place_for_temporary_files_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    assert scratch.claim() is None
    scratch.clear(None)
    scratch.remove(None)
    scratch.clear(str(tmp_path / "missing" / "distrain-run-x"))
    scratch.remove_abandoned()
