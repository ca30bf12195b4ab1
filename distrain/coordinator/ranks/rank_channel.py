"""The connection between rank 0 and another rank, over TCP, if another launcher has started them. Runs in: coordinator.

Each side says a password of the run before anything else is read. The ranks know both of them through the framework's
own process group, which is no more secret.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import secrets
import signal
import socket
import tempfile
import threading
import time
import weakref
from _queue import Empty, SimpleQueue  # queue.py may be the module of a user
from typing import IO, TYPE_CHECKING, NamedTuple

from distrain import wire
from distrain.errors import LaunchError, StandInError, StorageError, WorkerGroupError
from distrain.hosts.secret_port import SecretPort
from distrain.system.remote_path import RemotePath
from distrain.system.text import ranks_have
from distrain.transfer.executor import StorageExecutor
from distrain.wire.channel import Channel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from distrain.errors import DistrainError

_RANK_BYTES = 4
_TAKEN = {wire.WorkerSpec.__name__, wire.Upload.__name__, wire.RunEnded.__name__}
"""Messages that :class:`RankChannel` acts on itself."""
_CONNECT_S = 10.0
_PASSWORD_BYTES = 16
_LOOPBACK = "127.0.0.1"
_KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3}
"""With these, a reader notices within 14 s that the other host has no power or no network."""


class Passwords(NamedTuple):
    """The words by which a rank and rank 0 know each other: what the rank says, and the answer."""

    ours: str
    reply: str


class Entrance:
    """A port of rank 0 at which the other ranks connect. It is open until all have.

    only_here: all ranks are on this host. Raises OSError if it cannot listen.
    """

    def __init__(self, ranks: int, *, only_here: bool) -> None:
        self.passwords = Passwords(secrets.token_hex(_PASSWORD_BYTES), secrets.token_hex(_PASSWORD_BYTES))
        self._ranks = ranks
        self._connections: dict[int, socket.socket] = {}
        self._complete = threading.Event()
        self._port = SecretPort(self.passwords.ours, self._welcome, _LOOPBACK if only_here else "")
        self.port = self._port.number

    def connections(self) -> dict[int, socket.socket]:
        """Hand over the connections of all other ranks, which are on their way. Raise LaunchError if one is missing."""
        if not self._complete.wait(_CONNECT_S):
            missing = set(range(1, self._ranks)) - self._connections.keys()
            raise LaunchError(f"{ranks_have(missing)} not connected to rank 0 within {_CONNECT_S:g} s; read their logs")
        taken, self._connections = self._connections, {}
        return taken

    def close(self) -> None:
        """Let no more ranks connect."""
        self._port.close()
        for connection in self._connections.values():
            connection.close()

    def _welcome(self, connection: socket.socket, reader: IO[bytes]) -> None:
        rank = int.from_bytes(reader.read(_RANK_BYTES), "big")
        if rank in range(1, self._ranks) and rank not in self._connections:
            _keep_alive(connection)
            connection.sendall(self.passwords.reply.encode())
            self._connections[rank] = socket.socket(fileno=connection.detach())
            if len(self._connections) == self._ranks - 1:
                self._complete.set()


def connect(address: str, port: int, passwords: Passwords, rank: int) -> socket.socket:
    """Connect to the :class:`Entrance` of rank 0. Raise OSError."""
    connection = socket.create_connection((address, port), timeout=_CONNECT_S)
    try:
        connection.sendall(passwords.ours.encode() + rank.to_bytes(_RANK_BYTES, "big"))
        if connection.recv(2 * _PASSWORD_BYTES) != passwords.reply.encode():
            raise ConnectionError("another program answers there, or rank 0 has too many connections")
        _keep_alive(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _keep_alive(connection: socket.socket) -> None:
    """Send small messages at once, and notice that the kernel of the other host is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


_open: weakref.WeakSet[SocketChannel] = weakref.WeakSet()


class SocketChannel(Channel):
    """A channel over a socket, which children of the user's ``os.fork()`` do not hold open."""

    def __init__(self, connection: socket.socket) -> None:
        descriptor = connection.detach()
        super().__init__(descriptor, descriptor)
        _open.add(self)


def _close_in_child() -> None:
    for channel in list(_open):
        if channel.read_fd >= 0:
            with contextlib.suppress(OSError):
                os.close(channel.read_fd)


os.register_at_fork(after_in_child=_close_in_child)


class RankChannel:
    """A rank's end of the connection; also rank 0 has one, to the thread of the run in its process.

    A thread reads the connection, and passes messages on to the thread that trains. It answers itself when the run asks
    for stacks, as train_func may hang. It cannot do so while native code holds the GIL, but those that wait for other
    ranks or for a GPU release it; and where rank 0 is in such code, nothing asks.

    Calls raise WorkerGroupError or StorageError once rank 0 is gone, or says that the run has failed.

    on_stop: called, in the thread, with the name of the signal by which the run ends train_func.
    """

    has_uploader = False

    def __init__(
        self, connection: socket.socket, *, rank: int = 0, on_stop: Callable[[str], None] = lambda name: None
    ) -> None:
        self.at_end = False
        """True once nothing more will come."""
        self.uses_should_stop = False
        """True if train_func calls should_stop()."""
        self._connection = SocketChannel(connection)
        self._arrived: SimpleQueue[wire.Frame | None] = SimpleQueue()
        """Messages from the thread; at last None, which stays."""
        self._rank = rank
        self._on_stop = on_stop
        self._executor = StorageExecutor(None)
        self._spec: wire.WorkerSpec | None = None
        self._failure: wire.RunEnded | None = None
        self._end: wire.RunEnded | None = None
        self._is_idle = False
        """True while nothing but an order, or the end of the run, is awaited."""
        self._thread = threading.Thread(target=self._pass_on, name="distrain-rank", daemon=True)
        self._thread.start()

    # -- in the thread --------------------------------------------------------------------------------------------

    def _pass_on(self) -> None:
        """Read the connection to its end."""
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they have to interrupt that thread
        with contextlib.suppress(OSError):
            while frames := self._connection.wait():
                for frame in frames:
                    self._on_frame(frame)
        self._arrived.put(None)

    def _on_frame(self, frame: wire.Frame) -> None:
        match frame.kind:
            case wire.TakeStacks.__name__:
                attempt = frame.header["attempt"]
                self._connection.send(wire.Dump(attempt=attempt, rank=self._rank, what="stacks", body=_own_stacks()))
            case wire.Stop.__name__:
                self._on_stop(frame.header["signal"])
            case _:
                self._arrived.put(frame)

    # -- in the thread that trains --------------------------------------------------------------------------------

    def send(self, message: wire.Message) -> None:
        """Send, as any channel does. Raise WorkerGroupError if rank 0 is gone."""
        self.uses_should_stop = self.uses_should_stop or isinstance(message, wire.StopVote)
        try:
            self._connection.send(message)
        except OSError:
            self._thread.join()
            while self.receive():  # it may have said why
                pass
            raise self.error() from None

    def receive(self) -> list[wire.Frame]:
        """Return what has arrived, without waiting."""
        return self.wait(0.0)

    def wait(self, timeout_s: float | None = None) -> list[wire.Frame]:
        """Wait for a message, the end or the timeout, and return what has arrived, unless it is for this class."""
        frames: list[wire.Frame] = []
        with contextlib.suppress(Empty):
            while not self.at_end and (self._failure is None or self._is_idle):
                frame = self._arrived.get(timeout=0.0 if frames else timeout_s)
                if frame is None:
                    self._arrived.put(None)
                    self.at_end = not frames
                elif frame.kind not in _TAKEN:
                    frames.append(frame)
                    continue
                else:
                    self._take(frame.message())
                break
        if not frames and not self._is_idle and (self._failure is not None or self.at_end):
            raise self.error()
        return frames

    def await_spec(self) -> wire.WorkerSpec | None:
        """Wait for the order to train. Return None if the run has ended instead."""
        self._is_idle, self._spec = True, None
        while self._spec is None and self._end is None and not self.at_end:
            self.wait()
        self._is_idle = self.uses_should_stop = False
        return self._spec

    def use_storage(self, run: Path | RemotePath) -> None:
        """Store files in this run directory: a rank does so itself, also in a remote one."""
        self._executor = StorageExecutor(run if isinstance(run, RemotePath) else None)

    def await_end(self, timeout_s: float | None) -> bytes | None:
        """Return how the run has ended on rank 0 (:class:`~distrain.wire.RunEnded`), or None if that is not known."""
        self._is_idle = True
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while self._end is None and not self.at_end and (left_s := deadline - time.monotonic()) > 0:
            self.wait(None if timeout_s is None else left_s)
        return None if self._end is None else self._end.body

    def close(self) -> None:
        """Close the connection, and wait for the end of the thread."""
        if self._connection.write_fd < 0:
            return
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.write_fd)) as connection:
            connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._connection.close()

    def _take(self, message: wire.Message) -> None:
        match message:
            case wire.Upload():
                self.send(self._executor.do(message))
            case wire.WorkerSpec():
                self._spec = message
            case wire.RunEnded(text=""):
                self._end = message
            case wire.RunEnded():
                self._failure = message

    def error(self) -> DistrainError:
        """Return the error of a call for which rank 0 no longer answers."""
        text, culprit = "rank 0 ended before the run did, or its host is lost", 0
        if self._failure is not None:
            text = self._failure.text
            if self._failure.culprit is None:
                return StorageError(text)
            culprit = self._failure.culprit
        return WorkerGroupError(text, worker_failures={culprit: StandInError(text)}, culprit=culprit)


def _own_stacks() -> bytes:
    """Return the stacks of all threads of this process, as faulthandler writes them."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
