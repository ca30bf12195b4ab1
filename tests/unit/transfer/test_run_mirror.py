"""The mirror of the user's files in the cache of a host: what is placed there, and what stays at the end."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

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
        project.write("a.py", "a", mtime_ns=1_234_567_890_123_456_789),
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


def change_text(path: Path) -> None:
    path.write_text("xx")


def change_time(path: Path) -> None:
    path.write_text("y")


def to_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


def to_folder(path: Path) -> None:
    path.unlink()
    (path / "deep").mkdir(parents=True)


@pytest.mark.parametrize("change", [Path.unlink, change_text, change_time, to_link, to_folder])
def test_what_workers_have_done_to_a_file_is_undone(
    cache: HostCache, project: Project, change: Callable[[Path], None]
) -> None:
    """Other runs do not see it in the meantime."""
    file = project.write("a.py", "a")
    run, other = cache.claim_run("r"), cache.claim_run("s")
    place(run, cache, file)
    change(Path(run.mirrored(file.path)))
    for one in (run, other):
        one.place(deliver(cache, file), [])
        assert below(one.files) == {file.path[1:]: "a"}


def test_a_file_that_changed_within_one_tick_is_copied(cache: HostCache, project: Project) -> None:
    run = cache.claim_run("r")
    place(run, cache, project.write("a.py", "a", mtime_ns=10**18))
    place(run, cache, new := project.write("a.py", "b", mtime_ns=10**18))
    assert Path(run.mirrored(new.path)).read_text() == "b"


def test_an_unchanged_project_is_not_copied_again(cache: HostCache, project: Project) -> None:
    file = project.write("a.py", "a")
    run = cache.claim_run("r")
    place(run, cache, file)
    before = os.stat(run.mirrored(file.path)).st_ino
    place(run, cache, file)
    assert os.stat(run.mirrored(file.path)).st_ino == before


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
    run.files.rename(moved := tmp_path / "moved")
    run.files.symlink_to(moved)
    run.end()
    assert below(outside) == before
    assert files[0].path[1:] in below(moved)


@pytest.mark.parametrize("moment", range(3))
@pytest.mark.parametrize("repair", ["place", "trim"])
def test_a_kill_in_the_middle_is_repaired(cache: HostCache, project: Project, moment: int, repair: str) -> None:
    """Killed before and after each of two files is replaced."""
    old = [project.write("gone.py", "g"), *(project.write(name, "1") for name in ("a", "b"))]
    run = cache.claim_run("r")
    place(run, cache, *old)
    files = [project.write(name, "2") for name in ("a", "b")]
    folder = deliver(cache, *files)
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
        child.place(folder, [])
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_a_child(be_killed) == -signal.SIGKILL
    if repair == "trim":
        trim(cache, 1 << 40)
        assert not list(cache.runs.iterdir())
        return
    run = cache.claim_run("r")
    run.place(folder, [])
    assert below(run.files) == {file.path[1:]: "2" for file in files}
    assert not list(run.checkpoints.iterdir())
    assert sorted(path.name for path in run.path.iterdir()) == ["checkpoints", "files", "project"]


def test_a_full_disk_is_named(cache: HostCache, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    run = cache.claim_run("r")
    folder = deliver(cache, project.write("a.py", "a"))

    def full(source: Any, target: Path, **options: Any) -> None:
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OSError, match="No space left on device"):
        run.place(folder, [])


# -- the end of a run -------------------------------------------------------------------------------------------------


def test_a_run_without_files_of_workers_leaves_nothing(cache: HostCache, project: Project) -> None:
    run = cache.claim_run("r")
    run.place(folder := deliver(cache, project.write("d/a.py", "a")), [str(project.folder / "empty")])
    put(Path(run.mirrored(str(project.folder / "d"))) / "__pycache__" / "a.pyc")
    put(run.checkpoints / "a" / "b" / "model").parent.chmod(0o500)
    (run.checkpoints / "a").chmod(0o500)
    for _ in range(2):
        run.end()
        assert not list(cache.runs.iterdir())
    assert folder.exists()


def test_what_workers_have_written_stays_at_the_end(cache: HostCache, project: Project) -> None:
    run = cache.claim_run("r")
    place(run, cache, a := project.write("d/a.py", "a"), project.write("e/b.py", "b"), project.write("c.py", "c"))
    here = Path(run.mirrored(str(project.folder)))
    (here / "d" / "a.py").write_text("changed")
    (here / "f").mkdir()
    (here / "f" / "out.txt").write_text("1234")
    (here / "empty").mkdir()
    put(run.checkpoints / "checkpoint_0" / "model")
    run.end()
    assert below(here) == {"d/a.py": "changed", "f/out.txt": "1234"}
    assert sorted(path.name for path in here.iterdir()) == ["d", "f"]
    assert sorted(path.name for path in run.path.iterdir()) == ["files"]
    again = cache.claim_run("r")
    assert again.path == run.path
    place(again, cache, a)
    assert below(here) == {"d/a.py": "a", "f/out.txt": "1234"}
