"""Hosts behind a program like ssh: chatter at login, and the errors for its failures."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import distrain
from distrain import (
    BackendConfig,
    FailureConfig,
    LaunchError,
    Result,
    RunConfig,
    ScalingConfig,
    __version__,
)
from distrain.coordinator.connection.transport import Transport
from distrain.coordinator.run.fit import run_work
from distrain.hosts.hostfile import HostSpec
from distrain.worker.job.job import FunctionWork
from tests.process.conftest import SSH_THAT_EXECUTES, Fit, make_fake_ssh

if TYPE_CHECKING:
    from pathlib import Path

Over = Callable[[str], Fit]

OTHER_VERSION = """\
import sys
from dataclasses import replace
from distrain import wire
hello = wire.Hello(wire={wire}, distrain="{distrain}", python="3.11", pid=1, host={{}})
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
    assert time.monotonic() - began < 15.0
    assert raised.value.result is not None
    return str(raised.value)


def python(source: str) -> str:
    return f"exec {shlex.quote(sys.executable)} -c {shlex.quote(source)}"


@pytest.mark.parametrize(
    "chatter",
    [
        "head -c 300000 /dev/zero | tr '\\0' 'x'",
        r"printf '\000\377 distrain\000 \000distr\000'",
        "yes 'a very long greeting' | head -n 5000",
    ],
)
def test_login_chatter_does_no_harm(over: Over, chatter: str) -> None:
    assert over(f"{chatter}\n{SSH_THAT_EXECUTES}")(lambda: "works").return_value == "works"


def test_a_host_whose_busy_sshd_hangs_up_is_connected_later(over: Over, tmp_path: Path) -> None:
    hangs_up = "echo 'kex_exchange_identification: Connection closed by remote host' >&2; exit 255"
    first = f"if [ ! -e {tmp_path}/came ]; then touch {tmp_path}/came; {hangs_up}; fi"
    assert over(f"{first}\n{SSH_THAT_EXECUTES}")(lambda: "works").return_value == "works"


def test_garbage_and_exit_255_are_quoted(over: Over) -> None:
    text = failure(over("echo 'far: Name or service not known' >&2; echo 'some garbage'; exit 255"))
    for words in ("otherhost", "exit code 255", "Name or service not known", "some garbage", "ssh -T otherhost"):
        assert words in text


def test_a_missing_ssh_is_an_error_that_names_it(storage: Path) -> None:
    host = HostSpec(name="otherhost", address="otherhost")
    transport = Transport(host=host, template=("/nowhere/ssh", "otherhost", "{command}"), ships=False)
    text = failure(Fit(storage=storage, transport=transport))
    assert "/nowhere/ssh" in text


@pytest.mark.parametrize(("wire", "version"), [(1, "9.9.9"), (99, __version__)])
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


# -- two hosts -------------------------------------------------------------------------------------------------------

SLOW_FORKSERVER = """
import sys, time
if "forkserver" in sys.orig_argv:
    time.sleep(0.7)
"""


def two_hosts(tmp_path: Path, second: str = "") -> tuple[Transport, Transport]:
    """``second``: what the shell of the second one does first."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    one = make_fake_ssh(tmp_path / "first")
    two = make_fake_ssh(tmp_path / "second", f"{second}\n{SSH_THAT_EXECUTES}")
    first, second = (HostSpec(name=name, address=name, slots=slots) for name, slots in (("first", 2), ("second", 1)))
    return replace(one, host=first), replace(two, host=second)


def fit_on(hosts: Sequence[Transport], storage: Path, function: Callable[..., Any], **run: Any) -> Result:
    return run_work(
        FunctionWork(function=function, config={}, backend=BackendConfig()),
        ScalingConfig(num_workers=3),
        RunConfig(storage_path=storage, **run),
        transports=hosts,
    )


def test_a_restart_while_another_host_is_still_starting(tmp_path: Path, storage: Path) -> None:
    def train() -> str:
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and distrain.get_context().get_node_rank() == 0:
            os._exit(1)
        return "second attempt"

    (tmp_path / "sitecustomize.py").write_text(SLOW_FORKSERVER)
    hosts = two_hosts(tmp_path, f"export PYTHONPATH={tmp_path}:$PYTHONPATH")
    result = fit_on(hosts, storage, train, failure_config=FailureConfig(max_failures=1))
    assert result.return_value == "second attempt"
