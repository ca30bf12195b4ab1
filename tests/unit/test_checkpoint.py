"""The handle users see: directories, dicts, metadata."""

from __future__ import annotations

import os
import pickle
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from distrain.errors import CheckpointError
from distrain.storage.checkpoint import MANIFEST_FILE, METADATA_FILE, Checkpoint, remote_files
from distrain.system.remote_path import RemotePath, own_temporary_directory

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory as train_func writes it."""
    root = tmp_path / "checkpoint"
    (root / "deep").mkdir(parents=True)
    (root / "model.pt").write_bytes(b"weights")
    (root / "deep" / "rng.bin").write_bytes(b"state")
    return root


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, empty."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


# -- directories -----------------------------------------------------------------------------------------------------


def test_checkpoints_are_equal_if_they_refer_to_the_same_directory(folder: Path) -> None:
    class Other(Checkpoint): ...

    memory, view = MemoryFileSystem(), DirFileSystem("/a", MemoryFileSystem())
    same = [
        {Checkpoint(folder), Checkpoint(str(folder)), Checkpoint(folder.as_uri()), Other(folder)},
        {pickle.loads(pickle.dumps(Checkpoint(folder))), Checkpoint(folder, LocalFileSystem())},
        {Checkpoint("memory://run/1"), Checkpoint("/run/1", memory)},
    ]
    different = [Checkpoint(folder), Checkpoint(folder.parent), *same[2], Checkpoint("/run/1", view)]
    different += [Checkpoint.from_dict({"a": 1}), Checkpoint.from_dict({"a": 1})]
    assert [len(group) for group in same] == [1, 1, 1]
    assert len(set(different)) == len(different)
    assert different[-1] == different[-1] != different[0]
    assert Checkpoint(folder) != str(folder)


def test_to_directory_copies_all_files_but_our_manifest(folder: Path, tmp_path: Path) -> None:
    (folder / MANIFEST_FILE).write_text("{}")
    target = tmp_path / "copy" / "of"
    assert Checkpoint(folder).to_directory(target) == str(target)
    assert sorted(os.listdir(target)) == ["deep", "model.pt"]
    assert (target / "deep" / "rng.bin").read_bytes() == b"state"


def test_a_missing_directory_is_an_error_that_names_it(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="gone does not exist"), checkpoint.as_directory():
        pass
    with pytest.raises(CheckpointError, match="gone does not exist"):
        checkpoint.to_directory(tmp_path / "target")


# -- dicts -----------------------------------------------------------------------------------------------------------


def test_from_dict_refuses_what_is_no_dict() -> None:
    with pytest.raises(TypeError, match=r"takes a dict, got \[1\] \(list\)"):
        Checkpoint.from_dict([1])  # type: ignore[arg-type]


def test_a_directory_is_no_dict_and_says_what_to_use(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="as_directory"):
        Checkpoint(folder).to_dict()


# -- metadata --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["{", "[1]", "7"])
def test_damaged_metadata_is_named(folder: Path, text: str) -> None:
    (folder / ".metadata.json").write_text(text)
    checkpoint = Checkpoint(folder)
    with pytest.raises(CheckpointError, match=r"\.metadata\.json of .* is damaged: .*set_metadata\(\)"):
        checkpoint.get_metadata()
    checkpoint.set_metadata({"a": 1})
    assert checkpoint.get_metadata() == {"a": 1}


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"{}", b'{"files": 7}'])
def test_a_damaged_manifest_of_a_remote_checkpoint_is_named(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    path = RemotePath("/run/checkpoint_000000", MemoryFileSystem())
    (path / ".manifest.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"/checkpoint_000000/\.manifest\.json is damaged"):
        remote_files(path)


def test_metadata_can_be_set_and_updated_and_lies_beside_the_files(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    checkpoint.set_metadata({"a": 1, "b": 2})
    checkpoint.update_metadata({"b": 3, "c": 4})
    assert Checkpoint(folder).get_metadata() == {"a": 1, "b": 3, "c": 4}
    checkpoint.set_metadata({"d": 5})
    assert checkpoint.get_metadata() == {"d": 5}
    assert sorted(os.listdir(folder)) == [METADATA_FILE, "deep", "model.pt"]


def test_metadata_of_a_dict_is_never_written_to_the_working_directory(elsewhere: Path) -> None:
    checkpoint = Checkpoint.from_dict({"epoch": 3})
    try:
        checkpoint.set_metadata({"a": 1})
    except CheckpointError:
        pass
    else:
        assert checkpoint.get_metadata() == {"a": 1}
    assert os.listdir(elsewhere) == []


# -- the rest --------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_no_path_and_says_what_to_use(folder: Path) -> None:
    with pytest.raises(TypeError, match="as_directory"):
        os.path.join(Checkpoint(folder), "model.pt")


# -- Ray AIR's other forms -------------------------------------------------------------------------------------------


def test_a_url_that_nothing_can_read_says_so() -> None:
    with pytest.raises(CheckpointError, match="s4://bucket/checkpoint: Protocol not known: s4"):
        Checkpoint("s4://bucket/checkpoint")


def test_what_a_url_and_a_filesystem_mean(tmp_path: Path) -> None:
    assert Checkpoint(tmp_path.as_uri()).path == str(tmp_path)
    assert Checkpoint.from_directory(tmp_path.as_uri()).path == str(tmp_path)
    assert Checkpoint(tmp_path, filesystem=LocalFileSystem()).path == str(tmp_path)
    assert Checkpoint("memory://bucket/run").path == "memory://bucket/run"
    with pytest.raises(TypeError, match=r"must be fsspec's .* or pyarrow's"):
        Checkpoint(tmp_path, filesystem=object())


# -- remote ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where checkpoints are downloaded to; ``memory://c/a`` and ``memory://c/b`` are some."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("a", "b"):
        MemoryFileSystem().pipe_file(f"c/{name}/x", name.encode())
    yield own_temporary_directory("checkpoints")
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def test_readers_share_a_download_and_the_last_one_clears_it_away(downloads: Path) -> None:
    with Checkpoint("memory://c/a").as_directory() as one, Checkpoint("memory://c/a").as_directory() as two:
        assert one == two
        assert Path(one, "x").read_bytes() == b"a"
    assert list(downloads.iterdir()) == []


def test_what_a_killed_reader_has_left_goes_with_the_next_download_and_what_is_read_stays(downloads: Path) -> None:
    left = downloads / "0123-checkpoint_000000"
    (left / "files").mkdir(parents=True)
    (left / "files" / "x").write_bytes(b"half")
    with Checkpoint("memory://c/a").as_directory() as read:
        assert not left.exists()
        with Checkpoint("memory://c/b").as_directory():
            assert Path(read, "x").read_bytes() == b"a"
    assert list(downloads.iterdir()) == []


def test_a_download_that_fails_leaves_nothing(downloads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: RemotePath, names: list[str], target: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)
        (target / names[0]).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RemotePath, "get_all", full)
    with pytest.raises(CheckpointError, match="No space left"), Checkpoint("memory://c/a").as_directory():
        pass
    assert list(downloads.iterdir()) == []


def test_half_of_a_remote_checkpoint_that_is_being_deleted_is_not_read(downloads: Path) -> None:
    MemoryFileSystem().pipe_file("c/a/.pending.json", b"{}")
    with (
        pytest.raises(CheckpointError, match=r"was deleted while it was read .*CheckpointConfig\.num_to_keep"),
        Checkpoint("memory://c/a").as_directory(),
    ):
        pass
