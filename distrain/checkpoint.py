"""The handle users see: a directory that holds a checkpoint. Runs in: anywhere."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from distrain.errors import CheckpointError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Checkpoint"]

METADATA_FILE = ".metadata.json"
MANIFEST_FILE = ".manifest.json"
DICT_FILE = "dict_checkpoint.pkl"


class Checkpoint:
    """A reference to a directory, not its data; pickling copies the reference only.

    Make one with :meth:`from_directory` or :meth:`from_dict`, hand it to ``distrain.report()``, and get it back from
    ``distrain.get_checkpoint()`` or ``Result.checkpoint``. A ``file://`` URL is a path, too. Raises CheckpointError for
    other URLs, which cannot be read yet.
    """

    def __init__(self, path: str | os.PathLike[str], filesystem: None = None) -> None:
        if filesystem is not None:
            raise CheckpointError(f"Checkpoint({path!r}, filesystem=...): only local and shared directories so far")
        self.path: str = os.path.abspath(Path(_local_path(os.fspath(path))).expanduser())
        self._data: dict[str, Any] | None = None
        self._metadata: dict[str, Any] = {}  # of a checkpoint that is not on disk yet

    # -- directories ----------------------------------------------------------------------------------------------

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Self:
        """Refer to ``path``; nothing is copied or checked before the checkpoint is reported or read."""
        return cls(path)

    def to_directory(self, path: str | os.PathLike[str] | None = None) -> str:
        """Copy the files into ``path`` (default: a new temporary directory) and return it.

        Raises CheckpointError if the checkpoint's directory does not exist.
        """
        source = self._existing() if self._data is None else None
        target = Path(tempfile.mkdtemp(prefix="distrain-checkpoint-") if path is None else path).expanduser()
        target.mkdir(parents=True, exist_ok=True)
        if source is None:
            self._write_dict(target)
        else:
            shutil.copytree(source, target, dirs_exist_ok=True, ignore=_ignore_manifest)
        return str(target)

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[str]:
        """The files as a local directory, for reading: the directory itself, without a copy.

        A checkpoint made by :meth:`from_dict` is written to a temporary directory that goes with the context.
        """
        if self._data is None:
            yield str(self._existing())
            return
        with tempfile.TemporaryDirectory(prefix="distrain-checkpoint-") as folder:
            self._write_dict(Path(folder))
            yield folder

    def exists(self) -> bool:
        """Whether there is something to read."""
        return self._data is not None or Path(self.path).is_dir()

    def _existing(self) -> Path:
        folder = Path(self.path)
        if not folder.is_dir():
            raise CheckpointError(
                f"the checkpoint directory {self.path} does not exist (was it deleted by num_to_keep?)"
            )
        return folder

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
        file = self._existing() / DICT_FILE
        if not file.is_file():
            raise CheckpointError(f"{self.path} was not made by Checkpoint.from_dict(); use as_directory()")
        data: dict[str, Any] = pickle.loads(file.read_bytes())  # noqa: S301 - documented
        return data

    def _write_dict(self, folder: Path) -> None:
        (folder / DICT_FILE).write_bytes(cloudpickle.dumps(self._data))
        if self._metadata:
            (folder / METADATA_FILE).write_text(json.dumps(self._metadata))

    def as_reported(self, number: int, portable: Callable[[dict[str, Any]], dict[str, Any]] = dict) -> Checkpoint:
        """What :func:`distrain.report` stores: a dict as ``portable`` makes it, with what Ray AIR added; a directory as
        it is. ``number`` counts the checkpoints of the rank from 0."""
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

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """What :meth:`to_bytes` made. Unpickles: only for bytes that you trust. Files go into a temporary directory."""
        content: Mapping[str, Any] = pickle.loads(data)  # noqa: S301 - documented
        if "dict" in content:
            checkpoint = cls.from_checkpoint(cls.from_dict(content["dict"]))
            checkpoint._metadata = content["metadata"]
            return checkpoint
        folder = Path(tempfile.mkdtemp(prefix="distrain-checkpoint-"))
        for path, body in content["files"].items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(body)
        return cls.from_checkpoint(cls(folder))

    def to_bytes(self) -> bytes:
        """All of it in memory. Raises CheckpointError if the checkpoint's directory does not exist."""
        content: dict[str, Any] = {"dict": self._data, "metadata": self._metadata}
        if self._data is None:
            folder = self._existing()
            files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST_FILE]
            content = {"files": {str(path.relative_to(folder)): path.read_bytes() for path in files}}
        data: bytes = cloudpickle.dumps(content)
        return data

    @classmethod
    def from_uri(cls, uri: str) -> Self:
        """Refer to a directory by its ``file://`` URL."""
        return cls.from_checkpoint(cls(uri))

    def to_uri(self, uri: str) -> str:
        """Copy the files to a ``file://`` URL and return it."""
        self.to_directory(_local_path(uri))
        return uri

    @property
    def uri(self) -> str | None:
        """The ``file://`` URL of the directory; None before a checkpoint made by :meth:`from_dict` is reported."""
        return Path(self.path).as_uri() if self._data is None else None

    def get_preprocessor(self) -> None:
        """Always None: preprocessors were Ray AIR's, and train_func prepares its data itself."""

    # -- metadata -------------------------------------------------------------------------------------------------

    def get_metadata(self) -> dict[str, Any]:
        """The JSON metadata kept beside the files; ``{}`` if there is none."""
        if self._data is not None:
            return dict(self._metadata)
        try:
            metadata: dict[str, Any] = json.loads((self._existing() / METADATA_FILE).read_text())
        except FileNotFoundError:
            return {}
        return metadata

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Replace the metadata. Raises TypeError or ValueError for what is not JSON."""
        json.dumps(dict(metadata))
        if self._data is not None:
            self._metadata = dict(metadata)
            return
        target = self._existing() / METADATA_FILE
        aside = target.with_name(target.name + ".new")
        aside.write_text(json.dumps(dict(metadata)))
        aside.replace(target)

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Add to the metadata, or replace entries of it."""
        self.set_metadata(self.get_metadata() | dict(metadata))

    # -- the rest -------------------------------------------------------------------------------------------------

    def __fspath__(self) -> str:
        raise TypeError(
            "a Checkpoint is not a path; use `with checkpoint.as_directory() as folder:` or checkpoint.to_directory()"
        )

    def __repr__(self) -> str:
        return (
            f"Checkpoint(path={self.path!r})" if self._data is None else f"Checkpoint.from_dict({sorted(self._data)})"
        )


def _local_path(uri: str) -> str:
    scheme, separator, path = uri.partition("://")
    if separator and scheme != "file":
        raise CheckpointError(f"{uri}: only file:// URLs and paths can be read and written so far")
    return path if separator else uri


def _ignore_manifest(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name == MANIFEST_FILE]
