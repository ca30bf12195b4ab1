"""Modes of ``Dataset.write_parquet(path, mode=...)`` and the like for a directory that exists. Runs in: anywhere."""

from __future__ import annotations

from enum import Enum

from fsspec.core import url_to_fs


class SaveMode(str, Enum):
    """The fate of the files that are in the directory already."""

    CREATE = "create"
    APPEND = "append"
    OVERWRITE = "overwrite"
    IGNORE = "ignore"
    ERROR = "error"
    UPSERT = "upsert"


def make_directory(path: str, mode: SaveMode | str) -> bool:
    """Make a directory for files, and return False if none shall be written. Raises ValueError as the mode says."""
    filesystem, place = url_to_fs(path)
    mode = SaveMode(mode)
    if filesystem.exists(place):
        if mode in (SaveMode.CREATE, SaveMode.ERROR):
            raise ValueError(f"{path} exists, and the mode is {mode}: give another path, or mode=SaveMode.OVERWRITE")
        if mode is SaveMode.IGNORE:
            return False
        if mode is SaveMode.OVERWRITE:
            filesystem.rm(place, recursive=True)
    if mode is SaveMode.UPSERT:
        raise ValueError("files have no keys by which rows could be replaced: read them, and write them anew")
    filesystem.makedirs(place, exist_ok=True)
    return True
