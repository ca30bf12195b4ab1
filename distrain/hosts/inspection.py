"""Versions of packages, the storage, and free memory and disk space, as the workers of this host would find them.

No package is imported for it. Runs in: agent, coordinator.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.hosts.memory import memory_of_host

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from importlib.metadata import Distribution


def package_versions(packages: Iterable[str], sys_path: Sequence[str | None]) -> dict[str, str | None]:
    """Return the version of each package that an import with this path would find.

    It is None if there is no such package, and empty if the package has no readable version.
    sys_path: None in it stands for the entries of this interpreter.
    """
    from importlib.machinery import PathFinder
    from importlib.metadata import Distribution

    path = [found for entry in sys_path for found in (sys.path if entry is None else [entry])]
    versions: dict[str, str | None] = {}
    for package in packages:
        installed = next(iter(Distribution.discover(name=package, path=path)), None)
        if installed is not None:
            versions[package] = _version_of(installed)
        else:
            versions[package] = None if PathFinder.find_spec(package, path) is None else ""
    return versions


def _version_of(installed: Distribution) -> str:
    try:
        return str(installed.version or "")
    except Exception:  # a half-removed package; the exception depends on the version of Python
        return ""


def storage_problem(storage: str, probe_file: str, nonce: str) -> str | None:
    """Return why this host cannot use a directory of the coordinator's machine, or None if it can.

    probe_file: a file in it that holds ``nonce``.
    """
    try:
        os.listdir(storage)
        seen = Path(probe_file).read_text(errors="replace") if os.path.exists(probe_file) else ""
    except OSError as error:
        return f"cannot be opened: {_why(error)}"
    if nonce not in seen:
        return "is not the launching machine's"
    probe = Path(storage, f".distrain-probe-{uuid.uuid4().hex}")
    try:
        probe.write_text(nonce)
        if probe.read_text() != nonce:
            return "does not return what was written"
    except OSError as error:
        return f"cannot be written: {_why(error)}"
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return None


def _why(error: OSError) -> str:
    return error.strerror or str(error)


def disk_free_bytes(directory: str) -> int:
    """Return the free bytes of the disk that holds a directory; -1 if unknown."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage(directory).free
    return -1


def memory_free_bytes() -> int:
    """Return the free memory of the host in bytes."""
    used, total = memory_of_host()
    return total - used
