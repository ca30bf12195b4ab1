"""Virtual environments in the cache of a host: made once from a requirements file, used by many runs. Runs in: agent.

``<key>`` is an environment, and the key stands for all that it depends on. It is built in place, as its files name its
path. The file ``.complete`` in it is written last: without that, it is half-made, and never used. ``<key>.lock`` is
locked exclusively by who builds or deletes the environment (:mod:`distrain.transfer.host_side.cache_cleaning`), and
shared by the runs that use it. The locks are never deleted, as two processes could then lock two files of the same
name.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections import deque
from typing import TYPE_CHECKING

from distrain.system import process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

CONSTRAINT = "#constraint "
"""Begins a line of the requirements that restricts the version of a package without installing it."""
SHOW_EVERY_S = 5.0
"""Seconds between two lines about the progress."""

COMPLETE = ".complete"
_REQUIREMENTS, _CONSTRAINTS = "distrain-requirements.txt", "distrain-constraints.txt"
_POLL_S = 0.1
_TICK_S = 1.0
_LAST_LINES = 15
_USUAL_FOLDERS = "~/.local/bin", "~/.cargo/bin", "/usr/local/bin", "/usr/bin"
"""Further directories with tools. The PATH is short in a command that comes over ssh."""


def make_environment(folder: Path, requirements: str, *, python: str, show: Callable[[str], None]) -> Path:
    """Return the interpreter of the virtual environment with these requirements. Make it if it is not there yet.

    requirements: text of a requirements file, which may have lines that begin with :data:`CONSTRAINT`. python: the
    version, such as 3.11; what follows the minor version does not count. show: called with lines about the progress.

    Raise OSError if it cannot be made. The text has the last output of the tool that failed.
    """
    version = ".".join(python.split(".")[:2])
    environment = folder / _key(requirements, version)
    if not _use(environment):
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(environment, _Progress(show)) as lock:
            if not _use(environment):  # another run has not made it meanwhile
                _Builder(environment, requirements, version, _Progress(show), lock).build()
    return _python_of(environment)


def hold(folder: Path, python: Path) -> int:
    """Keep an environment from being deleted as long as the returned descriptor is open.

    python: what :func:`make_environment` has returned. Raise OSError if the environment was deleted meanwhile.
    """
    environment = python.parent.parent
    fd = os.open(lock_of(folder / environment.name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(fd, fcntl.LOCK_SH)
    if not _use(environment):
        os.close(fd)
        raise OSError(f"the virtual environment {environment} has just been deleted by another process: try again")
    return fd


# -- which one -------------------------------------------------------------------------------------------------------


def _key(requirements: str, version: str) -> str:
    parts = (requirements, version, sys.platform, platform.machine())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _python_of(environment: Path) -> Path:
    return environment / "bin" / "python"


def lock_of(environment: Path) -> Path:
    """Return the path of the file that who builds, uses or deletes an environment locks."""
    return environment.with_name(f"{environment.name}.lock")


def _use(environment: Path) -> bool:
    """Note the time of a use. Return False if the environment is half-made, or the Python that it links to is gone."""
    try:
        os.utime(environment / COMPLETE)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # it is on a file system that cannot be written, and may be used all the same
        return (environment / COMPLETE).exists() and _python_of(environment).exists()
    return _python_of(environment).exists()


# -- locks -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _locked(environment: Path, progress: _Progress) -> Iterator[int]:
    """Have the exclusive lock of an environment for the block. Wait for other runs, and show that."""
    with lock_of(environment).open("ab") as file:
        # On a file system without locks two runs that start at once may disturb each other.
        while _try_lock(file.fileno()) is False:
            progress.show("waiting for another run on this host, which makes the same virtual environment")
            time.sleep(_POLL_S)
        yield file.fileno()


def _try_lock(fd: int) -> bool | None:
    """Return False if another process has the lock, None on a file system without locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _delete(environment: Path) -> None:
    """Delete an environment. Killed in the middle of it, it leaves one that counts as half-made."""
    (environment / COMPLETE).unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(environment)


def _size_of(folder: Path) -> int:
    """Return the bytes of all files in a directory."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total


# -- building --------------------------------------------------------------------------------------------------------


class _Progress:
    """The lines about the progress: at most one in :data:`SHOW_EVERY_S`, besides the first and the last of a build."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._began = time.monotonic()
        self._shown_at = -SHOW_EVERY_S

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def show(self, text: str, *, always: bool = False) -> None:
        """Show a text with the seconds so far, unless another was shown just before."""
        now = self.seconds
        if always or now - self._shown_at >= SHOW_EVERY_S:
            self._shown_at = now
            self._show(text if now < _TICK_S else f"{text} ({now:.0f} s)")


class _Builder:
    """Makes one environment, with uv, or with the modules venv and pip of a Python of that version."""

    def __init__(self, environment: Path, requirements: str, version: str, progress: _Progress, lock: int) -> None:
        self._environment = environment
        self._requirements = requirements
        self._version = version
        self._progress = progress
        self._lock = lock
        self._uv, self._base = find_uv(), _find_python(version)
        count = sum(1 for line in requirements.splitlines() if re.match(r"\s*[^\s#-]", line))
        self._packages = f"{count} package{'s' if count != 1 else ''}"

    def build(self) -> None:
        """Make the environment, or leave nothing of it. Raise OSError."""
        if not self._uv and not self._base:
            raise OSError(
                f"neither uv nor Python {self._version} is on {platform.node()} to make a virtual environment with: "
                f"install uv (https://docs.astral.sh/uv), or Python {self._version} with its venv module"
            )
        _delete(self._environment)
        try:
            self._make()
            size = _size_of(self._environment)
            (self._environment / COMPLETE).touch()
        except BaseException:
            shutil.rmtree(self._environment, ignore_errors=True)
            raise
        self._progress.show(f"the virtual environment is ready: {size / 1e6:,.0f} MB", always=True)

    def _make(self) -> None:
        self._progress.show(
            f"making a virtual environment for Python {self._version} with {self._uv or self._base}: "
            f"{self._packages}, in {self._environment}"
        )
        if self._uv:
            make = [self._uv, "venv", "--python", self._base or self._version]
            cure = f"install Python {self._version} on this host, or let uv download it"
        else:
            make = [self._base, "-I", "-m", "venv"]
            cure = f"install uv on this host, or the venv module (python{self._version}-venv on Debian and Ubuntu)"
        self._run([*make, str(self._environment)], cure)
        self._run([*self._installer(), *self._requirement_files()], "")

    def _installer(self) -> list[str]:
        """Return the command that installs into the environment, without the requirements."""
        python = str(_python_of(self._environment))
        if not self._uv:  # -I: packages on the user's PYTHONPATH would count as installed
            return [python, "-I", "-m", "pip", "install", "--no-user", "--no-input", "--progress-bar", "off"]
        # An index for a single package, such as that of PyTorch, has old versions of others. uv would take those only.
        several = "--extra-index-url" in self._requirements and "UV_INDEX_STRATEGY" not in os.environ
        strategy = ["--index-strategy", "unsafe-best-match"] if several else []
        return [self._uv, "pip", "install", "--python", python, *strategy]

    def _requirement_files(self) -> list[str]:
        """Write the files into the environment, where people find them. Return the arguments that name them."""
        lines = self._requirements.splitlines()
        constraints = [line.removeprefix(CONSTRAINT) for line in lines if line.startswith(CONSTRAINT)]
        arguments = []
        for option, name, text in (
            ("-r", _REQUIREMENTS, self._requirements),
            ("-c", _CONSTRAINTS, "".join(f"{line}\n" for line in constraints)),
        ):
            (self._environment / name).write_text(text)
            arguments += [option, str(self._environment / name)]
        return arguments if constraints else arguments[:2]

    def _run(self, argv: Sequence[str], cure: str) -> None:
        """Run a tool and show how far it is. Raise OSError if it fails."""
        last: deque[str] = deque(maxlen=_LAST_LINES)

        def read(line: str) -> None:
            if line.strip():
                last.append(line.rstrip())
            what = f"installing {self._packages} with {'uv' if self._uv else 'pip'}"
            self._progress.show(f"{what}: {last[-1].strip()[:120]}" if last else what)

        directory = str(self._environment.parent)
        code = process.run_tied(argv, read, directory=directory, tick_s=_TICK_S, pass_fds=(self._lock,))
        if code:
            raise OSError(_failure(argv, code, last, cure, directory))


def find_uv() -> str:
    """Return the path of uv on this host, or "" if it is not installed in any of the usual places."""
    return _find("uv", os.path.dirname(sys.executable))


def _find_python(version: str) -> str:
    """Return an interpreter of this version, or "". It is this one if it has the version."""
    return sys.executable if sys.version.startswith(f"{version}.") else _find(f"python{version}")


def _find(program: str, *folders: str) -> str:
    places = [os.environ.get("PATH", os.defpath), *folders, *map(os.path.expanduser, _USUAL_FOLDERS)]
    return shutil.which(program, path=os.pathsep.join(places)) or ""


# -- failures --------------------------------------------------------------------------------------------------------

_DISK_FULL = re.compile(r"no space left|disk quota exceeded|\berrno 28\b|os error 28\b", re.IGNORECASE)
_NO_INDEX = re.compile(
    r"name resolution|dns error|failed to fetch|client error \(connect\)|connection (refused|timed out)|unreachable|"
    r"newconnectionerror|connecttimeout",
    re.IGNORECASE,
)


def _failure(argv: Sequence[str], code: int, last: Sequence[str], cure: str, folder: str) -> str:
    """Return what a person reads about a tool that failed."""
    output = "\n".join(last)
    if _DISK_FULL.search(output):
        cure = f"free space on the file systems of {folder} and of {tempfile.gettempdir()}, for temporary files"
    elif _NO_INDEX.search(output):
        cure = (
            "the host must reach a package index; one other than PyPI is set in pip.conf or uv.toml of the host, "
            "or by --index-url in the requirements"
        )
    text = f"no virtual environment could be made on {platform.node()}: {process.describe(argv)} ended with {code}"
    return "\n".join([text + (f" ({cure})" if cure else ""), *(f"  {line}" for line in last)])
