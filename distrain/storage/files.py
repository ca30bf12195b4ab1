"""Local files: list them, write small ones, and flush them to disk. Runs in: coordinator, worker, uploader."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from distrain.errors import CheckpointError
from distrain.storage.checkpoint import MANIFEST_FILE, PENDING_FILE
from distrain.storage.file_transfer import flush, folders_below, make_folders, naming
from distrain.storage.ownership import open_without_links

if TYPE_CHECKING:
    from collections.abc import Iterable

_KINDS = {stat.S_IFIFO: "named pipe", stat.S_IFSOCK: "socket"}


def list_files(folder: Path) -> list[str]:
    """Return the relative path of every file below ``folder``, sorted. Follow links.

    Raise CheckpointError for a broken or circular link, for a pipe, socket or device, and for a reserved name.
    """
    found: list[str] = []
    _add_files(folder, "", found)
    return sorted(found)


def _add_files(top: Path, inner: str, found: list[str]) -> None:
    """Add the files below ``top/inner`` to a list. There may be many: no Path objects, and no stat() but of links."""
    with os.scandir(os.path.join(top, inner)) as entries:
        for entry in entries:
            name = f"{inner}{entry.name}"
            if entry.is_dir():
                if entry.is_symlink():
                    _check_circle(top, Path(entry.path))
                _add_files(top, f"{name}/", found)
            elif entry.name in (MANIFEST_FILE, PENDING_FILE):
                _check_is_manifest(Path(entry.path))
            elif entry.is_file():
                found.append(name)
            else:
                _refuse(entry)


def _refuse(entry: os.DirEntry[str]) -> NoReturn:
    """Raise CheckpointError for what is neither a file nor a directory, OSError for a file that was deleted."""
    try:
        status = entry.stat()
    except OSError as error:
        if not entry.is_symlink():
            raise
        raise CheckpointError(f"{entry.path} is a link to {os.readlink(entry.path)}, which does not exist") from error
    raise CheckpointError(
        f"{entry.path} is a {_KINDS.get(stat.S_IFMT(status.st_mode), 'device')}, which no checkpoint can hold; "
        "delete it, or write the checkpoint's files into a directory of their own"
    )


def _check_is_manifest(path: Path) -> None:
    """Raise CheckpointError for a user's file with the name of a manifest.

    A checkpoint that is reported again has the manifest of its first commit, which is not one of its files.
    """
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        content = None
    if not isinstance(content, dict) or not {"attempt", "files", "index"} <= content.keys():
        raise CheckpointError(f"{path}: distrain writes its own {path.name} into every checkpoint; rename yours")


def copy_folders(source: Path, target: Path) -> None:
    """Make the directories below ``source`` also below ``target``. Raise OSError.

    Copying files makes only the directories that have files.
    """
    make_folders(target, folders_below(source))


def _check_circle(top: Path, folder: Path) -> None:
    """Raise CheckpointError for a link to a directory that it is in."""
    real, parents = folder.resolve(), folder.relative_to(top).parents
    if any((top / parent).resolve().is_relative_to(real) for parent in parents):
        raise CheckpointError(f"{folder} is a circular link: it is inside {os.readlink(folder)}, to which it leads")


def write_atomically(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Replace a file so that readers see the old or the new one, never a part. Raise OSError.

    sync: flush the file to disk first, so that this holds after a power cut, too.
    """
    temporary = path.with_name(f"{path.name}.new")
    try:
        write_file(temporary, data, sync=sync)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_output(path: Path, data: bytes) -> None:
    """Write a file that the user has named: into a pipe, a device or what a link leads to, else atomically."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_bytes(data)
    else:
        write_atomically(path, data, sync=False)


def write_file(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Write a file. ``sync``: flush it to disk. Raise OSError."""
    with naming(path), open(path, "wb", opener=open_without_links) as file:
        file.write(data)
        if sync:
            file.flush()
            os.fsync(file.fileno())


def sync_directories(root: Path, files: Iterable[str]) -> None:
    """Flush the directories of files, whose paths are relative to ``root``, and ``root`` itself. Raise OSError."""
    for folder in {Path(), *(parent for file in files for parent in Path(file).parents)}:
        flush(root / folder)
