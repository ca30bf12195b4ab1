"""The cache of a host, and a project of the user, for the tests of what is in it."""

from __future__ import annotations

import os
import shutil
import stat
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from distrain.transfer.host_side.host_cache import HostCache
from distrain.wire.shipped_file import ShippedFile, digest_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrain.transfer.host_side.run_mirror import RunMirror

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


def place(run: RunMirror, cache: HostCache, *files: ShippedFile) -> None:
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
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
