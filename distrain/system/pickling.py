"""Pickling by value: functions and classes that the reader cannot import are included. Runs in: anywhere.

The bytes of torch's tensors are stored once, also if tensors share them, and whatever their dtype is. Any unpickler
reads them with torch alone; they come back on the CPU.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import pickle
import sys
import types
from collections import ChainMap
from functools import partial
from typing import IO, TYPE_CHECKING, Any, ClassVar

import cloudpickle

from distrain.system.notebook import cell_of

if TYPE_CHECKING:
    from collections.abc import Mapping


MAIN_NAMES = ("__main__", "__mp_main__")
"""The names of the user's main module. Children of multiprocessing that are not forked know it by the second."""
_STORAGE_TYPES = ("UntypedStorage", "TypedStorage")


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    """Reduce code as cloudpickle does, with the name of its file, which errors, stacks and hang reports show.

    cloudpickle 3.1.3 replaces it by ``<dynamic-code>``. The layout of the arguments depends on the version of Python,
    but in each the file name is the first text. The code of a notebook's cell gets the name of the cell.
    """
    make, arguments = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    file_name = next(index for index, argument in enumerate(arguments) if isinstance(argument, str))
    return make, (*arguments[:file_name], cell_of(code.co_filename) or code.co_filename, *arguments[file_name + 1 :])


class _StorageBytes:
    """The bytes of a torch storage. They are pickled once, however many tensors share them."""

    def __init__(self, untyped: Any) -> None:
        self._untyped = untyped

    def __reduce__(self) -> tuple[Any, ...]:
        kind, plain = type(self._untyped), self._untyped.cpu()
        if not (size := plain.nbytes()):
            return kind, (0,)
        body: Any = (ctypes.c_char * size).from_address(plain.data_ptr())
        body.owner = plain  # which must not be freed before the bytes are pickled
        return partial(kind.from_buffer, dtype=sys.modules["torch"].uint8), (pickle.PickleBuffer(body),)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's pickler, with file names. It pickles ``__main__`` and modules like torch.backends.cudnn by name.

    by_value: False leaves functions and classes where they are, as ``pickle`` does.
    """

    dispatch_table: ClassVar[Mapping[type, Any]] = ChainMap(
        {types.CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table
    )

    def __init__(self, file: IO[bytes], *, by_value: bool = True, **options: Any) -> None:
        super().__init__(file, **options)
        self._by_value = by_value
        self._storage_bytes: dict[int, _StorageBytes] = {}
        main = sys.modules.get("__mp_main__")
        if main is not None and main.__name__ == "__mp_main__":  # of a child, whose main module workers cannot import
            cloudpickle.register_pickle_by_value(main)

    def reducer_override(self, value: Any) -> Any:
        if type(value).__name__ in _STORAGE_TYPES and type(value).__module__ == "torch.storage":
            return self._reduce_storage(value)
        if not self._by_value:
            return NotImplemented
        if isinstance(value, types.ModuleType):
            name = value.__name__
            by_name = type(value) is not types.ModuleType or name in MAIN_NAMES
            if by_name and sys.modules.get(name) is value:
                return importlib.import_module, (name,)
        return super().reducer_override(value)

    def _reduce_storage(self, storage: Any) -> tuple[Any, ...]:
        """Reduce a storage of torch, to a typed one, as torch.load() does.

        torch's own way fails for newer dtypes, such as float8.
        """
        torch: Any = sys.modules["torch"]
        untyped, dtype = getattr(storage, "_untyped_storage", storage), getattr(storage, "dtype", torch.uint8)
        body = self._storage_bytes.setdefault(untyped._cdata, _StorageBytes(untyped))
        return partial(torch.storage.TypedStorage, wrap_storage=body, dtype=dtype, _internal=True), ()


def pickled(value: object, *, by_value: bool = True) -> bytes:
    """Pickle the value; with ``by_value``, functions and classes that workers cannot import are included."""
    file = io.BytesIO()
    Pickler(file, by_value=by_value).dump(value)
    return file.getvalue()
