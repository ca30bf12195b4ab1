"""Checkpoints in the memory of hosts: kept, copied, verified, and stored without a coordinator."""

from __future__ import annotations

import contextlib
import json
import random
import resource
import shutil
import signal
import socket
import tempfile
import threading
import time
import zlib
from collections import deque
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from distrain import wire
from distrain.agent.memory_keeper import MemoryKeeper
from distrain.storage.commit import MemoryPart, MemoryRound, file_entry
from distrain.system.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Iterator

_T = TypeVar("_T", bound=wire.Message)
TOKEN = "0123456789abcdef"


class Host:
    """A host with rank ``rank``, whose part is in real shared memory."""

    def __init__(self, cluster: Cluster, name: str, rank: int) -> None:
        self.cluster, self.name, self.rank = cluster, name, rank
        self.root = Path(tempfile.mkdtemp(prefix="distrain-test-", dir="/dev/shm"))
        self.answers: deque[wire.Message] = deque()
        self.keeper = MemoryKeeper(cluster.loop, self._send, self.root)
        self.keeper.start(0, [rank])

    def _send(self, message: wire.Message) -> None:
        if isinstance(message, wire.MemoryServed):
            self.cluster.peers[self.name] = ("127.0.0.1", message.port)
        else:
            self.answers.append(message)

    def write(self, ordinal: int, files: dict[str, bytes], attempt: int = 0) -> Path:
        """Do as a worker does."""
        home = self.root / f"rank_{self.rank}"
        folder = home / f"{attempt}-{ordinal}"
        free = next(home.glob("free-*"), None)
        if free is not None:
            free.rename(folder)
        for name, data in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if (folder / name).exists() and (folder / name).stat().st_nlink > 1:
                (folder / name).unlink()
            (folder / name).write_bytes(data)
        return folder

    def ask(self, message: wire.Message, answer: type[_T]) -> _T:
        self.keeper.handle(message)
        return self.wait(answer)

    def wait(self, answer: type[_T]) -> _T:
        deadline = time.monotonic() + 20.0
        while not self.answers:
            assert time.monotonic() < deadline, "no answer"
            self.cluster.step()
        got = self.answers.popleft()
        assert isinstance(got, answer), got
        return got


class Cluster:
    """Hosts ``a``, ``b``, ...: rank 0 runs on the first, and each has the copy of the one before."""

    def __init__(self, count: int) -> None:
        self.loop = Loop()
        self.peers: dict[str, tuple[str, int]] = {}
        self.hosts = {name: Host(self, name, rank) for rank, name in enumerate("abc"[:count])}

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts.values())

    def step(self) -> None:
        self.loop.call_in("wake", 0.05, lambda: None)
        self.loop.step()

    def settle(self) -> None:
        for host in self:
            while host.keeper._cleaner.pending:
                self.step()

    def commit(
        self, index: int, keep: list[int], run: Path | None = None, size: int = 1000, only: str = "abc"
    ) -> MemoryRound:
        """Write and keep the checkpoint with this number. only: the hosts that hear of it."""
        names, files, parts = list(self.hosts), {}, {}
        for place, host in enumerate(self):
            contents = {f"rank{host.rank}/model.pt": random.Random(index).randbytes(size), f"r{host.rank}": b"x"}
            folder = host.write(index + 1, contents)
            hashed = host.ask(hash_files(host, index + 1, folder, contents), wire.FilesCopied)
            assert hashed.failed is None
            assert hashed.files == [(name, len(data), zlib.crc32(data)) for name, data in contents.items()]
            files |= {name: file_entry(size, crc, host.rank) for name, size, crc in hashed.files}
            copy = names[(place + 1) % len(names)]
            parts[host.rank] = MemoryPart(host.name, str(folder), copy if copy != host.name else "")
        name = f"checkpoint_{index:06d}"
        manifest = {"name": name, "index": index, "metrics": {"loss": 1.0}, "files": files}
        made = MemoryRound(name, manifest, {"by": "test"}, {"train": {"0": 5}}, parts)
        for host in self:
            if host.name in only:
                host.keeper.handle(keep_round(host, made, keep))
        self.settle()
        return made

    def copy(self, made: MemoryRound) -> None:
        for host in self:
            order = wire.FetchRound(attempt=0, name=made.name, is_copy=True, peers=self.peers)
            copied = host.ask(order, wire.RoundDone)
            assert copied.failed is None, copied


def keep_round(host: Host, made: MemoryRound | None, keep: list[int]) -> wire.KeepRound:
    names = [f"checkpoint_{index:06d}" for index in keep]
    token, body = TOKEN if len(host.cluster.hosts) > 1 else "", made.encoded() if made else b""
    return wire.KeepRound(attempt=0, host=host.name, keep=names, body=body, token=token)


def hash_files(host: Host, ordinal: int, folder: Path, files: Any) -> wire.Upload:
    return wire.Upload(
        attempt=0, rank=host.rank, ordinal=ordinal, source=str(folder), files=list(files), others=[], directory=""
    )


def facts_of(contents: dict[str, bytes]) -> dict[str, list[int]]:
    return {name: [len(body), zlib.crc32(body)] for name, body in contents.items()}


def gather(host: Host, made: MemoryRound, files: list[str] | None = None, attempt: int = 1) -> wire.RoundDone:
    files = list(made.manifest["files"]) if files is None else files
    order = wire.FetchRound(attempt=attempt, name=made.name, files=files, peers=host.cluster.peers)
    return host.ask(order, wire.RoundDone)


def flip(path: Path, random: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    path.write_bytes(data)


@pytest.fixture
def make_cluster() -> Iterator[Any]:
    made: list[Cluster] = []

    def make(count: int) -> Cluster:
        made.append(Cluster(count))
        return made[-1]

    yield make
    for cluster in made:
        for host in cluster:
            host.keeper.end()
            shutil.rmtree(host.root, ignore_errors=True)
        cluster.loop.close()


# -- what a rank has written ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "deep/b", "deep/empty"])
@pytest.mark.parametrize("change", ["flip", "append", "replace", "older"])
def test_what_is_damaged_before_it_is_hashed_is_not_sealed(make_cluster: Any, name: str, change: str) -> None:
    (host,) = make_cluster(1)
    old = {"a": b"old" * 400, "deep/b": b"o" * 999, "deep/empty": b"not empty"}
    contents = {"a": b"new" * 400, "deep/b": b"n" * 1000, "deep/empty": b""}
    folder = host.write(1, contents)
    order = replace(hash_files(host, 1, folder, contents), facts=facts_of(contents))
    assert host.ask(order, wire.FilesCopied).failed is None
    path = folder / name
    body = bytearray(path.read_bytes() or b"\0")
    match change:
        case "flip":
            body[len(body) // 2] ^= 1
            path.write_bytes(body)
        case "append":
            path.write_bytes(bytes(body) + b"x")
        case "replace":
            (folder / "other").write_bytes(bytes(len(body)))
            (folder / "other").replace(path)
        case "older":
            path.write_bytes(old[name])
    answer = host.ask(order, wire.FilesCopied)
    assert answer.failed is not None
    assert name in answer.failed
    assert answer.files == []


# -- gathering -------------------------------------------------------------------------------------------------------


def test_flipped_bytes_are_never_used_and_always_named(make_cluster: Any) -> None:
    cluster, chance = make_cluster(2), random.Random(40)
    for index in range(40):
        made = cluster.commit(index, keep=[index], size=5000)
        cluster.copy(made)
        rank, where = chance.randrange(2), chance.choice(["own", "copy", "both"])
        part = made.parts[rank]
        name = f"rank{rank}/model.pt"
        right = Path(part.folder, name).read_bytes()
        if where != "copy":
            flip(Path(part.folder, name), chance)
        if where != "own":
            flip(cluster.hosts[part.copy].root / "copies" / made.name / f"rank_{rank}" / name, chance)
        reader = cluster.hosts[part.host if where == "own" else part.copy]
        answer = gather(reader, made)
        if where == "both":
            assert f"{name} on host a has the checksum" in (answer.failed or "")
            assert f"{name} on host b has the checksum" in (answer.failed or "")
            continue
        assert answer.failed is None
        assert Path(answer.folder, name).read_bytes() == right
        (note,) = answer.notes
        assert note.startswith(f"rank {rank}: {name} on host {reader.name} has the checksum ")
        assert f"instead of {zlib.crc32(right):08x}" in note
        assert "is used instead" in note
        home = Path(part.folder) if where == "own" else reader.root / "copies" / made.name / f"rank_{rank}"
        assert (home / name).read_bytes() == right  # repaired


def test_only_files_that_are_asked_for_are_fetched(make_cluster: Any) -> None:
    cluster = make_cluster(3)
    made = cluster.commit(0, keep=[0])
    reader = cluster.hosts["b"]
    asked: list[str] = []
    find = cluster.hosts["a"].keeper._server._find
    cluster.hosts["a"].keeper._server._find = lambda **wanted: asked.append(wanted["file"]) or find(**wanted)
    folder = Path(gather(reader, made, ["rank1/model.pt"]).folder)
    assert not asked
    for attempt, files, fetched in [(1, ["r0"], ["r0"]), (1, ["r0", "r1"], []), (2, ["r0"], []), (2, [], [])]:
        asked.clear()
        assert Path(gather(reader, made, files, attempt).folder) == folder
        assert asked == fetched
    present = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert present == {"rank1/model.pt", "r0", "r1", ".metadata.json", ".manifest.json"}
    flip(folder / "r0", random.Random(0))
    assert gather(reader, made, ["r0"], 2).failed is None
    gather(reader, made, ["r0"], 3)
    assert asked == ["r0"]
    assert (folder / "r0").read_bytes() == b"x"


def test_a_host_that_cannot_be_reached_is_named_with_its_address(make_cluster: Any) -> None:
    cluster = make_cluster(2)
    made = cluster.commit(0, keep=[0])
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    cluster.peers["b"] = ("127.0.0.1", port)
    order = wire.FetchRound(attempt=0, name=made.name, is_copy=True, peers=cluster.peers)
    failed = cluster.hosts["a"].ask(order, wire.RoundDone).failed
    where = f"host b, at 127.0.0.1, port {port}, for host a"
    assert failed == f"rank1/model.pt cannot be read on {where} ([Errno 111] Connection refused)"


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (b"", "the connection has ended, or nothing came for 15 s"),
        (b"HTTP/1.1 400 Bad Request", "another program answers there"),
        (b"[]", "another program answers there"),
        (b"{}", "another program answers there"),
        (b'{"size":1000}\n' + bytes(10), "the connection has ended, or nothing came for 15 s"),
    ],
)
def test_another_program_at_the_port_is_told_from_a_host(make_cluster: Any, said: bytes, problem: str) -> None:
    cluster = make_cluster(2)
    made = cluster.commit(0, keep=[0])
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            peer, _ = server.accept()
            with peer:
                peer.sendall(said)
                peer.shutdown(socket.SHUT_WR)
                while peer.recv(1 << 16):
                    pass

        thread = threading.Thread(target=answer)
        thread.start()
        cluster.peers["b"] = server.getsockname()
        order = wire.FetchRound(attempt=0, name=made.name, is_copy=True, peers=cluster.peers)
        failed = cluster.hosts["a"].ask(order, wire.RoundDone).failed
        thread.join()
    assert failed is not None
    assert failed.endswith(f"({problem})")


def answer_of(port: int, sent: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as peer:
        peer.sendall(sent)
        peer.shutdown(socket.SHUT_WR)
        return b"".join(iter(partial(peer.recv, 1 << 16), b""))


def wanted(**fields: Any) -> bytes:
    return json.dumps(fields).encode() + b"\n"


@pytest.mark.parametrize("token", ["", "0123456789abcdeX", "0123456789abcde", "x" * 1000])
def test_who_sends_another_token_gets_nothing(make_cluster: Any, token: str) -> None:
    cluster = make_cluster(2)
    made = cluster.commit(0, keep=[0])
    request = wanted(name=made.name, rank=0, file="rank0/model.pt")
    port = cluster.peers["a"][1]
    assert random.Random(0).randbytes(1000) in answer_of(port, TOKEN.encode() + request)
    with contextlib.suppress(OSError):  # it has hung up, without reading what follows
        assert answer_of(port, token.encode() + request) == b""


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("file", "../secret"),
        ("file", "rank0/../../../secret"),
        ("file", "{root}/secret"),
        ("file", "secret"),
        ("rank", 7),
        ("rank", 1),
        ("name", "checkpoint_000007"),
        ("name", "../checkpoint_000000"),
    ],
)
def test_only_files_that_are_kept_are_handed_out(make_cluster: Any, field: str, value: Any) -> None:
    cluster = make_cluster(2)
    made = cluster.commit(0, keep=[0])
    host = cluster.hosts["a"]
    for folder in (host.root, Path(made.parts[0].folder)):
        (folder / "secret").write_text("SECRET")
    value = value.format(root=host.root) if isinstance(value, str) else value
    request = {"name": made.name, "rank": 0, "file": "rank0/model.pt", field: value}
    answer = answer_of(cluster.peers["a"][1], TOKEN.encode() + wanted(**request))
    assert b'"failed"' in answer
    assert b"SECRET" not in answer


def test_a_file_that_is_not_written_to_its_end_is_no_copy(make_cluster: Any) -> None:
    cluster = make_cluster(2)
    made = cluster.commit(0, keep=[0])
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    used = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, usual[1]))
    try:
        order = wire.FetchRound(attempt=0, name=made.name, is_copy=True, peers=cluster.peers)
        failed = cluster.hosts["a"].ask(order, wire.RoundDone).failed
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
        signal.signal(signal.SIGXFSZ, used)
    assert failed is not None
    assert "File too large" in failed


def test_the_port_is_closed_with_the_run_and_few_strangers_hold_threads(make_cluster: Any) -> None:
    cluster = make_cluster(2)
    made = cluster.commit(0, keep=[0])
    port = cluster.peers["a"][1]
    with contextlib.ExitStack() as strangers:
        for _ in range(200):
            strangers.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
        time.sleep(0.2)
        assert sum(thread.name == "distrain-peer" for thread in threading.enumerate()) <= 64
    request = wanted(name=made.name, rank=0, file="rank0/model.pt")
    assert random.Random(0).randbytes(1000) in answer_of(port, TOKEN.encode() + request)
    cluster.hosts["a"].keeper.end()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=10)
