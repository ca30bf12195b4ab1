"""The protocol of streams, a stream server, and copies between hosts."""

from __future__ import annotations

import os
import socket
import threading
import time
import zlib
from typing import TYPE_CHECKING, Any

import pytest

from distrain import wire
from distrain.system import process
from distrain.transfer.host_side.arrivals import ArrivingPart, receive_parts
from distrain.transfer.streams import peers, stream_server
from distrain.transfer.streams.peers import PeerConnections, PeerServer
from distrain.transfer.streams.stream_server import StreamServer
from distrain.transfer.streams.streams import (
    MOST_CONTENT,
    PartSender,
    Reader,
    RefusedError,
    StreamEndedError,
    as_header,
    check_name,
    send_header,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from distrain.transfer.streams.streams import Item


class Server:
    """A stream server, as a process."""

    def __init__(self) -> None:
        self.process = process.spawn(process.bootstrap_argv("stream-server"))
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.write_fd = self.process.stdin.fileno()
        self.reader = Reader(self.process.stdout.fileno())
        assert self.reader.skip_chatter() == b""

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        send_header(self.write_fd, {"do": do, **fields})
        return self.reader.answer()

    def read(self, folder: Path, items: list[Item]) -> list[bytes]:
        send_header(self.write_fd, {"do": "read", "folder": str(folder), "items": items})
        return [part_of(self.reader, count) for _, _, count in items]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


def part_of(reader: Reader, count: int) -> bytes:
    data: list[bytes] = []
    reader.part(count, lambda piece: data.append(bytes(piece)))
    return b"".join(data)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for fd in ends:
        os.close(fd)


def written(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


# -- parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 1000, MOST_CONTENT - 1, MOST_CONTENT, MOST_CONTENT + 1, 3 * MOST_CONTENT])
def test_a_part_arrives_as_it_is_on_disk(pipe: tuple[int, int], tmp_path: Path, size: int) -> None:
    data = os.urandom(size + 20)
    sender, reader = PartSender(pipe[1]), Reader(pipe[0])
    source = str(written(tmp_path / "file", data))

    def send() -> None:
        sender.send(source, 10, size)
        sender.send(source, 0, 10)
        sender.flush()

    threading.Thread(target=send).start()
    assert part_of(reader, size) == data[10 : size + 10]
    assert part_of(reader, 10) == data[:10]


def test_small_parts_travel_together(pipe: tuple[int, int], tmp_path: Path) -> None:
    sender = PartSender(pipe[1])
    sender.send(str(written(tmp_path / "file", b"text")), 0, 4)
    os.set_blocking(pipe[0], False)
    with pytest.raises(BlockingIOError):
        os.read(pipe[0], 1)
    sender.flush()
    assert os.read(pipe[0], 100) == b"\0\0\0\4text\0\0\0\0"


def test_a_file_that_became_shorter_ends_its_part_only(pipe: tuple[int, int], tmp_path: Path) -> None:
    source = str(written(tmp_path / "file", b"text"))
    sender, reader = PartSender(pipe[1]), Reader(pipe[0])
    sender.send(source, 0, 5)
    sender.send(str(tmp_path / "missing"), 0, 5)
    sender.send(source, 0, 4)
    sender.flush()
    with pytest.raises(RefusedError, match=rf"became shorter while it was read: '{source}'"):
        part_of(reader, 5)
    with pytest.raises(RefusedError, match=r"No such file or directory: .*missing"):
        part_of(reader, 5)
    assert part_of(reader, 4) == b"text"


def test_an_error_of_the_receiver_leaves_the_next_part_readable(pipe: tuple[int, int], tmp_path: Path) -> None:
    sender, reader = PartSender(pipe[1]), Reader(pipe[0])
    for text in (b"one", b"two"):
        sender.send(str(written(tmp_path / text.decode(), text)), 0, 3)
    sender.flush()
    opened: list[int] = []

    def open_part(number: int) -> ArrivingPart:
        opened.append(number)
        return ArrivingPart(str(tmp_path / ("no folder/x" if number == 0 else "arrived")), 0)

    with pytest.raises(FileNotFoundError, match="no folder"):
        receive_parts(reader, [("one", 0, 3), ("two", 0, 3)], open_part)
    assert opened == [0, 1]
    assert (tmp_path / "arrived").read_bytes() == b"two"


@pytest.mark.parametrize(
    "data",
    [b"", b"\0\0\0\2", b"\0\0\0\1a\0\0\0\0", b"\0\x7f\0\0", b"\xff\xff\xff\xff\0\0\0\3{}{"],
    ids=["end", "cut", "too few bytes", "too large a chunk", "no JSON"],
)
def test_what_is_no_part_ends_the_stream(data: bytes) -> None:
    read_fd, write_fd = os.pipe()
    os.write(write_fd, data)
    os.close(write_fd)
    with pytest.raises(StreamEndedError):
        part_of(Reader(read_fd), 2)
    os.close(read_fd)


def test_chatter_before_the_magic_is_skipped(pipe: tuple[int, int]) -> None:
    os.write(pipe[1], b"Welcome\0\n" + wire.MAGIC + as_header({"sizes": []}))
    reader = Reader(pipe[0])
    assert reader.skip_chatter() == b"Welcome\0\n"
    assert reader.answer() == {"sizes": []}


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../file", "a/../../b", "..", ".", "a\0b"])
def test_a_name_that_leads_out_is_refused(name: str) -> None:
    with pytest.raises(RefusedError, match="no file below the folder"):
        check_name(name)


# -- the server ------------------------------------------------------------------------------------------------------


def test_the_server_answers_many_requests_that_were_sent_at_once(server: Server, tmp_path: Path) -> None:
    names = [written(tmp_path / f"fïle\udcff{number}", b"%d" % number).name for number in range(10)]
    for name in names:
        send_header(server.write_fd, {"do": "read", "folder": str(tmp_path), "items": [(name, 0, 1)]})
        send_header(server.write_fd, {"do": "hash", "folder": str(tmp_path), "files": [name]})
    for number, name in enumerate(names):
        content = b"%d" % number
        assert part_of(server.reader, 1) == content
        assert server.reader.answer() == {"files": [[name, 1, zlib.crc32(content)]]}


def test_the_server_ends_with_stdin_although_nobody_reads_what_it_writes(server: Server, tmp_path: Path) -> None:
    written(tmp_path / "file", bytes(8 << 20))
    send_header(server.write_fd, {"do": "read", "folder": str(tmp_path), "items": [("file", 0, 8 << 20)]})
    assert server.reader.some(1)
    assert server.process.stdin is not None
    server.process.stdin.close()
    assert server.process.wait(5) == 0


def test_what_is_not_complete_stays_where_the_agent_deletes_it(server: Server, tmp_path: Path) -> None:
    """Without the directory of a run, nobody would delete it."""
    send_header(server.write_fd, write_request(tmp_path / "no such run" / "new", "file"))
    os.write(server.write_fd, b"\0\0\0\3abc\0\0\0\0")
    with pytest.raises(RefusedError, match="no such run"):
        server.reader.answer()
    staging = tmp_path / "new"
    send_header(server.write_fd, write_request(staging, "file", "deep/b"))
    os.write(server.write_fd, b"\0\0\0\3abc\0\0\0\0\0\0\0\1a")
    while not (staging / "deep" / "b").exists():
        assert server.process.poll() is None
    assert [path.stat().st_mode & 0o777 for path in (staging, staging / "deep")] == [0o700] * 2
    assert server.process.stdin is not None
    server.process.stdin.close()
    assert server.process.wait(5) == 0
    assert os.listdir(tmp_path) == ["new"]


def write_request(staging: Path, *names: str) -> dict[str, object]:
    items = [(name, 0, 3) for name in names]
    return {"do": "write", "staging": str(staging), "items": items, "is_crc32": True}


def test_a_server_that_works_for_long_shows_signs_of_life(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Else the patience of the other side would end during a part that comes over a slow line."""
    monkeypatch.setattr(stream_server, "SIGN_OF_LIFE_S", 0.05)
    (requests_out, requests), (answers, answers_in) = os.pipe(), os.pipe()
    threading.Thread(target=StreamServer(requests_out, answers_in).run, daemon=True).start()  # until this process ends
    reader = Reader(answers, patience_s=0.5)
    send_header(requests, write_request(tmp_path / "new", "file"))
    for byte in (b"\0\0\0\3", b"a", b"b", b"c", b"\0\0\0\0"):
        time.sleep(0.3)
        os.write(requests, byte)
    assert reader.answer()["digests"] == [f"crc32:{zlib.crc32(b'abc')}"]


def test_no_more_bytes_are_written_than_were_asked_for(tmp_path: Path) -> None:
    (read_fd, write_fd), taken = os.pipe(), bytearray()
    os.write(write_fd, b"\0\0\0\2ab\0\0\0\2cd\0\0\0\0")
    with pytest.raises(StreamEndedError, match="2 bytes, of which 1 were asked for"):
        Reader(read_fd).part(3, taken.extend)
    assert taken == b"ab"


def test_an_unknown_request_ends_the_server(server: Server) -> None:
    with pytest.raises(StreamEndedError):
        server.ask("dance")


# -- other hosts ------------------------------------------------------------------------------------------------------


@pytest.fixture
def serving(tmp_path: Path) -> PeerServer:
    written(tmp_path / "folder" / "deep" / "file", b"content")
    written(tmp_path / "secret", b"secret")
    (tmp_path / "folder" / "inside").symlink_to("deep/file")
    (tmp_path / "folder" / "outside").symlink_to("../secret")
    return PeerServer(str(tmp_path / "folder"), "127.0.0.1")


def copied(peer: peers.Peer, name: str, count: int) -> bytes:
    connections = PeerConnections()
    try:
        return part_of(connections.request(peer, "token", [(name, 0, count)]), count)
    finally:
        connections.close()


@pytest.mark.parametrize("name", ["deep/file", "inside"])
def test_who_knows_the_secret_may_read(serving: PeerServer, name: str) -> None:
    assert copied(("127.0.0.1", serving.port, serving.secret), name, 7) == b"content"


@pytest.mark.parametrize("name", ["../secret", "outside", "deep/../../secret", "{}/secret"])
def test_nothing_outside_of_the_folder_can_be_read(serving: PeerServer, tmp_path: Path, name: str) -> None:
    with pytest.raises(RefusedError, match="no file below the folder"):
        copied(("127.0.0.1", serving.port, serving.secret), name.format(tmp_path), 6)


def test_who_does_not_know_the_secret_may_not_read(serving: PeerServer) -> None:
    with pytest.raises(StreamEndedError, match="does not know the secret"):
        copied(("127.0.0.1", serving.port, "f" * 64), "deep/file", 7)


def test_a_stranger_that_takes_the_requests_learns_nothing() -> None:
    """It repeats the proof of the side that connects."""
    near, far = socket.socketpair()

    def pretend() -> None:
        far.sendall(bytes(32))
        far.sendall(far.recv(64, socket.MSG_WAITALL)[32:])

    threading.Thread(target=pretend).start()
    with near, pytest.raises(StreamEndedError, match="does not know the secret"):
        peers.introduce(near, "secret")
    far.close()


def test_a_handshake_has_a_time_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peers, "_HANDSHAKE_S", 0.1)
    silent = PeerServer(str(tmp_path), "127.0.0.1")
    with socket.create_connection(("127.0.0.1", silent.port)) as connection:
        connection.settimeout(5)
        assert len(connection.recv(32, socket.MSG_WAITALL)) == 32
        assert connection.recv(1) == b""


def test_the_kernel_notices_within_seconds_that_the_other_host_has_no_power(serving: PeerServer) -> None:
    """Nobody sends an end of the connection then. The reader only waits, so it is up to keep-alive packets."""
    with peers.connect(("127.0.0.1", serving.port, serving.secret)) as connection:
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle, every, count = (
            connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
        )
        assert idle + every * count < 20


def test_the_number_of_connections_is_limited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peers, "_MOST_CONNECTIONS", 1)
    written(tmp_path / "file", b"1")
    serving = PeerServer(str(tmp_path), "127.0.0.1")
    peer = ("127.0.0.1", serving.port, serving.secret)
    first = peers.connect(peer)
    with pytest.raises((StreamEndedError, OSError)):
        copied(peer, "file", 1)
    first.close()
    for _ in range(1000):
        try:
            assert copied(peer, "file", 1) == b"1"
        except (StreamEndedError, OSError):
            continue
        return
    raise AssertionError("the place does not become free")
