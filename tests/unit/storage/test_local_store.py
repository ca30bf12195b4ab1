"""The run directory: names, locks, lines that survive, and commits that are whole or nothing."""

from __future__ import annotations

import _thread
import errno
import json
import math
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distrain.checkpoint import MANIFEST_FILE, METADATA_FILE, Checkpoint
from distrain.errors import CheckpointError, StorageError
from distrain.storage import files
from distrain.storage.commit import Commit, CommittedFile
from distrain.storage.files import copy_file, crc32_of, list_files, sync_file, write_atomically
from distrain.storage.local_store import LocalStore
from distrain.storage.paths import RunPaths, choose_run
from distrain.storage.records import CommittedCheckpoint, damage_of, read_metrics
from distrain.system.background import Background
from distrain.system.loop import Loop
from tests.conftest import wait_until
from tests.unit.conftest import commit_now

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HOLD_THE_LOCK = """
import sys
from pathlib import Path
from distrain.storage.local_store import LocalStore
store = LocalStore(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "run"


@pytest.fixture
def store(root: Path) -> Iterator[LocalStore]:
    opened = LocalStore(root)
    yield opened
    opened.close()


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


def commit(
    store: LocalStore,
    ordinal: int = 1,
    parts: dict[int, dict[str, bytes]] | None = None,
    name: str | None = None,
    **metrics: Any,
) -> CommittedCheckpoint:
    """Write the parts (rank -> path -> contents) as the ranks would, and commit them."""
    parts = {0: {"model.pt": b"weights"}} if parts is None else parts
    files = []
    for rank, contents in parts.items():
        folder = store.staging_directory(0, ordinal, rank)
        for path, data in contents.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
            files.append(CommittedFile(path, rank, len(data), zlib.crc32(data)))
    return commit_now(store, Commit(ordinal, tuple(files), tuple(parts), metrics), name=name)


def contents(folder: Path) -> dict[str, bytes]:
    return {path: (folder / path).read_bytes() for path, _ in list_files(folder)}


# -- commits ---------------------------------------------------------------------------------------------------------


def test_a_commit_joins_the_parts_of_all_ranks(store: LocalStore, root: Path) -> None:
    saved = commit(store, parts={0: {"model.pt": b"zero"}, 1: {"rng/1.bin": b"one", "rng/deep/er.bin": b"two"}})
    assert saved.path == root / "checkpoint_000000"
    assert contents(saved.path) == {"model.pt": b"zero", "rng/1.bin": b"one", "rng/deep/er.bin": b"two"}


def test_the_manifest_tells_files_sizes_hashes_ranks_and_metrics(store: LocalStore) -> None:
    saved = commit(store, parts={0: {"a": b"zero"}, 2: {"b": b"two"}}, loss=0.5)
    manifest = json.loads((saved.path / MANIFEST_FILE).read_text())
    assert manifest["files"]["b"] == {"size": 3, "crc32": f"{zlib.crc32(b'two'):08x}", "rank": 2}
    assert (manifest["ranks"], manifest["metrics"], manifest["index"]) == ([0, 2], {"loss": 0.5}, 0)


def test_commits_are_numbered_on(store: LocalStore) -> None:
    assert [commit(store, ordinal).path.name for ordinal in (1, 2)] == ["checkpoint_000000", "checkpoint_000001"]
    assert [saved.path.name for saved in store.committed] == ["checkpoint_000000", "checkpoint_000001"]


def test_nothing_is_left_of_the_staging_after_a_commit(store: LocalStore) -> None:
    commit(store)
    assert list(store.paths.staging.iterdir()) == []


def test_a_commit_that_fails_leaves_no_checkpoint(store: LocalStore) -> None:
    store.staging_directory(0, 1, 0)
    with pytest.raises(OSError, match="never-written"):
        commit_now(store, Commit(1, (CommittedFile("never-written", 0, 1, 1),), (0,), {}))
    assert store.paths.checkpoints() == []
    assert store.committed == []


def test_a_reopened_run_knows_its_checkpoints_and_numbers_on(root: Path) -> None:
    first = LocalStore(root)
    commit(first, loss=math.inf)
    first.close()
    second = LocalStore(root)
    assert second.committed == [CommittedCheckpoint(root / "checkpoint_000000", {"loss": math.inf})]
    assert second.latest == second.committed[0]
    assert commit(second).path.name == "checkpoint_000001"
    second.close()


def test_deleted_checkpoints_are_gone_and_numbers_are_not_used_again(store: LocalStore) -> None:
    for ordinal in (1, 2, 3):
        commit(store, ordinal)
    store.delete([0, 1])
    assert [path.name for path in store.paths.checkpoints()] == ["checkpoint_000002"]
    assert [saved.path.name for saved in store.committed] == ["checkpoint_000002"]
    assert commit(store, 4).path.name == "checkpoint_000003"


def test_large_checkpoints_are_deleted_while_the_loop_goes_on(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [commit(store, ordinal, {0: {"model.pt": b"x"}}).path for ordinal in (1, 2, 3)]
    may_go_on, unlink = threading.Event(), os.unlink

    def slow(*arguments: Any, **options: Any) -> None:
        assert may_go_on.wait(20)
        unlink(*arguments, **options)

    monkeypatch.setattr(os, "unlink", slow)
    store.delete([0])
    assert not folders[0].exists()
    aside = next(store.paths.staging.glob("deleted-*"))
    assert (aside / "model.pt").exists()
    store.delete([0])
    assert not folders[1].exists()
    may_go_on.set()
    wait_until(lambda: not list(store.paths.staging.iterdir()))


def test_checkpoints_are_listed_oldest_first_however_many_digits_they_have(root: Path) -> None:
    for index in (1_000_000, 2, 999_999):
        RunPaths(root).checkpoint(index).mkdir(parents=True)
    names = [path.name for path in RunPaths(root).checkpoints()]
    assert names == ["checkpoint_000002", "checkpoint_999999", "checkpoint_1000000"]


def test_only_directories_with_our_names_are_checkpoints(root: Path) -> None:
    for name in ("checkpoint_000001.new", "my_checkpoint_000001", "checkpoint_1"):
        (root / name).mkdir(parents=True)
    (root / "checkpoint_000007").write_text("a file")
    assert RunPaths(root).checkpoints() == []


def test_a_link_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.pt").symlink_to("elsewhere.pt")
    with pytest.raises(CheckpointError, match=r"model\.pt is a link to elsewhere\.pt, which does not exist"):
        list_files(tmp_path)


def test_a_checkpoint_that_somebody_reads_is_not_deleted(store: LocalStore) -> None:
    folders = [commit(store, ordinal, {0: {"model.pt": b"x"}}).path for ordinal in (1, 2)]
    with Checkpoint(folders[0]).as_directory() as folder:
        store.delete([0])
        assert Path(folder, "model.pt").read_bytes() == b"x"
        assert [saved.path for saved in store.committed] == folders
    store.delete([0])
    assert [saved.path for saved in store.committed] == folders[1:]
    assert not folders[0].exists()


def test_a_checkpoint_whose_validation_ends_while_somebody_reads_it_is_not_deleted(store: LocalStore) -> None:
    saved = commit(store, 1)
    commit(store, 2)
    with Checkpoint(saved.path).as_directory() as folder:
        store.add_validation(saved, "VALIDATED", {"accuracy": 1.0})  # which replaces the manifest
        store.delete([0])
        assert Path(folder, "model.pt").read_bytes() == b"weights"
    store.delete([0])
    assert not Path(folder).exists()


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_manifest_that_is_damaged_when_its_validation_ends_is_named(
    store: LocalStore, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = commit(store, 1)
    (Path(saved.path) / ".manifest.json").write_text(text)  # type: ignore[arg-type]
    store.add_validation(saved, "VALIDATED", {"accuracy": 1.0})
    assert re.search(r"it is damaged \(.*\): '.*/checkpoint_000000/\.manifest\.json'", capsys.readouterr().err)


def test_a_checkpoint_that_is_deleted_as_somebody_begins_to_read_it_is_not_read(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = commit(store, 1)
    commit(store, 2)
    checkpoint, opened = Checkpoint(saved.path), os.open

    def delete_when_opened(path: Any, flags: int, *rest: Any) -> int:
        fd = opened(path, flags, *rest)
        monkeypatch.setattr(os, "open", opened)
        store.delete([0])
        return fd

    monkeypatch.setattr(os, "open", delete_when_opened)
    with pytest.raises(CheckpointError, match=r"was deleted by num_to_keep"), checkpoint.as_directory():
        pass


def test_half_written_checkpoints_are_swept_when_the_next_run_starts(root: Path) -> None:
    first = LocalStore(root)
    (first.staging_directory(0, 1, 0) / "model.pt").write_bytes(b"half")
    first._directory.release()  # as a crash does it
    second = LocalStore(root)
    assert not second.paths.staging.exists()
    second.close()


def test_a_staging_directory_of_another_generation_is_another_one(root: Path) -> None:
    first = LocalStore(root)
    earlier = first.staging_directory(0, 1, 0)
    first.close()
    second = LocalStore(root)
    assert second.staging_directory(0, 1, 0) != earlier
    second.close()


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
        f"{MANIFEST_FILE} cannot be understood",
    ),
    "another manifest": (
        lambda folder: rewrite(folder / MANIFEST_FILE, lambda data: b'{"files": []}'),
        f"{MANIFEST_FILE} cannot be understood",
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
    assert [(saved.path.name, saved.metrics) for saved in store.committed] == [("checkpoint_000000", {"step": 1})]
    assert (root / "damaged-checkpoint_000001").is_dir()
    assert f"checkpoint_000001 is damaged: {said}" in capsys.readouterr().err
    assert commit(store, 1).path.name == "checkpoint_000002"
    store.close()


def reopened(store: LocalStore) -> LocalStore:
    store.close()
    return LocalStore(store.paths.root)


def test_a_copy_that_somebody_has_made_is_neither_offered_nor_deleted(root: Path) -> None:
    first = LocalStore(root)
    folders = [commit(first, ordinal).path for ordinal in (1, 2)]
    for copy in ("keep-this-one", "checkpoint_000007"):
        shutil.copytree(folders[1], root / copy)
    store = reopened(first)
    assert [saved.path for saved in store.committed] == folders
    store.delete([0])
    assert commit(store, 3).path.name == "checkpoint_000008"
    store.close()
    assert (root / "keep-this-one" / "model.pt").exists()


def test_a_checkpoint_whose_manifest_does_not_say_its_name_is_of_an_earlier_version(root: Path) -> None:
    first = LocalStore(root)
    folder = commit(first, 1).path
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    assert manifest.pop("name") == "checkpoint_000000"
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    store = reopened(first)
    assert [saved.path for saved in store.committed] == [folder]
    store.close()


def test_several_damaged_checkpoints_are_passed_over(root: Path) -> None:
    first = LocalStore(root)
    folders = [commit(first, ordinal).path for ordinal in (1, 2, 3)]
    first.close()
    for folder in folders[1:]:
        DAMAGES["flipped"][0](folder)
    store = LocalStore(root)
    assert [saved.path for saved in store.committed] == folders[:1]
    store.close()


def test_what_users_may_change_is_no_damage(root: Path) -> None:
    first = LocalStore(root)
    first.metadata = {"seed": 1}
    folder = commit(first).path
    first.close()
    Checkpoint(folder).update_metadata({"note": "good"})
    (folder / "notes.txt").write_text("mine")
    assert damage_of(folder) is None
    store = LocalStore(root)
    assert len(store.committed) == 1
    store.close()


def test_of_older_checkpoints_only_the_manifest_is_looked_at(root: Path) -> None:
    first = LocalStore(root)
    older, _ = commit(first, 1).path, commit(first, 2).path
    first.close()
    DAMAGES["flipped"][0](older)
    store = LocalStore(root)
    assert len(store.committed) == 2
    store.close()
    assert damage_of(older) == "model.pt has changed since it was committed"


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


@pytest.mark.parametrize("rank", [0, 1])
def test_its_own_metadata_comes_first(store: LocalStore, rank: int) -> None:
    store.metadata = {"model": "small", "epoch": 0}
    saved = commit(store, parts={0: {"a": b"1"}, rank: {METADATA_FILE: b'{"epoch": 3, "own": true}'}})
    data = (saved.path / METADATA_FILE).read_bytes()
    assert Checkpoint(saved.path).get_metadata() == {"model": "small", "epoch": 3, "own": True}
    assert manifest_entry(saved) == (len(data), f"{zlib.crc32(data):08x}")


def test_without_metadata_of_the_run_a_checkpoint_keeps_its_own(store: LocalStore) -> None:
    own = b'{"own":  true}'
    saved = commit(store, parts={0: {METADATA_FILE: own}})
    assert (saved.path / METADATA_FILE).read_bytes() == own
    assert manifest_entry(saved) == (len(own), f"{zlib.crc32(own):08x}")
    assert not (commit(store, 2).path / METADATA_FILE).exists()


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


FORK_AND_DIE = """
import os, sys, time
from distrain import RunConfig, ScalingConfig
from distrain.trainer import DataParallelTrainer

def train(config):
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        sys.stdout.close()
        time.sleep(60)
    os.kill(os.getpid(), 9)

run = RunConfig(storage_path=sys.argv[1], name="run")
DataParallelTrainer(train, scaling_config=ScalingConfig(num_workers=0), run_config=run).fit()
"""


def test_a_child_that_train_func_has_forked_does_not_hold_the_run_directory(root: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FORK_AND_DIE, str(root.parent)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.wait()
    try:
        LocalStore(root).close()
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_closed_store_gives_the_directory_free(root: Path) -> None:
    LocalStore(root).close()
    LocalStore(root).close()


def test_a_place_that_cannot_be_a_directory_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="cannot use the run directory"):
        LocalStore(tmp_path / "file" / "run")


# -- metrics ---------------------------------------------------------------------------------------------------------


def written(root: Path, *metrics: dict[str, Any]) -> list[dict[str, Any]]:
    """What a reader gets of metrics that a store has written."""
    store = LocalStore(root)
    for index, values in enumerate(metrics, start=1):
        store.append_metrics({"time": 1.0, "attempt": 0, "rank": 0, "index": index}, values)
    store.close()
    return [record["metrics"] for record in read_metrics(RunPaths(root).metrics)]


def same(one: object, other: object) -> bool:
    return repr(one) == repr(other)  # NaN is not equal to itself


def test_non_finite_numbers_are_null_and_named_in_the_file(root: Path) -> None:
    written(root, {"loss": math.nan, "eval": {"best": -math.inf}, "lr": 0.1, "all": [1.0, math.inf]})
    [line] = RunPaths(root).metrics.read_text().splitlines()
    record = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert record["metrics"] == {"loss": None, "eval": {"best": None}, "lr": 0.1, "all": [1.0, None]}
    assert record["nonfinite"] == {"/loss": "nan", "/eval/best": "-inf", "/all/1": "inf"}


def test_non_finite_numbers_come_back(root: Path) -> None:
    metrics = {"loss": math.nan, "eval": {"best": -math.inf}, "none": None, "all": [1.0, {"x": math.inf}]}
    assert same(written(root, metrics), [metrics])


def test_names_with_slashes_are_not_taken_for_nested_ones(root: Path) -> None:
    metrics = [{"eval/loss": math.nan, "eval": {"loss": 0.5}}, {"eval/loss": 0.5, "eval": {"loss": math.nan}}]
    assert same(written(root, *metrics), metrics)


metrics_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1, max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=50)
@given(metrics=st.dictionaries(st.text("abc", min_size=1, max_size=2), metrics_values, max_size=4))
def test_any_metrics_survive_the_round_trip(metrics: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    assert same(written(tmp_path_factory.mktemp("run"), metrics), [metrics])


def test_a_torn_last_line_is_passed_over_by_readers(root: Path) -> None:
    written(root, {"loss": 1}, {"loss": 2})
    with RunPaths(root).metrics.open("a") as file:
        file.write('{"time":1.0,"attempt":0,"ra')
    assert [record["metrics"] for record in read_metrics(RunPaths(root).metrics)] == [{"loss": 1}, {"loss": 2}]


def test_a_torn_last_line_is_cut_off_before_new_ones_are_written(root: Path) -> None:
    written(root, {"loss": 1})
    with RunPaths(root).metrics.open("a") as file:
        file.write('{"time":1.0,"attempt":0,"ra')
    assert written(root, {"loss": 2}) == [{"loss": 1}, {"loss": 2}]


def test_readers_choose_one_rank_or_all(store: LocalStore) -> None:
    for rank in (0, 1):
        store.append_metrics({"rank": rank}, {"rank": rank})
    store.flush()
    assert [record["rank"] for record in read_metrics(store.paths.metrics, rank=1)] == [1]
    assert [record["rank"] for record in read_metrics(store.paths.metrics, rank=None)] == [0, 1]


def test_a_run_without_metrics_has_none(root: Path) -> None:
    assert list(read_metrics(RunPaths(root).metrics)) == []


# -- names -----------------------------------------------------------------------------------------------------------


def made(storage_path: Path, name: str, status: str | None) -> None:
    root = storage_path / name
    root.mkdir(parents=True)
    if status is not None:
        (root / "run.json").write_text(json.dumps({"status": status}))


def test_a_run_without_a_name_gets_one_of_its_own(tmp_path: Path) -> None:
    roots = {choose_run(tmp_path, None) for _ in range(10)}
    assert len(roots) == 10
    assert {root.parent for root in roots} == {tmp_path}


def test_a_new_name_is_used_as_it_is(tmp_path: Path) -> None:
    assert choose_run(tmp_path, "run") == tmp_path / "run"


@pytest.mark.parametrize("status", ["running", "failed", "aborted"])
def test_an_unfinished_run_goes_on(tmp_path: Path, status: str) -> None:
    made(tmp_path, "run", status)
    assert choose_run(tmp_path, "run") == tmp_path / "run"


def test_a_finished_run_is_left_alone(tmp_path: Path) -> None:
    made(tmp_path, "run", "finished")
    made(tmp_path, "run-2", "finished")
    assert choose_run(tmp_path, "run") == tmp_path / "run-3"


def test_the_unfinished_successor_of_a_finished_run_goes_on(tmp_path: Path) -> None:
    made(tmp_path, "run", "finished")
    made(tmp_path, "run-2", "failed")
    assert choose_run(tmp_path, "run") == tmp_path / "run-2"


def test_a_directory_that_is_no_run_is_no_run_that_goes_on(tmp_path: Path) -> None:
    made(tmp_path, "run", None)
    assert choose_run(tmp_path, "run") == tmp_path / "run"


def test_the_home_directory_and_relative_paths_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert choose_run("~/runs", "run") == tmp_path / "runs" / "run"
    assert choose_run("runs", "run") == tmp_path / "runs" / "run"
    assert choose_run(None, "run") == tmp_path / "distrain_results" / "run"


def test_an_unreadable_manifest_is_a_storage_error(tmp_path: Path) -> None:
    made(tmp_path, "run", None)
    (tmp_path / "run" / "run.json").write_text("{torn")
    with pytest.raises(StorageError, match=r"run\.json is damaged, or another program's"):
        choose_run(tmp_path, "run")


# -- files -----------------------------------------------------------------------------------------------------------


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


def test_every_name_of_a_run_lies_below_its_root(root: Path) -> None:
    paths = RunPaths(root)
    names = [getattr(paths, name) for name, value in vars(RunPaths).items() if isinstance(value, property)]
    names += [paths.checkpoint(3), paths.log(0, 1), paths.stacks(0, 1), paths.validation_log("checkpoint_000003")]
    assert all(root in name.parents for name in names)
    assert len(set(names)) == len(names)


def test_logs_may_lie_elsewhere(root: Path, tmp_path: Path) -> None:
    assert RunPaths(root).log(1, 2, tmp_path) == tmp_path / root.name / "attempt_1" / "rank_2.log"


def test_a_commit_that_fails_leaves_the_others_to_be_waited_for(root: Path) -> None:
    loop, store = Loop(), LocalStore(root)
    background, failed, saved = Background(loop, "files"), [], []
    store.on_failure = failed.append
    store.start(loop, background, "id", [])
    for ordinal, parts in ((1, (CommittedFile("never-written", 0, 1, 1),)), (2, ())):
        store.staging_directory(0, ordinal, 0)
        store.commit(0, Commit(ordinal, parts, (0,), {}), then=saved.append)
    assert store.is_committing
    while not store.is_idle:
        loop.step()
    assert (store.is_committing, len(failed), len(saved)) == (False, 1, 1)
    store.detach()
    background.close()
    loop.close()
    store.close()


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
