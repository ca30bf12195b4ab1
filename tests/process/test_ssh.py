"""Hosts behind a program like ssh: what it may say, and how its failures are told."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

import distrain
from distrain import LaunchError, __version__
from distrain.transport import PrefixTransport
from tests.process.conftest import SSH_THAT_EXECUTES, Fit, make_fake_ssh

if TYPE_CHECKING:
    from pathlib import Path

Over = Callable[[str], Fit]

OTHER_VERSION = """\
import sys
from dataclasses import replace
from distrain import wire
hello = wire.Hello(wire={wire}, distrain="{distrain}", python="3.11", run_id="", hostname="far", pid=1, cpus=1,
                   memory_bytes=1, gpus=None)
sys.stdout.buffer.write(wire.MAGIC + wire.encode(hello))
sys.stdout.flush()
sys.stdin.buffer.read()
"""


@pytest.fixture
def over(tmp_path: Path, storage: Path) -> Over:
    """A Fit over a fake ssh with this body."""
    return lambda body: Fit(storage=storage, transport=make_fake_ssh(tmp_path, body))


def failure(fit: Fit) -> str:
    began = time.monotonic()
    with pytest.raises(LaunchError) as raised:
        fit(lambda: None)
    assert time.monotonic() - began < 5.0
    assert raised.value.result is not None
    return str(raised.value)


def python(source: str) -> str:
    return f"exec {shlex.quote(sys.executable)} -c {shlex.quote(source)}"


@pytest.mark.parametrize(
    "chatter",
    [
        "echo 'Welcome to far!'; echo 'Last login: never' >&2",
        "head -c 300000 /dev/zero | tr '\\0' 'x'",
        r"printf '\000\377 distrain\000 \000distr\000'",
        "yes 'a very long greeting' | head -n 5000",
    ],
)
def test_login_chatter_does_no_harm(over: Over, chatter: str) -> None:
    assert over(f"{chatter}\n{SSH_THAT_EXECUTES}")(lambda: "works").return_value == "works"


def test_garbage_and_exit_255_are_quoted(over: Over) -> None:
    text = failure(over("echo 'far: Name or service not known' >&2; echo 'some garbage'; exit 255"))
    assert "otherhost" in text
    assert "exit code 255" in text
    assert "Name or service not known" in text
    assert "some garbage" in text
    assert "ssh -T otherhost" in text


def test_a_host_without_python_is_quoted(over: Over) -> None:
    text = failure(over("echo 'sh: 1: python: not found' >&2; exit 127"))
    assert "exit code 127" in text
    assert "python: not found" in text


def test_a_missing_ssh_is_an_error_that_names_it(storage: Path) -> None:
    transport = PrefixTransport(name="otherhost", prefix=("/nowhere/ssh", "otherhost"))
    text = failure(Fit(storage=storage, transport=transport))
    assert "/nowhere/ssh" in text


@pytest.mark.parametrize("end", ["exit 0", "kill -9 $$"])
def test_a_silent_end_is_told_too(over: Over, end: str) -> None:
    text = failure(over(end))
    assert ("exit code 0" if end == "exit 0" else "SIGKILL") in text


@pytest.mark.parametrize(("wire", "version"), [(1, "9.9.9"), (99, __version__), (99, "9.9.9")])
def test_another_version_is_refused_with_the_command_that_mends_it(over: Over, wire: int, version: str) -> None:
    text = failure(over(python(OTHER_VERSION.format(wire=wire, distrain=version))))
    assert f"distrain {version}" in text
    assert f"pip install distrain=={__version__}" in text


def test_an_agent_that_talks_nonsense_is_refused(over: Over) -> None:
    source = (
        "import sys, time\nfrom distrain import wire\n"
        "sys.stdout.buffer.write(wire.MAGIC + b'\\xff' * 100)\nsys.stdout.flush()\nsys.stdin.read()"
    )
    assert "protocol" in failure(over(python(source)))


def test_nothing_of_the_users_environment_is_needed_to_start(over: Over) -> None:
    """What reaches the far side is argv only, as with the real ssh."""
    fit = over('for command; do :; done; cd /; exec env -i PATH=/usr/bin:/bin sh -c "$command"')

    def train() -> int:
        return distrain.get_context().get_world_size()

    assert fit(train).return_value == 2
