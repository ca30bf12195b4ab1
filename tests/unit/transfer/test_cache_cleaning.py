"""The deletion of what is old or left over in the cache of a host, and of what is in use."""

from __future__ import annotations

import fcntl
import itertools
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from distrain.transfer.host_side import cache_cleaning
from distrain.transfer.host_side.cache_cleaning import empty, size_by_kind, trim
from tests.unit.transfer.conftest import HOUR, KB, age, below, in_a_child, place, put

if TYPE_CHECKING:
    from distrain.transfer.host_side.host_cache import HostCache
    from tests.unit.transfer.conftest import Project


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
    assert size_by_kind(cache) == {"blobs": 0, "runs": 0, "environments": 0, "programs": 0}
    blob(cache, "a", 0)
    old_run(cache, "r", 0, 200 * KB)
    environment(cache, "e", 0)
    program(cache, "p", 0)
    os.link(cache.environments / "e" / "lib" / "package", cache.root.parent / "in-the-cache-of-uv")
    rough = {kind: round(size / KB, -2) for kind, size in size_by_kind(cache).items()}
    assert rough == {"blobs": 100, "runs": 200, "environments": 100, "programs": 100}
    assert size_by_kind(cache)["environments"] < 80 * KB
    assert size_by_kind(cache)["blobs"] == 100 * KB


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
        trim(cache, sum(size_by_kind(cache).values()))
        assert path.exists()
        trim(cache, sum(size_by_kind(cache).values()) - 1)
        assert [path.exists() for path in paths] == [False] * count + [True] * (len(paths) - count)
    trim(cache, 0)
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
    trim(cache, 0)
    kept = [cache.blob(file.digest), run.path, used, running]
    assert [path.exists() for path in [*kept, unused, idle]] == [True] * 4 + [False] * 2
    for fd in fds:
        os.close(fd)
    run.end()
    trim(cache, 0)
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
    trim(cache, 0)
    assert (cache.blob(file.digest).exists(), young.exists()) == (True, True)


def test_a_blob_that_is_used_while_it_is_deleted_stays(cache: HostCache, monkeypatch: pytest.MonkeyPatch) -> None:
    path, usual = blob(cache, "a", 9 * HOUR), os.rename

    def use_before(source: str, target: str) -> None:
        if source == str(path):
            os.utime(path)
        usual(source, target)

    monkeypatch.setattr(os, "rename", use_before)
    trim(cache, 0)
    assert path.exists()


def test_clocks_that_were_set_back_keep_nothing_forever(cache: HostCache) -> None:
    path = blob(cache, "a", -9 * HOUR)
    trim(cache, 0)
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
        put(cache.blobs / "ab" / f"ab{38 * '0'}.new-trim", old=2 * HOUR),
        program(cache, ".new-x1", 2 * HOUR),
        program(cache, "p.new-trim", 2 * HOUR),
    ]
    young = program(cache, ".new-x2", 0)
    plain = blob(cache, "c", 9 * HOUR)
    trim(cache, 1 << 40)
    assert [path.exists() for path in [*old, young, plain]] == [False] * 3 + [True] * 2
    assert list(below(cache.runs / "r")) == [".lock", f"files/{project.folder.relative_to('/')}/out"]


def test_five_environments_are_kept_also_below_the_limit(cache: HostCache) -> None:
    """One that somebody is making counts, like any that was used just now, as soon as it is complete."""
    paths = [environment(cache, f"e{hours}", hours * HOUR) for hours in (3, 7, 2, 6, 4, 5, 0)]
    making = put(cache.environments / "making" / "bin" / "python").parent.parent
    trim(cache, 1 << 40)
    assert [path.exists() for path in [*paths, making]] == [True, False, True, False, True, True, True, True]


def test_only_one_process_trims(cache: HostCache) -> None:
    path = blob(cache, "a", 9 * HOUR)
    with cache_cleaning._alone(cache, wait=False):
        trim(cache, 0)
        assert path.exists()
    trim(cache, 0)
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
    freed, in_use = empty(cache)
    os.close(fd)
    assert in_use == ["environments/used", "runs/live"]
    assert round(freed / KB, -2) == 400
    assert (old.exists(), young.exists(), len(below(run.files))) == (False, True, 1)
    run.end()
    assert empty(cache)[1] == []
    assert sum(size_by_kind(cache).values()) == 0


def test_emptying_it_takes_no_program_that_is_just_arriving(cache: HostCache) -> None:
    path = program(cache, ".new-x", 0)
    assert empty(cache) == (0, [])
    assert path.exists()
