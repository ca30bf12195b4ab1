"""A local run directory: commits that are whole or nothing, damage, metadata, and its lock."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distrain.coordinator.store.local_store import LocalStore
from distrain.errors import CheckpointError, StorageError
from distrain.storage.checkpoint import MANIFEST_FILE, METADATA_FILE, Checkpoint
from distrain.storage.commit import Commit, CommittedCheckpoint, file_entry
from distrain.storage.files import list_files
from distrain.storage.records import damage_of
from tests.conftest import verify_now
from tests.unit.conftest import commit_now, delete_oldest, perform

if TYPE_CHECKING:
    from collections.abc import Callable

HOLD_THE_LOCK = """
import sys
from pathlib import Path
from distrain.coordinator.store.local_store import LocalStore
store = LocalStore(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def commit(
    store: LocalStore,
    ordinal: int = 1,
    parts: dict[int, dict[str, bytes]] | None = None,
    name: str | None = None,
    **metrics: Any,
) -> CommittedCheckpoint:
    """Write the parts (rank -> path -> contents) as the ranks would, and commit them."""
    parts = {0: {"model.pt": b"weights"}} if parts is None else parts
    files = {}
    for rank, contents in parts.items():
        folder = store.staging_directory(f"0-{ordinal}")
        for path, data in contents.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
            files[path] = file_entry(len(data), zlib.crc32(data), rank)
    return commit_now(store, Commit(ordinal, files, tuple(parts), metrics), name=name)


def contents(folder: Path) -> dict[str, bytes]:
    return {path: (folder / path).read_bytes() for path in list_files(folder)}


# -- commits ---------------------------------------------------------------------------------------------------------


def test_a_file_that_was_cut_off_after_it_was_stored_is_not_committed(store: LocalStore) -> None:
    (store.staging_directory("0-1") / "model.pt").write_bytes(b"half")
    with pytest.raises(OSError, match=r"the file has changed since it was stored: .*model\.pt"):
        commit_now(store, Commit(1, {"model.pt": file_entry(8, 1, rank=0)}, (0,), {}))
    assert store.paths.checkpoints() == []


def test_the_manifest_tells_files_sizes_hashes_ranks_and_metrics(store: LocalStore) -> None:
    saved = commit(store, parts={0: {"a": b"zero"}, 2: {"b": b"two"}}, loss=0.5)
    manifest = json.loads((saved.path / MANIFEST_FILE).read_text())
    assert manifest["files"]["b"] == {"size": 3, "crc32": f"{zlib.crc32(b'two'):08x}", "rank": 2}
    assert (manifest["ranks"], manifest["metrics"], manifest["index"]) == ([0, 2], {"loss": 0.5}, 0)


def test_a_reopened_run_knows_its_checkpoints_and_numbers_on(root: Path) -> None:
    first = LocalStore(root)
    commit(first, loss=math.inf)
    first.close()
    second = LocalStore(root)
    assert second.ledger.all == [CommittedCheckpoint(root / "checkpoint_000000", {"loss": math.inf})]
    assert second.ledger.latest == second.ledger.all[0]
    assert commit(second).path.name == "checkpoint_000001"
    second.close()


def test_a_checkpoint_that_is_being_read_is_not_deleted(store: LocalStore) -> None:
    folders = [commit(store, ordinal, {0: {"model.pt": b"x"}}).path for ordinal in (1, 2)]
    with Checkpoint(folders[0]).as_directory() as folder:
        delete_oldest(store)
        assert Path(folder, "model.pt").read_bytes() == b"x"
        assert [saved.path for saved in store.ledger.all] == folders
    delete_oldest(store)
    assert [saved.path for saved in store.ledger.all] == folders[1:]
    assert not folders[0].exists()


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_manifest_that_is_damaged_when_its_validation_ends_is_named(
    store: LocalStore, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = commit(store, 1)
    (Path(saved.path) / ".manifest.json").write_text(text)  # type: ignore[arg-type]
    perform(store)
    store.ledger.validated(saved, "VALIDATED", {"accuracy": 1.0})
    assert re.search(r"it is damaged \(.*\): '.*/checkpoint_000000/\.manifest\.json'", capsys.readouterr().err)


def test_a_checkpoint_that_is_deleted_as_a_reader_opens_it_is_not_read(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = commit(store, 1)
    commit(store, 2)
    checkpoint, opened = Checkpoint(saved.path), os.open

    def delete_when_opened(path: Any, flags: int, *rest: Any) -> int:
        fd = opened(path, flags, *rest)
        monkeypatch.setattr(os, "open", opened)
        delete_oldest(store)
        return fd

    monkeypatch.setattr(os, "open", delete_when_opened)
    with pytest.raises(CheckpointError, match=r"was deleted by num_to_keep"), checkpoint.as_directory():
        pass


def test_a_store_that_could_not_be_opened_holds_no_lock(root: Path) -> None:
    (root / "checkpoint_000000" / MANIFEST_FILE).mkdir(parents=True)  # which reading cannot be done
    with pytest.raises(StorageError, match=r"cannot read the checkpoint .*checkpoint_000000: .*directory"):
        LocalStore(root)
    (root / "checkpoint_000000" / MANIFEST_FILE).rmdir()
    (root / "checkpoint_000000").rmdir()
    LocalStore(root).close()


# -- damage ----------------------------------------------------------------------------------------------------------


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (lambda folder: os.truncate(folder / "model.pt", 3), "model.pt has 3 bytes instead of 7"),
    "flipped": (
        lambda folder: rewrite(folder / "model.pt", lambda data: bytes([data[0] ^ 1]) + data[1:]),
        "model.pt has changed since it was committed",
    ),
    "missing": (lambda folder: (folder / "model.pt").unlink(), "model.pt is missing"),
    "no manifest": (lambda folder: (folder / MANIFEST_FILE).unlink(), f"{MANIFEST_FILE} is missing"),
    "half a manifest": (
        lambda folder: rewrite(folder / MANIFEST_FILE, lambda data: data[:20]),
        f"{MANIFEST_FILE} cannot be parsed",
    ),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_set_aside_and_its_number_is_not_used_again(
    root: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first = LocalStore(root)
    commit(first, 1, step=1)
    damage, said = DAMAGES[kind]
    damage(commit(first, 2, step=2).path)
    first.close()
    store = LocalStore(root)
    verify_now(store)
    assert [(saved.path.name, saved.metrics) for saved in store.ledger.all] == [("checkpoint_000000", {"step": 1})]
    assert (root / "damaged-checkpoint_000001").is_dir()
    assert f"checkpoint_000001 is damaged: {said}" in capsys.readouterr().err
    assert commit(store, 1).path.name == "checkpoint_000002"
    store.close()


def reopened(store: LocalStore) -> LocalStore:
    store.close()
    return LocalStore(store.paths.root)


def test_a_copy_that_a_user_has_made_is_neither_offered_nor_deleted(root: Path) -> None:
    first = LocalStore(root)
    folders = [commit(first, ordinal).path for ordinal in (1, 2)]
    for copy in ("keep-this-one", "checkpoint_000007"):
        shutil.copytree(folders[1], root / copy)
    store = reopened(first)
    assert [saved.path for saved in store.ledger.all] == folders
    delete_oldest(store)
    assert commit(store, 3).path.name == "checkpoint_000008"
    store.close()
    assert (root / "keep-this-one" / "model.pt").exists()


def test_what_users_may_change_is_no_damage(root: Path) -> None:
    first = LocalStore(root)
    first.metadata = {"seed": 1}
    folder = commit(first).path
    first.close()
    Checkpoint(folder).update_metadata({"note": "good"})
    (folder / "notes.txt").write_text("mine")
    assert damage_of(folder) is None
    store = LocalStore(root)
    assert len(store.ledger.all) == 1
    store.close()


# -- metadata --------------------------------------------------------------------------------------------------------


def manifest_entry(saved: CommittedCheckpoint, name: str = METADATA_FILE) -> tuple[int, str] | None:
    entry = json.loads((saved.path / MANIFEST_FILE).read_text())["files"].get(name)
    return entry and (entry["size"], entry["crc32"])


def test_every_checkpoint_gets_the_metadata_of_the_run(store: LocalStore) -> None:
    store.metadata = {"model": "small", "nested": {"a": [1, None]}}
    for ordinal in (1, 2):
        saved = commit(store, ordinal)
        data = (saved.path / METADATA_FILE).read_bytes()
        assert Checkpoint(saved.path).get_metadata() == store.metadata
        assert manifest_entry(saved) == (len(data), f"{zlib.crc32(data):08x}")
        assert manifest_entry(saved, "model.pt") is not None


@pytest.mark.parametrize("own", [b"[1]", b"no json", b"\xff\xfe", b""])
def test_own_metadata_that_is_no_json_object_is_left_alone(
    store: LocalStore, own: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    store.metadata = {"model": "small"}
    saved = commit(store, parts={0: {METADATA_FILE: own}})
    assert (saved.path / METADATA_FILE).read_bytes() == own
    assert manifest_entry(saved) == (len(own), f"{zlib.crc32(own):08x}")
    assert capsys.readouterr().err.count(METADATA_FILE) == 1


# -- the lock --------------------------------------------------------------------------------------------------------


def test_a_directory_in_use_by_another_process_is_refused_with_its_pid(root: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_THE_LOCK, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(StorageError, match=rf"process {holder.pid}\) is using .*RunConfig.name"):
            LocalStore(root)
        holder.communicate()
    LocalStore(root).close()


def test_a_path_that_cannot_be_a_directory_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="cannot use the run directory"):
        LocalStore(tmp_path / "file" / "run")


# -- rollbacks ---------------------------------------------------------------------------------------------------------


def suspects(store: LocalStore, *asked: tuple[dict[str, Any], int]) -> list[str]:
    """Return the suspect checkpoint of each rollback, given by the rows to leave out, and the reports before it."""
    perform(store)
    return [store.ledger.roll_back(skip_to, reports=reports) for skip_to, reports in asked]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ([({}, 9), ({}, 9), ({}, 9), ({}, 9)], ["", "2", "1", ""]),
        ([({"x": 1}, 0), ({"x": 1}, 5), ({"x": 2}, 5), ({"y": 1}, 5)], ["", "2", "", ""]),
        ([({"x": number}, 1) for number in range(6)], ["", "", "", "2", "1", ""]),
        ([({"x": number}, 2) for number in range(9)], [""] * 9),
        ([({"x": number}, 3 * (number == 2)) for number in range(6)], ["", "", "", "", "", "2"]),
    ],
    ids=["nothing is left out", "the same", "more than three in a row", "reports between", "one that comes further"],
)
def test_a_checkpoint_is_suspect_when_the_run_does_not_get_past_it(
    store: LocalStore, asked: list[tuple[dict[str, Any], int]], expected: list[str]
) -> None:
    for ordinal in (1, 2, 3):
        commit(store, ordinal)
    assert [name[-1:] for name in suspects(store, *asked)] == expected
    kept, left_out = store.ledger.all[-1], {name: of for skip_to, _ in asked for name, of in skip_to.items()}
    assert kept.skip_to == left_out == json.loads((Path(str(kept.path)) / MANIFEST_FILE).read_text())["skip_to"]
