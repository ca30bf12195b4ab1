"""Errors of an agent that cannot start its forkserver."""

from __future__ import annotations

import errno
import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from distrain.agent.main import _why_no_forkserver

if TYPE_CHECKING:
    from pathlib import Path


def test_only_a_directory_that_is_to_blame_is_blamed(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    with pytest.raises(OSError, match="missing") as directory:
        subprocess.Popen(["true"], cwd=missing)
    with pytest.raises(OSError, match="missing") as program:
        subprocess.Popen([f"{missing}-program"], cwd=tmp_path)
    full = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    said = [_why_no_forkserver(error, missing) for error in (directory.value, program.value, full)]
    assert said[0] == f"no worker can run in {missing}: No such file or directory; create it, or set cwd="
    assert said[1].startswith("cannot start the forkserver, the parent of its workers: [Errno 2] No such file")
    assert said[2].endswith("Too many open files; raise the limit on open files with ulimit -n")
