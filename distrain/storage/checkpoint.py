"""Checkpoint: the users' handle for a directory that holds a checkpoint, local or remote. Runs in: anywhere."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from distrain.errors import CheckpointError
from distrain.storage.names import DICT_FILE
from distrain.storage.names import METADATA_FILE as METADATA_FILE
from distrain.storage.separated import Separated, load
from distrain.system.locks import lock_path, locked_directory, locked_file
from distrain.system.pickling import Pickler
from distrain.system.remote_path import RemotePath, locate, own_temporary_directory
from distrain.system.scratch import scratch_directory, temporary_directory

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem
    from typing_extensions import Self

POSITIONS = "distrain.positions"
"""Key of the metadata under which the coordinator stores the ranks' positions in the data."""
MANIFEST_FILE = ".manifest.json"
PENDING_FILE = ".pending.json"
"""In a remote checkpoint that is incomplete. Its content is DELETED if the checkpoint is being deleted."""
DELETED = b"{}"
_DICT = DICT_FILE.partition(".")[0]
_PREFIX = "distrain-checkpoint-"
_COMPLETE = ".complete"


class Checkpoint:
    """A reference to a directory, not its data; pickling copies the reference only.

    Make one with :meth:`from_directory` or :meth:`from_dict`, hand it to ``distrain.report()``, and get it back from
    ``distrain.get_checkpoint()`` or ``Result.checkpoint``.

    path: a local or shared directory, or a URL that fsspec knows (``s3://bucket/run/checkpoint_000003``). Or, with
        ``filesystem`` (fsspec's or pyarrow's), a path in that.

    Raises CheckpointError for a URL whose filesystem is not installed.

    >>> checkpoint = Checkpoint.from_dict({"step": 3})
    >>> checkpoint.to_dict()
    {'step': 3}
    """

    def __init__(self, path: str | os.PathLike[str], filesystem: Any = None) -> None:
        try:
            self._location: Path | RemotePath | None = locate(path, filesystem)  # None for one made from a dict
        except OSError as error:
            raise CheckpointError(str(error)) from error
        self.path: str = str(self._location)
        self._data: dict[str, Any] | None = None
        self._metadata: dict[str, Any] = {}  # of one made from a dict
        self._name = _DICT
        """Of the files of one made from a dict; another one if the tensors are in a file of their own in every mode."""

    # -- directories ----------------------------------------------------------------------------------------------

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Self:
        """Refer to ``path``. Nothing is copied or checked before the checkpoint is reported or read."""
        return cls(path)

    def to_directory(self, path: str | os.PathLike[str] | None = None) -> str:
        """Copy the files into ``path`` (default: a new temporary directory) and return it.

        A worker's temporary directory is deleted after the attempt; in other processes it is yours to delete.
        Raises CheckpointError if the checkpoint's directory does not exist, or cannot be read.
        """
        self._check_exists()
        made = tempfile.mkdtemp(prefix=_PREFIX, dir=scratch_directory()) if path is None else path
        target = Path(made).expanduser()
        target.mkdir(parents=True, exist_ok=True)
        match self._find(()):
            case None:
                self._write_dict(target)
            case RemotePath() as remote:
                self._download(remote, target)
            case _:
                with self._locked_folder() as folder:
                    shutil.copytree(folder, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST_FILE))
        return str(target)

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[str]:
        """Yield the files as a local directory, for reading. A committed local checkpoint is not deleted meanwhile.

        A local checkpoint is not copied. If a worker's host does not see the storage, the checkpoint is copied there,
        for all its workers. A remote one is downloaded into a temporary directory, which all processes of the host that
        read it at the same time share. One made by :meth:`from_dict` is written to a temporary directory. The latter
        two are deleted after the context. Raises CheckpointError if the checkpoint cannot be read.
        """
        self._check_exists()
        if self._location is None:
            with temporary_directory(_PREFIX) as temporary:
                self._write_dict(Path(temporary))
                yield temporary
        else:
            with self._locked_folder() as folder:
                yield str(folder)

    @contextlib.contextmanager
    def _locked_folder(self, files: Collection[str] | None = None) -> Iterator[Path]:
        """Yield a local directory, locked for reading. A copy that was deleted before it was locked is made again.

        files: those that are read; None: all.
        """
        while True:
            folder = self._find(files)  # may change: what was in memory may be in remote storage now
            with contextlib.ExitStack() as stack:
                if isinstance(folder, RemotePath):
                    folder = stack.enter_context(self._shared_download(folder))
                assert folder is not None
                try:
                    stack.enter_context(locked_for_reading(folder))
                except CheckpointError:
                    if folder == self._location:
                        raise
                    continue
                yield folder
                return

    @contextlib.contextmanager
    def _shared_download(self, remote: RemotePath) -> Iterator[Path]:
        """Yield a download that the processes of this host share. The last reader deletes it."""
        identity = f"{type(remote.filesystem).__name__} {remote.url} {self._read_file(MANIFEST_FILE)!r}"
        key = hashlib.sha256(identity.encode()).hexdigest()[:16]
        folder = own_temporary_directory("checkpoints") / f"{key}-{remote.name}"
        with contextlib.ExitStack() as stack:
            stack.callback(delete_unread, [folder])
            with locked_file(f"{folder}.lock"):  # waits for a process that downloads
                stack.enter_context(locked_directory(folder))
                if not (folder / _COMPLETE).exists():
                    self._fill(folder, remote)
            yield folder / "files"

    def _fill(self, folder: Path, remote: RemotePath) -> None:
        """Download the files for all processes. First delete what killed ones have left, to make room."""
        delete_unread(other for other in folder.parent.iterdir() if other != folder)
        shutil.rmtree(folder / "files", ignore_errors=True)
        try:
            (folder / "files").mkdir()  # also for a checkpoint without files
            self._download(remote, folder / "files")
            (folder / _COMPLETE).touch()
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _download(self, remote: RemotePath, target: Path) -> None:
        try:
            if names := remote_files(remote):
                remote.get_all(names, target)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{self.path} was deleted while it was read ({error}). num_to_keep does not wait for readers of remote "
                "storage, as nothing shows that they read: read a newer checkpoint, or keep more of them "
                "(CheckpointConfig.num_to_keep)"
            ) from error
        except OSError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"the checkpoint {self.path} cannot be read: {error}")

    def exists(self) -> bool:
        """Return whether there is something to read. Raises CheckpointError if the storage does not answer."""
        if self._location is None:
            return True
        try:
            place = self._find(())
            return place.is_dir() if isinstance(place, Path) else place is not None and place.exists()
        except OSError as error:
            raise self._unreadable(error) from error
        except CheckpointError:  # the coordinator does not have it either
            return False

    def _find(self, files: Collection[str] | None) -> Path | RemotePath | None:
        """Return the place of the files for this process: a copy, if they are in memory, or its host does not see them.

        files: those that are read; None: all. The place may lack others. Raises CheckpointError.
        """
        place = self._location
        if _fetch is None or place is None:
            return place
        is_of_run = str(place.parent) == _run
        if (_lacks_storage and is_of_run) or ((_lacks_storage or is_of_run) and not _is_there(place)):
            found = _fetch(self.path, files)
            if found == self.path:
                return place
            folder, _, name = found.rpartition("/")
            return place.parent / name if folder == _run else Path(found)
        return place

    def _check_exists(self) -> None:
        if not self.exists():
            self._find(())  # raises what the coordinator says
            raise CheckpointError(absence_of(self.path, " (was it deleted by num_to_keep?)"))

    @property
    def filesystem(self) -> AbstractFileSystem:
        """The fsspec filesystem that ``path`` is on."""
        import fsspec

        remote = self.remote_path
        return fsspec.filesystem("file") if remote is None else remote.filesystem

    @property
    def remote_path(self) -> RemotePath | None:
        """The path of a remote checkpoint, else None."""
        return self._location if isinstance(self._location, RemotePath) else None

    # -- dicts ----------------------------------------------------------------------------------------------------

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Checkpoint:
        """Make a checkpoint from a dict of picklable values, as in Ray AIR. It becomes one file when reported.

        Tensors of all dtypes come back on the CPU. Those that share memory still do so, and its bytes are stored once.
        """
        if not isinstance(data, Mapping):
            raise TypeError(f"Checkpoint.from_dict takes a dict, got {data!r} ({type(data).__name__})")
        checkpoint = cls(DICT_FILE)
        checkpoint.path, checkpoint._location = "", None
        checkpoint._data = dict(data)
        return checkpoint

    def to_dict(self) -> dict[str, Any]:
        """Return the dict given to :meth:`from_dict`. Unpickles: read only checkpoints that you trust.

        Once reported it also has, as in Ray AIR, ``_timestamp`` (seconds since 1970), ``_preprocessor`` (None) and
        ``_current_checkpoint_id``. Raises CheckpointError if the checkpoint was not made from a dict.
        """
        if self._data is not None:
            return dict(self._data)
        data = self.read(_DICT)
        if data is None:
            raise CheckpointError(f"{self.path} was not made by Checkpoint.from_dict(); use as_directory()")
        return data

    @classmethod
    def separated_from(cls, data: Mapping[str, Any] | None, name: str) -> Checkpoint:
        """Make a checkpoint of a dict, with the tensors in a file of their own. It has no files for None.

        name: of its files, without a suffix.
        """
        checkpoint = cls.from_dict(data or {})
        checkpoint._name = name if data is not None else ""
        return checkpoint

    def read(self, name: str) -> dict[str, Any] | None:
        """Return a dict that is stored under a name, None if there is none. Unpickles."""
        body = self._read_file(f"{name}.pkl")
        if body is None:
            return None
        with contextlib.ExitStack() as stack:

            def open_tensors() -> BinaryIO:
                folder = stack.enter_context(self._locked_folder([f"{name}.bin"]))
                return stack.enter_context(Path(folder, f"{name}.bin").open("rb"))

            data: dict[str, Any] = load(body, open_tensors)
            return data

    def _read_file(self, name: str) -> bytes | None:
        """Return the content of one of the files, or None if it does not exist."""
        self._check_exists()
        place = self._find([name])
        assert place is not None
        try:
            return (place / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unreadable(error) from error

    def separated(self) -> dict[str, bytes | Separated]:
        """Return the files of a checkpoint made from a dict, with the tensors in one of their own."""
        files: dict[str, bytes | Separated] = {}
        if self._metadata:
            files[METADATA_FILE] = json.dumps(self._metadata).encode()
        if self._name:
            tensors = Separated(self._data)
            files |= {f"{self._name}.pkl": tensors.skeleton, f"{self._name}.bin": tensors}
        return files

    def _write_dict(self, folder: Path) -> None:
        if self._name != _DICT:
            for name, content in self.separated().items():
                (folder / name).write_bytes(content) if isinstance(content, bytes) else content.write(folder / name)
            return
        with (folder / DICT_FILE).open("wb") as file:
            Pickler(file).dump(self._data)
        if self._metadata:
            (folder / METADATA_FILE).write_text(json.dumps(self._metadata))

    def as_reported(self, number: int, portable: Callable[[dict[str, Any]], dict[str, Any]] = dict) -> Checkpoint:
        """Return the checkpoint as :func:`distrain.report` stores it: a dict with the entries that Ray AIR adds.

        number: counts the checkpoints of the rank from 0. portable: makes the values loadable in other processes.
        """
        if self._data is None:
            return self
        extra = {"_timestamp": int(time.time()), "_preprocessor": None, "_current_checkpoint_id": number}
        checkpoint = copy.copy(self)
        if self._name == _DICT:
            checkpoint._data = portable(self._data) | extra
        return checkpoint

    @classmethod
    def from_checkpoint(cls, other: Checkpoint) -> Self:
        """Return the same checkpoint as this class, which may have methods to read it, such as TorchCheckpoint."""
        checkpoint = cls.__new__(cls)
        checkpoint.__dict__.update(other.__dict__)
        return checkpoint

    def get_preprocessor(self) -> None:
        """Return None. Preprocessors were Ray AIR's; here train_func prepares its data itself."""

    # -- metadata -------------------------------------------------------------------------------------------------

    def get_metadata(self) -> dict[str, Any]:
        """Return the JSON metadata, ``{}`` if there is none. Raises CheckpointError if it is damaged."""
        if self._data is not None:
            return dict(self._metadata)
        try:
            return dict(json.loads(self._read_file(METADATA_FILE) or b"{}"))
        except (ValueError, TypeError) as error:
            raise CheckpointError(
                f"{METADATA_FILE} of {self.path} is damaged: {error}; set_metadata() replaces it"
            ) from error

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Replace the metadata, but keep the positions in the data, which distrain has stored there.

        Raises TypeError or ValueError for values that JSON does not have.
        """
        text = json.dumps(dict(metadata))
        if self._location is None:
            self._metadata = dict(metadata)
            return
        self._check_exists()
        if self._find(()) != self._location:
            raise CheckpointError(f"{self.path} is on another machine: call set_metadata() there, in the worker")
        with contextlib.suppress(CheckpointError):  # metadata that are damaged are replaced
            kept = {name: value for name, value in self.get_metadata().items() if name == POSITIONS}
            text = json.dumps({**kept, **metadata})
        target = self._location / METADATA_FILE
        if isinstance(target, RemotePath):
            target.write_bytes(text.encode())
        else:
            temporary = target.with_name(target.name + ".new")
            temporary.write_text(text)
            temporary.replace(target)

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Add entries to the metadata, or replace them."""
        self.set_metadata(self.get_metadata() | dict(metadata))

    # -- the rest -------------------------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        """Compare the directories that both refer to. A checkpoint that is made from a dict equals only itself."""
        if not isinstance(other, Checkpoint):
            return NotImplemented
        if self is other or self._data is not None or other._data is not None:
            return self is other
        return self._identity == other._identity

    def __hash__(self) -> int:
        return id(self) if self._data is not None else hash(self._identity[0])

    @property
    def _identity(self) -> tuple[str, Any]:
        """The path and the filesystem; pyarrow's own one, as two views of it by fsspec are never equal."""
        remote = self.remote_path
        if remote is None:
            return self.path, None
        filesystem = remote.filesystem
        return remote.path, filesystem.fs if type(filesystem).__name__ == "ArrowFSWrapper" else filesystem

    def __fspath__(self) -> str:
        raise TypeError(
            "a Checkpoint is not a path; use `with checkpoint.as_directory() as folder:` or checkpoint.to_directory()"
        )

    def __repr__(self) -> str:
        if self._data is not None:
            return f"Checkpoint.from_dict({sorted(self._data)})"
        given = self.remote_path.given if self.remote_path else None
        return f"Checkpoint(path={self.path!r}{f', filesystem={type(given).__name__}' if given else ''})"


# -- checkpoints on another machine ----------------------------------------------------------------------------------

_Fetch = Callable[[str, Collection[str] | None], str]
_fetch: _Fetch | None = None
_run = ""
_lacks_storage = False


def fetch_with(function: _Fetch, run: str, *, lacks_storage: bool) -> None:
    """Read checkpoints that this host does not have through a function that fetches files and returns where they are.

    run: the run directory. A checkpoint of it that does not exist may be in the memory of the hosts. lacks_storage: the
    directory is on another machine. What this host has at that path is something else.
    """
    global _fetch, _run, _lacks_storage
    _fetch, _run, _lacks_storage = function, run, lacks_storage


def absence_of(path: str, advice: str = "") -> str:
    """Say that there is no checkpoint directory at the path. ``advice``: added if there is nothing at all."""
    if os.path.isfile(path):
        return f"{path} is a file, but a checkpoint is a directory: give the directory that holds the file"
    return f"the checkpoint directory {path} does not exist{advice}"


def _is_there(place: Path | RemotePath) -> bool:
    """Return whether a checkpoint is stored. One that is still being stored in remote storage has no manifest."""
    return place.is_dir() if isinstance(place, Path) else (place / MANIFEST_FILE).exists()


# -- reading ---------------------------------------------------------------------------------------------------------


def remote_files(checkpoint: RemotePath) -> list[str]:
    """Return the files of a remote checkpoint: those in its manifest, if it has one, and its metadata.

    Raise FileNotFoundError if it is being deleted, OSError if the storage fails.
    """
    present = [name for name in checkpoint.files() if name != MANIFEST_FILE]
    try:
        named = set(json.loads((checkpoint / MANIFEST_FILE).read_bytes())["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{checkpoint / MANIFEST_FILE} is damaged ({type(error).__name__}: {error}); use another checkpoint"
        ) from error
    except FileNotFoundError:
        if not present and not checkpoint.exists():
            raise
        if PENDING_FILE not in present:
            return present
        try:
            is_deleted = (checkpoint / PENDING_FILE).read_bytes() == DELETED
        except FileNotFoundError:  # the checkpoint was committed, or deleted, just now
            return remote_files(checkpoint)
        if is_deleted:
            raise
        return [name for name in present if name != PENDING_FILE]
    return sorted({*named, *({METADATA_FILE} & set(present))})


@contextlib.contextmanager
def locked_for_reading(folder: Path) -> Iterator[None]:
    """Keep num_to_keep from deleting a local checkpoint. Do nothing on a file system without locks.

    Raise CheckpointError if the checkpoint was deleted just before.
    """
    with contextlib.ExitStack() as stack:
        for path in _paths_to_lock(folder):
            with contextlib.suppress(OSError):
                if (fd := lock_path(path, fcntl.LOCK_SH, os.O_RDONLY)) is not None:
                    stack.callback(os.close, fd)
                elif path == folder:
                    raise CheckpointError(f"{folder} was deleted by num_to_keep just before it was read")
        yield


@contextlib.contextmanager
def locked_for_deletion(folder: Path) -> Iterator[bool]:
    """Lock a local checkpoint against readers. Yield False if a process reads it, True on a file system without locks.

    If True is yielded, no process begins to read the checkpoint before the context ends.
    """
    with contextlib.ExitStack() as stack:
        yield all(_lock_alone(path, stack) for path in _paths_to_lock(folder))


def delete_unread(folders: Iterable[Path]) -> None:
    """Delete local checkpoints, but not those that a process reads."""
    for folder in folders:
        with locked_for_deletion(folder) as is_unread:
            if is_unread:
                shutil.rmtree(folder, ignore_errors=True)


def _lock_alone(path: Path, stack: contextlib.ExitStack) -> bool:
    """Lock a path exclusively. Return False if another process has a lock."""
    try:
        flags = os.O_RDONLY if path.is_dir() else os.O_RDWR  # NFS wants O_RDWR for an exclusive lock
        fd = lock_path(path, fcntl.LOCK_EX | fcntl.LOCK_NB, flags)
    except OSError:  # it may not be opened
        return True
    if fd is not None:
        stack.callback(os.close, fd)
    return fd is not None or not path.exists()


def _paths_to_lock(folder: Path) -> tuple[Path, Path]:
    """Return the paths that a reader locks.

    It locks the directory because the manifest may be replaced, and the manifest because some shared file systems
    propagate only file locks to other hosts.
    """
    return folder, folder / MANIFEST_FILE
