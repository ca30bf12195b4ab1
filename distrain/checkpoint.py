"""The handle users see: a directory that holds a checkpoint, here or elsewhere. Runs in: anywhere."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pickle
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from distrain.errors import CheckpointError
from distrain.system.ray_names import ExplainedClass, explaining
from distrain.system.remote_path import RemotePath, locate, own_temporary_directory
from distrain.system.scratch import scratch_directory

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem
    from typing_extensions import Self

__all__ = ["Checkpoint", "files_of", "reading", "unread"]

METADATA_FILE = ".metadata.json"
MANIFEST_FILE = ".manifest.json"
PENDING_FILE = ".pending.json"
"""Elsewhere: in one that is not complete yet, or not any more; then it says DELETED."""
DELETED = b"{}"
DICT_FILE = "dict_checkpoint.pkl"
_PREFIX = "distrain-checkpoint-"
_COMPLETE = ".complete"
_AGAIN_S = 0.02


@explaining("Checkpoint")
class Checkpoint(metaclass=ExplainedClass):
    """A reference to a directory, not its data; pickling copies the reference only.

    Make one with :meth:`from_directory` or :meth:`from_dict`, hand it to ``distrain.report()``, and get it back from
    ``distrain.get_checkpoint()`` or ``Result.checkpoint``.

    path: a local or shared directory, or a URL that fsspec knows (``s3://bucket/run/checkpoint_000003``). Or, with
        ``filesystem`` (fsspec's or pyarrow's), a path in that.

    Raises CheckpointError for a URL that nothing installed can read.

    >>> checkpoint = Checkpoint.from_dict({"step": 3})
    >>> checkpoint.to_dict()
    {'step': 3}
    """

    def __init__(self, path: str | os.PathLike[str], filesystem: Any = None) -> None:
        where = _located(path, filesystem)
        self.path: str = str(where)
        self._place = where if isinstance(where, RemotePath) else None
        self._data: dict[str, Any] | None = None
        self._metadata: dict[str, Any] = {}  # of a checkpoint that is not on disk yet

    # -- directories ----------------------------------------------------------------------------------------------

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Self:
        """Refer to ``path``; nothing is copied or checked before the checkpoint is reported or read."""
        return cls(path)

    def to_directory(self, path: str | os.PathLike[str] | None = None) -> str:
        """Copy the files into ``path`` (default: a new temporary directory) and return it.

        A worker's temporary directory is deleted after the attempt; in other processes it is yours to delete.
        Raises CheckpointError if the checkpoint's directory does not exist, or cannot be read.
        """
        self._check_exists()
        target = Path(_temporary_directory() if path is None else path).expanduser()
        target.mkdir(parents=True, exist_ok=True)
        if self._data is not None:
            self._write_dict(target)
        elif self._place is not None:
            self._download(self._place, target)
        else:
            with reading(Path(self.path)):
                shutil.copytree(self.path, target, dirs_exist_ok=True, ignore=_ignore_manifest)
        return str(target)

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[str]:
        """The files as a local directory, for reading; a committed local checkpoint is not deleted meanwhile.

        A local one is not copied. One elsewhere is downloaded into a temporary directory, which all processes of the
        host that read it at that time share; one made by :meth:`from_dict` is written to one. Both go with the context.
        Raises CheckpointError if there is none, or if it cannot be read.
        """
        self._check_exists()
        if self._data is not None:
            with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=scratch_directory()) as folder:
                self._write_dict(Path(folder))
                yield folder
        elif self._place is not None:
            with self._shared_download(self._place) as path:
                yield str(path)
        else:
            with reading(Path(self.path)):
                yield self.path

    @contextlib.contextmanager
    def _shared_download(self, place: RemotePath) -> Iterator[Path]:
        identity = f"{type(place.filesystem).__name__} {place.url} {self._read_small(MANIFEST_FILE)!r}"
        key = hashlib.sha256(identity.encode()).hexdigest()[:16]
        folder = own_temporary_directory("checkpoints") / f"{key}-{place.name}"
        lock_path, complete = _lock_of(folder), folder / _COMPLETE
        while True:
            with _open_lock(lock_path) as lock:
                fcntl.flock(lock, fcntl.LOCK_SH)  # waits for who downloads
                if not complete.exists():
                    try:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:  # not to be waited for: it may be somebody who reads by now
                        time.sleep(random.uniform(0.0, _AGAIN_S))  # noqa: S311
                        continue
                    if _is_at(lock, lock_path) and not complete.exists():
                        self._fill(folder, place)
                elif _is_at(lock, lock_path):
                    try:
                        yield folder / "files"
                    finally:
                        _drop_unless_read(folder, lock)
                    return

    def _fill(self, folder: Path, place: RemotePath) -> None:
        """With what other processes could share; what killed ones have left goes first, to make room."""
        for other in folder.parent.glob("*.lock"):
            if other != _lock_of(folder):
                with contextlib.suppress(FileNotFoundError), _open_lock(other) as lock:
                    _drop_unless_read(other.with_suffix(""), lock)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            (folder / "files").mkdir(parents=True)  # also for a checkpoint without files
            self._download(place, folder / "files")
            (folder / _COMPLETE).touch()
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _download(self, place: RemotePath, target: Path) -> None:
        try:
            if names := files_of(place):
                place.get_all(names, target)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{self.path} was deleted while it was read ({error}). Who reads what is elsewhere cannot be seen, so "
                "num_to_keep does not wait for it: read a newer checkpoint, or have the run keep more of them "
                "(CheckpointConfig.num_to_keep)"
            ) from error
        except OSError as error:
            raise CheckpointError(f"the checkpoint {self.path} cannot be read: {error}") from error

    def exists(self) -> bool:
        """Whether there is something to read. Raises CheckpointError if that cannot be found out."""
        if self._data is not None:
            return True
        try:
            return Path(self.path).is_dir() if self._place is None else self._place.exists()
        except OSError as error:
            raise CheckpointError(f"the checkpoint {self.path} cannot be read: {error}") from error

    def _check_exists(self) -> None:
        if not self.exists():
            raise CheckpointError(
                f"the checkpoint directory {self.path} does not exist (was it deleted by num_to_keep?)"
            )

    @property
    def filesystem(self) -> AbstractFileSystem:
        """What ``path`` is on."""
        import fsspec

        return fsspec.filesystem("file") if self._place is None else self._place.filesystem

    @property
    def place(self) -> RemotePath | None:
        """Where it is, if that is elsewhere."""
        return self._place

    # -- dicts ----------------------------------------------------------------------------------------------------

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Checkpoint:
        """A checkpoint that holds a dict of picklable values, as in Ray AIR; it becomes one file when reported."""
        if not isinstance(data, Mapping):
            raise TypeError(f"Checkpoint.from_dict takes a dict, got {data!r} ({type(data).__name__})")
        checkpoint = cls(DICT_FILE)
        checkpoint.path = ""
        checkpoint._data = dict(data)
        return checkpoint

    def to_dict(self) -> dict[str, Any]:
        """The dict given to :meth:`from_dict`; once reported also, as in Ray AIR, ``_timestamp`` (seconds since 1970),
        ``_preprocessor`` (None) and ``_current_checkpoint_id``. Unpickles: read only checkpoints that you trust.

        Raises CheckpointError if the checkpoint was not made from a dict.
        """
        if self._data is not None:
            return dict(self._data)
        body = self._read_small(DICT_FILE)
        if body is None:
            raise CheckpointError(f"{self.path} was not made by Checkpoint.from_dict(); use as_directory()")
        data: dict[str, Any] = pickle.loads(body)  # noqa: S301 - documented
        return data

    def _read_small(self, name: str) -> bytes | None:
        """One of the files; None if there is no such."""
        self._check_exists()
        try:
            return Path(self.path, name).read_bytes() if self._place is None else (self._place / name).read()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CheckpointError(f"the checkpoint {self.path} cannot be read: {error}") from error

    def _write_dict(self, folder: Path) -> None:
        (folder / DICT_FILE).write_bytes(cloudpickle.dumps(self._data))
        if self._metadata:
            (folder / METADATA_FILE).write_text(json.dumps(self._metadata))

    def as_reported(self, number: int, portable: Callable[[dict[str, Any]], dict[str, Any]] = dict) -> Checkpoint:
        """What :func:`distrain.report` stores: a dict as ``portable`` makes it, with what Ray AIR added; a directory as
        it is. ``number`` counts the checkpoints of the rank from 0.
        """
        if self._data is None:
            return self
        extra = {"_timestamp": int(time.time()), "_preprocessor": None, "_current_checkpoint_id": number}
        checkpoint = type(self).from_dict(portable(self._data) | extra)
        checkpoint._metadata = self._metadata
        return checkpoint

    # -- Ray AIR's other forms ------------------------------------------------------------------------------------

    @classmethod
    def from_checkpoint(cls, other: Checkpoint) -> Self:
        """The same checkpoint as this class, which may know how to read it: ``TorchCheckpoint.from_checkpoint(c)``."""
        checkpoint = cls.__new__(cls)
        checkpoint.__dict__.update(other.__dict__)
        return checkpoint

    def get_preprocessor(self) -> None:
        """Always None: preprocessors were Ray AIR's, and train_func prepares its data itself."""

    # -- metadata -------------------------------------------------------------------------------------------------

    def get_metadata(self) -> dict[str, Any]:
        """The JSON metadata kept beside the files; ``{}`` if there is none. Raises CheckpointError if it is damaged."""
        if self._data is not None:
            return dict(self._metadata)
        try:
            return dict(json.loads(self._read_small(METADATA_FILE) or b"{}"))
        except (ValueError, TypeError) as error:
            raise CheckpointError(
                f"{METADATA_FILE} of {self.path} is damaged: {error}; set_metadata() replaces it"
            ) from error

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Replace the metadata. Raises TypeError or ValueError for what is not JSON."""
        json.dumps(dict(metadata))
        if self._data is not None:
            self._metadata = dict(metadata)
            return
        self._check_exists()
        text = json.dumps(dict(metadata))
        if self._place is not None:
            (self._place / METADATA_FILE).write(text.encode())
            return
        target = Path(self.path, METADATA_FILE)
        aside = target.with_name(target.name + ".new")
        aside.write_text(text)
        aside.replace(target)

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Add to the metadata, or replace entries of it."""
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
        """Path and filesystem; pyarrow's own, as two views of it by fsspec are never equal."""
        if self._place is None:
            return self.path, None
        filesystem = self._place.filesystem
        return self._place.path, filesystem.fs if type(filesystem).__name__ == "ArrowFSWrapper" else filesystem

    def __fspath__(self) -> str:
        raise TypeError(
            "a Checkpoint is not a path; use `with checkpoint.as_directory() as folder:` or checkpoint.to_directory()"
        )

    def __repr__(self) -> str:
        if self._data is not None:
            return f"Checkpoint.from_dict({sorted(self._data)})"
        given = self._place.given if self._place else None
        return f"Checkpoint(path={self.path!r}{f', filesystem={type(given).__name__}' if given else ''})"


# -- reading ---------------------------------------------------------------------------------------------------------


def files_of(place: RemotePath) -> list[str]:
    """The files of a checkpoint elsewhere: those of its manifest, if it has one, and its metadata. Raises OSError:
    FileNotFoundError for one that is half deleted.
    """
    present = [name for name in place.files() if name != MANIFEST_FILE]
    try:
        named = set(json.loads((place / MANIFEST_FILE).read())["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{place / MANIFEST_FILE} is damaged ({type(error).__name__}: {error})") from error
    except FileNotFoundError:
        if PENDING_FILE not in present:
            return present
        try:
            is_deleted = (place / PENDING_FILE).read() == DELETED
        except FileNotFoundError:  # it was committed, or deleted, just now
            return files_of(place)
        if is_deleted:
            raise
        return [name for name in present if name != PENDING_FILE]
    return sorted({*named, *({METADATA_FILE} & set(present))})


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Nobody deletes this local checkpoint meanwhile; where there are no locks, we do without.

    Raises CheckpointError if it was deleted just before.
    """
    with contextlib.ExitStack() as stack:
        for path in _locked(folder):
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_RDONLY)
                stack.callback(os.close, fd)
                fcntl.flock(fd, fcntl.LOCK_SH)
                if path == folder and not _is_at(fd, folder):
                    raise CheckpointError(f"{folder} was deleted by num_to_keep just before it was read")
        yield


@contextlib.contextmanager
def unread(folder: Path) -> Iterator[bool]:
    """Whether nobody reads this local checkpoint, as far as the file system tells. If so, nobody begins to before the
    context ends.
    """
    with contextlib.ExitStack() as stack:
        yield all(_lock_alone(path, stack) for path in _locked(folder))


def _lock_alone(path: Path, stack: contextlib.ExitStack) -> bool:
    """False if somebody else has a lock."""
    try:
        fd = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)  # which NFS wants for such a lock
        stack.callback(os.close, fd)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no such file, or no locks
        return True
    return True


def _locked(folder: Path) -> tuple[Path, Path]:
    """What who reads a checkpoint locks: the directory, as the manifest may be replaced meanwhile, and the manifest, as
    some shared file systems tell other hosts of locks of files only.
    """
    return folder, folder / MANIFEST_FILE


@contextlib.contextmanager
def _open_lock(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _is_at(fd: int, path: Path) -> bool:
    """Whether the file is still there, and not deleted since it was opened."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), path.stat())
    return False


def _drop_unless_read(folder: Path, lock: int) -> None:
    with contextlib.suppress(BlockingIOError):  # somebody reads it
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(lock, _lock_of(folder)):
            shutil.rmtree(folder, ignore_errors=True)
            _lock_of(folder).unlink()


def _temporary_directory() -> str:
    return tempfile.mkdtemp(prefix=_PREFIX, dir=scratch_directory())


def _located(path: str | os.PathLike[str], filesystem: Any) -> Path | RemotePath:
    try:
        return locate(path, filesystem)
    except OSError as error:
        raise CheckpointError(str(error)) from error


def _ignore_manifest(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name == MANIFEST_FILE]
