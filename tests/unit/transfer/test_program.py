"""The arrival of distrain on a host that does not have it, with the real command line and its own environment."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import uuid
from typing import TYPE_CHECKING

import pytest

from distrain import wire
from distrain.system import process
from distrain.transfer import program

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ASK = wire.MAGIC + wire.encode(wire.AskForProgram())
BARE = ("-S",)
"""Flags of an interpreter that has no packages, as a host may have it."""


class Host:
    """A host that has none of the directories of this machine."""

    def __init__(self, tmp_path: Path) -> None:
        self.cache = tmp_path / "cache"
        self.environment = {"DISTRAIN_CACHE": str(self.cache), "TMPDIR": str(tmp_path), "PATH": "/nowhere"}
        self._started: list[subprocess.Popen[bytes]] = []

    @property
    def home(self) -> Path:
        return self.cache / "programs" / program.key()

    @property
    def there(self) -> list[str]:
        """The names in the directory for programs."""
        return sorted(os.listdir(self.home.parent)) if self.home.parent.exists() else []

    def start(
        self,
        *,
        python: str = sys.executable,
        flags: tuple[str, ...] = BARE,
        root: str = "/nowhere/distrain",
        name: str = "agent",
    ) -> subprocess.Popen[bytes]:
        """Start a program that ends at once: an agent finds nothing to kill, a validator nothing to do."""
        arguments = (uuid.uuid4().hex, "sweep") if name == "agent" else (str(os.getpid()), "run", "log")
        argv = program.arrival_argv(python, name, *arguments, flags=flags)
        argv[argv.index(str(process.own_package()))] = root
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        started = subprocess.Popen(
            ["/usr/bin/env", "-i", *variables, *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._started.append(started)
        return started

    def run(self, parcel: bytes = b"", **options: object) -> tuple[int, bytes, str]:
        """Exit code, stdout and stderr of a program that is sent a parcel, whether it asks for one or not."""
        started = self.start(**options)  # type: ignore[arg-type]
        stdout, stderr = started.communicate(parcel, timeout=60)
        return started.returncode, stdout, stderr.decode()

    def close(self) -> None:
        for started in self._started:
            started.kill()
            with contextlib.suppress(ValueError):  # it was read to its end
                started.communicate()


@pytest.fixture(scope="module")
def brought(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the program on a host where it has arrived."""
    host = Host(tmp_path_factory.mktemp("brought"))
    assert host.run(program.parcel())[0] == 0
    return host.home


@pytest.fixture
def visited(host: Host, brought: Path) -> Host:
    """A host where the program has arrived before."""
    shutil.copytree(brought, host.home, copy_function=os.link)
    return host


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    made.close()


# -- arrival ---------------------------------------------------------------------------------------------------------


def test_the_program_arrives_once_with_all_that_it_needs(host: Host) -> None:
    assert host.run(program.parcel()) == (0, ASK, "")
    assert host.there == [program.key()]
    assert host.cache.stat().st_mode & 0o777 == 0o700
    own = process.own_package()
    for path in (path for path in own.rglob("*") if path.suffix != ".pyc" and path.is_file()):
        assert (host.home / "distrain" / path.relative_to(own)).read_bytes() == path.read_bytes()
    assert (host.home / "psutil" / "__init__.py").exists()
    os.utime(host.home, (0, 0))
    assert host.run() == (0, b"", "")  # the second one does not ask
    assert host.home.stat().st_mtime > 0  # and shows that it has used it


def test_the_key_is_about_names_and_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [program.key()]
    for name, text in (("a.py", "1"), ("a.py", "2"), ("b.py", "2"), ("b.txt", "2"), ("c.txt", "3")):
        package = tmp_path / "package"
        shutil.rmtree(package, ignore_errors=True)
        (package / "__pycache__").mkdir(parents=True)
        (package / name).write_text(text)
        (package / "__pycache__" / "a.py").write_text(str(len(keys)))
        monkeypatch.setattr(process, "own_package", lambda package=package: package)
        program.key.cache_clear()
        keys.append(program.key())
    program.key.cache_clear()
    assert len(set(keys[:5])) == 5
    assert keys[4] == keys[5]  # other files do not travel


def test_a_program_that_runs_has_locked_its_files(visited: Host) -> None:
    import fcntl

    argv = program.arrival_argv(sys.executable, "stream-server", flags=BARE)
    argv[argv.index(str(process.own_package()))] = "/nowhere/distrain"
    with subprocess.Popen(
        argv, env=visited.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        assert server.stdout.read(len(wire.MAGIC)) == wire.MAGIC
        fd = os.open(visited.home, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        server.communicate()
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(fd)


# -- failures --------------------------------------------------------------------------------------------------------


def damaged(parcel: bytes) -> bytes:
    middle = len(parcel) // 2
    return parcel[:middle] + bytes([parcel[middle] ^ 1]) + parcel[middle + 1 :]


def test_a_parcel_that_arrives_damaged_is_refused(host: Host) -> None:
    code, _, said = host.run(damaged(program.parcel()))
    assert (code, host.there) == (1, [])
    assert said.startswith("distrain cannot be stored there: it arrived damaged; ")
    assert host.run(program.parcel())[0] == 0


def test_a_cache_that_cannot_be_written_is_one_line_with_the_cure(host: Host) -> None:
    host.cache.write_text("a file")
    code, asked, said = host.run(program.parcel())
    assert (code, asked) == (1, b"")
    assert said.count("\n") == 1
    assert said.startswith("distrain cannot be stored there: ")
    assert str(host.cache) in said
    assert said.endswith(
        "; name another directory with env.DISTRAIN_CACHE= in the hostfile, or free some space there\n"
    )


@pytest.mark.parametrize("how", ["link", "mode"])
def test_no_program_is_run_from_a_cache_that_others_can_write(visited: Host, how: str) -> None:
    """They may have put a program of their own there before, as the name of its directory can be predicted."""
    if how == "link":
        visited.cache.rename(visited.cache.with_name("theirs"))
        visited.cache.symlink_to("theirs")
    else:
        visited.cache.chmod(0o777)
    code, asked, said = visited.run()
    assert (code, asked) == (1, b"")
    assert f"others may have put programs into {visited.cache}; name another directory with" in said


def with_customization(host: Host, tmp_path: Path, code: str) -> None:
    """Change the interpreter of the host before it runs anything."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(code)
    host.environment["PYTHONPATH"] = str(tmp_path / "site")


def test_an_old_python_is_one_line(host: Host, tmp_path: Path) -> None:
    with_customization(
        host, tmp_path, "import sys\nsys.version_info = (3, 9, 1, 'final', 0)\nsys.version = '3.9.1 (x)'"
    )
    code, asked, said = host.run(program.parcel(), flags=("-s",))
    assert (code, asked) == (1, b"")
    assert said == f"distrain needs Python 3.10 or later, and {sys.executable} is 3.9.1\n"
    assert not host.cache.exists()


# -- the interpreter -------------------------------------------------------------------------------------------------

VERSION = ".".join(map(str, sys.version_info[:2]))
PYTHON = sys.executable


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory in the PATH of a host. The path of this interpreter is in another one."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "own"))
    return tmp_path / "bin"


def install(*paths: Path, version: str = VERSION) -> None:
    """Install interpreters that tell their version, and otherwise show how they are called."""
    for path in paths:
        tells = f"import sys; sys.version_info = ({version.replace('.', ', ')}, 0); exec(sys.argv.pop(1))"
        path.write_text(
            f'#!/bin/sh\nif [ "$2" != code ]; then exec {PYTHON} -S -c "{tells}" "$2"; fi\necho {path.name} "$@"\n'
        )
        path.chmod(0o755)


def started_in(folder: Path) -> tuple[int, str, str]:
    _, *argv = program._find_python()
    command = ["/bin/sh", *argv, "-c", "code", "a  b"]
    done = subprocess.run(command, env={"PATH": str(folder)}, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("same", "older", "chosen"),
    [
        (("../own", f"python{VERSION}", "python3"), (), "own"),
        ((f"python{VERSION}", "python3", "python"), (), f"python{VERSION}"),
        (("python",), ("python3",), "python"),
        ((), ("python3", "python"), "python3"),  # it tells what is wrong
    ],
)
def test_the_interpreter_is_the_same_or_has_the_same_version(
    folder: Path, same: tuple[str, ...], older: tuple[str, ...], chosen: str
) -> None:
    install(*(folder / name for name in same))
    install(*(folder / name for name in older), version="3.5")
    assert started_in(folder) == (0, f"{chosen} -c code a  b\n", "")


def test_without_any_interpreter_the_names_that_were_tried_are_told(folder: Path) -> None:
    code, said, failed = started_in(folder)
    assert (code, said) == (127, "")
    assert f"/own, and no python{VERSION}, python3 or python in PATH=" in failed


def test_no_shell_reads_the_command_in_another_way() -> None:
    """fish reads a backslash before a single quote as an escape, also between single quotes."""
    assert not any("\\'" in word for word in program.arrival_argv("", "agent", "id", "no-gpus"))
