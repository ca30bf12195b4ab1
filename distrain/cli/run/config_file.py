"""The config file of a project: ``distrain.toml``, or ``[tool.distrain]`` in pyproject.toml. Runs in: coordinator."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from distrain.storage.lines import MOST_BYTES, read_with
from distrain.storage.runs.listing import WrongArgument
from distrain.system.text import did_you_mean

directory = ""
"""The directory to look in first, if not the working directory; set in processes that try out a user's script."""
_FILES = {"distrain.toml": "", "pyproject.toml": "tool.distrain."}
"""The names of config files, the preferred one first, and what stands in front of their keys."""

_HARMLESS = {"storage-path"}
"""The options that another user's file may set. Most others name hosts, commands, variables, or files to copy."""


class Layer(NamedTuple):
    """The options of a config file, or those of one of its targets.

    label: what errors put in front of a key, such as ``pyproject.toml: tool.distrain.on.lab.``
    options: the values by option, without the dashes in front.
    """

    label: str
    folder: Path
    options: dict[str, Any]

    def path(self, text: Any) -> str:
        """Return a path or URL of the file, where a path is relative to the file. Raise WrongArgument."""
        if not isinstance(text, str):
            raise WrongArgument(f"{self.label}: a path must be a string, got {text!r}")
        return text if "://" in text else os.path.join(self.folder, os.path.expanduser(text))


def layers(target: str | None) -> list[Layer]:
    """Return the options of the config file, if there is one, and then those of a target, which replace them.

    Raise WrongArgument for a file that cannot be parsed, or if there is no such target; OSError.
    """
    found = list(filter(None, map(_layer_in, _folders())))[:1]
    targets = found[0].options.pop("on", {}) if found else {}
    if not isinstance(targets, dict) or not all(isinstance(options, dict) for options in targets.values()):
        header = f"[{found[0].label.rpartition(' ')[2]}on.NAME]"
        raise WrongArgument(f"{found[0].label}on: must be tables of options, each under {header}, got {targets!r}")
    if target is not None:
        if target not in targets:
            where = f"{found[0].label}on" if found else f"distrain.toml or pyproject.toml for {os.getcwd()}"
            raise WrongArgument(f"--on {target}: there is no such target in {where}{did_you_mean(target, targets)}")
        found.append(Layer(f"{found[0].label}on.{target}.", found[0].folder, targets[target]))
    return found


def storage_path(target: str | None) -> str | None:
    """Return the storage path that the config file names, or None. Raise WrongArgument or OSError."""
    key = "storage-path"
    named = [layer.path(layer.options[key]) for layer in layers(target) if key in layer.options]
    return named[-1] if named else None


def _folders() -> list[Path]:
    """Return the working directory, and those above it up to the repository or home directory of the same owner.

    A file further up may belong to another user, as in /tmp.
    """
    here, home = Path(directory or os.getcwd()), Path(os.path.realpath(os.path.expanduser("~")))
    folders, owner = [here, *here.parents], here.stat().st_uid
    for number, folder in enumerate(folders, start=1):
        if (folder == home or (folder / ".git").exists()) and folder.stat().st_uid == owner:
            return folders[:number]
    return [here]


def _layer_in(folder: Path) -> Layer | None:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    for name, prefix in _FILES.items():
        path = os.path.relpath(folder / name)
        try:
            text, owner = read_with(path, lambda file: (file.read(MOST_BYTES), os.fstat(file.fileno()).st_uid))
            table: Any = tomllib.loads(text.decode())
        except FileNotFoundError:
            continue
        except (ValueError, PermissionError, RecursionError) as error:
            raise WrongArgument(f"{path}: {error}; --no-config ignores the file") from None
        for key in prefix.split(".")[:-1]:
            table = table.get(key) if isinstance(table, dict) else None
        if isinstance(table, dict):
            if owner not in (0, os.geteuid()) and (refused := sorted(table.keys() - _HARMLESS)):
                why = f"belongs to another user (uid {owner}), and {refused[0]} could run commands as you"
                raise WrongArgument(f"{path} {why}: make the file your own, or ignore it with --no-config")
            return Layer(f"{path}: {prefix}", folder, table)
    return None
