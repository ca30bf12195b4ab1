"""The files of the user's own project, which hosts that share no files with this machine need for their workers.

They are those that git knows of the repositories that hold the directories on sys.path, else those that can be imported
from these directories, and the packages that this process has imported from elsewhere. Secrets, large files and links
that lead out of the project are left out, unless the user names them. Runs in: coordinator.
"""

from __future__ import annotations

import os
import re
import stat
import sys
import sysconfig
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from enum import Enum
from importlib.machinery import all_suffixes
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from distrain.errors import LaunchError
from distrain.shipping.shipped_file import ShippedFile, digest_of
from distrain.system.process import output_of, own_package

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set

LIMIT_BYTES = 100_000_000
MOST_FILES = 20_000
_SMALL_BYTES = 1_000_000
"""Files that are no code are shipped up to this size."""
_MOST_NAMED = 3
"""Number of files that a note or an error names."""

_CODE = (".py", ".so", ".pyd")
_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages"})
_SKIPPED_IN_PATH = re.compile(rf"(?:^|/)(?:{'|'.join(sorted(_SKIPPED))})/")
_SECRET = re.compile(
    r"/(?:"
    r"\.(?:ssh|aws|gnupg|kube|docker)/"
    r"|(?:"
    r"\.env(?:\.(?!(?:[^/]*\.)?(?:example|sample|template)\Z)[^/]*)?"
    r"|[^/]*\.(?:pem|key|p12|pfx|kdbx)"
    r"|id_(?:rsa|dsa|ecdsa|ed25519)(?![^/]*\.py\Z)[^/]*"
    r"|\.netrc|\.pgpass|\.git-credentials|\.pypirc|\.htpasswd|credentials(?:\.json)?|service-account[^/]*\.json"
    r"|kubeconfig"
    r")\Z)",
    re.IGNORECASE,
)
"""Matches the absolute path of a file that usually holds a secret."""

_GIT = ("git", "ls-files", "-z", "-t", "--cached", "--others", "--exclude-standard")
_UNTRACKED = "?"
"""How git marks a file that is neither tracked nor ignored."""


class _Wanted(Enum):
    """The files to take of a directory that git does not list: code, also small files, or all."""

    CODE = 1
    SMALL = 2
    ALL = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """The user's own files that hosts need.

    files: sorted by their paths; at first without digests. folders: absolute paths of the user's own directories: the
    working directory, those of sys.path, those of scripts, and those that hold a package which is imported in another
    way. notes: lines for the user about what is left out.
    """

    files: tuple[ShippedFile, ...]
    folders: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(file.size for file in self.files)

    def with_digests(self) -> Project:
        """Read the files, and return the project with their digests. Raise LaunchError if a file cannot be read."""
        read = (file if file.digest else _read(file.path) for file in self.files)
        return replace(self, files=tuple(file for file in read if file is not None))


def find_project(
    *,
    sys_path: Sequence[str],
    directory: str,
    targets: Sequence[str] = (),
    modules: Mapping[str, ModuleType] | None = None,
    named: Sequence[str] = (),
    limit_bytes: int = LIMIT_BYTES,
) -> Project:
    """Return the files that workers need, without reading them. Raise LaunchError if they are too many or too large.

    directory: the working directory, which other paths may be relative to. targets: scripts that the workers run.
    modules: those that this process has imported; by default sys.modules. named: files and directories to ship as they
    are. limit_bytes: the largest size of all files together.
    """
    interpreter = _interpreter_places()
    directory = os.path.abspath(directory)
    entries = [entry for entry in _absolute(sys_path, directory) if not _belongs_to(interpreter, entry)]
    scripts = _absolute(targets, directory)
    parents = [path for path in map(os.path.dirname, scripts) if not _belongs_to(interpreter, path)]
    own = list(dict.fromkeys(filter(os.path.isdir, [*entries, *scripts, *parents])))
    files = _absolute(map(os.path.expanduser, named), directory)

    def search(folders: Sequence[str]) -> _Search:
        found = _Search(directory, own, folders)
        found.add_own()
        for path in [*entries, *scripts]:  # an entry of sys.path may be an archive
            found.add_one(path)
        found.add_imported(dict(sys.modules if modules is None else modules), interpreter)
        for path in files:
            found.add_named(path)
        found.leave_out_runs()
        found.check_size(limit_bytes)
        return found

    repositories = list(dict.fromkeys(filter(None, map(_repository_of, [*own, directory]))))
    try:
        found = search(list(dict.fromkeys([*repositories, *own])))
    except LaunchError as error:
        if not set(repositories) - set(own):
            raise
        found = search(own)
        found.note(f"only {_some(list(map(_shown, own)))} is shipped, not the whole repository: {error}")
    return Project(files=found.files(), folders=tuple(sorted(found.folders)), notes=tuple(found.notes))


def _absolute(paths: Iterable[str], directory: str) -> list[str]:
    return [os.path.normpath(os.path.join(directory, path)) for path in paths]


# -- the search ------------------------------------------------------------------------------------------------------


class _Search:
    """Collects files, and why others are left out.

    places: the user's directories on sys.path, and those of scripts. own: those to look through: the same, or the whole
    repositories that they are in.
    """

    def __init__(self, directory: str, places: Sequence[str], own: Sequence[str]) -> None:
        self.folders = {directory, *places}
        self._notes: list[str] = []
        self._found: dict[str, os.stat_result] = {}
        self._crowded = [path for path in own if _holds_more_than_a_project(path)]
        self._own = [path for path in own if path not in self._crowded]
        self._inside = {os.path.realpath(path) for path in self._own}
        """Directories that a link may lead to."""
        self._distrain = tuple({f"{path}/" for path in (str(own_package()), os.path.realpath(own_package()))})
        self._parents_of_named: set[str] = set()
        self._left_out = _LeftOut()

    def add_own(self) -> None:
        for folder in self._crowded:
            self._walk(folder, _Wanted.CODE, deep=False)
        for folder in self._own:
            if not any(path.startswith(f"{folder}/") for path in self._found):  # else its repository was added
                self._add_tree(folder, _Wanted.CODE)

    def add_one(self, path: str) -> None:
        """Add a file that is needed wherever it is, unless it is not there. Links are followed."""
        try:
            status = os.stat(path)
        except OSError:
            return
        if stat.S_ISREG(status.st_mode):
            self._add_file(path, status, _Wanted.ALL)

    def add_named(self, path: str) -> None:
        """Add a file, or all that a directory holds. Raise LaunchError if it cannot be found."""
        try:
            status = os.stat(path)
        except OSError as error:
            raise LaunchError(f"--ship {_shown(path)}: {error.strerror}") from error
        self._parents_of_named.add(os.path.dirname(path))
        self._left_out.links.pop(path, None)
        if stat.S_ISDIR(status.st_mode):
            self._walk(path, _Wanted.ALL)
        elif stat.S_ISREG(status.st_mode):
            self._add_file(path, status, _Wanted.ALL)
        else:
            raise LaunchError(f"--ship {_shown(path)}: it is neither a file nor a directory")

    # -- directories

    def _add_tree(self, folder: str, wanted: _Wanted, sites: tuple[str, ...] = ()) -> None:
        """Add what git knows of a directory, or ``wanted`` if that is nothing, as the whole directory is ignored.

        sites: real paths of the directories that hold the links which lead here.
        """
        listed = self._listed_by_git(folder) if wanted is not _Wanted.ALL else []
        for path, tracked in listed:
            self._add(path, _Wanted.SMALL, sites, tracked=tracked)
        if not listed:
            self._walk(folder, wanted, sites)

    def _listed_by_git(self, folder: str) -> list[tuple[str, bool]]:
        """Return the paths of files, links and nested repositories that are not ignored, and if they are tracked."""
        if not _has_repository(folder):
            return []
        output = output_of(_GIT, folder)
        if output is None:
            self._left_out.unlisted.add(folder)
            return []
        lines = os.fsdecode(output).split("\0")
        # A submodule that is not there is listed as "./" if this is its directory.
        entries = [(line[2:], line[0] != _UNTRACKED) for line in lines if line and line[1:] != " ./"]
        # Not everybody ignores the virtual environment.
        name = "/pyvenv.cfg"
        skipped = tuple(path[: 1 - len(name)] for path, tracked in entries if not tracked and path.endswith(name))
        return [
            (f"{folder}/{path.rstrip('/')}", tracked)
            for path, tracked in entries
            if tracked or not (path.startswith(skipped) or _SKIPPED_IN_PATH.search(path))
        ]

    def _walk(self, folder: str, wanted: _Wanted, sites: tuple[str, ...] = (), *, deep: bool = True) -> None:
        waiting = [folder]
        while waiting:
            for entry in _entries(waiting.pop(), wanted):
                if not _is_taken(entry, wanted, deep):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                else:
                    self._add(entry.path, wanted, sites)

    # -- files

    def _add(self, path: str, wanted: _Wanted, sites: tuple[str, ...], *, tracked: bool = False) -> None:
        """Add a file, what a link leads to, or a nested repository. Other kinds of files are not shipped."""
        try:
            status = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):  # deleted, perhaps just now
            return
        except OSError as error:
            raise _unreadable(path, error) from error
        if stat.S_ISREG(status.st_mode):
            self._add_file(path, status, wanted, tracked=tracked)
        elif stat.S_ISLNK(status.st_mode):
            self._add_link(path, wanted, sites, tracked=tracked)
        elif os.path.lexists(f"{path}/.git"):  # else it is a submodule that is not there
            self._add_tree(path, wanted, sites)

    def _add_file(self, path: str, status: os.stat_result, wanted: _Wanted, *, tracked: bool = False) -> None:
        if path in self._found or path.startswith(self._distrain):
            return
        if wanted is not _Wanted.ALL:
            if _SECRET.search(path):
                self._left_out.add_secret(path, tracked=tracked)
                return
            if status.st_size > _SMALL_BYTES and not path.endswith(_CODE):
                self._left_out.large.add(path)
                return
        self._found[path] = status
        if len(self._found) > MOST_FILES:
            raise self._too_many()

    def _add_link(self, path: str, wanted: _Wanted, sites: tuple[str, ...], *, tracked: bool) -> None:
        target = os.path.realpath(path)
        try:
            status = os.stat(target)
        except OSError:  # broken
            if path.endswith(".py"):
                self._left_out.broken.add(path)
            return
        self._left_out.links.pop(path, None)  # of an earlier visit, before a directory was named
        if wanted is not _Wanted.ALL and not any(_is_below(target, folder) for folder in self._inside):
            self._left_out.links[path] = target
        elif stat.S_ISDIR(status.st_mode):
            self._add_linked_tree(path, target, wanted, sites)
        elif not stat.S_ISREG(status.st_mode) or target.startswith(self._distrain):
            return
        elif wanted is not _Wanted.ALL and _SECRET.search(target):
            self._left_out.add_secret(path, tracked=tracked)
        else:
            self._add_file(path, status, wanted, tracked=tracked)

    def _add_linked_tree(self, path: str, target: str, wanted: _Wanted, sites: tuple[str, ...]) -> None:
        sites = (*sites, os.path.realpath(os.path.dirname(path)))
        is_circle = any(_is_below(site, target) for site in sites)
        if not is_circle and not target.startswith(self._distrain) and f"{target}/" not in self._distrain:
            self._add_tree(path, wanted, sites)

    # -- imported modules

    def add_imported(self, modules: Mapping[str, ModuleType], interpreter: tuple[str, ...]) -> None:
        """Add the modules of own directories even if git ignores them, and the packages that others belong to."""
        own = tuple(f"{path}/" for path in {*self._own, *self._inside})
        elsewhere: dict[str, str] = {}
        for name, file in _files_of(modules):
            if file.startswith(own) and not _belongs_to(interpreter, file):
                self.add_one(file)
            elif not _belongs_to(interpreter, file) and not file.startswith(self._distrain):
                elsewhere[name] = file
        tops = {_top_level(name, elsewhere) for name in elsewhere}
        for name, path in sorted(tops.union(_editable(modules))):
            if name != own_package().name:
                self._add_installed(name, path)

    def _add_installed(self, name: str, path: str) -> None:
        """Add a package or a module of this name.

        Of a package git may ignore modules that were compiled in place, and yet it needs them.
        """
        if not os.path.exists(path):  # deleted, or in an archive
            return
        self.folders.add(_parent_of(name, path))
        if os.path.isdir(path):
            self._inside.add(os.path.realpath(path))
            self._add_tree(path, _Wanted.SMALL)
            self._walk(path, _Wanted.CODE)
        else:
            self.add_one(path)

    # -- the result

    def files(self) -> tuple[ShippedFile, ...]:
        """Return all files, without digests."""
        return tuple(_shipped_file(path, self._found[path]) for path in sorted(self._found))

    def leave_out_runs(self) -> None:
        """Leave out run directories of distrain, which may be in the project and need not be ignored by git."""
        tops = (os.path.dirname(path) for path in self._found if path.endswith("/run.json"))
        runs = tuple(f"{top}/" for top in tops if os.path.exists(f"{top}/metrics.jsonl"))
        if runs:
            self._found = {path: status for path, status in self._found.items() if not path.startswith(runs)}

    def check_size(self, limit_bytes: int) -> None:
        """Raise LaunchError if the files are larger than the limit."""
        size = sum(status.st_size for status in self._found.values())
        if size > limit_bytes:
            largest = self._heaviest(lambda status: status.st_size)
            raise LaunchError(
                f"the project has {_amount(size)} to ship, and the limit is {_amount(limit_bytes)}. The largest parts "
                f"are {', '.join(f'{_shown(path)} ({_amount(part)})' for path, part in largest)}. Raise the limit with "
                f"--ship-limit SIZE or ShippingConfig(limit_bytes=...), {_OTHER_CURES}"
            )

    def _too_many(self) -> LaunchError:
        largest = self._heaviest(lambda status: 1)
        return LaunchError(
            f"the project has more than {MOST_FILES:,} files to ship. Most of those seen so far are in "
            f"{', '.join(f'{_shown(path)} ({count:,})' for path, count in largest)}. Pack them into fewer files, "
            f"{_OTHER_CURES}"
        )

    def _heaviest(self, weight: Callable[[os.stat_result], int]) -> list[tuple[str, int]]:
        """Return the heaviest files and directories that are directly in a directory of the project."""
        roots = [f"{path.rstrip('/')}/" for path in self.folders | self._parents_of_named]
        weights: Counter[str] = Counter()
        for path, status in self._found.items():
            root = max((root for root in roots if path.startswith(root)), key=len, default="/")
            weights[root + path[len(root) :].partition("/")[0]] += weight(status)
        return weights.most_common(_MOST_NAMED)

    def note(self, text: str) -> None:
        """Add a line for the user."""
        self._notes.append(text)

    @property
    def notes(self) -> Iterator[str]:
        """Lines for the user about what is left out."""
        yield from self._notes
        for folder in self._crowded:
            yield f"only modules directly in {_shown(folder)} are shipped, as it holds more than a project; {_CURE}"
        yield from self._left_out.notes(self._found.keys())


def _shipped_file(path: str, status: os.stat_result, digest: str = "") -> ShippedFile:
    return ShippedFile(path, status.st_size, status.st_mtime_ns, status.st_mode & 0o777, digest)


def _read(path: str) -> ShippedFile | None:
    """Read a file. Return None if it has just been deleted."""
    try:
        return _shipped_file(path, os.stat(path), digest_of(Path(path)))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(path, error) from error


class _LeftOut:
    """What is not shipped although the user may expect it."""

    def __init__(self) -> None:
        self.large: set[str] = set()
        self.secrets: set[str] = set()
        self.links: dict[str, str] = {}
        """Links that lead out of the project, and where."""
        self.broken: set[str] = set()
        self.unlisted: set[str] = set()
        """Directories with a repository that git could not read."""

    def add_secret(self, path: str, *, tracked: bool) -> None:
        if tracked:  # nobody expects the others to be copied
            self.secrets.add(path)

    def notes(self, found: Set[str]) -> Iterator[str]:
        """Return lines for the user about files that were not found in another way."""
        for folder in sorted(self.unlisted):
            yield f"git could not list the files of {_shown(folder)}, so only code is shipped; git status tells why"
        if paths := sorted(self.links.keys() - found):
            leads = [f"{_shown(path)} (to {_shown(self.links[path])})" for path in paths]
            yield f"not shipped, as these links lead out of the project: {_some(leads)}; {_CURE}"
        if paths := sorted(self.broken - found):
            yield f"not shipped, as these links lead nowhere: {_some(list(map(_shown, paths)))}"
        if paths := sorted(self.secrets - found):
            yield f"not shipped, as they may hold secrets: {_some(list(map(_shown, paths)))}; {_CURE}"
        if paths := sorted(self.large - found):
            left = _some(list(map(_shown, paths)))
            yield f"not shipped, as they are larger than {_amount(_SMALL_BYTES)}: {left}; {_CURE}"


# -- directories -----------------------------------------------------------------------------------------------------


def _holds_more_than_a_project(folder: str) -> bool:
    """Tell if a directory is that of temporary files, the user's home, or above it."""
    real = os.path.realpath(folder)
    return _is_below(os.path.realpath(os.path.expanduser("~")), real) or real == os.path.realpath(tempfile.gettempdir())


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


def _has_repository(folder: str) -> bool:
    """Tell if a directory seems to be in a work tree of git. This costs less than to start git."""
    above = os.path.realpath(folder)
    while not os.path.lexists(os.path.join(above, ".git")):
        above, last = os.path.dirname(above), above
        if above == last:
            return False
    return True


def _repository_of(folder: str) -> str | None:
    """Return the top directory of the repository that a directory is in; None if that holds more than a project."""
    above = folder
    while not os.path.lexists(os.path.join(above, ".git")):
        above, last = os.path.dirname(above), above
        if above == last:
            return None
    return None if _holds_more_than_a_project(above) else above


def _entries(folder: str, wanted: _Wanted) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        if wanted is _Wanted.ALL:
            raise _unreadable(folder, error) from error
        return []  # neither can this process import from it


def _is_taken(entry: os.DirEntry[str], wanted: _Wanted, deep: bool) -> bool:
    if wanted is _Wanted.ALL:
        return True
    try:
        is_folder = entry.is_dir()
    except OSError:
        return False
    if not is_folder:
        return wanted is _Wanted.SMALL or entry.name.endswith(_CODE)
    return deep and _may_hold_code(entry, wanted)


def _may_hold_code(folder: os.DirEntry[str], wanted: _Wanted) -> bool:
    if folder.name in _SKIPPED or folder.name.startswith(".") or os.path.lexists(f"{folder.path}/pyvenv.cfg"):
        return False
    return wanted is _Wanted.SMALL or folder.name.isidentifier()


# -- modules ---------------------------------------------------------------------------------------------------------


def _interpreter_places() -> tuple[str, ...]:
    """Return the directories of this interpreter's own modules and programs, each with a slash at its end."""
    user = sysconfig.get_preferred_scheme("user")
    paths = [
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "scripts")),
        sysconfig.get_path("scripts", user),
        os.path.dirname(sys.executable),
    ]
    return tuple(sorted({f"{place}/" for path in filter(None, paths) for place in (path, os.path.realpath(path))}))


def _belongs_to(interpreter: tuple[str, ...], path: str) -> bool:
    """Tell if a file or an entry of sys.path is of the interpreter, or was installed there."""
    name, below = os.path.basename(path), f"{path}/"
    return (
        below.startswith(interpreter)
        or "/site-packages/" in below
        or "/dist-packages/" in below
        or name == ".ipython"
        or (name.startswith("python") and name.endswith(".zip"))
    )


def _files_of(modules: Mapping[str, ModuleType]) -> Iterator[tuple[str, str]]:
    """Return the names of modules and the files that they come from."""
    for name, contents in _contents_of(modules):
        file = contents.get("__file__")
        if isinstance(file, str) and os.path.isabs(file):
            yield name, os.path.normpath(file)


def _editable(modules: Mapping[str, ModuleType]) -> Iterator[tuple[str, str]]:
    """Return the names and paths of what setuptools has installed to be imported from where it is."""
    for finder, contents in _contents_of(modules):
        if not (finder.startswith("__editable___") and finder.endswith("_finder")):
            continue
        mapping = contents.get("MAPPING")
        for name, path in mapping.items() if isinstance(mapping, dict) else ():
            candidates = [path, *(os.path.splitext(path)[0] + suffix for suffix in all_suffixes())]
            yield from ((name, found) for found in candidates[:1] if os.path.isdir(found))
            yield from ((name, found) for found in candidates if os.path.isfile(found))


def _contents_of(modules: Mapping[str, ModuleType]) -> Iterator[tuple[str, dict[str, object]]]:
    for name, module in modules.items():
        if isinstance(module, ModuleType):
            # Anything else would make importlib's LazyLoader import the module.
            yield name, object.__getattribute__(module, "__dict__")


def _top_level(name: str, files: Mapping[str, str]) -> tuple[str, str]:
    """Return the name and the path of the outermost package or module, with a file, that a module belongs to."""
    parts = name.split(".")
    outermost = next(top for end in range(1, len(parts) + 1) if (top := ".".join(parts[:end])) in files)
    file = files[outermost]
    return outermost, os.path.dirname(file) if os.path.basename(file).startswith("__init__.") else file


def _parent_of(name: str, path: str) -> str:
    """Return the directory to import a package or module from: above all parts of its name if it is found by them."""
    folder, _, last = path.rpartition("/")
    stem = f"{folder}/{last.partition('.')[0]}"
    return stem.removesuffix("/" + name.replace(".", "/")) if stem.endswith("/" + name.replace(".", "/")) else folder


# -- texts -----------------------------------------------------------------------------------------------------------

_CURE = "name what workers need: --ship PATH"
_OTHER_CURES = "keep files out with .gitignore, or use --no-ship if all hosts have the project already"


def _unreadable(path: str, error: OSError) -> LaunchError:
    return LaunchError(f"{_shown(path)} cannot be shipped: {error.strerror}. Make it readable, {_OTHER_CURES}")


def _shown(path: str) -> str:
    return path if path.isprintable() else repr(path)


def _some(texts: Sequence[str]) -> str:
    further = f" and {len(texts) - _MOST_NAMED:,} more" if len(texts) > _MOST_NAMED else ""
    return ", ".join(texts[:_MOST_NAMED]) + further


def _amount(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 100_000 else f"{size:,} bytes"
