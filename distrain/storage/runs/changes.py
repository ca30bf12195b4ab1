"""What the user has changed between two starts of a run: settings, arguments, script, commit. Runs in: anywhere."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from distrain.system.text import flatten

if TYPE_CHECKING:
    from collections.abc import Mapping

_MOST = 20
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_MISSING = "(missing)"


def find_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return what differs between the run.json of two starts, {} if nothing does.

    ``changed`` has the old and the new value of the first settings by their names, ``more`` the number of others.
    """
    old, new = _code(before), _code(now)
    pairs = {name: [value, new[name]] for name, value in old.items() if name in new}
    old, new = _config(before), _config(now)
    pairs |= {name: [old.get(name, _MISSING), new.get(name, _MISSING)] for name in {**old, **new}}
    changed = [(name, pair) for name, pair in pairs.items() if _comparable(pair[0]) != _comparable(pair[1])]
    return {"changed": dict(changed[:_MOST]), "more": len(changed[_MOST:])} if changed else {}


def changes_in_words(found: Mapping[str, Any]) -> list[str]:
    """Return a line for each change, such as ``lr 0.1 → 0.01``."""
    lines = [f"{name} {old!s:.60} → {new!s:.60}" for name, (old, new) in found["changed"].items()]
    return lines + ([f"... {found['more']} more"] if found["more"] else [])


def _code(facts: Mapping[str, Any]) -> dict[str, Any]:
    git, names = facts.get("git"), {"script": "script", "script_sha256": "script's sha256", "arguments": "arguments"}
    code = {text: facts[name] for name, text in names.items() if facts.get(name) is not None}
    if isinstance(git, dict):
        code["git commit"] = f"{git.get('commit')!s:.12}{'-dirty' if git.get('dirty') else ''}"
    return code


def _config(facts: Mapping[str, Any]) -> dict[str, Any]:
    config = facts.get("train_loop_config")
    return flatten(config) if isinstance(config, dict) else {}


def _comparable(value: Any) -> str:
    """Return a value as text, without the addresses of objects, which differ in every process."""
    return _ADDRESS.sub("", repr(value))
