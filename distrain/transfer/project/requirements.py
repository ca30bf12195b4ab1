"""The packages that a run needs, as the text of one requirements file. Runs in: coordinator.

It is for :func:`~distrain.transfer.host_side.environments.make_environment` on hosts that have other packages, and none
of the files of this machine.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.errors import LaunchError
from distrain.system import process
from distrain.system.scratch import temporary_directory
from distrain.transfer.host_side.environments import find_uv

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from importlib.metadata import Distribution

FREEZE = "freeze"
"""The source that stands for the packages of this interpreter."""


def requirements_of(source: str, *, directory: str) -> str:
    """Return the text of a requirements file. Raise LaunchError if it cannot be had.

    source: ``freeze``, a ``uv.lock`` or a directory with one, or a requirements file. directory: the one that a
    relative path starts from.

    ``freeze`` names the version of each distribution that this interpreter has. A local suffix such as ``+cu130`` is
    removed, as the usual index does not have those versions: hosts get the build that it has. What is not installed
    from an index is left out, and named in a comment.
    """
    if source == FREEZE:
        return _frozen()
    path = Path(directory, Path(source).expanduser())
    if path.is_dir():
        path /= "uv.lock"
    if path.name == "uv.lock":
        return _exported(path)
    if path.suffix in (".toml", ".lock", ".yml", ".yaml"):
        raise LaunchError(f"{path} is not a requirements file: export one from it, or name a uv.lock")
    return "".join(f"{line}\n" for line in _lines(path, ()))


# -- requirements files ----------------------------------------------------------------------------------------------

_INCLUDE = re.compile(r"(?:-r|--requirement)[\s=]*(?P<path>\S.*)")
_UNREACHABLE = re.compile(
    r"(?:-c|--constraint)\b|(?:-e|--editable)(?!.*://)|(?:-f|--find-links)(?!.*://|[\s=]*[/$])"
    r"|(?:[^;]*@\s*)?(?:file:(?!/)|\.{1,2}/)|[^/$-][^:;]*\.(?:whl|zip|tar\.gz)$"
)
"""Matches a line that needs another file of this machine."""


def _lines(path: Path, above: tuple[Path, ...]) -> Iterator[str]:
    """Yield the lines of a requirements file and of those that it includes. above: the files that include this one."""
    path = path.resolve()
    if path in above:
        raise LaunchError(f"requirements files include each other in a circle: {' -> '.join(map(str, [*above, path]))}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"the requirements file {path} cannot be read ({error}): correct its name or text") from error
    for line in re.sub(r"\\\n", "", text).splitlines():
        line = re.sub(r"(^|\s)#.*", "", line).strip()
        include = _INCLUDE.fullmatch(line)
        if include is not None and "://" not in include["path"]:
            yield from _lines(path.parent / include["path"], (*above, path))
        elif _UNREACHABLE.match(line):
            raise LaunchError(
                f"{path}: {line!r} needs a file of this machine: name published packages only; a package that is "
                "developed here is copied as code if its directory is on sys.path"
            )
        elif line:
            yield line


# -- uv.lock ---------------------------------------------------------------------------------------------------------

_EXPORT = ["--frozen", "--no-emit-project", "--no-hashes", "--format", "requirements-txt"]


def _exported(lock: Path) -> str:
    """Return what ``uv export`` makes of a lock file, and the indexes that the lock file names."""
    if not lock.is_file():
        raise LaunchError(f"there is no {lock}: make it with `uv lock`, or name a requirements file")
    uv = find_uv()
    if not uv:
        raise LaunchError(
            f"uv is not installed on this machine, and only uv can read {lock}: install it (pip install uv), or export "
            f"a requirements file elsewhere (uv export {' '.join(_EXPORT)})"
        )
    with temporary_directory("distrain-requirements-") as folder:
        target = Path(folder, "requirements.txt")
        output: list[str] = []
        argv = [uv, "export", *_EXPORT, "--quiet", "--output-file", str(target)]
        code = process.run_tied(argv, output.append, directory=str(lock.parent), tick_s=1.0)
        if code:
            text = "\n".join(filter(str.strip, output))
            raise LaunchError(f"{lock} cannot be exported; uv export, run in {lock.parent}, ended with {code}:\n{text}")
        exported = target.read_text()
    return "".join(f"{line}\n" for line in (*_indexes(lock.read_text()), *_published(exported.splitlines())))


def _indexes(lock: str) -> list[str]:
    """Return an option for each index that a lock file names, first for the one with the most packages."""
    counted = Counter(re.findall(r'registry = "(https?://[^"]+)"', lock)).most_common()
    return [f"{'--extra-index-url' if number else '--index-url'} {url}" for number, (url, _) in enumerate(counted)]


def _published(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines of an export, but a comment instead of each package that is on this machine only."""
    for line in lines:
        if line and not re.match(r"\s|#", line):
            is_local = "file://" in line or re.match(r"-e\b|[./]", line)
            yield f"# left out, as it is on the user's machine only: {line}" if is_local else line


# -- freeze ----------------------------------------------------------------------------------------------------------

_NEVER = {"distrain", "pip", "setuptools", "wheel"}


def _frozen() -> str:
    """Return the distributions of this interpreter as a requirements file."""
    installed = _distributions()
    left_to_others = _pinned_by_local_builds(installed)
    lines = []
    for name, distribution in sorted(installed.items()):
        reference, origin = _reference(name, distribution)
        if not reference:
            lines.append(f"# left out, as it comes from {origin}: {name} {distribution.version}")
        elif name in left_to_others:
            lines.append(f"# left out, as another package decides on its version: {reference}")
        else:
            lines.append(reference)
    return "".join(f"{line}\n" for line in lines)


def _distributions() -> dict[str, Distribution]:
    """Return the distributions that an import finds, by their normalised names."""
    found: dict[str, Distribution] = {}
    for distribution in importlib.metadata.distributions():
        with contextlib.suppress(FileNotFoundError, TypeError):  # a failed uninstallation leaves such distributions
            if "Name" in distribution.metadata and "Version" in distribution.metadata:
                found.setdefault(_normalised(distribution.metadata["Name"]), distribution)
    return {name: distribution for name, distribution in found.items() if name not in _NEVER}


def _reference(name: str, distribution: Distribution) -> tuple[str, str]:
    """Return what installs a distribution elsewhere, or an empty text and where it comes from."""
    direct = json.loads(distribution.read_text("direct_url.json") or "{}")
    url = str(direct.get("url", ""))
    if "archive_info" in direct and not url.startswith("file:"):
        return f"{name} @ {url}", ""
    folder = Path(str(distribution.locate_file("")))
    if not url and any((folder / file).is_file() for file in ("pyproject.toml", "setup.py", "setup.cfg")):
        url = str(folder)  # its metadata is next to its source, as ``setup.py develop`` puts it
    return ("" if url else f"{name}=={distribution.version.partition('+')[0]}"), url


def _pinned_by_local_builds(installed: Mapping[str, Distribution]) -> set[str]:
    """Return the distributions whose version goes with a build such as ``+cu130``.

    The build on the usual index may want other versions of them, those of the CUDA libraries for example.
    """
    local = {name for name, distribution in installed.items() if "+" in distribution.version}
    pinned: set[str] = set()
    todo = list(local)
    while todo:
        for text in installed[todo.pop()].requires or ():
            requirement = re.match(r"([\w.-]+)[^;]*?(?:(?<!!)==|~=|<)", text)
            name = _normalised(requirement[1]) if requirement else ""
            if name in installed and name not in local | pinned:
                pinned.add(name)
                todo.append(name)
    return pinned


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
