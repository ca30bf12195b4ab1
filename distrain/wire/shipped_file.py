"""A file of the user's machine as hosts are told of it, and the digest of a project. Runs in: coordinator, agent."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable


class ShippedFile(NamedTuple):
    """One file.

    path: absolute, on the coordinator's machine.
    size: in bytes. mtime_ns: time of the last change, in nanoseconds since 1970. mode: permission bits.
    ctime_ns: time at which the file was last changed in any way, which no tool sets back.
    """

    path: str
    size: int
    mtime_ns: int
    mode: int
    ctime_ns: int = 0

    @classmethod
    def found(cls, path: str, status: os.stat_result) -> ShippedFile:
        """Return a file with this status."""
        return cls(path, status.st_size, status.st_mtime_ns, status.st_mode & 0o777, status.st_ctime_ns)

    @property
    def is_in_place(self) -> bool:
        """True if this host has a file at that path with the same size and time of the last change.

        Then it shares the file with the user's machine, or has the same copy.
        """
        try:
            status = os.stat(self.path)
        except OSError:
            return False
        return (status.st_size, status.st_mtime_ns) == (self.size, self.mtime_ns)


def project_digest(files: Iterable[ShippedFile], folders: Iterable[str]) -> str:
    """Return the digest of a whole project. It changes whenever a file is written; no file is read for it."""
    text = f"{list(map(tuple, files))} {sorted(folders)}"
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:40]
