"""A pickled dict whose tensors and arrays are bytes in a second file, which are copied only once. Runs in: anywhere.

As with torch.save, the whole storage of a tensor is copied. Tensors that share it still do after they were loaded.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import pickle
import sys
from typing import TYPE_CHECKING, Any, BinaryIO

from distrain.errors import CheckpointError
from distrain.system.pickling import Pickler

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_ALIGNMENT = 64
_PICKLED = {int, str, tuple, dict, bool, float, bytes, list, type(None), type}
"""Frequent types without bytes of a tensor or an array."""
_GPU_RESERVE = 256 << 20
"""Bytes of a GPU that stay free when tensors are cloned on it."""


def _tensor(storage: Any, dtype: Any, *view: Any) -> Any:
    return sys.modules["torch"].empty(0, dtype=dtype, device="cpu").set_(storage._untyped_storage, *view)


class Separated(Pickler):
    """A value, pickled without the bytes of its tensors and arrays.

    skeleton: what :func:`load` reads. size: of the bytes.
    """

    def __init__(self, value: object) -> None:
        file = io.BytesIO()
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.size = 0
        self._torch: Any = sys.modules.get("torch")
        self._storages = (self._torch.UntypedStorage, self._torch.storage.TypedStorage) if self._torch else ()
        self._pieces: list[tuple[int, Any]] = []
        """Offset and source: a memoryview, or an untyped storage of torch."""
        self._places: dict[int, tuple[Any, tuple[int, int, int]]] = {}
        """By the address of a storage: the storage, which must not be freed meanwhile; number, offset and size."""
        self.dump(value)
        self.skeleton = file.getvalue()

    def persistent_id(self, value: Any) -> Any:
        """Return the place of bytes, and for a storage also its dtype; None for a value to pickle."""
        if type(value) in _PICKLED:
            return None
        if isinstance(value, pickle.PickleBuffer):
            raw = value.raw()
            return self._add(raw, raw.nbytes), None
        if not isinstance(value, self._storages):
            return None
        storage = getattr(value, "_untyped_storage", value)
        if storage._cdata not in self._places:
            self._places[storage._cdata] = storage, self._add(storage, storage.nbytes())
        return self._places[storage._cdata][1], getattr(value, "dtype", self._torch.uint8)

    def reducer_override(self, value: Any) -> Any:
        """Reduce a plain tensor in a third of the time that torch takes, and all else as usual."""
        torch = self._torch
        is_dense = torch is not None and type(value) is torch.Tensor and value.layout is torch.strided
        if not is_dense or value.device.type not in ("cpu", "cuda") or value.requires_grad or value.__dict__:
            return super().reducer_override(value)
        if value.is_conj() or value.is_neg() or value.is_quantized:
            return super().reducer_override(value)
        view = value.storage_offset(), tuple(value.shape), value.stride()
        return _tensor, (value.untyped_storage(), value.dtype, *view)

    def _add(self, source: Any, size: int) -> tuple[int, int, int]:
        offset = -(-self.size // _ALIGNMENT) * _ALIGNMENT
        if size:
            self._pieces.append((offset, source))
            self.size = offset + size
        return len(self._places), offset, size

    def fill(self, buffer: mmap.mmap) -> Callable[[], None] | None:
        """Copy the bytes into a buffer.

        Tensors on GPUs are cloned there if there is room. Then, returns a function that copies the clones into the
        buffer, and which another thread may call.
        """
        pairs = []
        for offset, source in self._pieces:
            if isinstance(source, memoryview):
                buffer[offset : offset + source.nbytes] = source
            else:
                as_bytes = self._torch.empty(0, dtype=self._torch.uint8, device=source.device).set_(source)
                target = self._torch.frombuffer(buffer, dtype=self._torch.uint8, count=len(as_bytes), offset=offset)
                pairs.append((target, as_bytes))
        cloned = self._cloned([(target, source) for target, source in pairs if source.is_cuda])
        for target, source in pairs:
            if cloned is None or not source.is_cuda:
                target.copy_(source)
        return cloned

    def _cloned(self, pairs: list[tuple[Any, Any]]) -> Callable[[], None] | None:
        """Clone tensors on their GPUs. Returns a function that copies the clones, None if there is too little room."""
        if not pairs:
            return None
        cuda, needed = self._torch.cuda, dict.fromkeys((source.device for _, source in pairs), _GPU_RESERVE)
        for _, source in pairs:
            needed[source.device] += len(source)
        if any(cuda.mem_get_info(device)[0] < size for device, size in needed.items()):
            return None
        try:
            clones = [(target, source.clone()) for target, source in pairs]
        except cuda.OutOfMemoryError:  # the free memory is in pieces, or another process has taken it
            return None
        streams = {device: cuda.Stream(device) for device in needed}
        for device, stream in streams.items():
            stream.wait_stream(cuda.current_stream(device))

        def copy() -> None:
            for target, clone in clones:
                with cuda.stream(streams[clone.device]):
                    target.copy_(clone, non_blocking=True)
            for stream in streams.values():
                stream.synchronize()

        return copy

    def write(self, path: Path) -> None:
        """Write the bytes to a file, if there are any. Raise OSError."""
        if self.size and (copy := self.fill(map_file(path, self.size))) is not None:
            copy()


def map_file(path: Path, size: int) -> mmap.mmap:
    """Map a file for writing, in the pages that it has, after it was made that large. Raise OSError.

    A file that has other links is made anew.
    """
    if path.exists() and path.stat().st_nlink > 1:
        path.unlink()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(fd).st_size > size:
            os.ftruncate(fd, size)
        os.posix_fallocate(fd, 0, size)  # to write into a page that finds no room would kill the process
        return mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(fd)


class _Loader(pickle.Unpickler):
    def __init__(self, skeleton: bytes, open_bytes: Callable[[], BinaryIO]) -> None:
        super().__init__(io.BytesIO(skeleton))
        self._open = open_bytes
        self._file: BinaryIO | None = None
        self._storages: dict[int, Any] = {}

    def persistent_load(self, place: Any) -> Any:
        (number, offset, size), dtype = place
        if dtype is None:
            return self._read(bytearray(size), offset, size)
        torch: Any = sys.modules["torch"]  # imported, as ``dtype`` was just unpickled
        if number not in self._storages:
            storage = self._storages[number] = torch.UntypedStorage(size)
            self._read((ctypes.c_char * size).from_address(storage.data_ptr()), offset, size)
        # As in torch.load, also for an untyped one: that of a tensor with a newer dtype, such as float8.
        return torch.storage.TypedStorage(wrap_storage=self._storages[number], dtype=dtype, _internal=True)

    def _read(self, target: Any, offset: int, size: int) -> Any:
        if size:
            self._file = self._file or self._open()
            self._file.seek(offset)
            if self._file.readinto(target) < size:  # type: ignore[attr-defined]
                raise CheckpointError(f"{self._file.name} is damaged: it is shorter than its tensors")
        return target


def load(skeleton: bytes, open_bytes: Callable[[], BinaryIO]) -> Any:
    """Unpickle a skeleton, with tensors on the CPU, or any other pickle.

    open_bytes: opens the file of the bytes; called if there are any.
    """
    return _Loader(skeleton, open_bytes).load()
