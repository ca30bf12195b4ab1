"""The cache of a host, and a project of the user, for the tests of what is in it."""

from __future__ import annotations

import os
import shutil
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from distrain.transfer.host_side.host_cache import HostCache
from distrain.wire.shipped_file import ShippedFile, project_digest

if TYPE_CHECKING:
    from collections.abc import Callable

DAY = 24 * 3600.0
KB = 1 << 10


@pytest.fixture
def cache(tmp_path: Path) -> HostCache:
    return HostCache(tmp_path / "cache")


class Project:
    """Files on the user's machine."""

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
        return ShippedFile.found(str(path), path.stat())


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "project")


def deliver(cache: HostCache, *files: ShippedFile) -> Path:
    """Do what the mover does, and return the directory of the project."""
    folder = cache.projects / project_digest(files, [])
    for file in files if not folder.exists() else ():
        target = folder / file.path[1:]
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file.path, target)
    return folder


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


def put(path: Path, size: int = 100 * KB) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    return path


def in_a_child(act: Callable[[], object]) -> int:
    """The exit status of a process that has done something."""
    if (child := os.fork()) == 0:
        try:
            act()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
