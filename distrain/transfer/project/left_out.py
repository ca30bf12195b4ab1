"""The files that are not shipped, and the texts that tell the user why: notes and errors. Runs in: coordinator."""

from __future__ import annotations

import os
import re
from collections import Counter
from typing import TYPE_CHECKING

from distrain.errors import LaunchError
from distrain.system.text import size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

CODE = (".py", ".so", ".pyd")
"""Ends of the names of files that can be imported. These are shipped whatever their size is."""
_SMALL_BYTES = 1_000_000
"""The largest size of other files."""
_MOST_NAMED = 3
"""Number of files that a note or an error names."""

_SECRET = re.compile(
    r"/(?:"
    r"\.(?:ssh|aws|gnupg|kube|docker)/"
    r"|(?:"
    r"\.env(?:\.(?!(?:[^/]*\.)?(?:example|sample|template)\Z)[^/]*)?"
    r"|[^/]*\.(?:pem|key|p12|pfx|kdbx)"
    r"|id_(?:rsa|dsa|ecdsa|ed25519)(?![^/]*\.py\Z)[^/]*"
    r"|\.netrc|\.pgpass|\.git-credentials|\.pypirc|\.htpasswd|credentials(?:\.json)?|service-account[^/]*\.json"
    r"|kubeconfig"
    r")\Z)",
    re.IGNORECASE,
)
"""Matches the absolute path of a file that usually holds a secret."""

_CURE = "name what workers need: --ship PATH"


class LeftOut:
    """The files that are not shipped, and the reasons, for notes to the user."""

    def __init__(self) -> None:
        self.crowded: list[str] = []
        """Directories that hold more than a project. Modules directly in them are shipped."""
        self.unlisted: set[str] = set()
        """Directories with a repository that git could not read. Their code is shipped."""
        self.links: dict[str, str] = {}
        """Links that lead out of the project, and their targets."""
        self._secrets: set[str] = set()
        self._large: set[str] = set()

    def refuses(self, path: str, target: str) -> bool:
        """Tell if a file is left out because it may hold a secret or is too large, and remember it.

        target: where a link leads; else the path.
        """
        if _SECRET.search(path) or _SECRET.search(target):
            self._secrets.add(path)
        elif not path.endswith(CODE) and os.path.exists(target) and os.path.getsize(target) > _SMALL_BYTES:
            self._large.add(path)
        return path in self._secrets or path in self._large

    def notes(self, shipped: Set[str]) -> Iterator[str]:
        """Yield lines for the user. Paths that are shipped after all, as the user names them, are not in these."""
        for folder in self.crowded:
            yield f"only modules directly in {shown(folder)} are shipped: it holds more than a project; {_CURE}"
        for folder in sorted(self.unlisted):
            yield f"git could not list the files of {shown(folder)}, so only code is shipped; git status tells why"
        if paths := sorted(self.links.keys() - shipped):
            leads = [f"{shown(path)} (to {shown(self.links[path])})" for path in paths]
            yield f"not shipped because these links lead out of the project: {_some(leads)}; {_CURE}"
        if paths := sorted(self._secrets - shipped):
            yield f"not shipped because they may hold secrets: {some_paths(paths)}; {_CURE}"
        if paths := sorted(self._large - shipped):
            yield f"not shipped because they are larger than {size(_SMALL_BYTES)}: {some_paths(paths)}; {_CURE}"


# -- errors ----------------------------------------------------------------------------------------------------------


def too_large(sizes: Mapping[str, int], limit_bytes: int) -> LaunchError:
    """Return the error for files that are too large together. sizes: of the files."""
    folders: Counter[str] = Counter()
    for path, its in sizes.items():
        folders[os.path.dirname(path)] += its
    largest = ", ".join(f"{shown(path)} ({size(its)})" for path, its in folders.most_common(_MOST_NAMED))
    return LaunchError(
        f"the project has {size(sum(sizes.values()))} to ship, and the limit is {size(limit_bytes)}. The largest "
        f"directories are {largest}. Raise the limit with --ship-limit SIZE or ShippingConfig(limit_bytes=...), "
        "keep files out with .gitignore, or use --no-ship if all hosts have the project already"
    )


# -- parts of texts --------------------------------------------------------------------------------------------------


def shown(path: str) -> str:
    """Return a path as text for the user, on one line."""
    return path if path.isprintable() else repr(path)


def some_paths(paths: Iterable[str]) -> str:
    """Return the first paths as text for the user, and the number of the others."""
    return _some([shown(path) for path in paths])


def _some(texts: Sequence[str]) -> str:
    further = f" and {len(texts) - _MOST_NAMED:,} more" if len(texts) > _MOST_NAMED else ""
    return ", ".join(texts[:_MOST_NAMED]) + further
