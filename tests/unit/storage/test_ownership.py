"""Run directories that somebody else has prepared, in a storage path that others may write."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from typing import TYPE_CHECKING

import pytest

from distrain.coordinator.requests import connect
from distrain.coordinator.store.local_store import LocalStore
from distrain.coordinator.store.rank_logs import RankLogs
from distrain.errors import StorageError
from distrain.storage.files import write_atomically
from distrain.storage.paths import RunPaths
from distrain.system.background import Background
from distrain.trackers import TensorBoard
from distrain.trackers.logging import TrackerLog

if TYPE_CHECKING:
    from pathlib import Path

STRANGER, COLLEAGUE = 54321, 54322
NAMES = [".lock", "metrics.jsonl", "events.jsonl", ".reserve"]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    file = tmp_path / "victim"
    file.write_text("precious")
    return file


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run directory that was made beforehand, in a storage path like /tmp."""
    storage = tmp_path / "runs"
    storage.mkdir()
    storage.chmod(0o1777)
    made = storage / "run"
    made.mkdir()
    return made


@pytest.mark.parametrize("name", NAMES)
def test_a_run_writes_through_no_link(root: Path, victim: Path, name: str) -> None:
    (root / name).symlink_to(victim)
    with pytest.raises(StorageError, match=rf"{name} is a link.* delete"):
        LocalStore(root)
    assert victim.read_text() == "precious"
    assert (root / name).is_symlink()


@pytest.mark.parametrize("name", NAMES)
def test_a_run_waits_for_no_pipe(root: Path, name: str) -> None:
    os.mkfifo(root / name)
    with pytest.raises(StorageError, match=rf"{name} is not a regular file"):
        LocalStore(root)


def test_a_run_begins_where_clients_of_a_file_server_read_its_files(root: Path) -> None:
    """A server of NFS or Samba lends files to its clients. Somebody who writes on the server waits for their return."""
    (root / "metrics.jsonl").touch()
    lent = os.open(root / "metrics.jsonl", os.O_RDONLY)

    def give_back(*_: object) -> None:
        with contextlib.suppress(OSError):  # it was given back at an earlier signal
            fcntl.fcntl(lent, fcntl.F_SETLEASE, fcntl.F_UNLCK)

    before = signal.signal(signal.SIGIO, give_back)
    try:
        fcntl.fcntl(lent, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        LocalStore(root).close()
    finally:
        os.close(lent)
        signal.signal(signal.SIGIO, before)


def test_small_files_are_written_through_no_link(tmp_path: Path, victim: Path) -> None:
    for sync in (True, False):
        (tmp_path / "run.json.new").symlink_to(victim)
        with pytest.raises(OSError, match="is a link"):
            write_atomically(tmp_path / "run.json", b"{}", sync=sync)
    assert victim.read_text() == "precious"


def test_logs_are_written_through_no_link(tmp_path: Path, victim: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank_0.log").symlink_to(victim)
    logs = RankLogs(lambda attempt, rank: tmp_path / f"rank_{rank}.log", Background(None, "log"), print)
    logs.of(0).feed(1, b"output\n")
    logs.flush()
    assert victim.read_text() == "precious"
    assert "rank_0.log can no longer be written" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_request_goes_to_a_socket_only(root: Path, victim: Path, kind: str) -> None:
    requests = RunPaths(root).requests
    if kind == "link":
        requests.symlink_to(victim)
    else:
        requests.write_text("precious")
    with pytest.raises(ConnectionRefusedError):
        connect(RunPaths(root))
    assert victim.read_text() == requests.read_text() == "precious"


# -- owners ----------------------------------------------------------------------------------------------------------


@as_root
def test_what_a_stranger_has_made_where_everybody_may_write_is_not_used(root: Path) -> None:
    root.parent.chmod(0o1777)
    os.chown(root, STRANGER, STRANGER)
    with pytest.raises(StorageError, match=r"belongs to .*54321.* everybody may write") as raised:
        LocalStore(root)
    assert "RunConfig.name" in str(raised.value)
    assert os.listdir(root) == []


@as_root
def test_a_link_of_a_stranger_in_place_of_a_directory_is_not_followed(root: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    root.rmdir()
    root.symlink_to(tmp_path / "precious")
    os.lchown(root, STRANGER, STRANGER)
    with pytest.raises(StorageError, match=r"belongs to .*54321.* and is a link"):
        LocalStore(root)
    assert os.listdir(tmp_path / "precious") == []


@as_root
def test_colleagues_continue_each_others_runs_where_only_they_may_write(root: Path) -> None:
    root.parent.chmod(0o2775)
    os.chown(root, COLLEAGUE, COLLEAGUE)
    (root / "checkpoint_000000").mkdir()
    os.chown(root / "checkpoint_000000", STRANGER, COLLEAGUE)
    LocalStore(root).close()


@as_root
def test_a_tracker_reads_no_state_of_a_stranger(root: Path) -> None:
    os.chown(root, STRANGER, STRANGER)
    with pytest.raises(StorageError, match="belongs to"):
        TrackerLog(TensorBoard(), root, str(root)).start()
