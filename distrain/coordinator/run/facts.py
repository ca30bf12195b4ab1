"""Facts about a run for its run.json: the code, the versions, the settings without secrets. Runs in: coordinator."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import getpass
import hashlib
import math
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from distrain.coordinator.run import hydra_job
from distrain.hosts.inspection import package_versions
from distrain.storage.runs.listing import differing, settings_in
from distrain.storage.secrets import HIDDEN, hidden, is_secret
from distrain.system import __version__, process

_PACKAGES = (
    "accelerate", "datasets", "jax", "lightgbm", "lightning", "numpy", "tensorflow", "torch", "transformers", "xgboost",
)  # fmt: skip
"""Packages whose versions are noted."""
_DESCRIBE = ("git", "--no-optional-locks", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")
"""It writes the commit, with ``-dirty`` if a tracked file differs from it. It changes nothing."""
_PATIENCE_S = 0.3
"""Seconds that the end of a short run waits for that command."""
_MOST_ITEMS, _MOST_CHANGES = 100, 20
_LONGEST_TEXT = 300
_MOST_SEARCHED = 10_000
_DEEPEST = 6


# -- the code --------------------------------------------------------------------------------------------------------


class RunFacts:
    """The facts about a run that do not change. git looks for changed files while the run begins.

    script: what the user has started, "" if unknown; see :func:`distrain.worker.job.origin.script_of`.
    config: the train_loop_config. arguments: those of a script that the ranks run.
    """

    def __init__(self, script: str, config: Any, arguments: Sequence[str] = ()) -> None:
        self._facts: dict[str, Any] = {
            "script": script,
            "script_sha256": _digest_of(script),
            "arguments": _shortened(shlex.join(without_secrets(arguments))),
            "train_loop_config": plain(hydra_job.as_plain(config)),
            "directory": os.getcwd(),
            "host": platform.node(),
            "pid": os.getpid(),
            "user": _user(),
            "distrain": __version__,
            "python": sys.version.split()[0],
            "versions": _versions(),
            "argv": without_secrets(sys.argv),
        }
        self._git: process.Process | None = None

    def begin(self) -> None:
        """Start to look for the commit of the working directory, and for changed files."""
        with contextlib.suppress(OSError):  # there is no git
            self._git = process.spawn_quiet(
                _DESCRIBE, environment=os.environ, directory=os.getcwd(), output=subprocess.PIPE
            )

    def end(self) -> None:
        """Wait a moment for git, then kill it."""
        self.wait()
        if self._git is not None:
            self._git.kill()
            process.reap(self._git)

    def wait(self) -> None:
        """Wait a moment for git."""
        if self._git is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._git.wait(_PATIENCE_S)
            self.known()

    def note_changes(self, before: Mapping[str, Any], attempt: int) -> list[str]:
        """Note what the user has changed since an earlier start, and return it; see :func:`changes_between`.

        before: run.json of that start. attempt: the first one of this start.
        """
        self.wait()
        lines = changes_between(before, self._facts)
        self._facts["changes"] = before.get("changes", []) + [{"attempt": attempt, "lines": lines}] * bool(lines)
        return lines

    def known(self) -> dict[str, Any]:
        """Return what is known now. ``git`` is absent without a commit, and until git has answered."""
        if self._git is not None and self._git.poll() is not None:  # it has written a few bytes
            commit, _, dirty = self._git.communicate()[0].decode().strip().partition("-")
            self._git = None
            if commit:
                self._facts["git"] = {"commit": commit, "dirty": bool(dirty)}
        return dict(self._facts)


def _digest_of(script: str) -> str | None:
    """Return the first digits of the SHA-256 of a script, or of the file of a function; None if there is no file."""
    with contextlib.suppress(OSError):
        return hashlib.sha256(Path(re.sub(r":\w+$", "", script)).read_bytes()).hexdigest()[:12]
    return None


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # this user id has no name
        return str(os.getuid())


def _versions() -> dict[str, str]:
    found = package_versions(_PACKAGES, list(map(os.fspath, sys.path)))
    return {name: version for name, version in found.items() if version}


# -- changes ---------------------------------------------------------------------------------------------------------


def changes_between(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a line for each setting and each part of the code that differs between two starts, by their run.json.

    >>> changes_between({"train_loop_config": {"lr": 0.1}}, {"train_loop_config": {"lr": 0.01}})
    ['lr 0.1 → 0.01']
    """
    old, new = _code(before), _code(now)
    code = differing([{name: one[name] for name in old if name in new} for one in (old, new)])
    pairs = [*code.items(), *differing([settings_in(before), settings_in(now)], "(missing)").items()]
    lines = [_change(name, f"{was!s:.60}", f"{is_now!s:.60}") for name, (was, is_now) in pairs]
    more = len(lines) - _MOST_CHANGES
    return lines if more <= 0 else [*lines[:_MOST_CHANGES], f"... {more} more"]


def _change(name: str, was: str, is_now: str) -> str:
    return f"{name} {was} → {is_now}" if was != is_now else f"{name} has changed"  # beyond what is shown


def _code(facts: Mapping[str, Any]) -> dict[str, str]:
    git = facts.get("git")
    commit = f"{git.get('commit')!s:.12}{'-dirty' if git.get('dirty') else ''}" if isinstance(git, dict) else ""
    code = {"script": facts.get("script"), "script's sha256": facts.get("script_sha256"), "git commit": commit}
    return {name: value for name, value in {**code, "arguments": facts.get("arguments")}.items() if value}


# -- settings without secrets ----------------------------------------------------------------------------------------


def without_secrets(argv: Sequence[str]) -> list[str]:
    """Return the arguments with ``***`` for what looks secret by its name, and for credentials in URLs.

    Other users may read the run directory. ``--api-key X`` and all that :func:`hidden` finds within an argument look
    secret.
    """
    shown: list[str] = []
    option = ""
    for word in argv:
        is_value = option and not word.startswith("--") and is_secret(option, word)
        name, equals, value = word.partition("=")  # a secret may have spaces
        text = f"{name}={HIDDEN}" if equals and is_secret(name, value) else hidden(word)
        shown.append(HIDDEN if is_value else text)
        option = word if word.startswith("-") and "=" not in word else ""
    return shown


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
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=repr)  # the order of a set differs in every process
    if value is None or isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, (str, PurePath)):
        return _shortened(str(value))
    if depth < _DEEPEST and isinstance(value, Mapping):
        some = list(value.items())[:_MOST_ITEMS]
        left = {"...": f"{len(value) - len(some)} more"} if len(value) > len(some) else {}
        return {str(k): HIDDEN if is_secret(str(k), v) else plain(v, depth + 1) for k, v in some} | left
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
    return kind if is_secret(text, text) else _shortened(text)


def _shortened(text: str) -> str:
    """Return the beginning of a text without secrets. Of a long one, the rest is not searched for them."""
    shown = hidden(text[:_MOST_SEARCHED])
    is_whole = len(text) <= _MOST_SEARCHED and len(shown) <= _LONGEST_TEXT
    return shown if is_whole else f"{shown[:_LONGEST_TEXT]} ... ({len(text)} characters)"
