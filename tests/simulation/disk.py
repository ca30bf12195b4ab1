"""The disk of a run: a directory in memory whose operations take time, fail, and are partly lost at a power cut."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.world import World

_rename = os.rename
_COST_S = 0.003
"""The longest time of one operation, before which anything may happen."""


class Disk:
    """The files below ``root``. The rest of the file system neither fails nor forgets."""

    def __init__(self, world: World, root: Path, *, forgets: bool) -> None:
        self._world, self._root, self._forgets = world, str(root), forgets
        self._write = os.write
        self.errno = 0
        """The error that writing has now; 0: none."""
        self.has_room = False
        """True if a full disk still takes a part of one write."""
        self.full: set[str] = set()
        """Other directories, on which nothing can be written now."""
        self.slow: dict[str, float] = {}
        """By host: what each operation takes longer there, in seconds."""
        self._durable: dict[int, int] = {}
        """By inode: the bytes that were flushed."""
        self._renames: list[tuple[str, str, str, dict[str, int]]] = []
        """Source, target, a link to what the target was, and what else there was, with its size: of each rename that is
        not durable yet."""

    def has(self, path: str) -> bool:
        return path.startswith(self._root)

    def check(self, path: str) -> None:
        """Raise the error that writing there has now."""
        number = errno.ENOSPC if path.startswith(tuple(self.full)) else self.errno if self.has(path) else 0
        if number:
            raise OSError(number, os.strerror(number), path)

    def write(self, fd: int, data: Any) -> int:
        """Write as os.write() does."""
        path = path_of(fd)
        if self.errno == errno.ENOSPC and self.has(path) and self.has_room:
            self.has_room = False
            data = data[: len(data) // 2 + 1]
        else:
            self.check(path)
        return self._write(fd, data)

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of the module ``os`` as it is on this disk. Its last argument is a path or descriptor."""

        def call(*given: Any, **named: Any) -> Any:
            path = path_of(given[-1])
            self._world.pause(_COST_S)
            self._be_slow(path)
            self.check(path)
            return function(*given, **named)

        return call

    def copying(self, copy: Callable[..., int]) -> Callable[..., int]:
        """Return a function that copies bytes from one descriptor to another, which takes long on a slow disk."""

        def call(reader: int, writer: int, *given: int) -> int:
            self._be_slow(path_of(writer))
            return copy(reader, writer, *given)

        return call

    def _be_slow(self, path: str) -> None:
        if self.slow and self.has(path) and self._world.current is not None:
            host = self._world.current.process.host
            self._world.pause(2 * self.slow.get(host.name if host else "", 0.0))

    def rename(self, rename: Callable[..., Any]) -> Callable[..., Any]:
        """Return os.rename() or os.replace() of this disk, which remembers what a power cut may undo."""

        def call(source: Any, target: Any) -> None:
            if self._forgets and self.has(os.fspath(target)):
                old = ""
                if os.path.isfile(target):
                    old = f"{self._root}.old-{self._world.count}"
                    os.link(target, old)
                self._renames.append((os.fspath(source), os.fspath(target), old, self._sizes()))
            rename(source, target)

        return self.timed(call)

    def flush(self, fd: int) -> None:
        """Do what os.fsync() does."""
        status, path = os.fstat(fd), path_of(fd)
        self._durable[status.st_ino] = status.st_size
        renames = [os.path.dirname(target) for _, target, _, _ in self._renames]
        if path in renames:  # file systems keep the order of what they do with names
            del self._renames[: len(renames) - renames[::-1].index(path)]

    def _sizes(self) -> dict[str, int]:
        return {str(path): path.lstat().st_size for path in Path(self._root).rglob("*")}

    def lose_power(self) -> list[str]:
        """Forget what was not flushed, or a part of that. Return what was lost."""
        draw, lost = self._world.random, []
        before = {}
        for _ in range(draw.randint(0, len(self._renames))):
            source, target, old, before = self._renames.pop()
            with contextlib.suppress(OSError):  # deleted since
                _rename(target, source)
                lost.append(f"{source} is not renamed")
                if old:
                    _rename(old, target)
            # File systems write down what was done before something else before that.
            for path in sorted(self._sizes().keys() - before.keys() - {source, target}, reverse=True):
                os.rmdir(path) if os.path.isdir(path) else os.unlink(path)
        for path, size in sorted(self._sizes().items()):
            if os.path.isfile(path):
                inode = os.stat(path).st_ino
                durable = self._durable.get(inode, 0)
                most = max(durable, min(size, before.get(path, size)))
                kept = draw.choice([durable, draw.randint(durable, most), most]) if durable < size else size
                os.truncate(path, kept)
                self._durable[inode] = kept
                if kept < size:
                    lost.append(f"{path} has {kept} of {size} bytes")
        return [text.replace(f"{self._root}/", "") for text in lost]


def path_of(file: Any) -> str:
    """Return the path of a file that was given as one, or as a descriptor."""
    if isinstance(file, int):
        try:
            return os.readlink(f"/proc/self/fd/{file}")
        except OSError:
            return ""
    return os.fspath(file) if isinstance(file, (str, os.PathLike)) else ""
