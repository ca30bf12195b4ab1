"""The mover and the stream servers that it starts, without ssh."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import threading
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from distrain import wire
from distrain.system import process
from distrain.transfer import jobs
from distrain.transfer import mover as mover_module
from distrain.transfer.jobs import batches, parts_of
from distrain.transfer.mover import Mover
from distrain.transfer.streams import peers, stream_pool
from distrain.transfer.streams.stream_pool import Stream
from distrain.wire.child_link import ChildLink
from distrain.wire.shipped_file import digest_of
from tests.conftest import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from distrain.transfer.streams.streams import Item

SERVER = process.bootstrap_argv("stream-server")
_File = tuple[str, str, int, str]


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Stream]]:
    """The streams that movers in this process have begun to open."""
    opened: list[Stream] = []

    class Noted(Stream):
        def __init__(self, argv: list[str]) -> None:
            opened.append(self)
            super().__init__(argv)

    monkeypatch.setattr(stream_pool, "Stream", Noted)
    yield opened
    for stream in opened:
        if hasattr(stream, "_pipes"):  # it could be started
            stream.close()


@pytest.fixture
def mover() -> Mover:
    return Mover(SERVER)


def upload(source: Path, directory: Path, files: list[str], others: tuple[str, ...] = ()) -> wire.Upload:
    return wire.Upload(
        attempt=1, rank=2, ordinal=3, source=str(source), files=files, others=list(others), directory=str(directory)
    )


def written(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def facts(files: dict[str, bytes]) -> list[tuple[str, int, int]]:
    return [(name, len(data), zlib.crc32(data)) for name, data in files.items()]


def fetch(mover: Mover, source: Path, target: Path, files: list[str], others: tuple[str, ...] = ()) -> wire.FilesCopied:
    answer = mover.do(upload(source, target, files, others))
    assert isinstance(answer, wire.FilesCopied)
    assert (answer.attempt, answer.rank, answer.ordinal) == (1, 2, 3)
    return answer


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def same(found: list[tuple[str, int, int]], wanted: list[tuple[str, int, int]]) -> bool:
    return [tuple(fact) for fact in found] == wanted


# -- from the host ---------------------------------------------------------------------------------------------------


def test_files_come_with_their_sizes_and_crcs(mover: Mover, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "deep" / "target"
    files = {"a/b/model": os.urandom(3_000_000), "empty": b"", "fïle \udcff": b"text"}
    for name, data in (*files.items(), ("other", b"of all ranks")):
        written(source / name, data)
    (source / "folder" / "in folder").mkdir(parents=True)
    written(target / "empty", b"of another attempt")
    answer = fetch(mover, source, target, list(files), ("other",))
    assert answer.failed is None
    assert same(answer.files, facts(files))
    assert same(answer.skipped, facts({"other": b"of all ranks"}))
    assert contents(target) == files
    assert (target / "folder" / "in folder").is_dir()


def test_many_small_files_come_over_one_stream(mover: Mover, streams: list[Stream], tmp_path: Path) -> None:
    files = {f"folder {number % 7}/{number}": b"%d" % number * 50 for number in range(2000)}
    for name, data in files.items():
        written(tmp_path / "source" / name, data)
    answer = fetch(mover, tmp_path / "source", tmp_path / "target", list(files))
    assert same(answer.files, facts(files))
    assert contents(tmp_path / "target") == files
    assert len(streams) == 1


def test_a_large_file_comes_in_parts_over_several_streams(
    mover: Mover, streams: list[Stream], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stream_pool, "PART_BYTES", 1_000_003)
    monkeypatch.setattr(stream_pool, "_FURTHER_S", 0.05)
    monkeypatch.setattr(stream_pool, "_OWED_BYTES", 0)
    data = os.urandom(30_000_000)
    written(tmp_path / "source" / "model", data)
    written(tmp_path / "target" / "model", bytes(31_000_000))
    carriers, all_carry = set(), threading.Barrier(4)
    part = jobs.Fetch.receive

    def noted(self: jobs.Fetch, *arguments: object) -> None:
        if threading.current_thread() not in carriers:
            carriers.add(threading.current_thread())
            all_carry.wait(60)
        part(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(jobs.Fetch, "receive", noted)
    answer = fetch(mover, tmp_path / "source", tmp_path / "target", ["model"])
    assert same(answer.files, facts({"model": data}))
    assert contents(tmp_path / "target") == {"model": data}
    assert len(streams) == len(carriers) == 4


def test_a_missing_file_fails_its_order_only(mover: Mover, streams: list[Stream], tmp_path: Path) -> None:
    source = tmp_path / "source"
    written(source / "here", b"text")
    answer = fetch(mover, source, tmp_path / "target", ["here", "missing"])
    assert answer.failed == (
        f"[Errno 2] No such file or directory: '{source}/missing'; what could not be stored is in {source} on that host"
    )
    assert answer.files == []
    assert fetch(mover, source, tmp_path / "target", ["here"]).failed is None
    assert len(streams) == 1


def test_a_file_that_is_cut_while_it_is_read_fails_its_order_only(
    mover: Mover, streams: list[Stream], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    written(source / "model", bytes(100))
    begin = mover_module.make_folders

    def cut(*arguments: object) -> None:
        os.truncate(source / "model", 50)
        begin(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(mover_module, "make_folders", cut)
        assert f"became shorter while it was read: '{source}/model'" in str(
            fetch(mover, source, tmp_path / "target", ["model"]).failed
        )
    assert fetch(mover, source, tmp_path / "target", ["model"]).failed is None
    assert len(streams) == 1


@pytest.mark.parametrize("name", ["/etc/x", "../x"])
def test_a_host_cannot_write_elsewhere(mover: Mover, tmp_path: Path, name: str) -> None:
    written(tmp_path / "x", b"")
    (tmp_path / "source").mkdir()
    answer = fetch(mover, tmp_path / "source", tmp_path / "deep" / "target", [name])
    assert answer.failed
    assert not (tmp_path / "deep" / "x").exists()


def test_without_a_source_there_is_nothing_to_fetch(mover: Mover, tmp_path: Path) -> None:
    order = wire.Upload(attempt=0, rank=0, ordinal=1, source="", files=[], others=[], directory=str(tmp_path))
    answer = mover.do(order)
    assert isinstance(answer, wire.FilesCopied)
    assert str(answer.failed).endswith("cannot come from another machine")


# -- to the host -----------------------------------------------------------------------------------------------------


def blob(path: Path) -> _File:
    digest = digest_of(path)
    return str(path), digest, path.stat().st_size, digest


def checkpoint_file(path: Path, name: str) -> _File:
    return str(path), name, path.stat().st_size, f"crc32:{zlib.crc32(path.read_bytes())}"


def deliver(
    mover: Mover,
    folder: Path,
    files: list[_File],
    folders: tuple[str, ...] = (),
    peer: tuple[str, int, str] | None = None,
) -> str | None:
    answer = mover.do(
        wire.Deliver(folder=str(folder), files=files, staging=staging_for(folder), folders=[*folders], peer=peer)
    )
    assert isinstance(answer, wire.Delivered)
    return answer.failed


def test_files_go_to_a_private_folder(mover: Mover, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stream_pool, "PART_BYTES", 1_000_000)
    files = {"a/model": os.urandom(5_000_001), "empty": b"", f"a/{'n' * 255}": b"1"}
    orders = [checkpoint_file(written(tmp_path / "here" / name, data), name) for name, data in files.items()]
    folder = tmp_path / "cache" / "there"
    assert deliver(mover, folder, orders, folders=("nothing/inner",)) is None
    assert contents(folder) == files
    assert (folder / "nothing" / "inner").is_dir()
    assert {path.stat().st_mode & 0o777 for path in (folder.parent, folder, folder / "a")} == {0o700}


def test_a_file_with_its_digest_as_name_goes_once(mover: Mover, tmp_path: Path) -> None:
    code = written(tmp_path / "code", b"import this")
    folder = tmp_path / "there"
    assert deliver(mover, folder, [blob(code), blob(code)]) is None
    there = folder / digest_of(code)
    before = there.stat().st_ino
    assert deliver(mover, folder, [blob(code)]) is None
    assert there.stat().st_ino == before
    there.write_bytes(b"import")
    assert deliver(mover, folder, [blob(code)]) is None
    assert there.read_bytes() == b"import this"


def test_a_checkpoints_file_is_replaced(mover: Mover, tmp_path: Path) -> None:
    model = written(tmp_path / "model", b"new")
    there = written(tmp_path / "there" / "model", b"old")
    assert deliver(mover, tmp_path / "there", [checkpoint_file(model, "model")]) is None
    assert there.read_bytes() == b"new"


@pytest.mark.parametrize("of", [checkpoint_file, lambda path, name: (str(path), name, 4, digest_of(path))])
def test_a_file_with_another_content_gets_no_name(
    mover: Mover, tmp_path: Path, of: Callable[[Path, str], _File]
) -> None:
    good, bad = written(tmp_path / "good", b"text"), written(tmp_path / "bad", b"test")
    files = [of(good, "good"), of(bad, "bad")]
    bad.write_bytes(b"text")
    assert deliver(mover, tmp_path / "there", files) == f"{bad} has changed while it was shipped"
    assert contents(tmp_path / "there") == {}


def test_a_file_of_another_size_is_not_sent(mover: Mover, streams: list[Stream], tmp_path: Path) -> None:
    model = written(tmp_path / "model", b"text")
    failed = deliver(mover, tmp_path / "there", [(str(model), "model", 5, "crc32:1")])
    assert failed == f"{model} has changed while it was shipped"
    assert streams == []


def test_a_file_that_is_cut_while_it_is_sent_gets_no_name(
    mover: Mover, streams: list[Stream], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = written(tmp_path / "model", b"text")
    files = [checkpoint_file(model, "model")]
    cut = mover_module.batches

    def cutting(items: list[Item]) -> Iterator[list[Item]]:
        os.truncate(model, 2)
        return cut(items)

    with monkeypatch.context() as patched:
        patched.setattr(mover_module, "batches", cutting)
        assert deliver(mover, tmp_path / "there", files) == f"{model} has changed while it was shipped"
    assert contents(tmp_path / "there") == {}
    model.write_bytes(b"text")
    assert deliver(mover, tmp_path / "there", files) is None
    assert len(streams) == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", place], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting needs root: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def test_a_full_disk_of_the_host_is_named_and_freed(
    mover: Mover, streams: list[Stream], small_disk: Path, tmp_path: Path
) -> None:
    files = [
        checkpoint_file(written(tmp_path / name, bytes(size)), name) for name, size in (("a", 10), ("b", 1_000_000))
    ]
    failed = str(deliver(mover, small_disk / "there", files))
    assert "No space left on device" in failed
    assert str(small_disk / "staging") in failed
    assert contents(small_disk) == {}
    assert deliver(mover, small_disk / "there", files[:1]) is None
    assert len(streams) == 1


def test_a_full_disk_here_is_named(mover: Mover, streams: list[Stream], small_disk: Path, tmp_path: Path) -> None:
    files = {"a": bytes(3_000_000), "b": b"text"}
    for name, data in files.items():
        written(tmp_path / "source" / name, data)
    failed = str(fetch(mover, tmp_path / "source", small_disk / "there", list(files)).failed)
    assert failed.startswith(f"[Errno 28] No space left on device: '{small_disk}/there/a'; what could not be stored")
    (small_disk / "there" / "a").unlink()
    assert fetch(mover, tmp_path / "source", small_disk / "there", ["b"]).failed is None
    assert len(streams) == 1


# -- streams that end ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def stuck(order: Callable[[], object], reached: Callable[[], bool]) -> Iterator[list[object]]:
    """Carry out an order in another thread, and wait for a place in the middle of it. Yield what it returns."""
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(order()))
    thread.start()
    wait_until(reached, what="the middle of the order")
    yield answers
    thread.join(20)
    assert not thread.is_alive()


def is_arriving(folder: Path, size: int) -> bool:
    """Return whether a file of this size is where files are until all have arrived."""
    return any(path.stat().st_size == size for path in Path(staging_for(folder)).glob(".new-*/*"))


def staging_for(folder: Path) -> str:
    """Return a directory that the agent would have made for a run."""
    staging = next(parent for parent in folder.parents if parent.exists()) / "staging"
    staging.mkdir(exist_ok=True)
    return str(staging)


def opens_pipe(path: Path) -> bool:
    """Return whether somebody waits for a writer of a named pipe."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def as_ssh(before: str) -> list[str]:
    """Return the command line of a stream that does something first, as ssh and login shells do."""
    return ["sh", "-c", f"{before}; exec {shlex.join(SERVER)}"]


@pytest.mark.parametrize("failures", [0, 1])
def test_a_connection_that_is_opened_early_is_used_or_tried_again(
    streams: list[Stream], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    written(tmp_path / "source" / "a", b"text")
    monkeypatch.setattr(mover_module, "_RETRIES_S", ())
    mover = Mover(as_ssh(f"echo try >> {tmp_path}/tries; test $(wc -l < {tmp_path}/tries) -gt {failures} || exit 255"))
    mover.connect()
    wait_until(lambda: hasattr(streams[0], "reader") if streams else False, what="the connection")
    assert fetch(mover, tmp_path / "source", tmp_path / "target", ["a"]).failed is None
    assert len(streams) == 1 + failures


def test_an_order_is_carried_out_again_after_its_connection_has_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice ssh cannot connect."""
    written(tmp_path / "source" / "a", b"text")
    monkeypatch.setattr(mover_module, "_RETRIES_S", (0.0, 0.0))
    busy = f"echo busy >> {tmp_path}/tries; test $(wc -l < {tmp_path}/tries) -gt 2 || exit 255"
    mover = Mover(as_ssh(busy))
    assert fetch(mover, tmp_path / "source", tmp_path / "target", ["a"]).failed is None
    assert contents(tmp_path / "target") == {"a": b"text"}
    assert (tmp_path / "tries").read_text() == "busy\n" * 3


def test_a_stream_that_is_killed_fails_its_order_only(
    streams: list[Stream], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mover_module, "_RETRIES_S", ())
    mover = Mover(as_ssh("echo Welcome; echo the network is down >&2"))
    files = {"a": bytes(5_000_000), "b": b"text"}
    paths = {name: written(tmp_path / "here" / name, data) for name, data in files.items()}
    orders = [checkpoint_file(path, name) for name, path in paths.items()]
    os.mkfifo(tmp_path / "here" / "pipe")  # reading it, the sender waits
    blocked = [orders[0], (str(tmp_path / "here" / "pipe"), "pipe", 0, "crc32:0")]

    there = tmp_path / "there"
    with stuck(lambda: deliver(mover, there, blocked), lambda: is_arriving(there, 5_000_000)) as answers:
        streams[0]._process.kill()
        os.close(os.open(tmp_path / "here" / "pipe", os.O_WRONLY))
    assert answers == ["the connection for files has ended (exit code -9): the network is down"]
    assert not there.exists()
    assert deliver(mover, there, orders) is None
    assert contents(there) == files
    assert os.listdir(staging_for(there)) == []  # the next order deletes what is left there
    assert len(streams) == 2


def test_a_server_that_is_stopped_is_replaced(
    mover: Mover, streams: list[Stream], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_pool, "_PATIENCE_S", 0.3)
    monkeypatch.setattr(stream_pool, "_LAST_WORDS_S", 0.1)
    monkeypatch.setattr(mover_module, "_RETRIES_S", (0.0,))
    written(tmp_path / "source" / "a", b"text")
    assert fetch(mover, tmp_path / "source", tmp_path / "target", ["a"]).failed is None
    os.kill(streams[0]._process.pid, signal.SIGSTOP)
    assert fetch(mover, tmp_path / "source", tmp_path / "target", ["a"]).failed is None
    assert len(streams) == 2


def test_a_stream_that_ends_between_orders_is_replaced(mover: Mover, streams: list[Stream], tmp_path: Path) -> None:
    written(tmp_path / "source" / "a", b"text")
    assert fetch(mover, tmp_path / "source", tmp_path / "target", ["a"]).failed is None
    streams[0].kill()
    assert fetch(mover, tmp_path / "source", tmp_path / "target", ["a"]).failed is None
    assert len(streams) == 2


def test_what_ssh_says_is_in_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover_module, "_RETRIES_S", ())
    mover = Mover(["sh", "-c", "echo 'no python here'; echo 'Permission denied' >&2; exit 255"])
    failed = str(fetch(mover, tmp_path, tmp_path / "target", []).failed)
    assert failed.startswith("the connection for files has ended (exit code 255): Permission denied; what could")
    mover = Mover(["sh", "-c", "echo 'no python here'; exit 127"])
    assert "(exit code 127): no python here" in str(deliver(mover, tmp_path / "there", []))
    mover = Mover(["/no/such/ssh"])
    assert "No such file or directory: '/no/such/ssh'" in str(deliver(mover, tmp_path / "there", []))


# -- between hosts ---------------------------------------------------------------------------------------------------


def serve(mover: Mover, folder: Path) -> tuple[str, int, str]:
    answer = mover.do(wire.Serve(folder=str(folder), address="127.0.0.1"))
    assert isinstance(answer, wire.Serving)
    assert answer.failed is None
    return "127.0.0.1", answer.port, answer.secret


def test_a_host_copies_files_from_another_one(mover: Mover, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stream_pool, "PART_BYTES", 1_000_000)
    files = {"a/model": os.urandom(5_000_001), "empty": b""}
    paths = {name: written(tmp_path / "one" / name, data) for name, data in files.items()}
    orders = [checkpoint_file(path, name) for name, path in paths.items()]
    orders = [("/not/here", *rest) for _, *rest in orders]  # type: ignore[misc]
    peer, other = serve(mover, tmp_path / "one"), Mover(SERVER)
    assert deliver(other, tmp_path / "two", orders, peer=peer) is None
    assert contents(tmp_path / "two") == files
    paths["a/model"].write_bytes(bytes(5_000_001))
    failed = deliver(other, tmp_path / "three", orders, peer=peer)
    assert failed == "a/model from 127.0.0.1 has other contents"
    assert contents(tmp_path / "three") == {}
    failed = str(deliver(other, tmp_path / "three", orders, "", (*peer[:2], "f" * 64)))
    assert f"the host at 127.0.0.1, port {peer[1]}: it does not know the secret" in failed
    paths["empty"].unlink()
    assert "No such file" in str(deliver(other, tmp_path / "three", [orders[1]], "", peer))


def test_a_host_cannot_serve_at_the_address_of_another(mover: Mover, tmp_path: Path) -> None:
    answer = mover.do(wire.Serve(folder=str(tmp_path), address="192.0.2.1"))
    assert isinstance(answer, wire.Serving)
    assert "Cannot assign requested address" in str(answer.failed)


def test_a_peer_that_dies_leaves_nothing_half_written(mover: Mover, tmp_path: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def die() -> None:
        connection, _ = listener.accept()
        with connection:
            peers.welcome(connection, "secret")
            connection.recv(1000)
            connection.sendall(b"\0\0\0\2ab\0\0\0\2a")

    threading.Thread(target=die).start()
    peer = ("127.0.0.1", listener.getsockname()[1], "secret")
    failed = str(deliver(mover, tmp_path / "there", [("", "model", 4, "crc32:1")], peer=peer))
    listener.close()
    assert f"cannot be copied from the host at 127.0.0.1, port {peer[1]}: it has ended" in failed
    assert contents(tmp_path / "there") == {}


# -- the process -----------------------------------------------------------------------------------------------------


@pytest.fixture
def program() -> Iterator[ChildLink]:
    link = ChildLink(process.bootstrap_argv("mover", str(os.getpid()), json.dumps(SERVER)))
    yield link
    link.kill()


def test_orders_are_answered_in_their_order(program: ChildLink, tmp_path: Path) -> None:
    model = written(tmp_path / "source" / "model", b"text")
    program.channel.send(upload(tmp_path / "source", tmp_path / "target", ["missing"]))
    program.channel.send(upload(tmp_path / "source", tmp_path / "target", ["model"]))
    there = tmp_path / "there"
    files = [checkpoint_file(model, "model")]
    program.channel.send(wire.Deliver(folder=str(there), files=files, staging=staging_for(there)))
    answers: list[wire.Message] = []
    while len(answers) < 3:
        answers += [frame.message() for frame in program.channel.wait()]
        assert not program.channel.at_end
    assert [getattr(answer, "failed", None) is None for answer in answers] == [False, True, True]
    assert isinstance(answers[2], wire.Delivered)


@pytest.mark.parametrize("end", [signal.SIGKILL, None], ids=["killed", "end of orders"])
def test_nothing_remains_of_a_mover(program: ChildLink, tmp_path: Path, end: signal.Signals | None) -> None:
    model = written(tmp_path / "model", bytes(5_000_000))
    os.mkfifo(tmp_path / "pipe")
    files = [checkpoint_file(model, "model"), (str(tmp_path / "pipe"), "pipe", 0, "crc32:0")]
    if end is None:
        files.pop()
    there = tmp_path / "there"
    program.channel.send(wire.Deliver(folder=str(there), files=files, staging=staging_for(there)))
    if end is None:
        assert program.channel.wait()
    wait_until(lambda: (there / "model").exists() or is_arriving(there, 5_000_000), what="the file")
    [server] = psutil.Process(program.process.pid).children()
    if end is None:
        program.channel.close()
    else:
        program.process.send_signal(end)
    program.process.wait(10)
    wait_until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE, what="the end of the server")
    assert list(contents(there)) == ([] if end else ["model"])


# -- how an order is cut ---------------------------------------------------------------------------------------------


def test_files_are_cut_into_parts_and_small_parts_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_pool, "PART_BYTES", 10)
    monkeypatch.setattr(jobs, "_BATCH_BYTES", 12)
    monkeypatch.setattr(jobs, "_BATCH_ITEMS", 3)
    parts = parts_of({"a": 25, "b": 0, "c": 1, "d": 0, "e": 10}, whole=False)
    parts += parts_of({"f": 30}, whole=True)
    assert parts == [
        *[("a", 0, 10), ("a", 10, 10), ("a", 20, 5), ("b", 0, 0), ("c", 0, 1), ("d", 0, 0), ("e", 0, 10)],
        ("f", 0, 30),
    ]
    assert [[name for name, _, _ in batch] for batch in batches(parts)] == [
        *[["a"], ["a"], ["a", "b", "c"], ["d", "e"], ["f"]],
    ]
