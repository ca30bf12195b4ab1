"""The files of the user's own project, which hosts that share no files with this machine need for their workers.

They are those that git knows of the repositories that hold the directories on sys.path, else those that can be imported
from these directories, and packages that were installed to be edited. Secrets, large files and links that lead out of
the project are left out, unless the user names them. Runs in: coordinator.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.errors import LaunchError
from distrain.system.process import own_package
from distrain.transfer.project.directories import (
    Wanted,
    files_below,
    holds_more_than_a_project,
    is_below,
    listed_by_git,
    repository_of,
)
from distrain.transfer.project.left_out import CODE, LeftOut, shown, some_paths, too_large
from distrain.transfer.project.module_origins import belongs_to_interpreter, editable_installs, files_of
from distrain.wire.shipped_file import ShippedFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from types import ModuleType

_IMPORT = re.compile(r"^[ \t]*(?:import[ \t]+([\w., \t]+)|from[ \t]+(\w+)[\w.]*[ \t]+import\b)", re.MULTILINE)
_MOST_BYTES = 1_000_000
"""Larger files are data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """The user's own files that hosts need.

    files: sorted by their paths. folders: absolute paths of the user's own directories: the working directory, those of
    sys.path, those of scripts, and those that hold a package which was installed to be edited. notes: lines for the
    user about what is left out.
    """

    files: tuple[ShippedFile, ...]
    folders: tuple[str, ...]
    notes: tuple[str, ...]

    def third_party_imports(self) -> list[str]:
        """Return the top-level modules that Python files import, except the standard library's and those files.

        The files are not parsed: an import in a comment of several lines counts, too.
        """
        sources = [Path(file.path) for file in self.files if file.path.endswith(".py") and file.size <= _MOST_BYTES]
        own = {name for path in sources for name in _module_names(path, self.folders)}
        others = own | sys.stdlib_module_names | {"distrain"}
        found = dict.fromkeys(name for path in sources for name in _imports_in(path))
        return [name for name in found if name not in others]


def find_project(
    *,
    sys_path: Sequence[str],
    directory: str,
    targets: Sequence[str] = (),
    modules: Mapping[str, ModuleType] | None = None,
    named: Sequence[str] = (),
    limit_bytes: int,
) -> Project:
    """Find the files that workers need. Raise LaunchError if they are too large.

    directory: the working directory, which other paths may be relative to. targets: scripts that the workers run.
    modules: those that this process has imported; by default sys.modules. named: files and directories to ship as they
    are. limit_bytes: the largest size of all files together.
    """
    directory = os.path.abspath(directory)
    entries = [path for path in _absolute(sys_path, directory) if not belongs_to_interpreter(path)]
    entries = [path for path in entries if path == directory or not _holds_distrain(path)]
    scripts = _absolute(targets, directory)
    parents = [path for path in map(os.path.dirname, scripts) if not belongs_to_interpreter(path)]
    own = list(dict.fromkeys(filter(os.path.isdir, [*entries, *scripts, *parents])))
    named = _absolute(map(os.path.expanduser, named), directory)

    def search(folders: Iterable[str]) -> _Search:
        found = _Search({directory, *own}, list(dict.fromkeys(folders)))
        found.add_own()
        for path in [*entries, *scripts]:  # an entry of sys.path may be an archive
            found.add_one(path)
        found.add_imported(dict(sys.modules if modules is None else modules))
        for path in named:
            found.add_named(path)
        found.leave_out_distrain()
        found.check_size(limit_bytes)
        return found

    repositories = list(filter(None, map(repository_of, [*own, directory])))
    notes: list[str] = []
    try:
        found = search([*repositories, *own])
    except LaunchError as error:
        if not own or set(repositories) <= set(own):
            raise
        found = search(own)
        notes.append(f"only {some_paths(own)} is shipped, not the whole repository: {error}")
    return Project(files=found.files(), folders=tuple(sorted(found.folders)), notes=(*notes, *found.notes()))


def _holds_distrain(path: str) -> bool:
    """Tell the checkout of an editable install of distrain, which hosts get in another way."""
    return os.path.realpath(path) == os.path.realpath(own_package().parent)


def _absolute(paths: Iterable[str], directory: str) -> list[str]:
    return [os.path.normpath(os.path.join(directory, path)) for path in paths]


class _Search:
    """A collection of files to ship, and of those that are left out.

    folders: as in :class:`Project`; imported packages add some. own: directories to look through: the user's, or the
    whole repositories that they are in.
    """

    def __init__(self, folders: set[str], own: Sequence[str]) -> None:
        self.folders = folders
        self._found: dict[str, os.stat_result] = {}
        self._left_out = LeftOut()
        self._left_out.crowded = [path for path in own if holds_more_than_a_project(path)]
        self._own = [path for path in own if path not in self._left_out.crowded]
        self._inside = {os.path.realpath(path) for path in self._own}
        """Directories that a link may lead to."""

    # -- what to search

    def add_own(self) -> None:
        """Add the files of the directories to look through."""
        for folder in self._left_out.crowded:
            for path in map(str, Path(folder).glob("*")):
                if path.endswith(CODE):
                    self._add(path, Wanted.CODE)
        for folder in self._own:
            if not any(path.startswith(f"{folder}/") for path in self._found):  # else its repository was added
                self._add_tree(folder, Wanted.CODE)

    def add_one(self, path: str) -> None:
        """Add a file that is needed wherever it is, unless it is not there. Links are followed."""
        with contextlib.suppress(OSError):
            status = os.stat(path)
            if stat.S_ISREG(status.st_mode):
                self._found[path] = status

    def add_imported(self, modules: Mapping[str, ModuleType]) -> None:
        """Add the modules of own directories even if git ignores them, and what was installed to be edited."""
        own = tuple(f"{path}/" for path in {*self._own, *self._inside, *self._left_out.crowded})
        for file in files_of(modules):
            if file.startswith(own) and not belongs_to_interpreter(file):
                self.add_one(file)
        for path, folder in sorted(editable_installs(modules)):
            if os.path.realpath(path) != os.path.realpath(own_package()):
                self.folders.add(folder)
                self.add_one(path)
                if os.path.isdir(path):
                    self._inside.add(os.path.realpath(path))
                    self._add_tree(path, Wanted.SMALL)
                    self._walk(path, Wanted.CODE)  # git may ignore modules that were compiled in place

    def add_named(self, path: str) -> None:
        """Add a file, or all that a directory holds. Raise LaunchError if there is none."""
        if not (os.path.isdir(path) or os.path.isfile(path)):
            raise LaunchError(f"--ship {shown(path)}: no such file or directory (it copies from this machine)")
        self._left_out.links.pop(path, None)
        if os.path.isdir(path):
            self._walk(path, Wanted.ALL)
        else:
            self.add_one(path)

    # -- directories and files

    def _add_tree(self, folder: str, wanted: Wanted) -> None:
        """Add what git knows of a directory, or ``wanted`` if the whole directory is ignored."""
        listed = listed_by_git(folder) if wanted is not Wanted.ALL else []
        if listed is None:
            self._left_out.unlisted.add(folder)
        for path in listed or ():
            self._add(path, Wanted.SMALL)
        if not listed:
            self._walk(folder, wanted)

    def _walk(self, folder: str, wanted: Wanted) -> None:
        for path in files_below(folder, wanted):
            self._add(path, wanted)

    def _add(self, path: str, wanted: Wanted) -> None:
        """Add a file, what a link leads to, or a nested repository. Other kinds of files are not shipped."""
        target = os.path.realpath(path) if os.path.islink(path) else path
        self._left_out.links.pop(path, None)  # of an earlier visit, before a directory was named
        if target != path and wanted is not Wanted.ALL and not any(is_below(target, place) for place in self._inside):
            if os.path.exists(target):
                self._left_out.links[path] = target
        elif not os.path.isdir(target):
            if wanted is Wanted.ALL or not self._left_out.refuses(path, target):
                self.add_one(path)
        elif target == path:
            if os.path.lexists(f"{path}/.git"):  # else it is a submodule that is not there
                self._add_tree(path, wanted)
        elif not any(is_below(os.path.realpath(parent), target) for parent in Path(path).parents):  # a circle
            self._add_tree(path, wanted)

    # -- the result

    def leave_out_distrain(self) -> None:
        """Leave out the package, and run directories, which may be in the project and need not be ignored by git."""
        tops = (os.path.dirname(path) for path in self._found if path.endswith("/run.json"))
        runs = [f"{top}/" for top in tops if os.path.exists(f"{top}/metrics.jsonl")]
        own = (*runs, f"{own_package()}/", f"{os.path.realpath(own_package())}/")
        self._found = {path: status for path, status in self._found.items() if not path.startswith(own)}

    def check_size(self, limit_bytes: int) -> None:
        """Raise LaunchError if the files are larger than the limit."""
        sizes = {path: status.st_size for path, status in self._found.items()}
        if sum(sizes.values()) > limit_bytes:
            raise too_large(sizes, limit_bytes)

    def files(self) -> tuple[ShippedFile, ...]:
        """Return all files, sorted by their paths."""
        return tuple(ShippedFile.found(path, status) for path, status in sorted(self._found.items()))

    def notes(self) -> Iterator[str]:
        """Yield lines for the user about what is left out."""
        return self._left_out.notes(self._found.keys())


# -- what the files import -------------------------------------------------------------------------------------------


def _module_names(path: Path, folders: Iterable[str]) -> tuple[str, ...]:
    """Return all parts of the name that a file may have as a module: those below one of the project's directories."""
    below = [path.relative_to(folder) for folder in folders if path.is_relative_to(folder)]
    longest = max(below, key=lambda found: len(found.parts), default=Path(path.parent.name, path.name))
    return longest.with_suffix("").parts


def _imports_in(path: Path) -> Iterator[str]:
    try:
        text = path.read_text(errors="replace")
    except OSError:  # deleted since it was found
        return
    for plain, origin in _IMPORT.findall(text):
        for name in [origin] if origin else plain.split(","):
            if top := name.strip().split()[:1]:
                yield top[0].partition(".")[0]
