"""A real S3-protocol server (moto's), and a door in front of it that can be made to fail."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import fsspec

from tests.conftest import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

BUCKET = "bucket"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def moto_server() -> Iterator[int]:
    """Run an S3 server, and yield its port."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: can_connect(port) or server.poll() is not None, timeout_s=120.0, what="the S3 server")
        assert server.poll() is None, "the port was taken, perhaps by the S3 server of another test"
        yield port
    finally:
        server.kill()
        server.wait()


def forget_connections() -> None:
    """Close the connections that fsspec keeps in this process: the next test has another server."""
    kind = fsspec.get_filesystem_class("s3")
    for filesystem in list(kind._cache.values()):
        if filesystem._s3 is not None:
            kind.close_session(filesystem.loop, filesystem._s3)
    kind.clear_instance_cache()


def can_connect(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@dataclass
class Door:
    """A proxy in front of the server. After ``open()`` it passes connections on. After ``shut()`` it resets them, after
    ``fail()`` it answers every request with 503, after ``hold()`` it answers nothing until it opens again."""

    target: int
    port: int = 0
    requests: int = 0
    _mood: str = "open"

    def __post_init__(self) -> None:
        self._connections: set[socket.socket] = set()
        self._opened = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def open(self) -> None:
        self._mood = "open"
        self._opened.set()

    def shut(self) -> None:
        self._change("shut")

    def fail(self) -> None:
        self._change("fail")

    def hold(self) -> None:
        self._change("hold")

    def wait_for_requests(self, count: int) -> None:
        """Wait for ``count`` more requests."""
        goal = self.requests + count
        wait_until(lambda: self.requests >= goal, timeout_s=300.0, what=f"{count} requests")

    def _change(self, mood: str) -> None:
        self._opened.clear()
        self._mood = mood
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._change("shut")
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept(), which would hold it open
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.requests += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        self._connections.add(connection)
        with connection, contextlib.suppress(OSError):
            if self._mood == "hold":
                self._opened.wait()
            if self._mood == "fail":
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            elif self._mood == "open":
                with socket.create_connection(("127.0.0.1", self.target)) as server:
                    self._connections.add(server)
                    back = threading.Thread(target=pump, args=(server, connection), daemon=True)
                    back.start()
                    pump(connection, server)
                    back.join()
                    self._connections.discard(server)
        self._connections.discard(connection)


def pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


@dataclass(frozen=True)
class Bucket:
    """The bucket as the test sees it, without the door; ``environment`` leads programs through the door."""

    server: int
    door: Door
    prefix: str
    """The bucket, and the directory in it that belongs to this test."""

    @property
    def url(self) -> str:
        return f"s3://{self.prefix}"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.door.port}",
            "AWS_MAX_ATTEMPTS": "2",
        }

    @property
    def filesystem(self) -> Any:
        return fsspec.filesystem(
            "s3",
            key="test",
            secret="test",
            endpoint_url=f"http://127.0.0.1:{self.server}",
            use_listings_cache=False,
        )

    def files(self, run: str) -> dict[str, int]:
        """Return the sizes of the files in a run directory, in bytes, by relative path."""
        found = self.filesystem.find(f"{self.prefix}/{run}", detail=True)
        return {path.removeprefix(f"{self.prefix}/{run}/"): info["size"] for path, info in found.items()}

    def read(self, run: str, path: str) -> bytes:
        data: bytes = self.filesystem.cat_file(f"{self.prefix}/{run}/{path}")
        return data

    def write(self, run: str, path: str, data: bytes) -> None:
        self.filesystem.pipe_file(f"{self.prefix}/{run}/{path}", data)

    def delete(self, run: str, path: str) -> None:
        self.filesystem.rm_file(f"{self.prefix}/{run}/{path}")

    def committed(self, run: str) -> list[str]:
        """Return the names of the checkpoints that have a manifest, and check that each is complete."""
        files = self.files(run)
        names = sorted(path.partition("/")[0] for path in files if path.endswith("/.manifest.json"))
        for name in names:
            for path, fact in json.loads(self.read(run, f"{name}/.manifest.json"))["files"].items():
                assert files[f"{name}/{path}"] == fact["size"], f"{name}/{path}"
        return names
