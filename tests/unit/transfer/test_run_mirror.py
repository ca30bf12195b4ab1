"""The mirror of the user's files in the cache of a host: what is placed there, and what stays at the end."""

from __future__ import annotations

import os
import shutil
import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.transfer.conftest import below, deliver, in_a_child, place, put

if TYPE_CHECKING:
    from pathlib import Path

    from distrain.transfer.host_side.host_cache import HostCache
    from tests.unit.transfer.conftest import Project


# -- the mirror -------------------------------------------------------------------------------------------------------


def test_links_of_workers_lead_nothing_out_of_the_cache(cache: HostCache, project: Project, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    run = cache.claim_run("r")
    place(run, cache, project.write("d/a.py", "a"))
    folder = run.project / project.folder.relative_to("/") / "d"
    for path in folder.iterdir():  # the same files, also by their time, behind the link
        path.rename(outside / path.name)
    folder.rmdir()
    folder.symlink_to(outside)
    run.files.symlink_to(outside)
    run.end()
    assert below(outside) == {"a.py": "a"}
    assert not run.project.exists()


@pytest.mark.parametrize("moment", range(2))
@pytest.mark.parametrize("repair", ["place", "trim"])
def test_a_kill_in_the_middle_is_repaired(cache: HostCache, project: Project, moment: int, repair: str) -> None:
    """Killed while the project is copied, and afterwards."""
    files = [project.write(name, "2") for name in ("a", "b")]
    folder = deliver(cache, *files)

    def be_killed() -> None:
        if moment == 0:
            shutil.copystat = lambda *_, **options: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        child = cache.claim_run("r")
        (child.checkpoints / "half").mkdir()
        child.place(folder)
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_a_child(be_killed) == -signal.SIGKILL
    if repair == "trim":
        cache.trim(1 << 40)
        assert not list(cache.runs.iterdir())
        return
    run = cache.claim_run("r")
    run.place(folder)
    assert below(run.project) == {file.path[1:]: "2" for file in files}
    assert not list(run.checkpoints.iterdir())
    assert sorted(path.name for path in run.path.iterdir()) == sorted([folder.name, "checkpoints"])


def test_a_full_disk_is_named(cache: HostCache, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    run = cache.claim_run("r")
    folder = deliver(cache, project.write("a.py", "a"))

    def full(source: Any, target: Path, **options: Any) -> None:
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OSError, match="No space left on device"):
        run.place(folder)


# -- the end of a run -------------------------------------------------------------------------------------------------


def test_a_run_without_files_of_workers_leaves_nothing(cache: HostCache, project: Project) -> None:
    run = cache.claim_run("r")
    run.place(folder := deliver(cache, file := project.write("d/a.py", "a")))
    put((run.project / file.path[1:]).parent / "__pycache__" / "a.pyc")
    (run.files / "home" / "run").mkdir(parents=True)
    put(run.checkpoints / "a" / "b" / "model").parent.chmod(0o500)
    (run.checkpoints / "a").chmod(0o500)
    for _ in range(2):
        run.end()
        assert not list(cache.runs.iterdir())
    assert folder.exists()


@pytest.mark.parametrize("change", ["another file", "a link", "trial", "no project"])
def test_what_workers_have_written_stays_at_the_end(cache: HostCache, project: Project, change: str) -> None:
    run = cache.claim_run("r")
    place(run, cache, a := project.write("d/a.py", "a"))
    here, trial = run.project / a.path[1:], run.files / "home" / "run"
    trial.mkdir(parents=True)
    put(run.checkpoints / "checkpoint_0" / "model")
    match change:
        case "another file":
            put(here.parent / "out.txt")
        case "a link":
            here.with_name("link").symlink_to("/etc")
        case "trial":
            put(trial / "notes.txt")
        case "no project":
            shutil.rmtree(cache.projects / run.project.name)
    before = below(run.files if change == "trial" else run.project)
    run.end()
    kept = run.files if change == "trial" else run.project
    assert list(run.path.iterdir()) == [kept]
    assert below(kept) == before
    again = cache.claim_run("r")
    assert again.path == run.path
    place(again, cache, a)
    assert below(kept) == before
