"""The mirror of the user's files in the cache of a host: what is placed there, and what stays at the end."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distrain.transfer.host_side import run_mirror
from distrain.transfer.host_side.cache_cleaning import trim
from tests.unit.transfer.conftest import below, deliver, in_a_child, place, put

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrain.transfer.host_side.host_cache import HostCache
    from tests.unit.transfer.conftest import Project


# -- the mirror -------------------------------------------------------------------------------------------------------


def test_the_mirror_is_what_the_user_has(cache: HostCache, project: Project) -> None:
    run = cache.claim_run("r")
    files = [
        project.write("a.py", "a", mode=0o444, mtime_ns=1_234_567_890_123_456_789),
        project.write("d/run", "b", 0o755),
    ]
    run.place(deliver(cache, *files), [str(project.folder / "empty" / "deep")])
    here = Path(run.mirrored(str(project.folder)))
    assert here == cache.runs / "r" / "files" / project.folder.relative_to("/")
    assert below(run.files) == {files[0].path[1:]: "a", files[1].path[1:]: "b"}
    assert (here / "empty" / "deep").is_dir()
    status = (here / "a.py").stat()
    assert (stat.S_IMODE(status.st_mode), status.st_mtime_ns) == (0o644, 1_234_567_890_123_456_789)
    assert stat.S_IMODE((here / "d" / "run").stat().st_mode) == 0o755
    assert run.mirrored("/") == str(run.files)
    assert run.mirrored("/x/../../..//y") == f"{run.files}/y"


def test_workers_do_not_change_what_other_runs_get(cache: HostCache, project: Project) -> None:
    file = project.write("a.py", "a")
    run = cache.claim_run("r")
    place(run, cache, file)
    with open(run.mirrored(file.path), "a") as mirror:
        mirror.write("changed")
    other = cache.claim_run("s")
    place(other, cache, file)
    assert Path(other.mirrored(file.path)).read_text() == "a"


def change_text(path: Path) -> None:
    path.write_text("xx")


def change_time(path: Path) -> None:
    path.write_text("y")


def change_mode(path: Path) -> None:
    path.chmod(0o600)


def to_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


def to_folder(path: Path) -> None:
    path.unlink()
    (path / "deep").mkdir(parents=True)


@pytest.mark.parametrize("change", [Path.unlink, change_text, change_time, change_mode, to_link, to_folder])
def test_what_workers_have_done_to_a_file_is_undone(
    cache: HostCache, project: Project, change: Callable[[Path], None]
) -> None:
    file = project.write("a.py", "a")
    run = cache.claim_run("r")
    place(run, cache, file)
    change(Path(run.mirrored(file.path)))
    place(run, cache, file)
    assert below(run.files) == {file.path[1:]: "a"}
    assert stat.S_IMODE(os.lstat(run.mirrored(file.path)).st_mode) == 0o644


def test_a_file_that_changed_within_one_tick_is_copied(cache: HostCache, project: Project) -> None:
    run = cache.claim_run("r")
    place(run, cache, project.write("a.py", "a", mtime_ns=10**18))
    place(run, cache, new := project.write("a.py", "b", mtime_ns=10**18))
    assert Path(run.mirrored(new.path)).read_text() == "b"


def test_unchanged_files_are_not_copied_again(cache: HostCache, project: Project) -> None:
    files = [project.write("a.py", "a"), project.write("b.py", "b")]
    run = cache.claim_run("r")
    place(run, cache, *files)
    before = [os.stat(run.mirrored(file.path)).st_ino for file in files]
    place(run, cache, files[0], new := project.write("b.py", "bb"))
    after = [os.stat(run.mirrored(file.path)).st_ino for file in (files[0], new)]
    assert (after[0] == before[0], after[1] == before[1]) == (True, False)
    place(run, cache, files[0], new)
    assert after == [os.stat(run.mirrored(file.path)).st_ino for file in (files[0], new)]


def test_files_that_the_user_has_deleted_go_and_those_of_workers_stay(cache: HostCache, project: Project) -> None:
    run = cache.claim_run("r")
    kept = project.write("kept.py", "k")
    changed = project.write("log.txt", "l")
    place(run, cache, kept, changed, project.write("old/deep/gone.py", "g"), project.write("used/gone.py", "g"))
    here = Path(run.mirrored(str(project.folder)))
    (here / "used" / "of-worker").write_text("w")
    (here / "log.txt").write_text("l and more")
    place(run, cache, kept)
    assert below(here) == {"kept.py": "k", "used/of-worker": "w", "log.txt": "l and more"}
    assert not (here / "old").exists()


def test_a_new_file_takes_the_place_of_a_folder_and_a_folder_that_of_a_file(cache: HostCache, project: Project) -> None:
    run = cache.claim_run("r")
    place(run, cache, project.write("a/x.py", "1"), project.write("b", "2"))
    (Path(run.mirrored(str(project.folder))) / "a" / "of-worker").write_text("w")
    shutil.rmtree(project.folder / "a")
    (project.folder / "b").unlink()
    place(run, cache, a := project.write("a", "3"), b := project.write("b/y.py", "4"))
    assert below(run.files) == {a.path[1:]: "3", b.path[1:]: "4"}


def test_links_of_workers_lead_nothing_out_of_the_mirror(cache: HostCache, project: Project, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    run = cache.claim_run("r")
    files = [project.write("d/a.py", "a"), project.write("e/b.py", "b")]
    place(run, cache, *files)
    here = Path(run.mirrored(str(project.folder)))
    for name in ("d", "e"):
        for path in (here / name).iterdir():  # the same files, also by their time, behind the link
            path.rename(outside / path.name)
        (here / name).rmdir()
        (here / name).symlink_to(outside)
    before = below(outside)
    place(run, cache, files[0])  # e/b.py is no longer wanted
    assert below(outside) == before == {"a.py": "a", "b.py": "b"}
    assert below(here) == {"d/a.py": "a", "e": f"-> {outside}"}
    assert run.end() == (1, len(str(outside)))
    assert below(outside) == before


@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_link_in_place_of_the_whole_mirror_is_replaced(
    cache: HostCache, project: Project, tmp_path: Path, is_wanted: bool
) -> None:
    run = cache.claim_run("r")
    file = project.write("a.py", "a")
    for _ in range(2):
        place(run, cache, file)
        run.files.rename(outside := tmp_path / f"outside{time.monotonic_ns()}")
        run.files.symlink_to(outside)
    if is_wanted:
        assert run.end() == (0, 0)
    else:
        place(run, cache)
        assert not run.files.is_symlink()
    assert below(outside) == {file.path[1:]: "a"}


def test_directories_that_workers_have_closed_are_opened(cache: HostCache, project: Project) -> None:
    run = cache.claim_run("r")
    place(run, cache, first := project.write("d/a.py", "1"))
    (folder := Path(run.mirrored(first.path)).parent).chmod(0o500)
    place(run, cache, project.write("d/a.py", "22"))
    assert below(folder) == {"a.py": "22"}
    assert folder.stat().st_mode & 0o700 == 0o700


def test_a_damaged_blob_is_deleted_and_named(cache: HostCache, project: Project) -> None:
    file = project.write("a.py", "good")
    run = cache.claim_run("r")
    deliver(cache, file)
    cache.blob(file.digest).write_text("evil")
    with pytest.raises(OSError, match=f"{file.digest} was damaged, and is deleted now; start the run again"):
        run.place([file], [])
    assert cache.missing([file]) == [file.digest]
    assert not below(run.files)


def test_a_missing_blob_is_named(cache: HostCache, project: Project) -> None:
    file = project.write("a.py", "a")
    with pytest.raises(FileNotFoundError, match=file.digest):
        cache.claim_run("r").place([file], [])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named_with_the_cure(
    cache: HostCache, project: Project, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = cache.claim_run("r")
    place(run, cache, old := project.write("a.py", "old"))

    def full(source: Any, target: Path) -> None:
        target.write_text("half")
        raise OSError(number, os.strerror(number), str(target))

    new = project.write("a.py", "newer")
    deliver(cache, new)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", full)
        with pytest.raises(OSError, match=f"{os.strerror(number)} for {cache.root}, .*env.DISTRAIN_CACHE=") as caught:
            run.place([new], [])
    assert caught.value.errno == number
    assert below(run.files) == {old.path[1:]: "old"}
    assert not (run.path / ".new").exists()
    run.place([new], [])
    assert below(run.files) == {new.path[1:]: "newer"}


ON_A_SMALL_DISK = """
import os, subprocess, sys
from pathlib import Path
from distrain.transfer.host_side.host_cache import HostCache
from distrain.wire.shipped_file import ShippedFile, digest_of
disk = sys.argv[1]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], check=True)
cache = HostCache(Path(disk, "cache"))
run = cache.claim_run("r")
blob = Path(disk, "blob")
blob.write_bytes(b"x" * 150_000)
file = ShippedFile("/a.bin", 150_000, 10**18, 0o644, digest_of(blob))
cache.blob(file.digest).parent.mkdir()
blob.rename(cache.blob(file.digest))
try:
    run.place([file], [])
except OSError as error:
    print(error)
print(os.listdir(run.files), os.path.exists(run.path / ".new"))
cache.blob(file.digest).write_bytes(b"")
print(run.end(), os.listdir(cache.runs))
"""
UNSHARE = ("unshare", "--user", "--map-root-user", "--mount")


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*UNSHARE, "true"], capture_output=True).returncode != 0,
    reason="needs a namespace of its own",
)
def test_a_disk_that_is_really_full_keeps_nothing_half_written(tmp_path: Path) -> None:
    command = [*UNSHARE, sys.executable, "-c", ON_A_SMALL_DISK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    why, left, ended = done.stdout.splitlines()
    assert f"No space left on device for {tmp_path}/cache, where distrain keeps" in why
    assert (left, ended) == ("[] False", "(0, 0) []")


@pytest.mark.parametrize("moment", range(5))
@pytest.mark.parametrize("same_time", [True, False])
@pytest.mark.parametrize("repair", ["place", "trim"])
def test_a_kill_in_the_middle_is_repaired(
    cache: HostCache, project: Project, moment: int, same_time: bool, repair: str
) -> None:
    """The record is written, two files are replaced, the record is written: killed before and after each."""
    times = (10**18, 10**18 if same_time else 10**18 + 1)
    gone = project.write("gone.py", "g")
    run = cache.claim_run("r")
    place(run, cache, gone, *(project.write(name, "1", mtime_ns=times[0]) for name in ("a", "b")))
    files = deliver(cache, *(project.write(name, "2", mtime_ns=times[1]) for name in ("a", "b")))
    os.close(run._fd)

    def be_killed() -> None:
        counter, usual = itertools.count(), os.replace

        def replace(source: Any, target: Any) -> None:
            if next(counter) == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            usual(source, target)

        os.replace = replace  # type: ignore[assignment]
        child = cache.claim_run("r")
        (child.checkpoints / "half").mkdir()
        child.place(files, [])
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_a_child(be_killed) == -signal.SIGKILL
    if repair == "trim":
        trim(cache, 1 << 40)
        assert not list(cache.runs.iterdir())
        return
    run = cache.claim_run("r")
    run.place(files, [])
    assert below(run.files) == {file.path[1:]: "2" for file in files}
    assert not list(run.checkpoints.iterdir())
    assert sorted(path.name for path in run.path.iterdir()) == [".lock", ".placed.json", "checkpoints", "files"]


def test_a_record_that_a_power_cut_has_emptied_is_no_obstacle(cache: HostCache, project: Project) -> None:
    run = cache.claim_run("r")
    place(run, cache, file := project.write("a.py", "a"))
    (run.path / ".placed.json").write_bytes(b"")
    place(run, cache, file)
    assert run.end() == (0, 0)


# -- the end of a run -------------------------------------------------------------------------------------------------


def test_a_run_without_files_of_workers_leaves_nothing(cache: HostCache, project: Project) -> None:
    run = cache.claim_run("r")
    run.place(deliver(cache, file := project.write("d/a.py", "a")), [str(project.folder / "empty")])
    put(Path(run.mirrored(str(project.folder / "d"))) / "__pycache__" / "a.pyc")
    put(run.checkpoints / "checkpoint_0" / "model")
    assert run.end() == (0, 0)
    assert not list(cache.runs.iterdir())
    assert cache.missing([file]) == []
    assert run.end() == (0, 0)


def test_what_workers_have_written_stays_at_the_end(cache: HostCache, project: Project) -> None:
    run = cache.claim_run("r")
    place(run, cache, a := project.write("d/a.py", "a"), project.write("e/b.py", "b"), project.write("c.py", "c"))
    here = Path(run.mirrored(str(project.folder)))
    (here / "d" / "a.py").write_text("changed")
    (here / "f").mkdir()
    (here / "f" / "out.txt").write_text("1234")
    (here / "empty").mkdir()
    put(run.checkpoints / "checkpoint_0" / "model")
    assert run.end() == (2, 11)
    assert below(here) == {"d/a.py": "changed", "f/out.txt": "1234"}
    assert sorted(path.name for path in here.iterdir()) == ["d", "f"]
    assert sorted(path.name for path in run.path.iterdir()) == [".lock", "files"]
    again = cache.claim_run("r")
    assert again.path == run.path
    place(again, cache, a)
    assert below(here) == {"d/a.py": "a", "f/out.txt": "1234"}


def test_read_only_directories_of_workers_can_be_deleted(cache: HostCache) -> None:
    run = cache.claim_run("r")
    folder = run.checkpoints / "a" / "b"
    put(folder / "file")
    folder.chmod(0o500)
    folder.parent.chmod(0o500)
    assert run.end() == (0, 0)
    assert not run.path.exists()


def test_the_end_of_a_run_does_not_touch_the_next_one_in_the_same_place(cache: HostCache, project: Project) -> None:
    """A guard that was forked from the agent ends the run, too."""
    run = cache.claim_run("r")
    guard = run_mirror.RunMirror(run.path, cache.blobs, os.dup(run._fd))
    Path(run.mirrored("/out")).write_text("of a worker")
    assert run.end() == (1, 11)
    place(cache.claim_run("r"), cache, project.write("a.py", "a"))
    before = below(run.path)
    assert guard.end() == (0, 0)
    assert below(run.path) == before


def test_the_lock_of_a_run_is_deleted_last(cache: HostCache, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the record before it, as after a kill the files that it has would count as those of workers."""
    run, usual, names = cache.claim_run("r"), run_mirror.delete, list[str]()
    place(run, cache, project.write("a.py", "a"))
    Path(run.mirrored("/out")).touch()

    def delete(path: str | Path) -> None:
        names.append(os.path.basename(path))
        usual(path)

    monkeypatch.setattr(run_mirror, "delete", delete)
    run_mirror.delete_run(run.path)
    assert names[-2:] == [".placed.json", ".lock"]
