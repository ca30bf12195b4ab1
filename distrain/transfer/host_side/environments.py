"""Virtual environments in the cache of a host: made once from a requirements file, used by many runs. Runs in: agent.

``<key>/venv`` is an environment, and the key stands for all that it depends on. The file ``<key>/complete`` is written
last: without that, it is half-made, and made again. The runs that use it have locked ``<key>`` together. A process that
makes one has locked ``<key>.lock``.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import sys
import time
from collections import deque
from typing import TYPE_CHECKING

from distrain.system import process
from distrain.system.locks import locked_file
from distrain.transfer.host_side.host_cache import delete, lock_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_SHOW_EVERY_S = 5.0
"""Seconds between two lines about the progress."""
_LAST_LINES = 15
_USUAL_FOLDERS = "~/.local/bin", "~/.cargo/bin", "/usr/local/bin", "/usr/bin"
"""Further directories with tools. The PATH is short in a command that comes over ssh."""
_CURE = (
    "the host needs disk space, and must reach a package index; one other than PyPI is set in pip.conf or uv.toml of "
    "the host, or by --index-url in the requirements"
)


def make_environment(folder: Path, requirements: str, *, python: str, show: Callable[[str], None]) -> Path:
    """Return the interpreter of the virtual environment with these requirements. Make it if it is not there yet.

    It stays as long as this process lives. requirements: text of a requirements file. python: the version, such as
    3.11. show: called with lines about the progress.

    Raise OSError if it cannot be made. The text has the last output of the tool that failed.
    """
    parts = (requirements, python, sys.platform, platform.machine())
    home = folder / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    interpreter, complete = home / "venv" / "bin" / "python", home / "complete"
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked_file(f"{home}.lock") as building:  # another run may be making one
        lock_folder(home, fcntl.LOCK_SH)  # its descriptor stays open
        if not (complete.exists() and interpreter.exists()):  # the Python that it links to may be gone
            _build(home, requirements, python, show, building)
            complete.touch()
    return interpreter


def find_uv() -> str:
    """Return the path of uv on this host, or "" if it is not installed in any of the usual places."""
    return _find("uv", os.path.dirname(sys.executable))


def _build(home: Path, requirements: str, version: str, show: Callable[[str], None], lock_fd: int) -> None:
    """Make the environment with uv, or with venv and pip of such a Python. Raise OSError, and leave nothing."""
    uv = find_uv()
    base = sys.executable if sys.version.startswith(f"{version}.") else _find(f"python{version}")
    if not uv and not base:
        raise OSError(
            f"{platform.node()} has neither uv nor Python {version}, so no virtual environment can be made: "
            f"install uv (https://docs.astral.sh/uv), or Python {version} with its venv module"
        )
    for name in os.listdir(home):
        delete(home / name)
    show(f"making a virtual environment for Python {version} with {uv or base}, in {home}")
    (home / "requirements.txt").write_text(requirements)
    venv, listed = str(home / "venv"), ["-r", str(home / "requirements.txt")]
    python = f"{venv}/bin/python"
    if uv:
        # An index for a single package, such as that of PyTorch, has old versions of others.
        has_several_indexes = "--extra-index-url" in requirements and "UV_INDEX_STRATEGY" not in os.environ
        strategy = ["--index-strategy", "unsafe-best-match"] if has_several_indexes else []
        commands = [
            [uv, "venv", "--python", base or version, venv],
            [uv, "pip", "install", "--python", python, *strategy, *listed],
        ]
    else:  # -I: packages on the user's PYTHONPATH would count as installed
        commands = [
            [base, "-I", "-m", "venv", venv],
            [python, "-I", "-m", "pip", "install", "--no-user", "--no-input", "--progress-bar", "off", *listed],
        ]
    try:
        for argv in commands:
            _run(argv, show, lock_fd)
    except BaseException:
        shutil.rmtree(home, ignore_errors=True)
        raise
    show("the virtual environment is ready")


def _run(argv: list[str], show: Callable[[str], None], lock_fd: int) -> None:
    """Run a tool, and show now and then what it says. Raise OSError if it fails."""
    last: deque[str] = deque(maxlen=_LAST_LINES)
    shown_at = time.monotonic()

    def on_line(line: str) -> None:
        nonlocal shown_at
        last.append(line)
        if time.monotonic() - shown_at >= _SHOW_EVERY_S:
            shown_at = time.monotonic()
            show(line.strip()[:120])

    if code := process.run_lines(argv, on_line, pass_fds=[lock_fd]):
        text = f"no virtual environment could be made on {platform.node()}"
        text = f"{text}: {process.describe(argv)} ended with {code} ({_CURE})"
        raise OSError("\n".join([text, *(f"  {line}" for line in last)]))


def _find(program: str, *folders: str) -> str:
    places = [os.environ.get("PATH", os.defpath), *folders, *map(os.path.expanduser, _USUAL_FOLDERS)]
    return shutil.which(program, path=os.pathsep.join(places)) or ""
