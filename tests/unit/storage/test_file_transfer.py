"""How files get into the run directory: what is moved, and what is not."""

from __future__ import annotations

import os
import zlib
from typing import TYPE_CHECKING

import pytest

from distrain.storage.file_transfer import discard, file_copier

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "file").write_text("text")
    return folder


def test_a_file_whose_source_can_be_deleted_is_moved(source: Path, tmp_path: Path) -> None:
    inode = (source / "deep" / "file").stat().st_ino
    assert file_copier(source, tmp_path / "target", delete=True)("deep/file") == (4, zlib.crc32(b"text"))
    assert (source / "deep" / "file").exists()
    discard(source, tmp_path / "target", ["deep/file"])
    assert not source.exists()
    assert (tmp_path / "target" / "deep" / "file").stat().st_ino == inode


@pytest.mark.parametrize("path", ["", ".", "source"])
def test_nothing_is_deleted_by_a_relative_path(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="must be an absolute path"):
        discard(type(source)(path))
    assert (source / "deep" / "file").exists()


def test_a_file_that_keeps_another_name_becomes_a_copy(source: Path, tmp_path: Path) -> None:
    """As where its directory cannot be written, or somebody makes another link at that moment."""
    target = tmp_path / "target"
    file_copier(source, target, delete=True)("deep/file")
    os.link(source / "deep" / "file", tmp_path / "other name")
    discard(source, target, ["deep/file"])
    (tmp_path / "other name").write_text("changed")
    assert (target / "deep" / "file").read_text() == "text"
    assert os.listdir(target / "deep") == ["file"]
