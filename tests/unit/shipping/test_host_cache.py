"""The cache of a host: a mirror of the user's files, and what is deleted when."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distrain.shipping import host_cache, run_mirror
from distrain.shipping.host_cache import HostCache
from distrain.shipping.shipped_file import ShippedFile, digest_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HOUR = 3600.0
KB = 1 << 10


@pytest.fixture
def cache(tmp_path: Path) -> HostCache:
    return HostCache(tmp_path / "cache")


class Project:
    """Files on the user's machine, and how they come to the host."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir()

    def write(self, name: str, text: str, mode: int = 0o644, mtime_ns: int | None = None) -> ShippedFile:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)
        if mtime_ns is not None:
            os.utime(path, ns=(mtime_ns, mtime_ns))
        return self.shipped(name)

    def shipped(self, name: str) -> ShippedFile:
        path = self.folder / name
        status = path.stat()
        mode = stat.S_IMODE(status.st_mode)
        return ShippedFile(str(path), status.st_size, status.st_mtime_ns, mode, digest_of(path))


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "project")


def deliver(cache: HostCache, *files: ShippedFile) -> list[ShippedFile]:
    missing = cache.missing(files)
    for file in files:
        if file.digest in missing:
            cache.blob(file.digest).parent.mkdir(exist_ok=True)
            shutil.copyfile(file.path, cache.blob(file.digest))
    return list(files)


def place(run: run_mirror.RunMirror, cache: HostCache, *files: ShippedFile) -> None:
    run.place(deliver(cache, *files), [])


def below(folder: Path) -> dict[str, str]:
    """The files below a directory, by name, with their contents or where they lead."""
    paths = [Path(parent, name) for parent, folders, names in os.walk(folder) for name in [*names, *folders]]
    return {
        str(path.relative_to(folder)): f"-> {os.readlink(path)}" if path.is_symlink() else path.read_text()
        for path in paths
        if path.is_symlink() or path.is_file()
    }


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def put(path: Path, size: int = 100 * KB, old: float = 0.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    age(path, old)
    return path


def in_a_child(act: Callable[[], object]) -> int:
    """The exit status of a process that has done something."""
    if (child := os.fork()) == 0:
        try:
            act()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture
def start() -> Iterator[Callable[[Callable[[], object]], int]]:
    """Start a process that does something and then lives on."""
    children = []

    def begin(act: Callable[[], object]) -> int:
        read_fd, write_fd = os.pipe()
        if (child := os.fork()) == 0:
            try:
                act()
                os.write(write_fd, b"1")
                time.sleep(60)
            finally:
                os._exit(1)
        children.append(child)
        os.close(write_fd)
        assert os.read(read_fd, 1) == b"1"
        os.close(read_fd)
        return child

    yield begin
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


# -- where it is ------------------------------------------------------------------------------------------------------


def test_the_environment_says_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DISTRAIN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    roots = [HostCache().root]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    roots += [HostCache().root]
    monkeypatch.setenv("DISTRAIN_CACHE", "~/own")
    roots += [HostCache().root]
    assert roots == [tmp_path / ".cache" / "distrain", tmp_path / "xdg" / "distrain", tmp_path / "own"]


def test_only_its_user_may_look_into_it(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    cache = HostCache(tmp_path / "cache")
    for folder in (cache.root, cache.blobs, cache.runs, cache.environments, cache.programs):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(cache.claim_run("r").files.stat().st_mode) == 0o700


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "broken").symlink_to("missing")
    for name in ("link", "broken"):
        with pytest.raises(PermissionError, match=f"{name} is a link.*env.DISTRAIN_CACHE=/path in the hostfile"):
            HostCache(tmp_path / name)
    assert not list((tmp_path / "real").iterdir())


def test_another_users_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match=r"belongs to another user .*env.DISTRAIN_CACHE="):
        HostCache(tmp_path)


def test_a_directory_with_files_of_the_user_is_refused_and_left_alone(tmp_path: Path) -> None:
    """It would lose a directory ``runs`` of the user."""
    (tmp_path / "runs").mkdir()
    tmp_path.chmod(0o755)
    with pytest.raises(FileExistsError, match="has files that are not distrain's, such as runs; name another"):
        HostCache(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_a_bootstrap_may_have_been_there_first(tmp_path: Path) -> None:
    (tmp_path / "programs" / "key").mkdir(parents=True)
    HostCache(tmp_path)
    HostCache(tmp_path)


@pytest.mark.parametrize(("named", "why"), [("/proc/nothing", "No such file"), ("here", "here is no absolute path")])
def test_a_place_that_cannot_be_used_is_named_with_the_cure(
    named: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTRAIN_CACHE", named)
    with pytest.raises(OSError, match=f"{named}.*{why}|{why}") as caught:
        HostCache()
    assert "name another directory with env.DISTRAIN_CACHE=/path in the hostfile" in str(caught.value)


# -- what is there already --------------------------------------------------------------------------------------------


def test_files_are_in_place_if_all_are_the_same(project: Project) -> None:
    files = [project.write("a.py", "a"), project.write("b.py", "b")]
    assert HostCache.is_in_place(files)
    assert not HostCache.is_in_place([])
    assert not HostCache.is_in_place([files[0], files[1]._replace(size=2)])
    assert not HostCache.is_in_place([files[0], files[1]._replace(mtime_ns=1)])
    assert not HostCache.is_in_place([files[0], files[1]._replace(path=files[1].path + "x")])


def test_each_missing_file_is_named_once(cache: HostCache, project: Project) -> None:
    files = [project.write("a.py", "same"), project.write("b.py", "same"), project.write("c.py", "other")]
    assert cache.missing(files) == [files[0].digest, files[2].digest]
    deliver(cache, files[0])
    assert cache.missing(files) == [files[2].digest]


def test_a_file_with_the_wrong_size_is_missing_and_deleted(cache: HostCache, project: Project) -> None:
    file = project.write("a.py", "long text")
    put(cache.blob(file.digest), size=3)
    assert cache.missing([file]) == [file.digest]
    assert not cache.blob(file.digest).exists()


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
from distrain.shipping.host_cache import HostCache
from distrain.shipping.shipped_file import ShippedFile, digest_of
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
        cache.trim(1 << 40)
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


# -- several runs -----------------------------------------------------------------------------------------------------


def test_a_run_of_a_living_process_is_left_alone(
    cache: HostCache, monkeypatch: pytest.MonkeyPatch, start: Callable[[Callable[[], object]], int]
) -> None:
    monkeypatch.setattr(host_cache, "_FORMER_AGENT_S", 0.1)
    child = start(lambda: cache.claim_run("r"))
    began = time.monotonic()
    names = [run.path.name for run in (cache.claim_run("r"), cache.claim_run("r"), cache.claim_run("s"))]
    assert names == ["r-2", "r-3", "s"]
    assert time.monotonic() - began >= 0.2
    os.kill(child, signal.SIGKILL)
    assert cache.claim_run("r").path.name == "r"


def test_a_former_agent_may_take_a_moment_to_end(cache: HostCache) -> None:
    run = cache.claim_run("r")
    Path(run.mirrored("/out")).touch()
    threading.Timer(0.1, run.end).start()
    assert cache.claim_run("r").path.name == "r"


def test_a_forked_process_keeps_the_run(
    cache: HostCache, monkeypatch: pytest.MonkeyPatch, start: Callable[[Callable[[], object]], int]
) -> None:
    monkeypatch.setattr(host_cache, "_FORMER_AGENT_S", 0.0)
    run = cache.claim_run("r")
    start(lambda: None)
    os.close(run._fd)
    assert cache.claim_run("r").path.name == "r-2"


def test_many_processes_that_begin_and_end_at_once_get_directories_of_their_own(
    cache: HostCache, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_cache, "_FORMER_AGENT_S", 0.0)
    monkeypatch.setattr(host_cache, "_POLL_S", 0.001)
    files = deliver(cache, *(project.write(f"{number}.py", str(number)) for number in range(5)))

    def work() -> None:
        for _ in range(10):
            run = cache.claim_run("r")
            own = Path(run.mirrored("/own"))
            assert not own.exists()
            own.write_text("x")
            assert cache.missing(files) == []
            run.place(files, [])
            cache.trim(0)
            assert len(below(run.files)) == 6
            own.unlink()
            assert run.end() == (0, 0)

    children = []
    for _ in range(4):
        if (child := os.fork()) == 0:
            os._exit(in_a_child(work))
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert not list(cache.runs.iterdir())


def test_a_run_is_not_claimed_with_the_lock_of_a_deleted_directory(
    cache: HostCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, moments = fcntl.flock, iter([True])

    def delete_first(fd: int, how: int) -> None:
        if next(moments, False):
            shutil.rmtree(cache.runs / "r")
        usual(fd, how)

    monkeypatch.setattr(fcntl, "flock", delete_first)
    run = cache.claim_run("r")
    assert os.path.samestat(os.fstat(run._fd), os.stat(cache.runs / "r" / ".lock"))


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


@pytest.mark.parametrize("place", ["", ".", "..", ".lock", "a/b"])
def test_a_run_has_a_plain_name(cache: HostCache, place: str) -> None:
    with pytest.raises(ValueError, match="plain name"):
        cache.claim_run(place)


def no_locks(*_: object) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def test_without_locks_runs_work_and_nothing_is_deleted(
    cache: HostCache, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", no_locks)
    run = cache.claim_run("r")
    place(run, cache, project.write("a.py", "a"))
    cache.trim(0)
    assert len(below(run.files)) == 1
    assert run.end() == (0, 0)
    assert not run.path.exists()


# -- what is deleted --------------------------------------------------------------------------------------------------


def old_run(cache: HostCache, name: str, old: float, size: int = 100 * KB) -> Path:
    """A run that has ended, with a file of a worker."""
    run = cache.claim_run(name)
    put(run.files / "out", size)
    run.end()
    age(run.path / ".lock", old)
    return run.path


def environment(cache: HostCache, key: str, old: float) -> Path:
    put(cache.environments / key / "lib" / "package")
    put(cache.environments / key / ".complete", 0, old)
    (cache.environments / f"{key}.lock").touch()
    return cache.environments / key


def program(cache: HostCache, key: str, old: float) -> Path:
    put(cache.programs / key / "distrain" / "module.py")
    age(cache.programs / key, old)
    return cache.programs / key


def blob(cache: HostCache, digit: str, old: float) -> Path:
    return put(cache.blob(digit * 40), old=old)


def test_its_size_is_told_by_kind(cache: HostCache) -> None:
    assert cache.size() == {"blobs": 0, "runs": 0, "environments": 0, "programs": 0}
    blob(cache, "a", 0)
    old_run(cache, "r", 0, 200 * KB)
    environment(cache, "e", 0)
    program(cache, "p", 0)
    os.link(cache.environments / "e" / "lib" / "package", cache.root.parent / "in-the-cache-of-uv")
    rough = {kind: round(size / KB, -2) for kind, size in cache.size().items()}
    assert rough == {"blobs": 100, "runs": 200, "environments": 100, "programs": 100}
    assert cache.size()["environments"] < 80 * KB
    assert cache.size()["blobs"] == 100 * KB


def test_the_least_recently_used_goes_first(cache: HostCache) -> None:
    paths = [
        blob(cache, "a", 9 * HOUR),
        old_run(cache, "r", 8 * HOUR),
        environment(cache, "e", 7 * HOUR),
        program(cache, "p", 6 * HOUR),
        blob(cache, "b", 5 * HOUR),
        old_run(cache, "s", 4 * HOUR),
        environment(cache, "f", 3 * HOUR),
        program(cache, "newest", 2 * HOUR),
    ]
    for path, count in zip(paths[:-1], itertools.count(1)):
        cache.trim(sum(cache.size().values()))
        assert path.exists()
        cache.trim(sum(cache.size().values()) - 1)
        assert [path.exists() for path in paths] == [False] * count + [True] * (len(paths) - count)
    cache.trim(0)
    assert paths[-1].exists(), "the newest program"
    assert (cache.environments / "e.lock").exists(), "others may wait for it"
    assert not list(cache.root.rglob("*.new-*"))


def test_what_is_in_use_stays(cache: HostCache, project: Project) -> None:
    run = cache.claim_run("r")
    place(run, cache, file := project.write("a.py", "a"))
    used, unused = environment(cache, "e", 9 * HOUR), environment(cache, "f", 9 * HOUR)
    running, idle = program(cache, "p", 9 * HOUR), program(cache, "q", 9 * HOUR)
    program(cache, "newest", 2 * HOUR)
    age(cache.blob(file.digest), 9 * HOUR)
    age(run.path / ".lock", 9 * HOUR)
    fds = [os.open(cache.environments / "e.lock", os.O_RDWR), os.open(running, os.O_RDONLY)]
    for fd in fds:
        fcntl.flock(fd, fcntl.LOCK_SH)
    cache.trim(0)
    kept = [cache.blob(file.digest), run.path, used, running]
    assert [path.exists() for path in [*kept, unused, idle]] == [True] * 4 + [False] * 2
    for fd in fds:
        os.close(fd)
    run.end()
    cache.trim(0)
    assert not any(path.exists() for path in kept)


@pytest.mark.parametrize("use", ["missing", "place"])
def test_a_blob_that_was_just_used_stays_above_the_limit(cache: HostCache, project: Project, use: str) -> None:
    """Another run is about to place it, but has no directory yet that says so."""
    file = project.write("a.py", "a")
    run = cache.claim_run("r")
    place(run, cache, file)
    age(cache.blob(file.digest), 9 * HOUR)
    if use == "missing":
        assert cache.missing([file]) == []
    else:
        run.place([file], [])
    run.end()
    young = blob(cache, "a", 0.9 * HOUR)
    cache.trim(0)
    assert (cache.blob(file.digest).exists(), young.exists()) == (True, True)


def test_a_blob_that_is_used_while_it_is_deleted_stays(cache: HostCache, monkeypatch: pytest.MonkeyPatch) -> None:
    path, usual = blob(cache, "a", 9 * HOUR), os.rename

    def use_before(source: str, target: str) -> None:
        if source == str(path):
            os.utime(path)
        usual(source, target)

    monkeypatch.setattr(os, "rename", use_before)
    cache.trim(0)
    assert path.exists()


def test_clocks_that_were_set_back_keep_nothing_forever(cache: HostCache) -> None:
    path = blob(cache, "a", -9 * HOUR)
    cache.trim(0)
    assert not path.exists()


def test_leftovers_go_also_below_the_limit(cache: HostCache, project: Project) -> None:
    def be_killed() -> None:
        run = cache.claim_run("r")
        place(run, cache, project.write("a.py", "a"))
        put(run.checkpoints / "model")
        put(Path(run.mirrored(str(project.folder / "out"))))
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_a_child(be_killed) == -signal.SIGKILL
    old = [
        put(cache.blobs / "ab" / f"ab{38 * '0'}.new-token", old=2 * HOUR),
        program(cache, ".new-x1", 2 * HOUR),
        program(cache, "p.new-trim", 2 * HOUR),
    ]
    young = [put(cache.blobs / "ab" / f"ab{38 * '1'}.new-token"), program(cache, ".new-x2", 0)]
    plain = blob(cache, "c", 9 * HOUR)
    cache.trim(1 << 40)
    assert [path.exists() for path in [*old, *young, plain]] == [False] * 3 + [True] * 3
    assert list(below(cache.runs / "r")) == [".lock", f"files/{project.folder.relative_to('/')}/out"]


def test_only_one_process_trims(cache: HostCache) -> None:
    path = blob(cache, "a", 9 * HOUR)
    with cache._alone(wait=False):
        cache.trim(0)
        assert path.exists()
    cache.trim(0)
    assert not path.exists()


def test_emptying_it_leaves_what_is_in_use(cache: HostCache, project: Project) -> None:
    run = cache.claim_run("live")
    place(run, cache, project.write("a.py", "a"))
    old_run(cache, "r", 0)
    environment(cache, "e", 2 * HOUR)
    environment(cache, "used", 2 * HOUR)
    program(cache, "p", 2 * HOUR)
    old, young = blob(cache, "a", 2 * HOUR), blob(cache, "b", 0)
    fd = os.open(cache.environments / "used.lock", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_SH)
    freed, in_use = cache.empty()
    os.close(fd)
    assert in_use == ["environments/used", "runs/live"]
    assert round(freed / KB, -2) == 400
    assert (old.exists(), young.exists(), len(below(run.files))) == (False, True, 1)
    run.end()
    assert cache.empty()[1] == []
    assert sum(cache.size().values()) == 0


def test_emptying_it_takes_no_program_that_is_just_arriving(cache: HostCache) -> None:
    path = program(cache, ".new-x", 0)
    assert cache.empty() == (0, [])
    assert path.exists()
