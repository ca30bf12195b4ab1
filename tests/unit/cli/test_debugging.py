"""Editors that may attach to a rank, and others."""

from __future__ import annotations

import os
import socket
from threading import Thread
from typing import TYPE_CHECKING

import pytest

from distrain import wire
from distrain.cli import debugging
from distrain.wire.channel import Channel

if TYPE_CHECKING:
    from collections.abc import Iterator

STRANGER = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def connected(port: int, uid: int, family: socket.AddressFamily, *, stays: bool = True) -> int:
    """Connect as a user, send a byte, and stay until the end. Return the process."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setuid(uid)
            with socket.socket(family) as client:
                client.connect(("::ffff:127.0.0.1" if family == socket.AF_INET6 else "127.0.0.1", port))
                client.sendall(b"x")
                while stays and client.recv(1):
                    pass
        finally:
            os._exit(0)
    return pid


@as_root
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
@pytest.mark.parametrize("uid", [0, STRANGER])
def test_the_user_of_a_connection_is_known(listener: socket.socket, family: socket.AddressFamily, uid: int) -> None:
    pid = connected(listener.getsockname()[1], uid, family)
    peer, _ = listener.accept()
    with peer:
        assert debugging._user_of_peer(peer) == uid
    os.waitpid(pid, 0)


@as_root
def test_who_has_left_is_not_taken_for_root(listener: socket.socket) -> None:
    """The kernel gives a connection without a process to root."""
    pid = connected(listener.getsockname()[1], STRANGER, socket.AF_INET, stays=False)
    os.waitpid(pid, 0)
    peer, _ = listener.accept()
    with peer:
        assert debugging._user_of_peer(peer) is None


@as_root
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the command ends with its socket
def test_only_the_users_own_editor_reaches_the_rank(capsys: pytest.CaptureFixture[str]) -> None:
    user = debugging._Editor(0, 0)
    port = user._listener.getsockname()[1]
    ours, theirs = socket.socketpair()
    fd, other = ours.detach(), theirs.detach()
    run, user.channel = Channel(fd, fd), Channel(other, other)
    strangers = [connected(port, STRANGER, socket.AF_INET) for _ in range(3)]
    relay = Thread(target=debugging.relay, args=(user, [wire.DebuggerSays(attempt=0, rank=0, body=b"/")]))
    relay.start()
    for pid in strangers:  # they are disconnected
        os.waitpid(pid, 0)
    with socket.create_connection(("127.0.0.1", port)) as own:
        own.sendall(b"hello")
        frames: list[wire.Frame] = []
        while not frames:
            frames += run.wait()
        assert [frame.body for frame in frames] == [b"hello"], "nothing that a stranger has sent"
        run.close()
    relay.join(10)
    assert not relay.is_alive()
    assert capsys.readouterr().out.count("refused a connection from another user (uid 54321)") == 1
