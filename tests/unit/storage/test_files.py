"""Local files: listed, and written whole."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from distrain.errors import CheckpointError
from distrain.storage.checkpoint import MANIFEST_FILE
from distrain.storage.files import list_files, write_atomically

if TYPE_CHECKING:
    from pathlib import Path


def contents(folder: Path) -> dict[str, bytes]:
    return {path: (folder / path).read_bytes() for path in list_files(folder)}


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
    assert list_files(tmp_path) == ["a/file", "b/link/file"]


def test_a_link_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.pt").symlink_to("elsewhere.pt")
    with pytest.raises(CheckpointError, match=r"model\.pt is a link to elsewhere\.pt, which does not exist"):
        list_files(tmp_path)


def test_files_are_listed_below_all_folders_and_behind_links(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    (folder / "b" / "c").mkdir(parents=True)
    (folder / "empty").mkdir()
    (tmp_path / "elsewhere").mkdir()
    for path in (folder / "b" / "c" / "deep", folder / "a", tmp_path / "elsewhere" / "weights"):
        path.write_bytes(b"12")
    (folder / "folder").symlink_to(tmp_path / "elsewhere")
    (folder / "file").symlink_to(tmp_path / "elsewhere" / "weights")
    (folder / MANIFEST_FILE).write_text('{"attempt": 0, "files": {}, "index": 0}')
    assert list_files(folder) == ["a", "b/c/deep", "file", "folder/weights"]


def test_an_atomic_write_replaces_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    for data in (b"old", b"new"):
        write_atomically(tmp_path / "file", data)
    assert contents(tmp_path) == {"file": b"new"}
