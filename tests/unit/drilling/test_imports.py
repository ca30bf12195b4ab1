"""Functions that are called once a module has been imported."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING

from distrain.system.imports import when_imported

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_who_only_asks_whether_a_module_is_installed_does_not_keep_its_import_from_being_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "asked_for.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    calls: list[str] = []
    when_imported("asked_for", lambda: calls.append("imported"))
    assert find_spec("asked_for")
    assert find_spec("asked_for")
    assert not calls
    assert importlib.import_module("asked_for").value == 3
    assert calls == ["imported"]
