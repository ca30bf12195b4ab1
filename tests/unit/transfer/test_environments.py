"""Virtual environments on a host: made once, repaired, and shared by runs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from distrain.system.locks import lock_path
from distrain.transfer.host_side import environments
from distrain.transfer.host_side.environments import find_uv, make_environment
from tests.conftest import wait_until
from tests.wheels import make_wheel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    FakeUv = Callable[[str], Path]

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
UV = find_uv()
STEM = """\
#!/bin/sh
echo "$@" >> {log}
if [ "$1" = venv ]; then mkdir -p "$4/bin"; ln -s {python} "$4/bin/python"; exit; fi
environment=$(dirname "$(dirname "$4")")
{install}
"""
IN_A_PROCESS = """\
import sys
from pathlib import Path
from distrain.transfer.host_side.environments import make_environment
print(make_environment(Path(sys.argv[1]), "a==1\\n", python=sys.argv[2], show=lambda line: print(line, flush=True)))
"""


def version_in(python: Path, name: str) -> str:
    """The version of a wheel of :func:`make_wheel`, or the error of its import."""
    code = f"import {name}; print({name}.version)"
    done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, timeout=60)
    return (done.stdout or done.stderr).strip()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "environments"


@pytest.fixture
def no_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host without uv, and without any Python but the agent's. Programs in the returned directory are found."""
    tools, own = tmp_path / "tools", tmp_path / "own"
    tools.mkdir()
    own.mkdir()
    (own / "python").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setattr(environments, "_USUAL_FOLDERS", ())
    monkeypatch.setattr(sys, "executable", str(own / "python"))
    return tools


@pytest.fixture
def fake_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeUv:
    """Put an uv on the PATH whose installation is a piece of shell. Its command lines are in the returned file."""
    tools, log = tmp_path / "fake", tmp_path / "log"
    tools.mkdir()
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")

    def write(install: str) -> Path:
        program = tools / "uv"
        program.unlink(missing_ok=True)
        program.write_text(STEM.format(log=log, python=sys.executable, install=install))
        program.chmod(0o755)
        return log

    return write


@contextlib.contextmanager
def maker(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that makes an environment."""
    argv = [sys.executable, "-c", IN_A_PROCESS, str(folder), PYTHON]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def make(folder: Path, requirements: str = "a==1\n", python: str = PYTHON) -> Path:
    return make_environment(folder, requirements, python=python, show=lambda line: None)


def is_dead(pid: int) -> bool:
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True


# -- with the real tools ---------------------------------------------------------------------------------------------


def test_uv_installs_what_the_users_configuration_offers(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not UV:
        pytest.skip("uv is not installed")
    check_installation("uv", folder, tmp_path, monkeypatch)


def test_pip_installs_where_there_is_no_uv(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "find_uv", lambda: "")
    monkeypatch.setenv("PIP_USER", "1")  # pip refuses that in an environment
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))  # what is there is not in the environment
    (tmp_path / "path" / "tiny-1.5.dist-info").mkdir(parents=True)
    (tmp_path / "path" / "tiny-1.5.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: tiny\nVersion: 1.5\n"
    )
    check_installation("pip", folder, tmp_path, monkeypatch)


def check_installation(tool: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("1.0", "2.0"):
        make_wheel(tmp_path / "wheels", "tiny", version)
    monkeypatch.setenv(f"{tool.upper()}_FIND_LINKS", str(tmp_path / "wheels"))
    shown: list[str] = []
    text = "# one line\n--no-index\ntiny<2\n"
    python = make_environment(folder, text, python=PYTHON, show=shown.append)
    assert python.parent.parent.parent.parent == folder
    assert version_in(python, "tiny") == "1.0"
    assert re.match(rf"making a virtual environment for Python {PYTHON} with \S+, in ", shown[0])
    assert re.match("the virtual environment is ready", shown[-1])
    shown.clear()
    began = time.perf_counter()
    assert make_environment(folder, text, python=PYTHON, show=shown.append) == python
    assert time.perf_counter() - began < 0.02
    assert not shown


# -- which tool ------------------------------------------------------------------------------------------------------


def test_without_uv_and_without_that_python_it_says_what_to_install(folder: Path, no_tools: Path) -> None:
    with pytest.raises(OSError, match=r"has neither uv nor Python 3\.99, .*: install uv .*, or Python 3\.99 with"):
        make(folder, python="3.99")


# -- two at once, and deaths -----------------------------------------------------------------------------------------


def test_two_processes_at_once_build_it_once(folder: Path, tmp_path: Path, fake_uv: FakeUv) -> None:
    log = fake_uv(f"while [ ! -e {tmp_path / 'go'} ]; do sleep 0.02; done")
    with maker(folder) as one:
        assert one.stdout is not None
        assert one.stdout.readline().startswith("making a virtual environment")
        with maker(folder) as other:
            time.sleep(0.5)
            (tmp_path / "go").touch()
            pythons = [child.communicate(timeout=20)[0].splitlines()[-1] for child in (one, other)]
    assert pythons[0] == pythons[1] == str(make(folder))
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["venv", "pip"]


def test_what_a_killed_process_has_left_is_replaced_once_its_tools_are_dead(
    folder: Path, tmp_path: Path, fake_uv: FakeUv
) -> None:
    pids = tmp_path / "pids"
    fake_uv(f"touch $environment/half; sleep 60 & echo $$ $! > {pids}.new; mv {pids}.new {pids}; wait")
    with maker(folder) as child:
        wait_until(pids.exists)
        child.send_signal(signal.SIGKILL)
        child.wait()
    [half] = folder.glob("*/venv/half")
    assert lock_path(f"{half.parent.parent}.lock", fcntl.LOCK_EX | fcntl.LOCK_NB, os.O_RDONLY) is None
    for pid in map(int, pids.read_text().split()):  # as the guard does
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda pid=pid: is_dead(pid), what=f"the death of {pid}")
    fake_uv("touch $environment/whole")
    environment = make(folder).parent.parent
    assert not (environment / "half").exists()
    assert (environment / "whole").exists()


# -- failures and progress -------------------------------------------------------------------------------------------


def test_a_failure_has_the_last_output_and_leaves_nothing(folder: Path, fake_uv: FakeUv) -> None:
    fake_uv("seq 101 130; echo no match >&2; exit 3")
    with pytest.raises(OSError, match=r"uv pip install .* ended with 3 \(the host needs disk space") as caught:
        make(folder)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert lines[1:] == [*map(str, range(117, 131)), "no match"]
    assert not list(folder.glob("*/"))
    fake_uv("")
    assert make(folder).exists()


def test_the_progress_is_shown_now_and_then(folder: Path, fake_uv: FakeUv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "_SHOW_EVERY_S", 0.4)
    fake_uv("echo fetching tiny; for i in 1 2 3 4 5 6 7 8 9; do echo $i; sleep 0.13; done")
    times: list[float] = []
    shown: list[str] = []

    def show(line: str) -> None:
        times.append(time.monotonic())
        shown.append(line)

    make_environment(folder, "a==1\nb==2 \\\n", python=PYTHON, show=show)
    assert len(shown) >= 4
    assert re.fullmatch(r"\d", shown[-2])
    assert all(later - earlier >= 0.39 for earlier, later in pairwise(times[:-1]))
