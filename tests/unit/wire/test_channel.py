"""Framed messages over real pipes: both ways, large, slow, and to the end."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from distrain import wire
from distrain.errors import WireError
from distrain.system.loop import Loop
from distrain.wire.channel import Channel, widen_pipe

if TYPE_CHECKING:
    from collections.abc import Iterator


class Pair:
    """Two channels, connected by two pipes."""

    def __init__(self, *, greeting: bool = False) -> None:
        (read_down, write_down), (read_up, write_up) = os.pipe(), os.pipe()
        self.near = Channel(read_up, write_down, greeting=greeting)
        self.far = Channel(read_down, write_up)


@pytest.fixture
def loop() -> Iterator[Loop]:
    opened = Loop()
    yield opened
    opened.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Tests that take a loop as well take it first: it must outlive what it watches."""
    made = Pair()
    yield made
    made.near.close()
    made.far.close()


def messages(frames: list[wire.Frame]) -> list[wire.Message]:
    return [frame.message() for frame in frames]


# -- sending and waiting ---------------------------------------------------------------------------------------------


def test_threads_do_not_mix_their_frames(pair: Pair) -> None:
    sent = [wire.Output(attempt=0, rank=rank, stream=1, body=bytes([rank]) * 200_000) for rank in range(4)]
    threads = [threading.Thread(target=pair.near.send, args=(message,)) for message in sent]
    for thread in threads:
        thread.start()
    got: list[wire.Message] = []
    while len(got) < len(sent) and not pair.far.at_end:
        got += messages(pair.far.wait(10))
    for thread in threads:
        thread.join()
    assert sorted(got, key=lambda message: message.rank) == sent  # type: ignore[attr-defined]


# -- the end ---------------------------------------------------------------------------------------------------------


def test_sending_to_nobody_raises(pair: Pair) -> None:
    pair.far.close()
    with pytest.raises(BrokenPipeError):
        pair.near.send(wire.Ping())


# -- in a loop -------------------------------------------------------------------------------------------------------


class Listener:
    """Keeps what it is called with."""

    def __init__(self, loop: Loop, channel: Channel) -> None:
        self.heard: list[wire.Message] = []
        self.ends = 0
        self._loop = loop
        channel.attach(loop, self._on_frames)

    def _on_frames(self, frames: list[wire.Frame]) -> None:
        self.heard += messages(frames)
        self.ends += not frames


def test_what_is_queued_is_written_before_the_channel_closes(loop: Loop, pair: Pair) -> None:
    def send_and_close() -> None:
        pair.near.queue(wire.Ping())
        pair.near.queue(wire.Close())
        pair.near.close()
        pair.near.queue(wire.Ping())

    pair.near.attach(loop, lambda frames: None)
    loop.call_in("send", 0.0, send_and_close)
    loop.step()
    assert messages(pair.far.drain()) == [wire.Ping(), wire.Close()]


def test_garbage_ends_the_stream_of_a_loop_instead_of_the_loop(loop: Loop, pair: Pair) -> None:
    """A host that does not speak our protocol is a lost host; the loop must live to say so."""
    listener = Listener(loop, pair.near)
    pair.far.send(wire.encode(wire.Ping()) + b"Segmentation fault\n")
    try:
        while not listener.ends:
            loop.step()
    except WireError:
        pytest.fail("WireError came out of the loop")
    assert listener.heard == [wire.Ping()]


def test_draining_gets_a_large_last_frame_whole() -> None:
    """A dead worker's outcome may be larger than one read."""
    read_fd, write_fd = os.pipe()
    widen_pipe(write_fd)
    receiver = Channel(read_fd, os.open(os.devnull, os.O_WRONLY))
    data = wire.encode(wire.Dump(attempt=0, rank=0, what="", body=b"x" * 700_000))
    assert os.write(write_fd, data) == len(data)
    os.close(write_fd)
    assert [frame.raw for frame in receiver.drain()] == [data]
    assert receiver.at_end
    receiver.close()


@pytest.fixture
def interrupted() -> Iterator[None]:
    """SIGUSR1 for us, every now and then."""
    source = f"""
import os, random, signal, time
while True:
    time.sleep(random.uniform(10e-6, 1e-3))
    os.kill({os.getpid()}, signal.SIGUSR1)
"""
    previous = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    gc.disable()  # an exception in a callback of the collector goes nowhere
    with subprocess.Popen([sys.executable, "-c", source]) as killer:
        yield
        killer.kill()
    gc.enable()
    signal.signal(signal.SIGUSR1, previous)


@pytest.mark.usefixtures("interrupted")
@pytest.mark.parametrize(("handler", "size"), [("raises", 200_000), ("sends", 100)])
def test_a_signal_handler_within_send_tears_and_doubles_nothing(pair: Pair, handler: str, size: int) -> None:
    """A stop signal unwinds train_func wherever it is, be it within report(); its handler may report, too."""
    frames: list[wire.Frame] = []

    def read() -> None:
        while not pair.far.at_end:
            frames.extend(pair.far.wait())

    reader = threading.Thread(target=read)
    reader.start()
    numbers, sent, armed = itertools.count(), list[int](), False

    def send() -> None:
        number = next(numbers)
        pair.near.send(wire.encode(wire.Dump(attempt=0, rank=number, what="", body=b"x" * size)))
        sent.append(number)

    def interrupt(*_: object) -> None:
        nonlocal armed
        if armed:
            armed = False
            if handler == "raises":
                raise InterruptedError
            send()

    def send_until_interrupted() -> None:
        nonlocal armed
        armed = True
        while armed:
            send()

    signal.signal(signal.SIGUSR1, interrupt)
    ends_at = time.monotonic() + 1.0
    while time.monotonic() < ends_at:
        with contextlib.suppress(InterruptedError):
            send_until_interrupted()
    send()
    os.close(pair.near.write_fd)
    pair.near.write_fd = -1
    reader.join()
    assert pair.far.broken is None
    arrived = [message.rank for message in messages(frames) if isinstance(message, wire.Dump)]
    assert len(set(arrived)) == len(arrived) > 20
    assert set(arrived) >= set(sent)
