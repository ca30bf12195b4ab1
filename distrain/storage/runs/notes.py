"""The note and the tags that users give a run, in a file of their own. Runs in: anywhere."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from distrain.storage import names
from distrain.storage.lines import parse_json, read_file

if TYPE_CHECKING:
    from distrain.system.remote_path import RemotePath


class Notes(NamedTuple):
    """A note and tags. As text: ``#baseline #good lr is too high``."""

    text: str = ""
    tags: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join([*(f"#{tag}" for tag in self.tags), *self.text.split()])


def notes_of(folder: str | Path | RemotePath) -> Notes:
    """Return the notes of a run; empty ones if there is no usable file."""
    path = os.path.join(folder, names.NOTES) if isinstance(folder, (str, Path)) else folder / names.NOTES
    try:
        found = parse_json(read_file(path))
        return Notes(str(found["text"]), tuple(map(str, found["tags"])))
    except (OSError, ValueError, KeyError, TypeError):
        return Notes()


def write_notes(folder: Path | RemotePath, notes: Notes) -> None:
    """Replace the notes of a run. Raise OSError."""
    from distrain.storage.files import write_atomically

    data = json.dumps(notes._asdict(), indent=1).encode()
    if isinstance(folder, Path):
        write_atomically(folder / names.NOTES, data)
    else:
        (folder / names.NOTES).write_bytes(data)
