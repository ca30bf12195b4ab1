"""Pickling by value: functions and classes that the reader cannot import are included. Runs in: anywhere."""

from __future__ import annotations

import importlib
import io
import sys
import types
from collections import ChainMap
from typing import IO, TYPE_CHECKING, Any, ClassVar

import cloudpickle

from distrain.system.notebook import cell_of

if TYPE_CHECKING:
    from collections.abc import Mapping


MAIN_NAMES = ("__main__", "__mp_main__")
"""The names of the user's main module. Children of multiprocessing that are not forked know it by the second."""


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    """Reduce code as cloudpickle does, with the name of its file, which errors, stacks and hang reports show.

    cloudpickle 3.1.3 replaces it by ``<dynamic-code>``. The layout of the arguments depends on the version of Python,
    but in each the file name is the first text. The code of a notebook's cell gets the name of the cell.
    """
    make, arguments = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    file_name = next(index for index, argument in enumerate(arguments) if isinstance(argument, str))
    return make, (*arguments[:file_name], cell_of(code.co_filename) or code.co_filename, *arguments[file_name + 1 :])


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's pickler, with file names. By name go modules of a subclass, as torch.backends.cudnn, and main."""

    dispatch_table: ClassVar[Mapping[type, Any]] = ChainMap(
        {types.CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table
    )

    def __init__(self, file: IO[bytes], **options: Any) -> None:
        super().__init__(file, **options)
        main = sys.modules.get("__mp_main__")
        if (
            main is not None and main.__name__ == "__mp_main__"
        ):  # this is a child, and workers cannot import its main module
            cloudpickle.register_pickle_by_value(main)

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.ModuleType):
            name = value.__name__
            by_name = type(value) is not types.ModuleType or name in MAIN_NAMES
            if by_name and sys.modules.get(name) is value:
                return importlib.import_module, (name,)
        return super().reducer_override(value)


def pickled(value: object) -> bytes:
    """Pickle the value; functions and classes that workers cannot import are included."""
    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()
