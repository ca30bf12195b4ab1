"""The end of agents and of programs that run on many hosts at once: real processes, which are shells."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from distrain.coordinator.connection.agent_link import AgentLink
from distrain.coordinator.connection.transport import Transport
from distrain.hosts.hostfile import HostSpec
from distrain.system.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


def start(loop: Loop, script: str, ended: dict[str, str], *, number: int = 0) -> AgentLink:
    """Start a shell in place of an agent. Its end is noted in ``ended``."""
    transport = Transport(host=HostSpec(name=f"host{number}", address="host"), template=("far",), ships=False)
    end = lambda link, why: ended.setdefault(link.name, why)  # noqa: E731
    return AgentLink(loop, transport, ["sh", "-c", script], "run", on_message=lambda *message: None, on_end=end)


def run_until_ended(loop: Loop, links: list[AgentLink], ended: dict[str, str]) -> None:
    loop.call_in("test", 20.0, lambda: pytest.fail("it took too long"))
    while len(ended) < len(links):
        loop.step()
    loop.cancel("test")


def test_many_lost_connections_do_not_stop_the_loop(loop: Loop) -> None:
    """Each process lives on, as a guard does that empties its host. Waiting for one after the other took 20 s."""
    ended: dict[str, str] = {}
    links = [start(loop, "exec >&- 2>&-; sleep 60", ended, number=number) for number in range(20)]
    began, turns = time.monotonic(), 0

    def turn() -> None:
        nonlocal turns
        turns += 1
        loop.call_in("turn", 0.1, turn)

    turn()
    run_until_ended(loop, links, ended)
    assert time.monotonic() - began < 5.0
    assert turns >= 8  # nothing has blocked the loop in the meantime
    assert all("its connection was closed" in why for why in ended.values())
    for link in links:
        link.dispose()


@pytest.mark.parametrize(("script", "how"), [("exit 127", "exit code 127"), ("kill -9 $$", "killed by SIGKILL")])
def test_the_end_of_the_process_is_described(loop: Loop, script: str, how: str) -> None:
    ended: dict[str, str] = {}
    noise = "/x/site-packages/torch/y.py:3: UserWarning: Failed to initialize NumPy"
    links = [start(loop, f"echo some words >&2; echo '{noise}' >&2; {script}", ended)]
    run_until_ended(loop, links, ended)
    assert how in ended["host0"]
    assert ended["host0"].partition("last words:\n")[2].splitlines()[0] == "some words"
    assert "UserWarning" not in ended["host0"]
    links[0].dispose()
