"""The working directory of a trial, and a fence around everything else. Runs in: coordinator, worker.

A script finds its files in the working directory of a trial, and what it writes there is the trial's. Writing elsewhere
raises an error. Native code is not seen, except for torch.save().
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_LARGEST_COPY = 1_000_000
"""Bytes; larger files are linked."""
_MOST_COPIES = 5000
"""Files that are copied. Those deeper down are linked, and directories with as many entries as a whole."""
_LINKED = (".git", ".venv", "__pycache__", "node_modules", "venv")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = ("os.link", "os.mkdir", "os.remove", "os.rename", "os.symlink", "shutil.rmtree")


def mirror(source: str | os.PathLike[str], target: Path) -> None:
    """Make a directory with the same content: small files are copied, so that they may be overwritten."""
    target.mkdir()
    folders, left = deque([(Path(source), target)]), _MOST_COPIES
    while folders:
        folder, made = folders.popleft()
        for entry in os.scandir(folder):
            copy, is_own = made / entry.name, target.resolve().is_relative_to(os.path.abspath(entry))
            with contextlib.suppress(OSError):  # it cannot be read, or has gone
                is_folder = entry.is_dir() and not entry.is_symlink() and entry.name not in _LINKED and not is_own
                if is_folder and len(os.listdir(entry)) <= left:
                    copy.mkdir()
                    folders.append((Path(entry), copy))
                elif entry.is_file() and entry.stat().st_size <= _LARGEST_COPY and left > 0:
                    shutil.copy2(entry, copy)
                    left -= 1
                else:
                    copy.symlink_to(os.path.abspath(entry))


def fence(users: Sequence[str], allowed: str) -> Callable[[object], None]:
    """From now on, raise PermissionError if Python code of this process writes anywhere but below ``allowed``.

    Caches are free, too: hidden directories of the home, and directories that variables such as HF_HOME name, unless
    they are in a directory of ``users``. Return the check, for a path.
    """
    home = os.path.expanduser("~")
    named = [value for name, value in os.environ.items() if name.endswith(("_HOME", "CACHE", "_CACHE_DIR"))]
    free = [
        os.path.realpath(path)
        for path in ("/dev", "/proc", "/run", tempfile.gettempdir(), *filter(os.path.isabs, named))
    ]

    def check(path: object) -> None:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return
        real = os.path.realpath(os.fsdecode(path))
        is_users = any(_is_below(real, root) for root in users)
        is_cache = real.startswith(f"{home}/.") or any(_is_below(real, root) for root in free)
        if not _is_below(real, allowed) and (is_users or not is_cache):
            raise PermissionError(
                f"distrain drill: the script writes {real}, which may be yours. Relative paths are redirected into the "
                "drill's directory; in arguments, write {drill} for that directory, as in --output {drill}/out"
            )

    def hear(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            if (isinstance(flags, int) and flags & _WRITING) or (isinstance(mode, str) and set(mode) & set("wax+")):
                check(path)
        elif event in _CHANGES and arguments[-1] in (-1, None, arguments[0]):  # not relative to an open directory
            for path in arguments["link" in event : 2]:
                if event != "os.mkdir" or not os.path.isdir(str(path)):  # as makedirs() tries
                    check(path)

    sys.addaudithook(hear)
    return check


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip(os.sep) + os.sep)
