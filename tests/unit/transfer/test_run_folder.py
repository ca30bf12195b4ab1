"""The directory of a run in the cache of a host, and the copies of projects: what stays at the end of a run."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from distrain.wire.shipped_file import project_digest
from tests.unit.transfer.conftest import below, deliver, in_a_child, put

if TYPE_CHECKING:
    from pathlib import Path

    from distrain.transfer.host_side.host_cache import HostCache
    from tests.unit.transfer.conftest import Project


# -- projects ---------------------------------------------------------------------------------------------------------


def test_a_project_is_found_by_the_facts_of_its_files(cache: HostCache, project: Project) -> None:
    file = project.write("a.py", "a")
    digest = project_digest([file], [])
    for other in ({"path": "/b.py"}, {"mode": 0o755}, {"size": 2}, {"mtime_ns": 1}, {"ctime_ns": 1}):
        assert digest != project_digest([file._replace(**other)], [])
    assert digest != project_digest([file], ["/empty"])
    assert cache.use_project(digest, [file]) == (cache.projects / digest, False)
    folder = deliver(cache, file)
    assert cache.use_project(digest, [file]) == (folder, True)


@pytest.mark.parametrize("change", ["another file", "a file of the project", "no file"])
def test_workers_write_into_a_project_as_at_home(cache: HostCache, project: Project, change: str) -> None:
    """A run that finds code that another one has changed gets a copy of its own."""
    files = [project.write("d/a.py", "a"), project.write("b.py", "b")]
    folder = deliver(cache, *files)
    here = folder / files[0].path[1:]
    match change:
        case "another file":
            put(here.parent / "out.txt")
        case "a file of the project":
            here.write_text("changed")
        case "no file":
            here.unlink()
    before = below(folder)
    found, is_there = cache.use_project(folder.name, files)
    assert is_there == (change == "another file")
    assert found == (folder if is_there else folder.with_name(f"{folder.name}-2"))
    assert below(folder) == before


# -- runs -------------------------------------------------------------------------------------------------------------


def test_links_of_workers_lead_nothing_out_of_the_cache(cache: HostCache, tmp_path: Path) -> None:
    (outside := tmp_path / "outside").mkdir()
    (outside / "a.py").write_text("a")
    run = cache.claim_run("r")
    run.files.symlink_to(outside)
    run.end()
    assert below(outside) == {"a.py": "a"}


@pytest.mark.parametrize("repair", ["claim", "trim"])
def test_a_kill_in_the_middle_is_repaired(cache: HostCache, repair: str) -> None:
    def be_killed() -> None:
        child = cache.claim_run("r")
        (child.checkpoints / "half").mkdir()
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_a_child(be_killed) == -signal.SIGKILL
    if repair == "trim":
        cache.trim()
        assert not list(cache.runs.iterdir())
    else:
        assert not list(cache.claim_run("r").checkpoints.iterdir())


def test_a_run_without_files_of_workers_leaves_nothing(cache: HostCache) -> None:
    run = cache.claim_run("r")
    (run.files / "home" / "run").mkdir(parents=True)
    put(run.checkpoints / "a" / "b" / "model").parent.chmod(0o500)
    (run.checkpoints / "a").chmod(0o500)
    for _ in range(2):
        run.end()
        assert not list(cache.runs.iterdir())


def test_what_workers_have_written_into_the_directory_of_the_run_stays_at_the_end(cache: HostCache) -> None:
    run = cache.claim_run("r")
    put(run.files / "home" / "run" / "notes.txt")
    put(run.checkpoints / "checkpoint_0" / "model")
    before = below(run.files)
    run.end()
    assert list(run.path.iterdir()) == [run.files]
    again = cache.claim_run("r")
    assert below(again.files) == before
