"""Remote paths: what they mean, which names and filesystems are refused, and what is tried again."""

from __future__ import annotations

import os
import re
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from distrain.errors import StorageError
from distrain.system import remote_path
from distrain.system.remote_path import RemotePath, decode_filesystem, encode_filesystem, locate

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _empty_memory() -> Iterator[None]:
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


class Moody(MemoryFileSystem):  # type: ignore[misc]
    """Answers every operation with the next of ``moods``, an exception, as long as there are any."""

    protocol = "moody"
    cachable = False

    def __init__(self, *moods: Exception) -> None:
        super().__init__()
        self.moods = list(moods)

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        if self.moods:
            raise self.moods.pop(0)
        super().pipe_file(path, value, **options)


class Unpicklable(MemoryFileSystem):  # type: ignore[misc]
    protocol = "unpicklable"

    def __reduce__(self) -> Any:
        raise TypeError("not me")


# -- where it leads --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/runs", Path("/runs")),
        ("file:///runs", Path("/runs")),
        ("~/runs", Path.home() / "runs"),
        ("runs", Path.cwd() / "runs"),
        ("/runs/exp::1/checkpoint", Path("/runs/exp::1/checkpoint")),
        ("file:///a%20b/%C3%BC", Path("/a b/ü")),
        ("file://~/runs", Path.home() / "runs"),
        (Path("lr:"), Path.cwd() / "lr:"),
    ],
)
def test_local_paths(path: Any, expected: Path) -> None:
    assert locate(path) == expected


def test_a_filesystem_whose_package_is_missing_is_told_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(OSError, match=r"^gs://bucket/run: gcsfs is not installed: pip install gcsfs$"):
        _ = RemotePath("gs://bucket/run").filesystem


@pytest.mark.parametrize("name", ["exp::1", "r?x", "st*r", "[ab]", "deep/q?versionId=7"])
def test_a_name_that_fsspec_does_not_take_literally_is_refused(name: str) -> None:
    run, given = locate("memory://runs"), MemoryFileSystem()
    assert isinstance(run, RemotePath)
    with pytest.raises(OSError, match=rf"{re.escape(name)}' has .* in it, which remote filesystems do not take"):
        _ = run / name
    with pytest.raises(OSError, match="give the file, the run or its storage_path another name"):
        locate(f"runs/{name}", given)
    with pytest.raises(OSError, match="another name"):
        locate(f"memory://runs/{name}")


@pytest.mark.parametrize(
    ("url", "cure"),
    [
        ("s3://b/r?endpoint_override=http://localhost:9000", "AWS_ENDPOINT_URL=http://localhost:9000"),
        ("s3://b/r?scheme=http&endpoint_override=h%3A9&secret_key=K", "AWS_ENDPOINT_URL=http://h:9"),
        ("gs://b/r?anonymous=True", "storage_filesystem"),
    ],
)
def test_options_of_pyarrow_are_named_with_what_to_do_instead(url: str, cure: str) -> None:
    with pytest.raises(OSError, match="has options of pyarrow behind a '\\?'") as raised:
        locate(url)
    assert str(raised.value).endswith(cure)
    assert "=K" not in str(raised.value)


def test_filesystems_travel_as_text() -> None:
    given = fsspec.filesystem("memory")
    assert isinstance(decode_filesystem(encode_filesystem(given)), MemoryFileSystem)
    assert (encode_filesystem(None), decode_filesystem("")) == ("", None)
    with pytest.raises(OSError, match="Unpicklable cannot be used by other processes"):
        encode_filesystem(Unpicklable())


def test_storage_that_other_processes_cannot_reach_is_refused() -> None:
    for memory in (RemotePath("memory://runs"), RemotePath("runs", DirFileSystem("/x", fs=MemoryFileSystem()))):
        with pytest.raises(OSError, match=r"^\S+ is in the memory of this process, .*tempfile.mkdtemp"):
            memory.check_shared()
    with pytest.raises(OSError, match="Unpicklable cannot be used by other processes"):
        RemotePath("runs", Unpicklable()).check_shared()
    RemotePath("runs", fsspec.filesystem("http")).check_shared()


# -- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "pyarrow", "directory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> RemotePath:
    """On a filesystem without directories, and on some that have them."""
    if request.param == "memory":
        return RemotePath("memory://runs/run")
    if request.param == "directory":
        return RemotePath("runs/run", DirFileSystem(str(tmp_path), fs=LocalFileSystem()))
    from fsspec.implementations.arrow import ArrowFSWrapper
    from pyarrow.fs import LocalFileSystem as ArrowsLocalFileSystem
    from pyarrow.fs import SubTreeFileSystem

    return RemotePath("runs/run", ArrowFSWrapper(SubTreeFileSystem(str(tmp_path), ArrowsLocalFileSystem())))


def test_what_is_written_can_be_read_listed_and_removed(root: RemotePath, tmp_path: Path) -> None:
    assert (root.exists(), root.names(), root.files()) == (False, [], {})
    (root / "a" / "b").write_bytes(b"123")
    source = tmp_path / "source" / "c" / "d"
    source.parent.mkdir(parents=True)
    source.write_bytes(b"45678")
    root.put_all(tmp_path / "source", ["c/d"])
    assert root.exists()
    assert root.names() == ["a", "c"]
    assert {name: size for name, (size, _) in root.files().items()} == {"a/b": 3, "c/d": 5}
    assert (root / "a/b").read_bytes() == b"123"
    root.get_all(["c/d"], tmp_path / "deep")
    assert (tmp_path / "deep" / "c" / "d").read_bytes() == b"45678"
    (root / "a").remove()
    (root / "a").remove()
    assert root.names() == ["c"]
    with pytest.raises(FileNotFoundError, match=r"cannot read .*a/b"):
        (root / "a/b").read_bytes()


# -- trying again ----------------------------------------------------------------------------------------------------


def test_a_passing_trouble_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    moody = Moody(ConnectionError("reset"), TimeoutError("slow"))
    RemotePath("x/y", moody).write_bytes(b"1")
    assert (moody.moods, moody.cat_file("/x/y")) == ([], b"1")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("error", [PermissionError("denied"), FileNotFoundError("no bucket"), ValueError("nonsense")])
def test_what_another_try_cannot_change_is_not_tried_again(error: Exception) -> None:
    moody = Moody(error, error)
    kind = type(error) if isinstance(error, OSError) else OSError
    with pytest.raises(kind, match=f"cannot write x/y: {type(error).__name__}: {error}"):
        RemotePath("x/y", moody).write_bytes(b"1")
    assert len(moody.moods) == 1


def test_what_fails_for_good_names_the_url_and_the_cause() -> None:
    moody = Moody(*[ConnectionError("reset")] * 99)
    with pytest.raises(OSError, match=r"cannot write x/y \(tried 3 times\): ConnectionError: reset"):
        RemotePath("x/y", moody, patience_s=1.0).write_bytes(b"1")


def test_a_retry_may_be_refused() -> None:
    """The owner of a run checks that it still is, before it writes again what failed while it was suspended."""

    def refuse() -> None:
        raise StorageError("another process has the run")

    moody = Moody(*[ConnectionError("reset")] * 2)
    with pytest.raises(StorageError, match="another process"):
        (RemotePath("x", moody, before_retry=refuse) / "y").write_bytes(b"1")
    assert len(moody.moods) == 1


def test_a_trouble_that_lasts_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(remote_path, "_report_retry", told.append)
    monkeypatch.setattr(remote_path, "_QUIET_S", 0.5)
    RemotePath("x/y", Moody(*[ConnectionError("reset")] * 3), patience_s=9.0).write_bytes(b"1")
    assert told == ["cannot write x/y: ConnectionError: reset; trying again for 9 s"]


@pytest.mark.parametrize("text", ["abc", "-1", "nan", ""])
def test_an_environment_that_says_nonsense_of_it_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("DISTRAIN_STORAGE_PATIENCE_S", text)
    with pytest.raises(OSError, match=f"DISTRAIN_STORAGE_PATIENCE_S must be a number of seconds, .*, got '{text}'"):
        locate("memory://x")


# -- temporary files -------------------------------------------------------------------------------------------------


def test_a_temporary_directory_that_somebody_else_made_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_path.tempfile, "tempdir", str(tmp_path))
    assert remote_path.own_temporary_directory("x").is_dir()
    assert os.stat(tmp_path / f"distrain-{os.getuid()}").st_mode & 0o777 == 0o700
    monkeypatch.setattr(remote_path.os, "getuid", lambda: 12345)
    (tmp_path / "distrain-12345").mkdir()
    with pytest.raises(PermissionError, match="belongs to another user; set TMPDIR"):
        remote_path.own_temporary_directory("x")


def test_readers_of_one_checkpoint_share_a_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from distrain import Checkpoint

    monkeypatch.setattr(remote_path.tempfile, "tempdir", str(tmp_path))
    (RemotePath("memory://run/checkpoint") / "model.pt").write_bytes(b"weights")
    both, folders = threading.Barrier(2), set()

    def read() -> None:
        with Checkpoint("memory://run/checkpoint").as_directory() as folder:
            both.wait(timeout=20)  # a reader does not keep another one from reading
            folders.add(folder)
            assert Path(folder, "model.pt").read_bytes() == b"weights"
            both.wait(timeout=20)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    [folder] = folders
    assert not Path(folder).exists()
