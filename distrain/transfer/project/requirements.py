"""The packages that a run needs, as the text of one requirements file. Runs in: coordinator.

It is for :func:`~distrain.transfer.host_side.environments.make_environment` on hosts that have other packages, and none
of the files of this machine.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from distrain.errors import LaunchError
from distrain.system import process
from distrain.system.scratch import temporary_directory
from distrain.transfer.host_side.environments import CONSTRAINT, find_uv

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from importlib.metadata import Distribution

FREEZE = "freeze"
"""The source that stands for the packages of this interpreter."""

_SHIPPED_AS_CODE = (
    "name published packages only; one that is developed on this machine is shipped as code if its directory is on "
    "sys.path"
)


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

_INCLUDE = re.compile(
    r"(?:(?:-r|--requirement)|(?P<constraint>-c|--constraint))(?:\s+|\s*=\s*|(?<=^-[rc]))(?P<path>\S.*)"
)
_PLACE = re.compile(r"(?:-f|--find-links|-i|--index-url|--extra-index-url)(?:\s+|\s*=\s*|(?<=^-[fi]))(?P<path>\S+)")
_EDITABLE = re.compile(r"(?:-e|--editable)(?:\s+|\s*=\s*|(?<=^-e))(?P<path>\S+)")
_ARCHIVE = re.compile(r"\.(whl|zip|tar|tgz|tar\.\w+)$", re.IGNORECASE)


def _lines(path: Path, above: tuple[Path, ...]) -> Iterator[str]:
    """Yield the lines of a requirements file and of those that it includes. above: the files that include this one."""
    path = path.resolve()
    if path in above:
        raise LaunchError(f"requirements files include each other in a circle: {' -> '.join(map(str, [*above, path]))}")
    for number, line in _logical_lines(path):
        include = _INCLUDE.fullmatch(line)
        if include is None or "://" in include["path"]:
            _check_reachable(line, f"{path}, line {number}")
            yield line
            continue
        included = _lines(path.parent / shlex.split(include["path"])[0], (*above, path))
        yield from included if include["constraint"] is None else map(_as_constraint, included)


def _logical_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of each line. Lines that a backslash continues are joined, comments are removed."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"the requirements file {path} cannot be read ({error}): correct its name or text") from error
    begun = ""
    for number, line in enumerate([*text.splitlines(), ""], 1):
        begun += line.removesuffix("\\")
        if not line.endswith("\\"):
            if stripped := re.sub(r"(^|\s)#.*", "", begun).strip():
                yield number, stripped
            begun = ""


def _as_constraint(line: str) -> str:
    return line if line.startswith((CONSTRAINT, "-")) else CONSTRAINT + line


def _check_reachable(line: str, where: str) -> None:
    """Raise LaunchError if a line names a file or directory that a host cannot have."""
    if place := _PLACE.fullmatch(line):
        if _is_relative(place["path"]):
            raise LaunchError(f"{where}: {line!r} is a directory of this machine: write an absolute path or a URL")
    elif path_in(line) is not None:
        raise LaunchError(f"{where}: {line!r} is a path on this machine: {_SHIPPED_AS_CODE}")


def path_in(line: str) -> str | None:
    """Return the local path that a line installs from, if it is editable or relative; else None."""
    if editable := _EDITABLE.match(line):
        path = editable["path"]
        return path if "://" not in path or path.startswith("file:") else None
    if line.startswith("-"):
        return None
    requirement = re.split(r";|\s--", line)[0].strip()
    name, at, target = requirement.partition("@")
    if at and "/" not in name:
        return target.strip() if _is_relative(target.strip()) else None
    is_path = "/" in requirement or requirement.startswith((".", "file:")) or _ARCHIVE.search(requirement)
    return requirement if is_path and _is_relative(requirement) else None


def _is_relative(path: str) -> bool:
    """Tell if a path is relative. A URL is not, and neither is one that begins with a variable of the host."""
    return "://" not in path and not path.removeprefix("file:").startswith(("/", "${"))


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
    counted = Counter(re.findall(r'registry = "(https?://[^"]+)"', lock))
    kinds = ["--index-url", *["--extra-index-url"] * len(counted)]
    return [f"{kind} {url}" for kind, (url, _) in zip(kinds, counted.most_common())]  # noqa: B905 - one too many


def _published(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines of an export, but a comment instead of each package that is on this machine only."""
    for line in lines:
        if re.match(r"\s|#", line) or not line:
            continue
        is_local = path_in(line) is not None or "file://" in line
        yield f"# left out, as it is on the user's machine only: {line}" if is_local else line


# -- freeze ----------------------------------------------------------------------------------------------------------

_NEVER = {"distrain", "pip", "setuptools", "wheel"}


class _Installed(NamedTuple):
    """One distribution of this interpreter.

    reference: what installs it elsewhere; empty if it cannot be installed elsewhere. origin: where it comes from if not
    from an index.
    """

    distribution: Distribution
    reference: str
    origin: str


def _frozen() -> str:
    """Return the distributions of this interpreter as a requirements file."""
    installed = {name: _installed(name, found) for name, found in sorted(_distributions().items())}
    left_to_others = _pinned_by_local_builds(installed)
    lines = []
    for name, one in installed.items():
        if not one.reference:
            lines.append(f"# left out, as it comes from {one.origin}: {name} {one.distribution.version}")
        elif name in left_to_others:
            lines.append(f"# left out, as {left_to_others[name]} decides on its version: {one.reference}")
        else:
            lines.append(one.reference)
    return "".join(f"{line}\n" for line in lines)


def _distributions() -> dict[str, Distribution]:
    """Return the distributions that an import finds, by their normalised names."""
    found: dict[str, Distribution] = {}
    for distribution in importlib.metadata.distributions():
        with contextlib.suppress(FileNotFoundError, TypeError):  # a failed uninstallation leaves such distributions
            if "Name" in distribution.metadata and "Version" in distribution.metadata:
                found.setdefault(_normalised(distribution.metadata["Name"]), distribution)
    return {name: distribution for name, distribution in found.items() if name not in _NEVER}


def _installed(name: str, distribution: Distribution) -> _Installed:
    direct = json.loads(distribution.read_text("direct_url.json") or "{}")
    url = str(direct.get("url", ""))
    version = distribution.version.partition("+")[0]
    if not url:
        source = _source_tree(distribution)
        return _Installed(distribution, "" if source else f"{name}=={version}", source)
    if "archive_info" in direct and not url.startswith("file:"):
        return _Installed(distribution, f"{name} @ {url}", "")
    return _Installed(distribution, "", url)


def _source_tree(distribution: Distribution) -> str:
    """Return the directory of a distribution whose metadata is next to its source, as ``setup.py develop`` puts it."""
    folder = Path(str(distribution.locate_file("")))
    is_source = any((folder / name).is_file() for name in ("pyproject.toml", "setup.py", "setup.cfg"))
    return str(folder) if is_source else ""


def _pinned_by_local_builds(installed: dict[str, _Installed]) -> dict[str, str]:
    """Return the distributions whose version goes with a build such as ``+cu130``, and that build.

    The build on the usual index may want other versions of them, those of the CUDA libraries for example.
    """
    local = {name for name, one in installed.items() if "+" in one.distribution.version}
    pinned: dict[str, str] = {}
    todo = [(name, name, frozenset[str]()) for name in sorted(local)]
    while todo:
        name, build, extras = todo.pop()
        for other, other_extras in _bounded_requirements(installed[name].distribution, extras):
            if other in installed and other not in local and other not in pinned:
                pinned[other] = build
                todo.append((other, build, other_extras))
    return pinned


_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)\s*(?:\[(?P<extras>[^]]*)\])?(?P<versions>[^;]*)(?:;(?P<marker>.*))?")


def _bounded_requirements(distribution: Distribution, extras: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield what a distribution requires below or at a version: its name, and its extras."""
    for text in distribution.requires or ():
        match = _REQUIREMENT.match(text)
        if match is None or not re.search(r"(?<!!)==|~=|<", match["versions"]):
            continue
        wanted = re.search(r"""extra\s*==\s*["']([^"']+)""", match["marker"] or "")
        if wanted is None or wanted[1] in extras:
            yield _normalised(match["name"]), frozenset(re.findall(r"[\w.-]+", match["extras"] or ""))


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
