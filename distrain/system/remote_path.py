"""A file or directory on a filesystem that is reached through fsspec: S3, GCS, ... Runs in: anywhere.

Operations that fail for a reason that may pass are tried again. An operation that fails for good raises an OSError that
names the URL and the cause.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import math
import os
import pickle
import tempfile
import time
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import IO, TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl, unquote_to_bytes

from distrain.system.background import in_threads
from distrain.system.imports import find_filesystem
from distrain.system.log import warn
from distrain.system.pickling import pickled
from distrain.system.text import count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fsspec import AbstractFileSystem

_PATIENCE_VARIABLE = "DISTRAIN_STORAGE_PATIENCE_S"
_PATIENCE_S = 300.0
"""Seconds to retry an operation before it fails, unless the environment variable says otherwise."""
OPENING_PATIENCE_S = 5.0
"""Seconds to retry an operation while a run begins, so that a wrong address is reported soon."""
_QUIET_S = 3.0
"""Seconds to retry an operation before the user is warned."""
_HASHING_THREADS = 16
_READ_BYTES = 4 << 20
_CONNECTIONS = 32
"""Connections to S3 at the same time. botocore's default is 10, with which files wait for each other."""
_SMALL_BYTES = 4 << 20
"""Size up to which a file is small: as many are copied at the same time as there are connections."""
_LARGE_FILES = 4
"""Larger files that are copied at the same time."""
_PARTS = 16
"""Parts of large files that are copied to S3 at the same time. They are in memory."""
_PART_BYTES = 16 << 20
_MOST_PARTS = 10_000
"""Parts that a file in S3 may have."""
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
"""Errors that are not retried, as another try cannot succeed."""
_FINAL_NUMBERS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENAMETOOLONG})
"""Error numbers that are not retried. They come from the local file that is copied to or from."""
_FINAL_NAMES = frozenset({"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "ParamValidationError"})
"""Names of botocore's errors that are not retried. By name, as botocore need not be installed."""
_SPECIAL = ("::", "*", "?", "[")
"""Parts of a name that fsspec does not take literally: chains, patterns (rm() deletes all matches), versions on S3."""
_WITHOUT_DIRECTORIES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "az", "adl", "http", "https", "memory"})
"""Protocols of filesystems that have no real directories."""
_VERSION_KEYS = ("ETag", "etag", "md5Hash", "content_settings.content_md5", "mtime", "created")
"""Fields of fsspec's file info that change when a file is written again, the best first. Filesystems differ in them."""


def _patience_s() -> float:
    text = os.environ.get(_PATIENCE_VARIABLE, str(_PATIENCE_S))
    with contextlib.suppress(ValueError):
        if (patience_s := float(text)) >= 0:
            return patience_s
    raise OSError(f"the environment variable {_PATIENCE_VARIABLE} must be a number of seconds, 0 or more, got {text!r}")


_T = TypeVar("_T")
_report_retry: Callable[[str], None] = warn


def report_retries_to(callback: Callable[[str], None]) -> None:
    """Pass the text about a storage that does not answer and is tried again to ``callback``, instead of warning."""
    global _report_retry
    _report_retry = callback


# -- which filesystem ------------------------------------------------------------------------------------------------


def as_fsspec(filesystem: Any) -> AbstractFileSystem:
    """Return the filesystem itself, or fsspec's view of pyarrow's. Raise TypeError for anything else."""
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
    """Return the absolute local path, or the RemotePath, that a path or URL means, without looking there.

    ``file://`` URLs are decoded (%20 is a space), which makes this the inverse of :meth:`pathlib.Path.as_uri`. Raise
    OSError for a URL whose filesystem is not available, for a remote name with special characters, and for a URL that
    was turned into a Path.
    """
    text = os.fspath(path)
    if isinstance(path, PurePath):
        _refuse_former_url(path)
    if filesystem is not None:
        given = as_fsspec(filesystem)
        local = _local_path(given, text)
        if local is not None:
            return Path(os.path.abspath(local))
        _check_name(text)
        return RemotePath(text.rstrip("/"), given)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return Path(os.path.abspath(Path(text).expanduser()))
    if scheme in ("file", "local"):
        return Path(os.path.abspath(Path(os.fsdecode(unquote_to_bytes(rest))).expanduser()))
    if "::" not in rest:
        _refuse_options(text)
    if not all("://" in inner or inner.startswith("/") for inner in text.split("::")[1:]):  # not a chain of filesystems
        _check_name(text)
    remote = RemotePath(text.rstrip("/") if rest.strip("/") else f"{scheme}://")
    _check_name(remote.path)  # which also raises for a protocol that no filesystem has
    return remote


def _refuse_former_url(path: PurePath) -> None:
    from fsspec import available_protocols

    protocol, colon, rest = (path.parts or ("",))[0].partition(":")
    if colon and not rest and protocol in available_protocols():
        raise OSError(f"{path} is a {type(path).__name__}, in which a URL loses a slash: give the URL as a string")


_ARROW_OPTIONS = {"endpoint_override", "region", "scheme", "anonymous", "access_key", "secret_key", "session_token"}


def _refuse_options(url: str) -> None:
    """Raise OSError for a URL with pyarrow's options. Some are secrets, so their values are not shown."""
    place, _, query = url.partition("?")
    options = dict(parse_qsl(query))
    if not options.keys() & _ARROW_OPTIONS:
        return
    cure = "set them in the environment, or give a storage_filesystem"
    if server := options.get("endpoint_override"):
        scheme = "" if "://" in server else f"{options.get('scheme', 'https')}://"
        cure = f"set the environment variable AWS_ENDPOINT_URL={scheme}{server}"
    raise OSError(f"{place} has options of pyarrow behind a '?' ({', '.join(options)}), which distrain ignores: {cure}")


def _check_name(name: str) -> str:
    """Return the name. Raise OSError if fsspec would not take it literally."""
    if special := [part for part in _SPECIAL if part in name]:
        raise OSError(
            f"{name!r} has {special[0]!r} in it, which remote filesystems do not take as a part of a name: "
            "give the file, the run or its storage_path another name"
        )
    return name


def _is_s3fs(filesystem: Any) -> bool:
    return type(filesystem).__name__ == "S3FileSystem"


def _local_path(filesystem: Any, path: str) -> str | None:
    """Return the local path that ``path`` means in a local filesystem, or in a view of one; None in a remote one."""
    filesystem, path = _unwrapped(filesystem, path)
    if _protocol(filesystem) != "file":
        return None
    stripped: str = filesystem._strip_protocol(path) if hasattr(filesystem, "_strip_protocol") else path
    return stripped


def _unwrapped(filesystem: Any, path: str) -> tuple[Any, str]:
    """Return the filesystem inside of all wrappers, and what a path is there."""
    match type(filesystem).__name__:
        case "DirFileSystem":
            return _unwrapped(filesystem.fs, filesystem._join(path))
        case "ArrowFSWrapper":
            return _unwrapped(filesystem.fs, path)
        case "SubTreeFileSystem":
            return _unwrapped(filesystem.base_fs, f"{filesystem.base_path}/{path}")
    return filesystem, path


def _protocol(filesystem: Any) -> str:
    """Return the protocol of a filesystem of fsspec or pyarrow; that of the inner one, if it is a wrapper."""
    filesystem, _ = _unwrapped(filesystem, "")
    protocol: Any = filesystem.protocol if hasattr(filesystem, "protocol") else filesystem.type_name
    name: str = protocol if isinstance(protocol, str) else protocol[0]
    return "file" if name == "local" else name


def encode_filesystem(filesystem: AbstractFileSystem | None) -> str:
    """Return a filesystem as text for other processes, "" for None. Raise OSError if it cannot be pickled."""
    if filesystem is None:
        return ""
    try:
        return base64.b64encode(pickled(filesystem)).decode()
    except Exception as error:
        raise OSError(f"{type(filesystem).__name__} cannot be used by other processes: {error!r}") from error


def decode_filesystem(text: str) -> AbstractFileSystem | None:
    """Return the filesystem that :func:`encode_filesystem` was given."""
    return pickle.loads(base64.b64decode(text)) if text else None  # noqa: S301 - our own


def own_temporary_path() -> Path:
    """Return the parent of all that :func:`own_temporary_directory` makes, without looking there."""
    return Path(tempfile.gettempdir(), f"distrain-{os.getuid()}")


def own_temporary_directory(name: str) -> Path:
    """Make and return a directory that only this user can read.

    It is the same for all processes of the host that have the same TMPDIR. Raise OSError if another user made it.
    """
    folder = own_temporary_path()
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid() or folder.is_symlink():
        raise PermissionError(f"{folder} belongs to another user; set TMPDIR to a directory of your own")
    inner = folder / name
    inner.mkdir(mode=0o700, exist_ok=True)
    return inner


# -- a remote path ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RemotePath:
    """A file or directory that is reached through fsspec. Methods raise OSError.

    url: the URL as users write it; if ``given`` is not None, a path within that filesystem.
    given: the filesystem that the user made, or None.
    patience_s: seconds to retry an operation before it fails. The default is DISTRAIN_STORAGE_PATIENCE_S, or 300.
    before_retry: called before each retry; what it raises ends the operation.
    """

    url: str
    given: AbstractFileSystem | None = None
    patience_s: float = field(default_factory=_patience_s)
    before_retry: Callable[[], None] | None = field(default=None, compare=False, repr=False)

    @property
    def filesystem(self) -> AbstractFileSystem:
        """The filesystem. Raises OSError if its package is not installed, or no filesystem has the URL's protocol."""
        return self._resolve()[0]

    @property
    def path(self) -> str:
        """The path within the filesystem."""
        return self._resolve()[1]

    def _resolve(self) -> tuple[AbstractFileSystem, str]:
        if self.given is not None:
            found, path = self.given, self.given._strip_protocol(self.url)
        else:
            try:
                found, path = find_filesystem(self.url)
            except (ImportError, ValueError, OSError) as error:
                raise OSError(f"{self.url}: {error}") from error
        if _is_s3fs(found):  # it connects later
            found.config_kwargs = {"max_pool_connections": _CONNECTIONS, **found.config_kwargs}
        return found, path

    def check_shared(self) -> None:
        """Raise OSError if other processes cannot reach the storage."""
        encode_filesystem(self.given)
        if _protocol(self.filesystem) == "memory":
            raise OSError(
                f"{self} is in the memory of this process, and the other processes of a run cannot reach it; choose a "
                "directory (such as tempfile.mkdtemp()) or a URL such as s3://bucket/runs as storage_path"
            )

    @property
    def name(self) -> str:
        return self.url.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        above = self.url.rpartition("/")[0]
        return replace(self, url=f"{above}/" if above.endswith(":/") else above)

    def __truediv__(self, name: str) -> RemotePath:
        slash = "" if self.url.endswith("://") else "/"
        return replace(self, url=f"{self.url}{slash}{_check_name(name)}")

    def __str__(self) -> str:
        return self.url

    # -- reading --------------------------------------------------------------------------------------------------

    def read_bytes(self) -> bytes:
        """Return the content of the file. Raise FileNotFoundError if there is none."""
        data: bytes = self._try("read", lambda fs, path: fs.cat_file(path))
        return data

    def exists(self) -> bool:
        """Return whether there is a file of that name, or any file below it."""
        return bool(self._try("look for", lambda fs, path: fs.exists(path)))

    def names(self) -> list[str]:
        """Return the sorted names directly below; none if there is no such directory."""

        def ls(fs: AbstractFileSystem, path: str) -> list[str]:
            try:
                return [str(entry).rstrip("/").rpartition("/")[2] for entry in fs.ls(path, detail=False)]
            except FileNotFoundError:
                return []

        return sorted(name for name in self._try("list", ls) if name)

    def files(self) -> dict[str, tuple[int, str]]:
        """Return the size in bytes and the version of every file below, by relative path.

        The version changes when the file is written again. It is empty where the filesystem has none.
        """

        def find(fs: AbstractFileSystem, path: str) -> dict[str, tuple[int, str]]:
            found = fs.find(path, detail=True)
            start = len(path.rstrip("/")) + 1
            return {
                name[start:]: (int(info["size"] or 0), _version(info)) for name, info in found.items() if name[start:]
            }

        files: dict[str, tuple[int, str]] = self._try("list", find)
        return files

    def get_all(self, names: Sequence[str], target: Path) -> None:
        """Copy files below this path to a local directory, many at once where the filesystem can."""
        targets = [target / name for name in names]
        for folder in {path.parent for path in targets}:
            folder.mkdir(parents=True, exist_ok=True)
        paths = [str(path) for path in targets]
        self._try(f"write {target} from", lambda fs, path: fs.get([f"{path}/{name}" for name in names], paths))

    def read_with(self, action: Callable[[IO[bytes]], _T]) -> _T:
        """Return the result of ``action``, which is called with the open file and may seek in it.

        Raise FileNotFoundError if there is no such file.
        """

        def read(fs: AbstractFileSystem, path: str) -> _T:
            with fs.open(path, "rb") as file:
                return action(file)

        return self._try("read", read)

    def crc32(self) -> tuple[int, int]:
        """Read the whole file, and return its size in bytes and its crc32."""
        size = crc = 0
        with self._try("read", lambda fs, path: fs.open(path, "rb", block_size=_READ_BYTES)) as file:
            while data := file.read(_READ_BYTES):
                size, crc = size + len(data), zlib.crc32(data, crc)
        return size, crc

    def hash_all(self, names: Sequence[str]) -> list[tuple[str, int, int]]:
        """Read files below this path, and return the name, the size in bytes and the crc32 of each.

        Several are read at the same time if the filesystem is asynchronous. Others may not allow that.
        """
        threads = _HASHING_THREADS if getattr(self.filesystem, "async_impl", False) else 1
        facts = in_threads(lambda name: (self / name).crc32(), names, threads=threads)
        return [(name, *fact) for name, fact in zip(names, facts, strict=True)]

    # -- writing --------------------------------------------------------------------------------------------------

    def write_bytes(self, data: bytes) -> None:
        """Write the file, and replace one that exists."""
        self._make_parent()
        self._try("write", lambda fs, path: fs.pipe_file(path, data))

    def create(self, data: bytes) -> None:
        """Write a new file. Raise FileExistsError if it exists.

        If two processes do this at once, one of them fails on filesystems with conditional writes (S3, GCS, ...).
        """
        self._make_parent()
        self._try("create", lambda fs, path: fs.pipe_file(path, data, mode="create"))

    def put_all(self, source: Path, names: Sequence[str]) -> None:
        """Copy files of a local directory to below this path, many at once where the filesystem can.

        With S3, this takes 0.5 GB of memory at most: 256 MB of the files, and s3fs copies them. Other filesystems may
        take more for large files.
        """
        for name in {name.rpartition("/")[0]: name for name in names}.values():
            (self / name)._make_parent()
        sizes = {name: (source / name).stat().st_size for name in names}
        large = [name for name, size in sizes.items() if size > _SMALL_BYTES]
        self._put_batch(source, [name for name, size in sizes.items() if size <= _SMALL_BYTES], _CONNECTIONS, {})
        at_once = min(_LARGE_FILES, len(large))
        options: dict[str, int] = {}
        if large and _is_s3fs(self.filesystem):
            part = max(_PART_BYTES, math.ceil(max(sizes.values()) / _MOST_PARTS))
            options = {"chunksize": part, "max_concurrency": _PARTS // at_once}
        self._put_batch(source, large, at_once, options)

    def _put_batch(self, source: Path, names: Sequence[str], at_once: int, options: Mapping[str, int]) -> None:
        if getattr(self.filesystem, "async_impl", False):  # others copy one file after the other
            options = {"batch_size": at_once, **options}
        sources = [str(source / name) for name in names]

        def put(fs: AbstractFileSystem, path: str) -> None:
            fs.put(sources, [f"{path}/{_check_name(name)}" for name in names], **options)

        if names:
            self._try("write", put)

    def remove(self) -> None:
        """Delete the file, or all files below this path. Do nothing if there are none."""

        def rm(fs: AbstractFileSystem, path: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                fs.rm(path, recursive=True)

        self._try("delete", rm)

    def _make_parent(self) -> None:
        """Make the parent directory. Object stores need none, and would take the order for a new bucket."""
        if _protocol(self.filesystem) not in _WITHOUT_DIRECTORIES:
            self.parent._try("make", lambda fs, path: fs.makedirs(path, exist_ok=True))

    # -- retries --------------------------------------------------------------------------------------------------

    def _try(self, verb: str, action: Callable[[AbstractFileSystem, str], _T]) -> _T:
        """Return the result of ``action``. Retry it for ``patience_s``, then raise an OSError that names this path."""
        fs, path = self._resolve()
        began, pause_s, tries = time.monotonic(), _FIRST_PAUSE_S, 0
        while True:
            tries += 1
            fs.invalidate_cache()  # other processes may have written meanwhile
            try:
                return action(fs, path)
            except Exception as error:
                if _is_final(error):
                    raise self._named(verb, error) from error
                spent_s = time.monotonic() - began
                if spent_s + pause_s > self.patience_s:
                    raise self._named(verb, error, f" (tried {count(tries, 'time')})" if tries > 1 else "") from error
                if spent_s < _QUIET_S <= spent_s + pause_s:
                    _report_retry(f"{self._named(verb, error)}; trying again for {self.patience_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            if self.before_retry is not None:
                self.before_retry()

    def _named(self, verb: str, error: Exception, tried: str = "") -> OSError:
        kinds = (PermissionError, FileNotFoundError, FileExistsError)
        kind = next((kind for kind in kinds if isinstance(error, kind)), OSError)
        return kind(f"cannot {verb} {self.url}{tried}: {type(error).__name__}: {error}")


def _version(info: Mapping[str, Any]) -> str:
    return next((str(info[key]) for key in _VERSION_KEYS if info.get(key)), "")


def _is_final(error: Exception) -> bool:
    return (
        isinstance(error, _FINAL)
        or type(error).__name__ in _FINAL_NAMES
        or (isinstance(error, OSError) and error.errno in _FINAL_NUMBERS)
    )
