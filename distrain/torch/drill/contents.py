"""The tensors in a checkpoint, whatever has written it. Runs in: coordinator."""

from __future__ import annotations

import contextlib
import zlib
from typing import TYPE_CHECKING, Any

import torch

from distrain.storage.checkpoint import MANIFEST_FILE, Checkpoint
from distrain.storage.names import DICT_FILE

if TYPE_CHECKING:
    from pathlib import Path


def differing_tensors(path: Path, first: Path, second: Path) -> list[str]:
    """Return the names of tensors that differ from those in two checkpoints that are equal there."""
    ours, theirs, others = map(contents, (path, first, second))
    return [name for name, value in theirs.items() if others.get(name) == value != ours.get(name)]


def contents(folder: Path) -> dict[str, int]:
    """Return the checksum of each tensor of floating-point numbers in the files that are understood."""
    found: dict[str, int] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST_FILE:
            name = str(path.relative_to(folder))
            with contextlib.suppress(Exception):  # the file of another program may look like one of these
                _add(found, name, Checkpoint(folder).to_dict() if name == DICT_FILE else _loaded(path))
    return found


def _loaded(path: Path) -> Any:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=False)


def _add(found: dict[str, int], name: str, value: Any) -> None:
    """Add what is in a value, by its path."""
    if hasattr(value, "state_dict") and not isinstance(value, type):
        value = value.state_dict()
    if isinstance(value, dict):
        for key, one in value.items():
            _add(found, f"{name}/{key}", one)
    elif isinstance(value, (list, tuple)):
        for index, one in enumerate(value):
            _add(found, f"{name}/{index}", one)
    elif hasattr(value, "detach"):
        local = (value.to_local() if hasattr(value, "to_local") else value).detach()
        if local.is_floating_point():
            found[name] = zlib.crc32(repr((float(local.double().sum()), float(local.double().norm()))).encode())
