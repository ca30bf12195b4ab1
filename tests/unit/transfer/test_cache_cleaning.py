"""The deletion of what is old or left over in the cache of a host, and of what is in use."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

from distrain.transfer.host_side.host_cache import lock_folder
from tests.unit.transfer.conftest import DAY, age, deliver, put

if TYPE_CHECKING:
    from pathlib import Path

    from distrain.transfer.host_side.host_cache import HostCache
    from tests.unit.transfer.conftest import Project


def old_run(cache: HostCache, name: str, old: float) -> Path:
    """A run that has ended, with a file of a worker."""
    run = cache.claim_run(name)
    put(run.files / "out")
    run.end()
    age(run.path, old)
    return run.path


def entry(cache: HostCache, name: str, old: float) -> Path:
    path = cache.root / name
    put(path / "lib" / "file")
    (path / "complete").touch()
    age(path, old)
    return path


def test_what_was_unused_for_a_month_is_deleted(cache: HostCache) -> None:
    names = ("projects", "environments", "programs", "programs/.new-")
    old = [entry(cache, f"{name}/old", 31 * DAY) for name in names[:3]]
    old.append(entry(cache, "programs/.new-x", 31 * DAY))
    young = [entry(cache, f"{name}/young", 29 * DAY) for name in names[:3]] + [old_run(cache, "young", 29 * DAY)]
    not_copied_home = [old_run(cache, "old", 31 * DAY)]
    cache.trim()
    kept = [*young, *not_copied_home]
    assert [path.exists() for path in (*old, *kept)] == [False] * len(old) + [True] * len(kept)


def test_what_is_in_use_stays(cache: HostCache, project: Project) -> None:
    run = cache.claim_run("live")
    folder = deliver(cache, file := project.write("a.py", "a"))
    assert cache.use_project(folder.name, [file])[1]
    used = entry(cache, "environments/used", 0)
    fd = lock_folder(used, fcntl.LOCK_SH)
    assert fd is not None
    for path in (used, run.path, folder):
        age(path, 31 * DAY)
    cache.trim()
    assert used.exists()
    assert run.path.exists()
    assert folder.exists()
    os.close(fd)
    cache.trim()
    assert not used.exists()
