"""A simulated bucket: what distrain uses of a filesystem of fsspec, over objects in memory that take time to reach."""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from distrain.storage.checkpoint import MANIFEST_FILE
from distrain.system.remote_path import RemotePath

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from tests.simulation.world import World

URL = "gs://runs"
_COST_S = 0.03
_LONGEST_S = 10.0
_LOST_ANSWERS = 0.3
"""The share of failed operations that take place all the same."""
_T = TypeVar("_T")


class Bucket:
    """An object store. An object is there as a whole, or not at all."""

    protocol = "gs"

    def __init__(self, world: World) -> None:
        self.objects: dict[str, tuple[bytes, str]] = {}
        """By path: content and version."""
        self.is_broken = False
        self.slow_s = 0.0
        """The most seconds that are added to an operation."""
        self._world = world
        self._versions = itertools.count()

    def _do(self, action: Callable[[], _T]) -> _T:
        if self._world.current is None:  # a property looks
            return action()
        began, cost_s = self._world.now, _COST_S + self.slow_s
        self._world.pause(cost_s)
        if self._world.now > began + cost_s + _LONGEST_S:
            raise OSError("the connection was reset")  # while the process was suspended
        if self.is_broken:
            if self._world.random.random() < _LOST_ANSWERS:
                action()
            raise OSError("503: the bucket is broken")
        return action()

    def _below(self, path: str) -> list[str]:
        return sorted(name for name in self.objects if name == path or name.startswith(f"{path}/"))

    def _content(self, path: str) -> bytes:
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self.objects[path][0]

    def _put(self, path: str, data: bytes) -> None:
        self.objects[path] = data, f"v{next(self._versions)}"

    def flip(self, number: int, flipped: Collection[Path]) -> str:
        """Flip a bit of another file of a checkpoint that is committed, and return its path; "" if there is none.

        The commit notes the versions of the files: what somebody overwrites before, it takes for what was stored.
        """
        paths = [path for path in sorted(self.objects) if "/state" in path or "/more" in path]
        committed = [path for path in paths if f"{path.rpartition('/')[0]}/{MANIFEST_FILE}" in self.objects]
        paths = [path for path in committed if Path(path) not in flipped]
        if not paths:
            return ""
        path = paths[number % len(paths)]
        data = self.objects[path][0]
        self._put(path, bytes([data[0] ^ 1]) + data[1:])
        return path

    # -- what fsspec has ------------------------------------------------------------------------------------------

    def invalidate_cache(self) -> None:
        pass

    def cat_file(self, path: str) -> bytes:
        return self._do(lambda: self._content(path))

    def open(self, path: str, mode: str = "rb", **options: Any) -> io.BytesIO:
        return io.BytesIO(self.cat_file(path))

    def exists(self, path: str) -> bool:
        return self._do(lambda: bool(self._below(path)))

    def ls(self, path: str, detail: bool = False) -> list[str]:
        start = len(path) + 1
        return self._do(
            lambda: list(dict.fromkeys(f"{path}/{name[start:].partition('/')[0]}" for name in self._below(path)))
        )

    def find(self, path: str, detail: bool = True) -> dict[str, dict[str, Any]]:
        def look() -> dict[str, dict[str, Any]]:
            found = {name: self.objects[name] for name in self._below(path)}
            return {name: {"size": len(data), "ETag": version} for name, (data, version) in found.items()}

        return self._do(look)

    def get_file(self, path: str, target: str) -> None:
        Path(target).write_bytes(self.cat_file(path))

    def get(self, paths: list[str], targets: list[str]) -> None:
        for path, target in zip(paths, targets, strict=True):
            self.get_file(path, target)

    def pipe_file(self, path: str, data: bytes, mode: str = "overwrite") -> None:
        def write() -> None:
            if mode == "create" and path in self.objects:
                raise FileExistsError(path)
            self._put(path, bytes(data))

        self._do(write)

    def put_file(self, source: str, path: str) -> None:
        data = Path(source).read_bytes()
        self._do(lambda: self._put(path, data))

    def put(self, sources: list[str], paths: list[str], **options: Any) -> None:
        for source, path in zip(sources, paths, strict=True):
            self.put_file(source, path)

    def rm(self, path: str, recursive: bool = False) -> None:
        names = self._do(lambda: self._below(path))
        if not names:
            raise FileNotFoundError(path)
        for name in names:
            self._do(lambda name=name: self.objects.pop(name, None))


# -- reading run directories, local or in a bucket --------------------------------------------------------------------


def checkpoint_folders(run: Path | RemotePath) -> Iterator[Path | RemotePath]:
    """Return the directories that may be checkpoints."""
    names = run.names() if isinstance(run, RemotePath) else sorted(path.name for path in run.glob("*"))
    yield from (run / name for name in names if name.startswith("checkpoint_"))


def contents(folder: Path | RemotePath) -> dict[str, bytes]:
    """Return the visible files of a directory."""
    if isinstance(folder, RemotePath):
        names = list(folder.files())
    else:
        names = [file.name for file in folder.iterdir() if file.is_file()] if folder.exists() else []
    return {name: (folder / name).read_bytes() for name in names if not name.startswith(".")}
