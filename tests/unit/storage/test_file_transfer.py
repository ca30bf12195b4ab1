"""Files on their way into a checkpoint, and what is deleted of the local ones."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

from distrain.storage.file_transfer import LocalFiles, file_copier


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "file").write_text("text")
    return folder


def test_a_file_is_copied_and_can_be_changed_afterwards(source: Path, tmp_path: Path) -> None:
    copy = file_copier(source, tmp_path / "target")
    assert copy("deep/file") == (4, zlib.crc32(b"text"))
    (source / "deep" / "file").write_text("changed")
    assert (tmp_path / "target" / "deep" / "file").read_text() == "text"


def test_local_files_are_deleted_with_their_directories(source: Path) -> None:
    LocalFiles(source).delete()
    assert not source.exists()


def test_a_relative_path_means_the_same_after_a_change_of_directory(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = LocalFiles(Path("source"))
    other = tmp_path / "other"
    (other / "source").mkdir(parents=True)
    monkeypatch.chdir(other)
    files.delete()
    assert (other / "source").exists()
    assert not source.exists()


def test_a_file_that_was_changed_or_added_since_stays_and_the_others_go(source: Path) -> None:
    (source / "old").write_text("old")
    files = LocalFiles(source)
    (source / "deep" / "file").write_text("next")
    (source / "new").write_text("new")
    files.delete()
    assert sorted(str(path.relative_to(source)) for path in source.rglob("*")) == ["deep", "deep/file", "new"]
    assert (source / "deep" / "file").read_text() == "next"


def test_a_file_that_was_rewritten_at_once_with_the_same_size_stays(source: Path) -> None:
    """The clock of a file system ticks every few milliseconds."""
    path = source / "deep" / "file"
    for number in range(200):
        path.write_text("text")
        files = LocalFiles(source)
        path.write_text("next")
        files.delete()
        assert path.read_text() == "next", number


def test_a_file_that_was_replaced_stays(source: Path) -> None:
    files = LocalFiles(source)
    (source / "new").write_text("text")
    (source / "new").replace(source / "deep" / "file")
    files.delete()
    assert (source / "deep" / "file").exists()


@pytest.mark.parametrize("name", ["source", "source/link", "source/deep/link"])
def test_of_a_symlink_only_the_link_is_deleted(source: Path, tmp_path: Path, name: str) -> None:
    behind = tmp_path / "behind"
    behind.mkdir()
    (behind / "file").write_text("mine")
    if name == "source":
        source.rename(tmp_path / "moved")
    (tmp_path / name).symlink_to(behind)
    LocalFiles(source).delete()
    assert not os.path.lexists(source)
    assert (behind / "file").read_text() == "mine"


def test_a_directory_that_somebody_else_has_deleted_is_no_error(source: Path) -> None:
    first, second = LocalFiles(source), LocalFiles(source)
    second.delete()
    first.delete()
    assert not source.exists()


@pytest.mark.parametrize(
    ("other", "overlaps"), [("", True), ("deep", True), ("..", True), ("../source2", False), ("../link", True)]
)
def test_directories_that_overlap(source: Path, tmp_path: Path, other: str, *, overlaps: bool) -> None:
    (tmp_path / "link").symlink_to(source)
    assert LocalFiles(source).overlaps(source / other) is overlaps
