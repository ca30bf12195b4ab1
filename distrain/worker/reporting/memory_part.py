"""A rank's part of a checkpoint, written into the memory of its host. Runs in: worker.

The agent frees old parts by renaming their directories. Reusing their files reuses their pages.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain.hosts.cgroup import memory_use
from distrain.hosts.inspection import memory_free_bytes
from distrain.storage.file_transfer import crc32_of, states_of, unchanged
from distrain.storage.files import list_files
from distrain.storage.separated import Separated, map_file
from distrain.system.background import start_hidden_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrain.storage.checkpoint import Checkpoint

_NO_ROOM = {errno.ENOSPC, errno.ENOMEM, errno.EDQUOT}
_RESERVE = 256 << 20
"""Bytes of the host's memory that a part leaves free."""


class _Buffer:
    """A mapped file, which stays mapped and, for a GPU, pinned."""

    def __init__(self, path: Path, size: int) -> None:
        self._pinned_at, self._fd = 0, -1
        self.memory = map_file(path, size)
        self._fd = os.open(path, os.O_RDONLY)

    def fits(self, path: Path, size: int) -> bool:
        """Return whether this is the file at ``path``, with that size and no other link."""
        return self.is_at(path) and self._status.st_nlink == 1 and self._status.st_size == size

    def is_at(self, path: Path) -> bool:
        return path.exists() and os.path.samestat(self._status, path.stat())

    @property
    def is_deleted(self) -> bool:
        return self._status.st_nlink == 0

    @property
    def _status(self) -> os.stat_result:
        return os.fstat(self._fd)

    def pin(self) -> None:
        """Let a GPU write directly into the memory; best effort."""
        if not self._pinned_at:
            torch: Any = sys.modules["torch"]
            address = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()
            if int(torch.cuda.cudart().cudaHostRegister(address, len(self.memory), 1)) == 0:  # 1: for all GPUs
                self._pinned_at = address

    def close(self) -> None:
        """Unpin the memory before it is unmapped: another mapping at this address would count as pinned, too."""
        if self._pinned_at:
            sys.modules["torch"].cuda.cudart().cudaHostUnregister(self._pinned_at)
            self._pinned_at = 0
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()


@dataclass
class Part:
    """A part as it is reported.

    copy_from_gpu: copies what is still on GPUs; None if all bytes are written. facts: size and crc32 of each file.
    """

    folder: Path
    files: list[str]
    copy_from_gpu: Callable[[], None] | None = None
    facts: dict[str, list[int]] = field(default_factory=dict)


class MemoryParts:
    """Writes the parts of a rank, one at a time. folder: of all its parts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._buffers: list[_Buffer] = []
        self._is_written = threading.Event()
        self._is_written.set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the part before is written."""
        self._is_written.wait(timeout_s)

    def drop(self, name: str) -> None:
        """Let the next part use the directory of this one, whose checkpoint was dropped."""
        with contextlib.suppress(OSError):  # it was not written to memory, or the agent has freed it
            (self._folder / name).rename(self._folder / f"free-{name}")

    def write(self, name: str, checkpoint: Checkpoint) -> Part:
        """Write the files of a checkpoint. Raise an error that :func:`is_short` knows if there is too little room.

        name: of the new directory.
        """
        self.wait()
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(errno.ENOSPC, f"{self._folder} cannot be made ({error.strerror})") from error
        folder = self._reused(self._folder / name)
        try:
            if not checkpoint.path:
                return self._write(folder, checkpoint.separated())
            with checkpoint.as_directory() as source:
                states = states_of(Path(source), list_files(Path(source)))
                with unchanged(Path(source), states):
                    return self._write(folder, {file: Path(source, file) for file in states})
        except BaseException:
            folder.rename(folder.with_name(f"free-{name}"))
            raise

    def _reused(self, folder: Path) -> Path:
        """Return the directory for a part, with the files of one that the agent has freed, if there is one."""
        for free in self._folder.glob("free-*"):
            try:
                return free.rename(folder)
            except FileNotFoundError:  # the agent has just deleted it
                continue
        folder.mkdir()
        return folder

    def _write(self, folder: Path, contents: dict[str, Any]) -> Part:
        sizes = {file: _size(content) for file, content in contents.items()}
        files = [file for file, size in sizes.items() if size or not isinstance(contents[file], Separated)]
        needed = sum(sizes.values())
        for path in sorted(folder.rglob("*"), reverse=True):  # what is in a directory comes before it
            if path.is_dir():
                with contextlib.suppress(OSError):  # files of this part stay in it
                    path.rmdir()
            elif path.stat().st_nlink > 1 or str(path.relative_to(folder)) not in files:
                path.unlink()
            else:
                needed -= path.stat().st_size
        _check_room(needed)
        part = Part(folder, files)
        for file in files:
            content, size, path = contents[file], sizes[file], folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Separated):
                self._fill(part, file, content)
            elif not size:
                path.write_bytes(b"")  # it may contain bytes of an older part
                part.facts[file] = [0, 0]
            else:
                memory = map_file(path, size)
                with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as source:
                    if source.readinto(memory) < size:
                        raise OSError(errno.EIO, "the file became shorter while it was read", str(content))
                part.facts[file] = [size, crc32_of(memory)]
        return part

    def _fill(self, part: Part, file: str, tensors: Separated) -> None:
        buffer = self._buffer_of(part.folder / file, tensors.size)
        copy = tensors.fill(buffer.memory)
        if copy is None:
            part.facts[file] = [tensors.size, crc32_of(buffer.memory)]
            return
        cuda: Any = sys.modules["torch"].cuda
        device = cuda.current_device()

        def finish() -> None:
            cuda.set_device(device)  # else this thread would use the first GPU, and memory of it
            buffer.pin()
            copy()
            part.facts[file] = [tensors.size, crc32_of(buffer.memory)]

        part.copy_from_gpu = finish

    def _buffer_of(self, path: Path, size: int) -> _Buffer:
        """Return the mapped file, and close those that are deleted, or that have another size or a reader now."""
        for buffer in list(self._buffers):
            if buffer.fits(path, size):
                return buffer
            if buffer.is_deleted or buffer.is_at(path):
                self._buffers.remove(buffer)
                buffer.close()
        self._buffers.append(_Buffer(path, size))
        return self._buffers[-1]

    def finish(self, part: Part, then: Callable[[Exception | None], None]) -> None:
        """Copy what is still on GPUs, in a thread, and call ``then`` with the error, or None."""
        copy = part.copy_from_gpu
        assert copy is not None
        self._is_written.clear()

        def run() -> None:
            failed = None
            try:
                copy()
            except Exception as error:
                failed = error
            finally:
                self._is_written.set()
            then(failed)

        start_hidden_thread(run)


def is_short(error: Exception) -> bool:
    """Return whether memory is too small, or cannot be used at all, so that checkpoints must go to storage."""
    is_full = isinstance(error, MemoryError) or getattr(error, "errno", None) in _NO_ROOM
    return is_full or "out of memory" in str(error)  # of a GPU: several exception classes have no other sign


def _size(content: Any) -> int:
    if isinstance(content, Separated):
        return content.size
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def _check_room(needed: int) -> None:
    """Raise OSError if the host or the control group of this process has too little memory for so many new bytes."""
    free = memory_free_bytes()
    if needed > 0 and free:
        used, limit = memory_use() or (0, free)
        free = min(free, limit - used)
        if needed + _RESERVE > free:
            raise OSError(errno.ENOSPC, f"{needed:,} bytes of memory are needed, and {max(free, 0):,} are free")
