"""Facts about a run for its run.json: the code, the versions, the settings without secrets. Runs in: coordinator."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import getpass
import math
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from distrain.system import __version__, process

if TYPE_CHECKING:
    from collections.abc import Iterable

_PACKAGES = {
    "torch", "numpy", "tensorflow", "jax", "lightning", "transformers", "accelerate", "datasets", "xgboost", "lightgbm",
}  # fmt: skip
"""Packages whose versions are noted."""
_DESCRIBE = ("git", "--no-optional-locks", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")
"""It writes the commit, with ``-dirty`` if a tracked file differs from it. It changes nothing."""
_PATIENCE_S = 0.3
"""Seconds that the end of a short run waits for that command."""
_MOST_ITEMS = 100
_LONGEST_TEXT = 300
_MOST_SEARCHED = 10_000
_DEEPEST = 6
_HIDDEN = "***"
_WORD_END = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_SECRET_WORD = re.compile(
    r"(?:[a-z0-9]*(?:apikey|accesskey|credential|passphrase|passwd|password|privatekey|secret|secretkey|token)"
    r"|auth|authorization|bearer|key|pwd)(s?)\d*"
)
"""A word of a name that says that the value is secret. The group: of several (``max_tokens``)."""
_NUMBER = re.compile(r"[-+]?[\d._]+(?:e[-+]?\d+)?[kMGTB]?", re.IGNORECASE)
_NO_SECRETS = ("true", "false", "none")
_CREDENTIALS_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_NAME = re.compile(r"""(?<![\w.\-])([\w.\-]+)["'\]]*\s*[=:]\s*|(?<![^\s"'])(--?[\w.\-]+)(?:\s+|["']\s*,\s*)(?!-)""")
"""A name in front of a value: ``token=``, ``"token": ``, ``Authorization: ``, ``--token ``, ``"--token", ``."""
_QUOTED = re.compile(r"""(["'])(?:(?!\1)[^\\]|\\.)*\1""")
_WORD = re.compile(r"\S+")
_REST = re.compile(r".+", re.DOTALL)


# -- the code --------------------------------------------------------------------------------------------------------


class RunFacts:
    """The facts about a run that do not change. git looks for changed files while the run begins.

    script: what the user has started, "" if unknown; see :func:`distrain.worker.job.origin.script_of`.
    config: the train_loop_config.
    detached: the run has no terminal; its console is a file.
    """

    def __init__(self, script: str, config: Any, *, detached: bool = False) -> None:
        self._facts: dict[str, Any] = {
            "script": script,
            "train_loop_config": plain(config),
            "directory": os.getcwd(),
            "host": platform.node(),
            "pid": os.getpid(),
            "user": _user(),
            "distrain": __version__,
            "python": sys.version.split()[0],
            "versions": _versions(sys.path),
            "argv": without_secrets(sys.argv),
            "detached": detached,
        }
        self._git: process.SilentProgram | None = None

    def begin(self) -> None:
        """Start to look for the commit of the working directory, and for changed files."""
        with contextlib.suppress(OSError):  # there is no git
            self._git = process.SilentProgram(_DESCRIBE, directory=os.getcwd())

    def end(self) -> None:
        """Wait a moment for git."""
        if self._git is not None:
            self._git.end(_PATIENCE_S)
            self.known()

    def known(self) -> dict[str, Any]:
        """Return what is known now. ``git`` is absent without a commit, and until git has answered."""
        if self._git is not None and (found := self._git.output()) is not None:
            self._git = None
            commit, _, dirty = found.strip().partition("-")
            if commit:
                self._facts["git"] = {"commit": commit, "dirty": bool(dirty)}
        return dict(self._facts)


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # this user id has no name
        return str(os.getuid())


def _versions(path: Iterable[str]) -> dict[str, str]:
    """Return the versions of some packages by the names of their directories, as reading their metadata takes long."""
    found: dict[str, str] = {}
    for folder in path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        for name in names:
            package, dash, version = name.removesuffix(".dist-info").partition("-")
            if dash and name.endswith(".dist-info") and package in _PACKAGES:
                found.setdefault(package, version)
    return dict(sorted(found.items()))


# -- settings without secrets ----------------------------------------------------------------------------------------


def without_secrets(argv: Sequence[str]) -> list[str]:
    """Return the arguments with ``***`` for what looks secret by its name, and for credentials in URLs.

    Other users may read the run directory. ``--api-key X`` and all that :func:`_hidden` finds within an argument look
    secret.
    """
    shown: list[str] = []
    option = ""
    for word in argv:
        is_value = option and not word.startswith("--") and _is_secret(option, word)
        shown.append(_HIDDEN if is_value else _hidden(word))
        option = word if word.startswith("-") and "=" not in word else ""
    return shown


def _hidden(text: str) -> str:
    """Return a text with ``***`` for the values in it whose names look secret.

    Where such a value ends is known only if it is in quotes; otherwise, the rest of the text is hidden with it.

    >>> [_hidden(text) for text in ("--set=token=X", "https://me:X@host/?accessToken=X", "{'secretKey': 'X', 'a': 1}")]
    ['--set=token=***', 'https://***@host/?accessToken=***', "{'secretKey': ***, 'a': 1}"]
    """
    text = _CREDENTIALS_IN_URL.sub(_HIDDEN, text)
    shown, at = "", 0
    for match in _NAME.finditer(text):
        name = match[1] or match[2]
        if match.start() < at or not _is_secret(name, "?"):  # a long text has many names
            continue
        value = _QUOTED.match(text, match.end()) or (_WORD if match[2] else _REST).match(text, match.end())
        if value and _is_secret(name, value[0].strip("\"'")):
            shown, at = shown + text[at : match.end()] + _HIDDEN, value.end()
    return shown + text[at:]


def _is_secret(name: str, value: object) -> bool:
    """Tell by a name if a value is secret. Names may be snake_case, kebab-case or camelCase.

    A ``password`` may be a number. Other numbers are shown: ``max_tokens``, ``token_len``, ``num_key_value_heads``.
    """
    if value is None or isinstance(value, bool) or (isinstance(value, str) and value.lower() in _NO_SECRETS):
        return False
    words = [word.lower() for word in _WORD_END.split(name) if word]
    if isinstance(value, (int, float)) or (isinstance(value, str) and _NUMBER.fullmatch(value)):
        last = _SECRET_WORD.fullmatch(words[-1]) if words else None
        return last is not None and not last[1]
    return any(map(_SECRET_WORD.fullmatch, words))


def plain(value: Any, depth: int = 0) -> Any:
    """Return a value as short JSON, with ``***`` instead of secrets, which are known by their names.

    What is not JSON becomes its repr, or the name of its type if the repr seems to have a secret in it.

    >>> plain({"lr": 0.1, "api_key": "x", "sizes": (1, 2), "kind": int})
    {'lr': 0.1, 'api_key': '***', 'sizes': [1, 2], 'kind': "<class 'int'>"}
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if value is None or isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, (str, PurePath)):
        return _shortened(str(value))
    if depth < _DEEPEST and isinstance(value, Mapping):
        some = list(value.items())[:_MOST_ITEMS]
        left = {"...": f"{len(value) - len(some)} more"} if len(value) > len(some) else {}
        return {str(k): _HIDDEN if _is_secret(str(k), v) else plain(v, depth + 1) for k, v in some} | left
    if depth < _DEEPEST and isinstance(value, (list, tuple)):
        first, rest = value[:_MOST_ITEMS], len(value) - _MOST_ITEMS
        if all(isinstance(item, str) for item in first):  # it may be a command line
            first = without_secrets(first)
        return [plain(item, depth + 1) for item in first] + [f"... {rest} more"] * (rest > 0)
    return _repr_of(value)


def _repr_of(value: Any) -> str:
    kind = f"<{type(value).__name__}>"
    try:
        text = repr(value)
    except Exception:
        return kind
    return kind if _is_secret(text, text) else _shortened(text)


def _shortened(text: str) -> str:
    """Return the beginning of a text without secrets. Of a long one, the rest is not searched for them."""
    shown = _hidden(text[:_MOST_SEARCHED])
    is_whole = len(text) <= _MOST_SEARCHED and len(shown) <= _LONGEST_TEXT
    return shown if is_whole else f"{shown[:_LONGEST_TEXT]} ... ({len(text)} characters)"
