"""The connections of ranks to rank 0: who gets in, and what a rank hears of the end."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from distrain import wire
from distrain.coordinator.ranks import rank_channel
from distrain.coordinator.ranks.rank_channel import Entrance, Passwords, RankChannel, connect
from distrain.errors import WorkerGroupError
from distrain.wire.channel import Channel
from tests.conftest import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def entrance() -> Iterator[Entrance]:
    entrance = Entrance(3, only_here=True)
    yield entrance
    entrance.close()


def test_only_who_knows_the_secret_gets_in(entrance: Entrance) -> None:
    with pytest.raises(OSError, match=r"another program answers|reset"):
        connect("127.0.0.1", entrance.port, Passwords("0" * 32, ""), 1)
    with socket.create_connection(("127.0.0.1", entrance.port)) as mute:
        ranks = [connect("127.0.0.1", entrance.port, entrance.passwords, rank) for rank in (2, 1)]
        connections = entrance.connections()
        assert connections.keys() == {1, 2}
        connections[2].sendall(b"for rank 2")
        assert ranks[0].recv(100) == b"for rank 2"
    for connection in (mute, *ranks, *connections.values()):
        connection.close()


def test_who_does_not_know_the_answer_is_not_rank_0(entrance: Entrance) -> None:
    with pytest.raises(OSError, match="another program answers"):
        connect("127.0.0.1", entrance.port, entrance.passwords._replace(reply="no"), 1)


@pytest.mark.parametrize("said", [b"", b"\0", b"\0\0\0\0", b"\0\0\0\3", b"\0\0\0\1"], ids=repr)
def test_a_connection_that_is_no_other_rank_is_refused(entrance: Entrance, said: bytes) -> None:
    """It has died while it said who it is, says that it is rank 0, or one that is not there or has come already."""
    first = connect("127.0.0.1", entrance.port, entrance.passwords, 1)
    wait_until(lambda: entrance._connections)
    with socket.create_connection(("127.0.0.1", entrance.port), timeout=60) as odd:
        odd.sendall(entrance.passwords.ours.encode() + said)
        odd.shutdown(socket.SHUT_WR)
        odd.settimeout(60)
        assert odd.recv(1) == b""
    second = connect("127.0.0.1", entrance.port, entrance.passwords, 2)
    connections = entrance.connections()
    assert connections.keys() == {1, 2}
    connections[1].sendall(b"for rank 1")
    assert first.recv(100) == b"for rank 1"
    for connection in (first, second, *connections.values()):
        connection.close()


def test_a_rank_that_does_not_come_is_named(entrance: Entrance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_channel, "_CONNECT_S", 0.01)
    with pytest.raises(rank_channel.LaunchError, match=r"ranks 1, 2 have not connected"):
        entrance.connections()


@pytest.fixture
def pair() -> Iterator[tuple[RankChannel, Channel]]:
    ours, theirs = socket.socketpair()
    descriptor = theirs.detach()
    rank, server = RankChannel(ours), Channel(descriptor, descriptor)
    yield rank, server
    rank.close()
    server.close()


def test_the_end_of_rank_0_ends_every_wait(pair: tuple[RankChannel, Channel]) -> None:
    rank, server = pair
    server.close()
    with pytest.raises(WorkerGroupError, match="rank 0 ended before"):
        rank.wait()
    with pytest.raises(WorkerGroupError, match="rank 0 ended before"):
        rank.send(wire.Running(attempt=0, rank=1))
    assert rank.await_end(None) is None


def test_how_the_run_ended_is_known_also_if_rank_0_is_gone_by_then(pair: tuple[RankChannel, Channel]) -> None:
    rank, server = pair
    assert rank.await_end(0.01) is None
    server.send(wire.RunEnded(attempt=0, rank=1, body=b"the end"))
    server.close()
    assert rank.await_end(None) == b"the end"


def test_a_rank_stores_its_files_itself_when_rank_0_orders_it(
    pair: tuple[RankChannel, Channel], tmp_path: Path
) -> None:
    """As with remote storage."""
    rank, server = pair
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    (source / "model").write_text("weights")
    server.send(
        wire.Upload(attempt=0, rank=1, ordinal=1, source=str(source), files=["model"], others=[], directory=str(target))
    )
    stored = None
    while stored is None:
        assert rank.receive() == []
        stored = next((frame.message() for frame in server.wait(0.01)), None)
    assert isinstance(stored, wire.FilesCopied)
    assert stored.failed is None
    assert (target / "model").read_text() == "weights"


def test_a_rank_that_is_busy_answers_with_its_stacks_and_is_ended_by_a_signal() -> None:
    """In a thread of its own, while the one that trains may be anywhere."""
    ours, theirs = socket.socketpair()
    descriptor, ordered = theirs.detach(), list[str]()
    rank, server = RankChannel(ours, rank=3, on_stop=ordered.append), Channel(descriptor, descriptor)
    server.send(wire.TakeStacks(attempt=2))
    [dump] = [frame.message() for frame in server.wait(60)]
    assert isinstance(dump, wire.Dump)
    assert (dump.attempt, dump.rank, dump.what) == (2, 3, "stacks")
    assert b"test_a_rank_that_is_busy_answers" in dump.body
    server.send(wire.Stop(attempt=2, grace_s=1.0, signal="SIGUSR1"))
    wait_until(lambda: ordered == ["SIGUSR1"])
    rank.close()
    server.close()
