"""Child processes of a simulated world: uploaders and movers, and the servers to which movers open streams.

All of them are the real programs. What is simulated is what they talk over; also the sockets of agents, by which hosts
get files from the memory of others.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, ClassVar

from distrain.agent.peers import SILENCE_S
from distrain.hosts.reachability import CONNECT_TIMEOUT_S
from distrain.transfer import mover, stream_server, uploader
from distrain.transfer.stream import StreamEnd, StreamEndedError
from tests.simulation.hosts import Line
from tests.simulation.world import Process, SimulatedLoop, World

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distrain import wire
    from tests.simulation.hosts import Host

_PROGRAMS = {"uploader": uploader.main, "mover": mover.main}
_CONNECT_S = 0.2
_WRITE_S = 0.002


class End:
    """One end of the channel between a process and its child."""

    broken = None

    def __init__(self, world: World, process: Process) -> None:
        self.at_end = False
        self.out: Line
        self._world, self._process = world, process
        self._frames: list[wire.Frame] = []
        self._waiting: Any = None
        self._loop: SimulatedLoop | None = None
        self._on_frames: Callable[[list[wire.Frame]], None] = lambda frames: None
        self._is_closed = False

    def take(self, frame: wire.Frame | None) -> None:
        """Get a message, or None when the other end is gone."""
        if frame is None:
            self.at_end = True
        else:
            self._frames.append(frame)
        if self._loop is not None:
            self._loop.post(self._hand_over)
        elif self._waiting is not None:
            self._waiting.wake()

    def _hand_over(self) -> None:
        frames, self._frames = self._frames, []
        if self._loop is not None and not self._is_closed and (frames or self.at_end):
            self._on_frames(frames)
            if frames and self.at_end:
                self._loop.post(self._hand_over)

    def attach(self, loop: SimulatedLoop, on_frames: Callable[[list[wire.Frame]], None]) -> None:
        self._loop, self._on_frames = loop, on_frames

    def detach(self) -> None:
        self._loop = None

    def wait(self, timeout_s: float | None = None) -> list[wire.Frame]:
        until = None if timeout_s is None else self._world.now + timeout_s
        self._waiting = self._world.current
        while not (self._frames or self.at_end) and (until is None or self._world.now < until):
            self._world.wait(until)
        frames, self._frames = self._frames, []
        return frames

    def send(self, message: wire.Message) -> None:
        self.out.send(message)

    queue = send

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._is_closed = True


class SimulatedChild:
    """A ChildLink to a process of the world. The child dies with its parent."""

    def __init__(self, argv: Sequence[str], **how: Any) -> None:
        world = SimulatedLoop.world
        assert world.current is not None
        parent = world.current.process
        program, *arguments = argv[4:]
        self.process = Process(world, f"{program} of {parent.name}", parent.host)
        self.channel, there = End(world, parent), End(world, self.process)
        self.channel.out, there.out = Line(world, there.take), Line(world, self.channel.take)
        self.process.channel = there  # type: ignore[attr-defined]
        self.process.at_death.append(there.out.end)
        parent.at_death.append(self.process.kill)
        self.process.start(lambda: _PROGRAMS[program](arguments), is_main=True)

    def kill(self) -> int:
        self.channel.close()
        self.process.kill()
        return -9


def channel_to_parent(parent: str) -> End:
    """Return the end of the child that runs now."""
    current = SimulatedLoop.world.current
    assert current is not None
    return current.process.channel  # type: ignore[attr-defined, no-any-return]


class Pipe:
    """Bytes on their way to one reader, as a file that a socket makes."""

    def __init__(self, world: World) -> None:
        self.is_closed = False
        self._world, self._data = world, bytearray()
        self._reader: Any = None

    def write(self, data: bytes) -> None:
        if self.is_closed:
            raise BrokenPipeError
        self._data += data
        self._wake()

    def read(self, size: int) -> bytes:
        """Return so many bytes; fewer at the end, or when nothing comes for too long."""
        self._reader = self._world.current
        until = self._world.now + SILENCE_S
        while len(self._data) < size and not self.is_closed and self._world.now < until:
            self._world.wait(until)
        data = bytes(self._data[:size])
        del self._data[:size]
        return data

    def readline(self, _: int) -> bytes:
        line = b""
        while not line.endswith(b"\n") and (letter := self.read(1)):
            line += letter
        return line

    def close(self) -> None:
        self.is_closed = True
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None:
            self._reader.wake()


class Socket:
    """One end of a connection between two agents."""

    def __init__(self, world: World, own: Host, other: Host, pipes: tuple[Pipe, Pipe]) -> None:
        self._world, self._own, self._other = world, own, other
        self._from, self._to = pipes

    def settimeout(self, seconds: float) -> None:
        assert 0.0 < seconds < SILENCE_S + 1.0

    def recv(self, size: int) -> bytes:
        return self._from.read(size)

    def makefile(self, *_: Any, **how: Any) -> Any:
        return contextlib.nullcontext(self._from)

    def sendall(self, data: bytes) -> None:
        """Send bytes in two pieces, as either end may die between them."""
        middle = len(data) // 2
        for piece in (data[:middle], data[middle:]):
            self._world.pause(_WRITE_S + max(self._own.peer_delay_s, self._other.peer_delay_s))
            if not (self._own.is_cut_off or self._other.is_cut_off):
                self._to.write(piece)

    def sendfile(self, file: Any) -> None:
        self.sendall(file.read())

    def close(self) -> None:
        for pipe in (self._from, self._to):
            pipe.close()

    def at_death(self) -> None:
        """Close it as the kernel does, unless there is no kernel any more: then the other end hears nothing."""
        if self._own.is_up:
            self.close()

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Listener:
    """The socket of an agent at which others get files."""

    ports: ClassVar[dict[int, Listener]] = {}

    def __init__(self, _: str) -> None:
        self._world = world = SimulatedLoop.world
        assert world.current is not None
        self.process, self._waiting = world.current.process, world.current
        self._arrived: list[Socket] = []
        self.port = len(self.ports) + 1
        self.ports[self.port] = self

    def getsockname(self) -> tuple[str, int]:
        return "", self.port

    def fileno(self) -> int:
        return 0  # it is open

    def accept(self) -> tuple[Socket, None]:
        assert self._world.current is not None
        self._waiting = self._world.current
        while not self._arrived:
            self._world.wait()
        return self._arrived.pop(0), None

    def take(self, end: Socket) -> None:
        self._arrived.append(end)
        self._waiting.wake()


def connect(address: str, port: int) -> Socket:
    """Do as distrain.agent.peers does."""
    world, listener = SimulatedLoop.world, Listener.ports[port]
    assert world.current is not None
    own, other = world.current.process, listener.process
    if not other.host.is_up or any(host.is_cut_off or host.refuses_peers for host in (own.host, other.host)):
        world.sleep(CONNECT_TIMEOUT_S)
        raise TimeoutError("timed out")
    world.pause(_WRITE_S)
    if not other.is_alive:
        raise ConnectionRefusedError("Connection refused")
    there, back = Pipe(world), Pipe(world)
    ends = Socket(world, own.host, other.host, (back, there)), Socket(world, other.host, own.host, (there, back))
    for process, end in zip((own, other), ends, strict=True):
        process.at_death.append(end.at_death)
    listener.take(ends[1])
    return ends[0]


class SimulatedStream(mover.Stream):
    """The mover's end of a stream to a host."""

    hosts: ClassVar[dict[str, Host]]

    def __init__(self, argv: Sequence[str]) -> None:
        world, host = SimulatedLoop.world, self.hosts[argv[0]]
        assert world.current is not None
        parent = world.current.process
        world.pause(_CONNECT_S)
        if not (host.is_up and host.takes_streams):
            raise StreamEndedError("no route to host")
        self._server = Process(world, f"stream server of {host.name}", host)
        host.servers.append(self._server)
        here, there = End(world, parent), End(world, self._server)
        here.out, there.out = Line(world, there.take), Line(world, here.take)
        self._server.at_death.append(there.out.end)
        parent.at_death.append(here.out.end)
        self._server.start(lambda: _serve(there), is_main=True)
        StreamEnd.__init__(self, here)  # type: ignore[arg-type]

    def send(self, message: wire.Message) -> None:
        SimulatedLoop.world.pause(_WRITE_S)
        super().send(message)

    def end(self, found: str) -> str:
        self.close()
        return f"the connection for files has ended: {found}"

    def close(self) -> None:
        self._server.kill()


def _serve(end: Any) -> None:
    with contextlib.suppress(StreamEndedError, OSError):
        stream_server.serve(end)
