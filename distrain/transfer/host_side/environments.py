"""Virtual environments in the cache of a host: made once from a requirements file, used by many runs. Runs in: agent.

``<key>/venv`` is an environment, and the key stands for all that it depends on. It is built in place because its
files name its path. The file ``<key>/complete`` is written last: without that, it is half-made, and never used. A
process that builds it has locked ``<key>`` alone, the runs that use it have locked it together.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import sys
import time
from typing import TYPE_CHECKING

from distrain.storage.lock_probe import lock
from distrain.system import process
from distrain.system.text import count
from distrain.transfer.host_side.cache_files import delete, lock_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_COMPLETE = "complete"
_SHOW_EVERY_S = 5.0
"""Seconds between two lines about the progress."""
_POLL_S = 0.1
_LAST_LINES, _LAST_BYTES = 15, 16 << 10
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
    interpreter = home / "venv" / "bin" / "python"
    is_waiting = False
    while True:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (fd := lock_folder(home, fcntl.LOCK_SH)) is not None:  # stays open
            if (home / _COMPLETE).exists() and interpreter.exists():  # the Python that it links to may be gone
                return interpreter
            try:
                lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
            else:
                _build(home, requirements, python, show, fd)
                lock(fd, fcntl.LOCK_SH)
                return interpreter
        if not is_waiting:
            show("waiting for another run on this host, which makes the same virtual environment")
        is_waiting = True
        time.sleep(_POLL_S)


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
    packages = count(sum(1 for line in requirements.splitlines() if re.match(r"\s*[^\s#-]", line)), "package")
    show(f"making a virtual environment for Python {version} with {uv or base}: {packages}, in {home}")
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
            _run(argv, home, f"installing {packages} with {'uv' if uv else 'pip'}", show, lock_fd)
        (home / _COMPLETE).touch()
    except BaseException:
        shutil.rmtree(home, ignore_errors=True)
        raise
    show("the virtual environment is ready")


def _run(argv: Sequence[str], home: Path, what: str, show: Callable[[str], None], lock_fd: int) -> None:
    """Run a tool, and show now and then how far it is. Raise OSError if it fails."""
    began = shown_at = time.monotonic()

    def last_lines() -> list[str]:
        size = os.fstat(output.fileno()).st_size
        text = os.pread(output.fileno(), _LAST_BYTES, max(0, size - _LAST_BYTES)).decode(errors="replace")
        return [line.rstrip() for line in text.splitlines() if line.strip()][-_LAST_LINES:]

    def tick() -> None:
        nonlocal shown_at
        now = time.monotonic()
        if now - shown_at >= _SHOW_EVERY_S:
            shown_at = now
            show(": ".join([what, *(line.strip()[:120] for line in last_lines()[-1:])]) + f" ({now - began:.0f} s)")

    with open(home / "output.txt", "w+b") as output:
        code = process.run_watched(
            argv, output.fileno(), directory=str(home), tick=tick, tick_s=_POLL_S, pass_fds=(lock_fd,)
        )
        if code:
            text = f"no virtual environment could be made on {platform.node()}"
            text = f"{text}: {process.describe(argv)} ended with {code} ({_CURE})"
            raise OSError("\n".join([text, *(f"  {line}" for line in last_lines())]))


def _find(program: str, *folders: str) -> str:
    places = [os.environ.get("PATH", os.defpath), *folders, *map(os.path.expanduser, _USUAL_FOLDERS)]
    return shutil.which(program, path=os.pathsep.join(places)) or ""
