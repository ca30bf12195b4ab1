"""Files on their way into a checkpoint, and what is deleted of the local ones."""

from __future__ import annotations

import errno
import os
import zlib
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrain.storage.file_transfer import (
    LocalFiles,
    combined_crc32,
    hash_files,
    store_files,
)
from tests.conftest import CHANGES, REFUSED

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "file").write_text("text")
    return folder


def copied(source: Path, target: Path) -> tuple[int, int]:
    [(_, size, crc32)] = store_files(source, target, ["source"])
    return size, crc32


def synced(folder: Path) -> tuple[int, int]:
    return copied(folder, folder)


def hashed(folder: Path) -> tuple[int, int]:
    [(_, size, crc32)] = hash_files(folder, ["source"])
    return size, crc32


def test_hashing_ends_early_when_nobody_needs_it_any_more(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distrain.storage.file_transfer._PART_BYTES", 1)
    monkeypatch.setattr("distrain.storage.file_transfer._HASHING_THREADS", 1)
    needed = iter([True, True])
    with pytest.raises(OSError, match="canceled"):
        hash_files(source, ["deep/file"], is_needed=lambda: next(needed, False))


def in_small_steps(reader: int, writer: int, count: int, start: int, at: int) -> int:
    return os.pwrite(writer, os.pread(reader, min(700_000, count), start), at)


def only_at_first(reader: int, writer: int, count: int, start: int, at: int) -> int:
    if start:
        raise OSError(errno.EXDEV, "not between these")
    return os.pwrite(writer, os.pread(reader, min(999, count), start), at)


@pytest.mark.parametrize("by_kernel", [None, in_small_steps, only_at_first, lambda *_: 0])
@pytest.mark.parametrize("size", [0, 1, 1000, (4 << 20) + 1, (33 << 20) + 7])
def test_a_copy_is_equal_and_tells_size_and_crc(
    tmp_path: Path, size: int, by_kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_kernel is not None:
        monkeypatch.setattr(os, "copy_file_range", by_kernel)
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    (tmp_path / "source").write_bytes(data)
    told = copied(tmp_path, tmp_path / "deep")
    assert (tmp_path / "deep" / "source").read_bytes() == data
    assert told == (len(data), zlib.crc32(data)) == hashed(tmp_path) == synced(tmp_path)


def test_a_file_that_becomes_shorter_while_it_is_copied_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def truncate(*_: int) -> int:
        os.truncate(tmp_path / "source", 0)
        return 0

    (tmp_path / "source").write_bytes(b"1")
    monkeypatch.setattr(os, "copy_file_range", truncate)
    with pytest.raises(OSError, match=rf"{tmp_path}/source was written or replaced"):
        copied(tmp_path, tmp_path / "target")


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_file_that_changes_while_it_is_copied_or_hashed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object]
) -> None:
    path, crc32 = tmp_path / "source", zlib.crc32

    def changing(data: bytes, crc: int = 0) -> int:
        if path.read_bytes() == b"x" * 100:
            path.with_name("old").write_bytes(b"")
            change(path)
        return crc32(data, crc)

    monkeypatch.setattr(zlib, "crc32", changing)
    for function in (hashed, lambda folder: copied(folder, tmp_path / "target"), synced):
        path.write_bytes(b"x" * 100)
        with pytest.raises(OSError, match=REFUSED):
            function(tmp_path)


def test_a_copy_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "source").write_bytes(b"1")
    monkeypatch.setattr(os, "copy_file_range", full)
    with pytest.raises(OSError, match="No space left"):
        copied(tmp_path, tmp_path / "target")


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_the_crc_of_two_texts_is_that_of_both_together(first: bytes, second: bytes) -> None:
    assert combined_crc32(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


# -- local files -----------------------------------------------------------------------------------------------------


def test_a_file_that_was_changed_or_added_since_stays_and_the_others_go(source: Path) -> None:
    (source / "old").write_text("old")
    files = LocalFiles(source)
    (source / "deep" / "file").write_text("next")
    (source / "new").write_text("new")
    files.delete()
    assert sorted(str(path.relative_to(source)) for path in source.rglob("*")) == ["deep", "deep/file", "new"]
    assert (source / "deep" / "file").read_text() == "next"


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


@pytest.mark.parametrize(
    ("other", "overlaps"), [("", True), ("deep", True), ("..", True), ("../source2", False), ("../link", True)]
)
def test_directories_that_overlap(source: Path, tmp_path: Path, other: str, *, overlaps: bool) -> None:
    (tmp_path / "link").symlink_to(source)
    assert LocalFiles(source).overlaps(source / other) is overlaps
