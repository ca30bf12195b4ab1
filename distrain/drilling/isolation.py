"""The isolation of a trial: whatever it writes, the user's files stay as they are. Runs in: coordinator, worker.

Where the kernel allows it, a trial has a mount namespace of its own. There, the working directory, the script's
directory and the home are overlays: the user's files are read, and changes go to the trial's directory, for every path
and program. Everything else is read-only, except for :data:`_SHARED` and caches. Otherwise, a trial works in a copy,
and Landlock makes everything else read-only. The same holds for ranks on other hosts, which get copies of the project.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import stat
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.errors import JobError
from distrain.system.text import count, size
from distrain.transfer.host_side.host_cache import delete
from distrain.transfer.project.directories import is_below

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

_SHARED = ("/dev", "/proc", "/run")
"""System directories in which trials write like any other program."""
_TEMPORARY = ("/var/tmp", "/tmp")  # noqa: S108 - the system's
"""Directories for temporary files: the one with the drill's own directory is shared, the other gets an overlay."""
_CACHES = ("~/.cache", "~/.nv", "~/.triton", "/tmp/nvidia-mps")  # noqa: S108 - that is its name
"""The user's own, so that nothing is downloaded or compiled again, and the sockets of CUDA's server."""
_CHECKED_BY_SSH = ("/etc/ssh/ssh_config.d", "/etc/crypto-policies/back-ends")
"""Files that ssh reads only if they belong to the user or to root, who is unknown in a user namespace."""
_MOST_COPIED = 2_000_000_000
"""Bytes that are copied for a trial, where no overlay is allowed."""
_MOST_FILES = 200_000
_AT_FDCWD, _RECURSIVE, _CLONE, _EMPTY_PATH = -100, 0x8000, 1, 4
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""Numbers of system calls, the same on all architectures."""
_NEW_MOUNTS, _NEW_USERS, _SLAVES = 0x20000, 0x10000000, 0x84000
_NO_NEW_PRIVILEGES = 38
_WRITES = (1 << 1) | sum(1 << right for right in range(4, 13))
_REFER, _TRUNCATE = 1 << 13, 1 << 14
"""Rights of linux/landlock.h; the last two came with its versions 2 and 3."""


def _call(function: str | int, *arguments: object) -> int:
    """Call a function of the C library, or a system call by its number. Raise OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    values = [os.fsencode(value) if isinstance(value, str) else value for value in arguments]
    made = getattr(libc, function)(*values) if isinstance(function, str) else libc.syscall(function, *values)
    if made < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")
    return int(made)


def _number(value: int, length: int = 8) -> bytes:
    return value.to_bytes(length, sys.byteorder)


def scratch(roots: Collection[str]) -> Path:
    """Make the directory of a drill, outside the directories that it isolates."""
    usual = os.path.realpath(tempfile.gettempdir())
    tops = [top for top in (usual, *_TEMPORARY, usual) if os.access(top, os.W_OK) and not _is_in(top, _own(roots))]
    apart = [top for top in tops if top != _TEMPORARY[1] and not any(is_below(root, top) for root in roots)]
    return Path(tempfile.mkdtemp(prefix="distrain-drill-", dir=[*apart, *tops[::-1], None][0])).resolve()


def _own(roots: Collection[str]) -> list[str]:
    """Return the user's directories: ``roots``, and the home unless it is in one of them."""
    home = os.path.realpath(os.path.expanduser("~"))
    return [*roots] if home == "/" or _is_in(home, roots) else [home, *roots]


def _is_in(path: str, folders: Iterable[str]) -> bool:
    return any(is_below(path, folder) for folder in folders)


def _caches(roots: Collection[str]) -> list[str]:
    """Return the user's caches, except for those that contain a directory to be isolated, or are in one."""
    named = [
        value
        for name, value in os.environ.items()
        if name.endswith(("CACHE", "CACHE_DIR", "CACHE_HOME")) or name in ("HF_HOME", "TORCH_HOME")
    ]
    found = []
    for path in map(os.path.realpath, (*map(os.path.expanduser, _CACHES), *filter(os.path.isabs, named))):
        holds = any(is_below(root, path) for root in _own(roots))
        if os.path.isdir(path) and not holds and not _is_in(path, roots):
            found.append(path)
    return found


# -- a mount namespace -----------------------------------------------------------------------------------------------


def inside_file(folder: Path) -> Path:
    """Return a file that only processes in the namespace of a trial can see."""
    return folder / "inside/here"


def enter(folder: Path, roots: Sequence[str]) -> None:
    """Move this process, which has one thread, into a namespace with overlays of ``roots``. Raise OSError.

    folder: the trial's directory, which keeps the changes. The process has too many rights until it executes a program.
    """
    here, user, group = os.path.realpath("."), os.geteuid(), os.getegid()
    checked: tuple[str, ...] = ()
    try:
        _call("unshare", _NEW_MOUNTS)
    except OSError:
        _call("unshare", _NEW_MOUNTS | _NEW_USERS)
        checked = _CHECKED_BY_SSH
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path("/proc/self", name).write_text(text)
    _call("mount", "none", "/", None, ctypes.c_ulong(_SLAVES), None)
    shared = [os.path.realpath(path) for path in (*_SHARED, *_TEMPORARY) if os.path.isdir(path)]
    temporary = [path for path in shared if path in _TEMPORARY and not is_below(str(folder), path)]
    caches = {path: _clone(path) for path in _caches(roots)}
    clones = {path: _clone(path) for path in (*shared, str(folder.parent))}
    _call(_MOUNT_SETATTR, _AT_FDCWD, "/", _RECURSIVE, _number(1) + bytes(24), 32)  # read-only
    _attach(clones)
    own = {path: _file_systems(path) for path in (*temporary, *_own(roots))}  # before an overlay hides another one
    for index, (path, found) in enumerate(own.items()):
        try:
            _overlay(found, folder, str(roots.index(path)) if path in roots else f"other {index}")
        except OSError:  # then the home stays read-only
            if path in roots:
                raise
    _attach(caches)
    for place in filter(os.path.isdir, checked):
        _replace(place, {path.name: path.read_bytes() for path in Path(place).iterdir() if path.is_file()})
    marker = inside_file(folder)
    marker.parent.mkdir(exist_ok=True)
    _replace(str(marker.parent), {marker.name: b""})
    os.chdir(here)


def _replace(place: str, files: Mapping[str, bytes]) -> None:
    """Make a directory hold only these files, in memory, for processes of this namespace."""
    _call("mount", "tmpfs", place, "tmpfs", ctypes.c_ulong(0), "mode=755")
    for name, data in files.items():
        Path(place, name).write_bytes(data)
        Path(place, name).chmod(0o644)


def _clone(path: str) -> int:
    """Return a descriptor of a copy of the mounts at a path, for :func:`_attach`."""
    return _call(_OPEN_TREE, _AT_FDCWD, path, _CLONE | _RECURSIVE | os.O_CLOEXEC)


def _attach(clones: dict[str, int]) -> None:
    for path, fd in clones.items():
        _call(_MOVE_MOUNT, fd, "", _AT_FDCWD, path, _EMPTY_PATH)
        os.close(fd)


def _file_systems(root: str) -> list[tuple[str, int, int]]:
    """Return a directory and the mount points in it, each with a descriptor of itself and of a clone."""
    lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    code = re.compile(rb"\\([0-7]{3})")
    points = {os.fsdecode(code.sub(lambda found: bytes([int(found[1], 8)]), line.split()[4])) for line in lines}
    inner = sorted(point for point in points if is_below(point, root) and point != root)
    return [(path, os.open(path, os.O_PATH | os.O_CLOEXEC), _clone(path)) for path in (root, *inner)]


def _overlay(file_systems: list[tuple[str, int, int]], folder: Path, name: str) -> None:
    """Mount an overlay on each. Only the first must succeed; others may stay read-only. Raise OSError."""
    is_root = os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split()[1:] == ["0", "4294967295"]
    options = "redirect_dir=on" if is_root else "userxattr"  # root in a user namespace may not do the former
    for index, (path, lower, clone) in enumerate(file_systems):
        upper, work = (folder / use / name / str(index) for use in ("changes", "kernel"))
        layers = f"lowerdir=/proc/self/fd/{lower},upperdir={upper},workdir={work},index=off,{options}"
        try:
            if not upper.exists():
                upper.mkdir(parents=True)
                shutil.copystat(path, upper)
            work.mkdir(parents=True, exist_ok=True)
            _call("mount", "overlay", path, "overlay", ctypes.c_ulong(0), layers)
        except OSError:
            if not index:
                raise
            _attach({path: clone})


# -- a copy ----------------------------------------------------------------------------------------------------------


def mirror(source: str, target: Path, why: str, fresh: Collection[str] = ()) -> None:
    """Copy a directory, without virtual environments. Links that lead into it lead into the copy.

    why: why it cannot be isolated without a copy. fresh: relative paths that are left out.

    Raises JobError if more than :data:`_MOST_COPIED` would have to be copied.
    """
    copies: list[tuple[str, Path]] = []
    sizes: Counter[str] = Counter()
    for parent, folders, names in os.walk(source):
        relative = os.path.relpath(parent, source)
        made = target / relative
        made.mkdir()
        for name in [*folders, *names]:
            path, inside = os.path.join(parent, name), os.path.normpath(os.path.join(relative, name))
            with contextlib.suppress(FileNotFoundError):  # it has vanished
                mode = os.lstat(path).st_mode
                is_copied = inside not in fresh and not os.path.exists(os.path.join(path, "pyvenv.cfg"))
                if name in folders and (stat.S_ISLNK(mode) or not is_copied):
                    folders.remove(name)
                if is_copied and stat.S_ISLNK(mode):
                    (made / name).symlink_to(_moved(path, source, target))
                elif is_copied and stat.S_ISREG(mode):
                    copies.append((path, made / name))
                    sizes[os.path.join(source, inside.split(os.sep)[0])] += os.path.getsize(path)
        if len(copies) > _MOST_FILES:
            break
    if sizes.total() > min(_MOST_COPIED, shutil.disk_usage(target).free) or len(copies) > _MOST_FILES:
        largest = ", ".join(f"{path} ({size(one)})" for path, one in sizes.most_common(3))
        raise JobError(
            f"{source} is too large to copy for each run: {count(len(copies), 'file')}, {size(sizes.total())}. The "
            f"largest are {largest}. Root doesn't need a copy, nor do users who may create namespaces (here: {why}). "
            "Otherwise, move large files elsewhere and pass absolute paths, or hide files with --fresh PATTERN"
        )
    for path, copy in copies:
        with contextlib.suppress(PermissionError):  # the script cannot read it either
            shutil.copy2(path, copy)
    for parent, _, _ in os.walk(target, topdown=False):
        shutil.copystat(os.path.join(source, os.path.relpath(parent, target)), parent)


def _moved(link: str, source: str, target: Path) -> str:
    """Return where the copy of a link leads."""
    end = os.path.realpath(link)
    return str(target / os.path.relpath(end, source)) if is_below(end, source) else end


def landlock_version() -> int:
    """Return the version of Landlock in this kernel; 0 if it has none."""
    try:
        return _call(_CREATE_RULESET, None, 0, 1)
    except OSError:
        return 0


def confine(allowed: Iterable[str], roots: Sequence[str]) -> bool:
    """Make everything but shared directories and ``allowed`` read-only for this thread and all that it starts.

    roots: the user's directories; shared ones that contain one are read-only, too. Return whether the kernel can do it.
    """
    if not (version := landlock_version()):
        return False
    rights = _WRITES | (_REFER if version > 1 else 0) | (_TRUNCATE if version > 2 else 0)
    rules = _call(_CREATE_RULESET, _number(rights), 8, 0)
    shared = [
        path for path in (*_SHARED, *_TEMPORARY) if not any(is_below(root, os.path.realpath(path)) for root in roots)
    ]
    for path in filter(os.path.isdir, (*allowed, *shared, *_caches(roots))):
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        _call(_ADD_RULE, rules, 1, _number(rights) + _number(fd, 4), 0)
        os.close(fd)
    _call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _call(_RESTRICT_SELF, rules, 0)
    os.close(rules)
    return True


def remove(folder: Path) -> None:
    """Delete the directory of a drill, including those inside it that the kernel has made unreadable."""
    for path in folder.glob("*/kernel/*/*/work"):
        path.chmod(0o700)
    delete(folder)
