"""Samples that a thread takes of the main thread."""

from __future__ import annotations

import gc
import importlib
import os
import re
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from distrain.worker import places

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_forked_child_switches_threads_as_usual_and_can_nap() -> None:
    usual = sys.getswitchinterval()
    thread = threading.Thread(target=places.nap, args=(0.5,))
    thread.start()
    while sys.getswitchinterval() == usual:
        time.sleep(0.001)
    pid = os.fork()
    if pid == 0:
        try:
            is_usual = sys.getswitchinterval() == usual
            places.nap(0.0)  # would wait for ever
            os._exit(not is_usual)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    thread.join()
    assert sys.getswitchinterval() == usual


def test_the_users_code_may_switch_the_garbage_collector_off_and_on_at_any_time() -> None:
    usual = gc.get_threshold()
    with places.no_collection():
        assert gc.isenabled()
        gc.disable()
    assert not gc.isenabled()
    gc.enable()
    assert gc.get_threshold() == usual
    try:
        with places.no_collection():
            gc.set_threshold(500, 5, 5)
        assert gc.get_threshold() == (500, 5, 5)
    finally:
        gc.set_threshold(*usual)


# -- the text of the user's code -------------------------------------------------------------------------------------


def _contains(word: str) -> bool:
    return places.may_contain(re.compile(word), sys._getframe(1))


def test_a_word_is_found_in_the_code_that_runs_and_in_imported_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    word = "_".join(("all", "ranks", "meet"))  # which is not in this file
    (tmp_path / "helpers_of_the_user.py").write_text(f"def meet(): {word}()\n")
    (tmp_path / "package_of_the_user").mkdir()
    (tmp_path / "package_of_the_user" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert _contains("_contains")
    assert not _contains(word)
    for name in ("helpers_of_the_user", "package_of_the_user"):
        monkeypatch.setitem(sys.modules, name, importlib.import_module(name))
    assert _contains(word)


def test_code_without_a_text_may_contain_anything() -> None:
    namespace: dict[str, Any] = {"_contains": _contains}
    exec(compile("found = _contains('w[o]rd')", "/somewhere/train.py", "exec"), namespace)
    assert namespace["found"]
