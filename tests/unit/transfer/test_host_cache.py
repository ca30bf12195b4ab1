"""The cache of a host: its place, the files that are in it already, and the directories of several runs."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import time
from typing import TYPE_CHECKING

import pytest

from distrain.transfer.host_side import host_cache
from distrain.transfer.host_side.host_cache import HostCache
from tests.unit.transfer.conftest import deliver

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.transfer.conftest import Project


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
    for folder in (cache.root, cache.projects, cache.runs, cache.environments, cache.programs):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(cache.claim_run("r").checkpoints.stat().st_mode) == 0o700


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "broken").symlink_to("missing")
    for name in ("link", "broken"):
        with pytest.raises(OSError, match=f"{name} for .*it is a link.*env.DISTRAIN_CACHE=/path in the hostfile"):
            HostCache(tmp_path / name)
    assert not list((tmp_path / "real").iterdir())


def test_another_users_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(OSError, match=r"belongs to another user, .*env.DISTRAIN_CACHE="):
        HostCache(tmp_path)


def test_a_directory_with_files_of_the_user_is_refused_and_left_alone(tmp_path: Path) -> None:
    """It would lose a directory ``runs`` of the user."""
    (tmp_path / "runs").mkdir()
    tmp_path.chmod(0o755)
    with pytest.raises(OSError, match=r"has files that are not distrain's, such as runs\); name another"):
        HostCache(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


@pytest.mark.parametrize(("named", "why"), [("/proc/nothing", "No such file"), ("here", "here is not an absolute")])
def test_a_place_that_cannot_be_used_is_named_with_the_cure(
    named: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTRAIN_CACHE", named)
    with pytest.raises(OSError, match=f"{named}.*{why}|{why}") as caught:
        HostCache()
    assert "name another directory with env.DISTRAIN_CACHE=/path in the hostfile" in str(caught.value)


# -- several runs -----------------------------------------------------------------------------------------------------


def test_a_run_that_is_in_use_is_left_alone(cache: HostCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cache, "_FORMER_AGENT_S", 0.1)
    began = time.monotonic()
    runs = [cache.claim_run(name) for name in ("r", "r", "r", "s")]
    assert [run.path.name for run in runs] == ["r", "r-2", "r-3", "s"]
    assert time.monotonic() - began >= 0.2


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
    assert os.path.samestat(os.fstat(run._fd), os.stat(cache.runs / "r"))


def no_locks(*_: object) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def test_without_locks_runs_work_and_nothing_is_deleted(
    cache: HostCache, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", no_locks)
    run = cache.claim_run("r")
    folder = deliver(cache, file := project.write("a.py", "a"))
    with pytest.raises(OSError, match="No locks"):
        cache.trim()
    assert cache.use_project(folder.name, [file]) == (folder, True)
    run.end()
    assert not run.path.exists()
