"""A file of the user's project as the hosts are told of it, and the digests of files and projects.

Runs in: coordinator, agent.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_READ_BYTES = 1 << 20


class ShippedFile(NamedTuple):
    """One file.

    path: absolute, on the coordinator's machine.
    size: in bytes. mtime_ns: time of the last change, in nanoseconds since 1970. mode: permission bits.
    digest: of the content; see :func:`digest_of`. Empty if the file was not read.
    """

    path: str
    size: int
    mtime_ns: int
    mode: int
    digest: str = ""

    @classmethod
    def found(cls, path: str, status: os.stat_result, digest: str = "") -> ShippedFile:
        """Return a file with this status."""
        return cls(path, status.st_size, status.st_mtime_ns, status.st_mode & 0o777, digest)

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


def digest_of(path: Path, size: int) -> str:
    """Return the digest of the first ``size`` bytes of a file: the SHA-256 in hexadecimal digits. Raise OSError."""
    hasher = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while size and (data := file.read(min(size, _READ_BYTES))):
            hasher.update(data)
            size -= len(data)
    return hasher.hexdigest()


def project_digest(files: Iterable[ShippedFile], folders: Iterable[str]) -> str:
    """Return the digest of a whole project: its folders, and paths, modes and contents of its files, in their order."""
    lines = "".join(f"{file.path!r} {file.mode:o} {file.digest}\n" for file in files) + repr(sorted(folders))
    return hashlib.sha256(lines.encode(errors="backslashreplace")).hexdigest()[:40]
