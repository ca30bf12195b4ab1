"""The deletion of what is old or left over in the cache of a host, and of what is in use."""

from __future__ import annotations

import fcntl
import itertools
import os
from typing import TYPE_CHECKING

from distrain.transfer.host_side.cache_files import lock_folder
from tests.unit.transfer.conftest import HOUR, KB, age, below, place, put

if TYPE_CHECKING:
    from pathlib import Path

    from distrain.transfer.host_side.host_cache import HostCache
    from tests.unit.transfer.conftest import Project


def size_of(cache: HostCache) -> int:
    return sum(size for _, size, _ in cache._entries())


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


def test_the_least_recently_used_goes_first(cache: HostCache) -> None:
    paths = [
        entry(cache, "projects/a", 9 * HOUR),
        old_run(cache, "r", 8 * HOUR),
        entry(cache, "environments/e", 7 * HOUR),
        entry(cache, "programs/p", 6 * HOUR),
        entry(cache, "projects/b", 5 * HOUR),
    ]
    os.link(paths[0] / "lib" / "file", cache.root.parent / "in-the-cache-of-uv")
    assert round(size_of(cache) / KB, -2) == 500  # a file with two names counts in part
    for path, count in zip(paths, itertools.count(1)):
        cache.trim(size_of(cache))
        assert path.exists()
        cache.trim(size_of(cache) - 1)
        assert [path.exists() for path in paths] == [False] * count + [True] * (len(paths) - count)
    assert size_of(cache) == 0


def test_what_is_in_use_stays(cache: HostCache, project: Project) -> None:
    run = cache.claim_run("live")
    place(run, cache, project.write("a.py", "a"))
    old_run(cache, "r", 0)
    used = entry(cache, "environments/used", 9 * HOUR)
    entry(cache, "programs/p", 0)
    fd = lock_folder(used, fcntl.LOCK_SH)
    assert fd is not None
    age(run.path, 9 * HOUR)
    cache.trim(0)
    [project_in_use] = cache.projects.iterdir()
    left = {path for kind in ("environments", "programs", "runs") for path in (cache.root / kind).iterdir()}
    assert left == {used, run.path}
    assert len(below(run.project)) == 1
    os.close(fd)
    run.end()
    cache.trim(0)
    assert project_in_use.exists()  # this process uses it
    assert not used.exists()


def test_what_may_be_arriving_stays(cache: HostCache) -> None:
    old, young = entry(cache, "programs/.new-x1", 2 * HOUR), entry(cache, "programs/.new-x2", 0)
    cache.trim(0)
    assert [path.exists() for path in (old, young)] == [False, True]
