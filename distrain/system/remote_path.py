"""A place on a filesystem that is reached through fsspec: S3, GCS, ... Runs in: anywhere.

Every operation is tried again for a while when the storage does not answer, and what finally fails is an OSError that
names the URL and the cause.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import inspect
import os
import pickle
import tempfile
import time
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import IO, TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote_to_bytes

import cloudpickle

from distrain.system.log import warn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from fsspec import AbstractFileSystem

_PATIENCE_VARIABLE = "DISTRAIN_STORAGE_PATIENCE_S"
_PATIENCE_S = 300.0
OPENING_PATIENCE_S = 5.0
"""When a run begins: a wrong address is to be known in seconds."""
_QUIET_S = 3.0
"""Troubles that pass within this are not worth a word."""
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 10.0
_FINAL = (
    PermissionError,
    FileNotFoundError,
    FileExistsError,
    NotADirectoryError,
    IsADirectoryError,
    NotImplementedError,
    TypeError,
    ValueError,
    ImportError,
)
"""What another try cannot change."""
_FINAL_NUMBERS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENAMETOOLONG})
"""The same, of a local file that is copied to or from."""
_FINAL_NAMES = frozenset({"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "ParamValidationError"})
"""The same of botocore, which need not be installed."""
_VERSION_MARK = "?versionId="
_VERSION_KEYS = ("ETag", "etag", "md5Hash", "content_settings.content_md5", "mtime", "created")
"""What tells an object from another one of the same name, in the order of preference; each filesystem has its name."""


def _patience_s() -> float:
    text = os.environ.get(_PATIENCE_VARIABLE, str(_PATIENCE_S))
    with contextlib.suppress(ValueError):
        if (patience_s := float(text)) >= 0:
            return patience_s
    raise OSError(f"the environment variable {_PATIENCE_VARIABLE} must be a number of seconds, 0 or more, got {text!r}")


_T = TypeVar("_T")
_tell: Callable[[str], None] = warn


def tell_troubles_to(hear: Callable[[str], None]) -> None:
    """Have ``hear`` told when a storage does not answer and will be tried again; otherwise it is shown as a warning."""
    global _tell
    _tell = hear


# -- which filesystem ------------------------------------------------------------------------------------------------


def is_url(path: str) -> bool:
    """Whether a path says which filesystem it is on; ``file://`` included. What Path has made of an absolute path never
    does, also if a name in it has ``::``, with which fsspec chains filesystems.
    """
    return "://" in path or ("::" in path and path.partition("::")[0] in _protocols())


def _protocols() -> set[str]:
    from fsspec import available_protocols

    return set(available_protocols())


def as_fsspec(filesystem: Any) -> AbstractFileSystem:
    """The filesystem itself, or fsspec's view of pyarrow's. Raises TypeError for anything else."""
    from fsspec import AbstractFileSystem

    if isinstance(filesystem, AbstractFileSystem):
        return filesystem
    if type(filesystem).__module__.partition(".")[0] == "pyarrow":
        from fsspec.implementations.arrow import ArrowFSWrapper

        return ArrowFSWrapper(filesystem)
    raise TypeError(
        f"a filesystem must be fsspec's (fsspec.filesystem('s3', ...)) or pyarrow's (pyarrow.fs), got {filesystem!r}"
    )


def locate(path: str | os.PathLike[str], filesystem: Any = None) -> Path | RemotePath:
    """Where a path or URL leads to: an absolute local path, or a place elsewhere. Nothing is looked at yet.

    ``file://`` URLs are decoded (%20 is a space), which makes this the inverse of :meth:`pathlib.Path.as_uri`. Raises
    OSError if the filesystem that a URL names cannot be had, or for what was a URL before it became a Path.
    """
    text = os.fspath(path)
    if isinstance(path, PurePath):
        _refuse_former_url(path)
    if filesystem is not None:
        given = as_fsspec(filesystem)
        local = _local_path(given, text)
        return RemotePath(text.rstrip("/"), given) if local is None else Path(os.path.abspath(local))
    scheme, separator, rest = text.partition("://")
    if separator and scheme in ("file", "local"):
        return Path(os.path.abspath(Path(os.fsdecode(unquote_to_bytes(rest))).expanduser()))
    if is_url(text):
        place = RemotePath(text.rstrip("/") if rest.strip("/") else f"{scheme}://")
        _ = place.filesystem  # a name that no filesystem has is known at once
        return place
    return Path(os.path.abspath(Path(text).expanduser()))


def _refuse_former_url(path: PurePath) -> None:
    protocol, colon, rest = (path.parts or ("",))[0].partition(":")
    if colon and not rest and protocol in _protocols():
        raise OSError(f"{path} is a {type(path).__name__}, in which a URL loses a slash: give the URL as a string")


def _local_path(filesystem: Any, path: str) -> str | None:
    """What a path in the local filesystem, or in one that shows a part of it, is called there; None in another one."""
    match type(filesystem).__name__:
        case "DirFileSystem":
            return _local_path(filesystem.fs, filesystem._join(path))
        case "ArrowFSWrapper":
            return _local_path(filesystem.fs, path)
        case "SubTreeFileSystem":
            return _local_path(filesystem.base_fs, f"{filesystem.base_path}/{path}")
    if _protocol(filesystem) != "file":
        return None
    stripped: str = filesystem._strip_protocol(path) if hasattr(filesystem, "_strip_protocol") else path
    return stripped


def _protocol(filesystem: Any) -> str:
    """Its name, as fsspec or pyarrow says; that of what it wraps, if it is a wrapper."""
    match type(filesystem).__name__:
        case "DirFileSystem" | "ArrowFSWrapper":
            return _protocol(filesystem.fs)
        case "SubTreeFileSystem":
            return _protocol(filesystem.base_fs)
    protocol: Any = filesystem.protocol if hasattr(filesystem, "protocol") else filesystem.type_name
    name: str = protocol if isinstance(protocol, str) else protocol[0]
    return "file" if name == "local" else name


def encode_filesystem(filesystem: AbstractFileSystem | None) -> str:
    """As text, for other processes; empty for None. Raises OSError if it cannot be pickled."""
    if filesystem is None:
        return ""
    try:
        return base64.b64encode(cloudpickle.dumps(filesystem)).decode()
    except Exception as error:
        raise OSError(f"{type(filesystem).__name__} cannot be used by other processes: {error!r}") from error


def decode_filesystem(text: str) -> AbstractFileSystem | None:
    """What :func:`encode_filesystem` made."""
    return pickle.loads(base64.b64decode(text)) if text else None  # noqa: S301 - our own


def own_temporary_path() -> Path:
    """Return where :func:`own_temporary_directory` makes its directories, without looking there."""
    return Path(tempfile.gettempdir(), f"distrain-{os.getuid()}")


def own_temporary_directory(name: str) -> Path:
    """A directory of this user's alone, the same for all processes of the host that have the same TMPDIR. Raises
    OSError if somebody else has made it.
    """
    folder = own_temporary_path()
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid() or folder.is_symlink():
        raise PermissionError(f"{folder} belongs to somebody else; set TMPDIR to a directory of your own")
    inner = folder / name
    inner.mkdir(mode=0o700, exist_ok=True)
    return inner


# -- a place ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RemotePath:
    """A directory or file elsewhere.

    url: as people write it; a path within ``given``, if that is not None. patience_s: for how long what may be a
    passing trouble is tried again; default: what the environment says (DISTRAIN_STORAGE_PATIENCE_S), or 300; raises
    OSError if that is no number.
    """

    url: str
    given: AbstractFileSystem | None = None
    patience_s: float = field(default_factory=_patience_s)

    @property
    def filesystem(self) -> AbstractFileSystem:
        """Raises OSError if what the URL needs is not installed, or does not exist."""
        return self._resolved[0]

    @property
    def path(self) -> str:
        """Within the filesystem."""
        return self._resolved[1]

    @property
    def _resolved(self) -> tuple[AbstractFileSystem, str]:
        found = self._found()
        if _VERSION_MARK in self.url and _protocol(found[0]) in ("s3", "s3a"):
            raise OSError(
                f"{self.url}: s3fs takes what follows {_VERSION_MARK!r} for a version of the object, not for a part of "
                "its name: give the file, or the run, another name"
            )
        return found

    def _found(self) -> tuple[AbstractFileSystem, str]:
        if self.given is not None:
            return self.given, self.given._strip_protocol(self.url)
        import fsspec

        try:
            if not _has_names_like_a_chain(self.url):
                found: tuple[AbstractFileSystem, str] = fsspec.core.url_to_fs(self.url)
                return found
            kind = fsspec.get_filesystem_class(fsspec.core.split_protocol(self.url)[0])
            return kind(**kind._get_kwargs_from_urls(self.url)), kind._strip_protocol(self.url)
        except (ImportError, ValueError, OSError) as error:
            raise OSError(f"{self.url}: {error}") from error

    @property
    def name(self) -> str:
        return self.url.rstrip("/").rpartition("/")[2]

    @property
    def is_of_this_process(self) -> bool:
        """Whether other processes cannot get at it: ``memory://``, or a filesystem that cannot be pickled."""
        if _protocol(self.filesystem) == "memory":
            return True
        try:
            encode_filesystem(self.given)
        except OSError:
            return True
        return False

    @property
    def parent(self) -> RemotePath:
        """What it is in."""
        above = self.url.rpartition("/")[0]
        return replace(self, url=f"{above}/" if above.endswith(":/") else above)

    def __truediv__(self, name: str) -> RemotePath:
        return replace(self, url=f"{self.url}{name}" if self.url.endswith("://") else f"{self.url}/{name}")

    def __str__(self) -> str:
        return self.url

    # -- reading --------------------------------------------------------------------------------------------------

    def read(self) -> bytes:
        """Raises FileNotFoundError, OSError."""
        data: bytes = self._try("read", lambda fs, path: fs.cat_file(path))
        return data

    def exists(self) -> bool:
        """Whether there is a file of that name, or anything below it."""
        return bool(self._try("look for", lambda fs, path: fs.exists(path)))

    def names(self) -> list[str]:
        """What is directly below, sorted; empty if there is no such directory."""

        def ls(fs: AbstractFileSystem, path: str) -> list[str]:
            try:
                return [str(entry).rstrip("/").rpartition("/")[2] for entry in fs.ls(path, detail=False)]
            except FileNotFoundError:
                return []

        return sorted(name for name in self._try("list", ls) if name)

    def files(self) -> dict[str, tuple[int, str]]:
        """Relative path -> size in bytes and version of every file below. The version is another one when the file was
        written again; empty where the filesystem does not tell.
        """

        def find(fs: AbstractFileSystem, path: str) -> dict[str, tuple[int, str]]:
            found = fs.find(path, detail=True)
            start = len(path.rstrip("/")) + 1
            facts = {name[start:]: (int(info["size"] or 0), _version(info)) for name, info in found.items()}
            return {name: fact for name, fact in facts.items() if name}

        files: dict[str, tuple[int, str]] = self._try("list", find)
        return files

    def get(self, name: str, target: Path) -> None:
        """Copy a file from below here to a local one."""
        target.parent.mkdir(parents=True, exist_ok=True)
        (self / name)._try(f"write {target} from", lambda fs, path: fs.get_file(path, str(target)))

    def get_all(self, names: Sequence[str], target: Path) -> None:
        """Copy files from below here to below a local directory, many at once where the filesystem can."""
        targets = [target / name for name in names]
        for folder in {path.parent for path in targets}:
            folder.mkdir(parents=True, exist_ok=True)
        paths = [str(path) for path in targets]
        self._try(f"write {target} from", lambda fs, path: fs.get([f"{path}/{name}" for name in names], paths))

    def read_with(self, action: Callable[[IO[bytes]], _T]) -> _T:
        """Return what ``action`` makes of the open file, in which it may seek. Raises FileNotFoundError, OSError."""

        def read(fs: AbstractFileSystem, path: str) -> _T:
            with fs.open(path, "rb") as file:
                return action(file)

        return self._try("read", read)

    def chunks(self, size: int = 4 << 20) -> Iterable[bytes]:
        """The content, in turn."""
        with self._try("read", lambda fs, path: fs.open(path, "rb", block_size=size)) as file:
            while data := file.read(size):
                yield data

    def crc32(self) -> tuple[int, int]:
        """Size in bytes and crc32 of the content, all of which is read."""
        size = crc = 0
        for data in self.chunks():
            size, crc = size + len(data), zlib.crc32(data, crc)
        return size, crc

    # -- writing --------------------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        self._make_parent()
        self._try("write", lambda fs, path: fs.pipe_file(path, data))

    def create(self, data: bytes) -> None:
        """Raises FileExistsError if there is such a file already; two that do this at once: on filesystems that can
        (S3, GCS, ...), one of them fails.
        """
        self._make_parent()
        self._try("create", lambda fs, path: fs.pipe_file(path, data, mode="create"))

    def put(self, source: Path, name: str) -> None:
        """Copy a local file to below here."""
        target = self / name
        target._make_parent()
        target._try("write", lambda fs, path: fs.put_file(str(source), path))

    def put_all(self, source: Path, names: Sequence[str]) -> None:
        """Copy files from below a local directory to below here, many at once where the filesystem can."""
        for folder in {(self / name).parent.url: (self / name) for name in names}.values():
            folder._make_parent()
        sources, targets = [str(source / name) for name in names], [(self / name).path for name in names]
        self._try("write", lambda fs, path: fs.put(sources, targets))

    def remove(self) -> None:
        """Delete a file, or all that is below; harmless if there is nothing."""

        def rm(fs: AbstractFileSystem, path: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                if has_magic(path):
                    _remove_one_by_one(fs, path)
                else:
                    fs.rm(path, recursive=True)

        from fsspec.core import has_magic

        self._try("delete", rm)

    def _make_parent(self) -> None:
        """Filesystems with real directories want them; object stores take this for the bucket, and need none."""
        if _protocol(self.filesystem) not in _WITHOUT_DIRECTORIES:
            self.parent._try("make", lambda fs, path: fs.makedirs(path, exist_ok=True))

    # -- trying ---------------------------------------------------------------------------------------------------

    def _try(self, what: str, action: Callable[[AbstractFileSystem, str], _T]) -> _T:
        """Raises OSError that names us."""
        fs, path = self._resolved
        began, pause_s, tries = time.monotonic(), _FIRST_PAUSE_S, 0
        while True:
            tries += 1
            fs.invalidate_cache()  # what others wrote meanwhile counts
            try:
                return action(fs, path)
            except Exception as error:
                if _is_final(error):
                    raise self._named(what, error) from error
                spent_s = time.monotonic() - began
                if spent_s + pause_s > self.patience_s:
                    raise self._named(what, error, f" (tried {tries} times)") from error
                if spent_s < _QUIET_S <= spent_s + pause_s:
                    _tell(f"{self._named(what, error)}; trying again for {self.patience_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _named(self, what: str, error: Exception, tried: str = "") -> OSError:
        kinds = (PermissionError, FileNotFoundError, FileExistsError)
        kind = next((kind for kind in kinds if isinstance(error, kind)), OSError)
        return kind(f"cannot {what} {self.url}{tried}: {type(error).__name__}: {error}")


def _has_names_like_a_chain(url: str) -> bool:
    """Whether it has ``::`` in names, and not between filesystems of which one is in, or behind, the next."""
    import fsspec

    protocol = fsspec.core.split_protocol(url.partition("::")[0])[0]
    if "::" not in url or protocol is None:
        return False
    kinds = fsspec.get_filesystem_class(protocol).__mro__
    wanted = {name for kind in kinds for name in inspect.signature(kind.__init__).parameters}
    return not wanted & {"fo", "target_protocol"}


_WITHOUT_DIRECTORIES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "az", "adl", "http", "https", "memory"})


def _is_final(error: Exception) -> bool:
    return (
        isinstance(error, _FINAL)
        or type(error).__name__ in _FINAL_NAMES
        or (isinstance(error, OSError) and error.errno in _FINAL_NUMBERS)
    )


def _remove_one_by_one(fs: AbstractFileSystem, path: str) -> None:
    """What fsspec's rm() does, which takes such a name for a pattern, and deletes all that it matches."""
    for name, info in sorted(fs.find(path, withdirs=True, detail=True).items(), reverse=True):
        if info["type"] != "directory":
            fs.rm_file(name)
        elif _protocol(fs) not in _WITHOUT_DIRECTORIES:
            fs.rmdir(name)


def _version(info: dict[str, Any]) -> str:
    return next((str(info[key]) for key in _VERSION_KEYS if info.get(key)), "")
