"""Local files: listed, copied and hashed, whatever fails meanwhile."""

from __future__ import annotations

import _thread
import errno
import os
import signal
import socket
import stat
import subprocess
import zlib
from typing import TYPE_CHECKING, Any

import pytest

from distrain.checkpoint import MANIFEST_FILE
from distrain.errors import CheckpointError
from distrain.storage import files
from distrain.storage.files import copy_file, crc32_of, list_files, sync_file, write_atomically
from tests.conftest import wait_until

if TYPE_CHECKING:
    from pathlib import Path


def contents(folder: Path) -> dict[str, bytes]:
    return {path: (folder / path).read_bytes() for path, _ in list_files(folder)}


def test_what_is_no_file_is_refused_by_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/pipe is a named pipe, which no checkpoint can hold"):
        list_files(tmp_path)
    (tmp_path / "pipe").unlink()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        with pytest.raises(CheckpointError, match="/s is a socket"):
            list_files(tmp_path)
    (tmp_path / "s").unlink()
    (tmp_path / "null").symlink_to("/dev/null")
    with pytest.raises(CheckpointError, match="/null is a device"):
        list_files(tmp_path)


@pytest.mark.parametrize("target", [".", "..", "../..", "../other"])
def test_links_in_a_circle_are_refused_by_name(tmp_path: Path, target: str) -> None:
    for name in ("top/deep", "top/other"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "top" / "deep" / "file").touch()
    (tmp_path / "top" / "deep" / "link").symlink_to(target)
    (tmp_path / "top" / "other" / "back").symlink_to("../deep")
    with pytest.raises(CheckpointError, match=r"(link|back) is a circular link: it is inside \S+, to which it leads"):
        list_files(tmp_path / "top")


def test_links_to_one_directory_are_no_circle(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").touch()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "link").symlink_to("../a")
    assert list_files(tmp_path) == [("a/file", 0), ("b/link/file", 0)]


def test_a_link_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.pt").symlink_to("elsewhere.pt")
    with pytest.raises(CheckpointError, match=r"model\.pt is a link to elsewhere\.pt, which does not exist"):
        list_files(tmp_path)


def in_small_steps(reader: int, writer: int, count: int) -> int:
    return os.write(writer, os.read(reader, 700_000))


def only_at_first(reader: int, writer: int, count: int) -> int:
    if os.lseek(reader, 0, os.SEEK_CUR):
        raise OSError(errno.EXDEV, "not between these")
    return os.write(writer, os.read(reader, 999))


@pytest.mark.parametrize("by_kernel", [None, in_small_steps, only_at_first, lambda *_: 0])
@pytest.mark.parametrize("size", [0, 1, 1000, (4 << 20) + 1, (33 << 20) + 7])
def test_a_copy_is_equal_and_tells_size_and_crc(
    tmp_path: Path, size: int, by_kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_kernel is not None:
        monkeypatch.setattr(os, "copy_file_range", by_kernel)
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    (tmp_path / "source").write_bytes(data)
    told = copy_file(tmp_path / "source", tmp_path / "deep" / "target")
    assert (tmp_path / "deep" / "target").read_bytes() == data
    assert told == (len(data), zlib.crc32(data)) == crc32_of(tmp_path / "source") == sync_file(tmp_path / "source")


def test_a_copy_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(reader: int, writer: int, count: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "source").write_bytes(b"1")
    monkeypatch.setattr(os, "copy_file_range", full)
    with pytest.raises(OSError, match="No space left"):
        copy_file(tmp_path / "source", tmp_path / "target")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files that it kept from being closed
def test_a_copy_that_a_signal_handler_interrupts_leaves_no_thread(tmp_path: Path) -> None:
    class Alarm(Exception):
        pass

    def ring(number: int, frame: object) -> None:
        raise Alarm

    def tasks() -> int:
        return len(os.listdir("/proc/self/task"))

    data = bytes(range(256)) * (48 << 12)
    (tmp_path / "source").write_bytes(data)
    before, interrupted = tasks(), 0
    usual = signal.signal(signal.SIGALRM, ring)
    try:
        for moment in range(1, 60):
            try:
                signal.setitimer(signal.ITIMER_REAL, moment * 0.0005)
                told = copy_file(tmp_path / "source", tmp_path / "target")
                signal.setitimer(signal.ITIMER_REAL, 0)
                assert told == sync_file(tmp_path / "target") == (len(data), zlib.crc32(data))
            except Alarm:
                interrupted += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, usual)
    assert interrupted
    wait_until(lambda: tasks() <= before, what="the end of the threads")


def test_without_threads_a_copy_is_hashed_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*arguments: object) -> None:
        raise RuntimeError("can't start new thread")

    data = bytes(range(256)) * (48 << 12)
    (tmp_path / "source").write_bytes(data)
    monkeypatch.setattr(_thread, "start_new_thread", start)
    assert copy_file(tmp_path / "source", tmp_path / "target") == (len(data), zlib.crc32(data))


def test_a_copy_that_cannot_be_read_again_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int, buffers: Any, offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    (tmp_path / "source").write_bytes(b"1")
    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(OSError, match=r"Input/output error: .*target"):
        copy_file(tmp_path / "source", tmp_path / "target")
    with pytest.raises(OSError, match=r"Input/output error: .*source"):
        sync_file(tmp_path / "source")


def test_files_are_listed_with_sizes_below_all_folders(tmp_path: Path) -> None:
    (tmp_path / "b" / "c").mkdir(parents=True)
    (tmp_path / "b" / "c" / "deep").write_bytes(b"123")
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "empty").mkdir()
    assert list_files(tmp_path) == [("a", 1), ("b/c/deep", 3)]


def test_the_manifest_of_a_committed_checkpoint_is_not_one_of_its_files(tmp_path: Path) -> None:
    (tmp_path / MANIFEST_FILE).write_text('{"attempt": 0, "files": {}, "index": 0}')
    assert list_files(tmp_path) == []


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "weights").write_bytes(b"12")
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "folder").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "checkpoint" / "file").symlink_to(tmp_path / "elsewhere" / "weights")
    assert list_files(tmp_path / "checkpoint") == [("file", 2), ("folder/weights", 2)]


def test_an_atomic_write_replaces_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    for data in (b"old", b"new"):
        write_atomically(tmp_path / "file", data)
    assert contents(tmp_path) == {"file": b"new"}


def test_a_child_that_is_forked_during_a_copy_does_not_keep_it_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(range(256)) * (48 << 12)
    (tmp_path / "source").write_bytes(data)
    children, hash_part = [], files._hash_part

    def fork_first(*arguments: int) -> int:
        if not children:
            children.append(subprocess.Popen(["sleep", "60"], pass_fds=open_pipes()))
        return hash_part(*arguments)

    monkeypatch.setattr(files, "_hash_part", fork_first)
    try:
        assert copy_file(tmp_path / "source", tmp_path / "target") == (len(data), zlib.crc32(data))
    finally:
        for child in children:
            child.kill()
            child.wait()


def open_pipes() -> list[int]:
    fds = [int(name) for name in os.listdir("/proc/self/fd")]
    return [fd for fd in fds if os.path.exists(f"/proc/self/fd/{fd}") and stat.S_ISFIFO(os.fstat(fd).st_mode)]


def test_an_error_of_the_thread_that_hashes_is_the_error_of_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: int) -> int:
        raise OSError(errno.EIO, "the disk is broken")

    (tmp_path / "source").write_bytes(bytes(64 << 20))
    monkeypatch.setattr(files, "_hash_part", fail)
    with pytest.raises(OSError, match="the disk is broken"):
        copy_file(tmp_path / "source", tmp_path / "target")
