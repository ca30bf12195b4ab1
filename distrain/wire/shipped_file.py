"""A file of the user's project as the hosts are told of it, and its digest.

Runs in: coordinator, agent.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
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
    digest: str

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


def digest_of(path: Path) -> str:
    """Return the digest of a file's content: 40 hexadecimal digits of BLAKE2b. Raise OSError."""
    hasher = hashlib.blake2b(digest_size=20)
    with path.open("rb", buffering=0) as file:
        while data := file.read(_READ_BYTES):
            hasher.update(data)
    return hasher.hexdigest()
