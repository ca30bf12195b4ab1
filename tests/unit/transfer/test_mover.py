"""The mover, streams, and the stream servers at their far ends, without ssh."""

from __future__ import annotations

import json
import os
import shlex
import zlib
from typing import TYPE_CHECKING, Any

import pytest

from distrain import wire
from distrain.storage.checkpoint import locked_for_deletion
from distrain.system import process
from distrain.transfer import mover as mover_module
from distrain.transfer import stream as stream_module
from distrain.transfer.mover import Mover, Stream
from distrain.transfer.stream import RefusedError, StreamEnd, checked_name
from distrain.wire.child_link import ChildLink
from distrain.wire.shipped_file import ShippedFile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SERVER = process.bootstrap_argv("stream-server")


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Stream]]:
    """The streams that movers in this process have begun to open."""
    opened: list[Stream] = []

    class Noted(Stream):
        def __init__(self, argv: list[str]) -> None:
            opened.append(self)
            super().__init__(argv)

    monkeypatch.setattr(mover_module, "Stream", Noted)
    monkeypatch.setattr(mover_module, "_RETRIES_S", ())
    yield opened
    for stream in opened:
        if hasattr(stream, "_link"):  # it could be started
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


# -- from the host ---------------------------------------------------------------------------------------------------


def test_files_come_with_their_sizes_and_crcs(mover: Mover, streams: list[Stream], tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "deep" / "target"
    files = {"a/b/model": os.urandom(20_000_000), "empty": b"", "fïle \udcff": b"text"}
    files |= {f"folder {number % 7}/{number}": b"%d" % number * 50 for number in range(2000)}
    for name, data in (*files.items(), ("other", b"of all ranks")):
        written(source / name, data)
    (source / "folder" / "in folder").mkdir(parents=True)
    written(target / "empty", b"of another attempt")
    answer = fetch(mover, source, target, list(files), ("other",))
    assert answer.failed is None
    assert answer.files == facts(files)
    assert answer.skipped == facts({"other": b"of all ranks"})
    assert contents(target) == files
    assert (target / "folder" / "in folder").is_dir()
    assert fetch(mover, source, target, ["empty"]).files == facts({"empty": b""})
    assert len(streams) == 1


def test_a_file_that_is_cut_while_it_is_read_fails_its_order_only(
    mover: Mover, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    os.mkfifo(written(source / "model", bytes(100)).with_name("first"))  # reading it, the server waits

    def cut(*_: object) -> None:
        os.truncate(source / "model", 50)
        os.close(os.open(source / "first", os.O_WRONLY))

    with monkeypatch.context() as patched:
        patched.setattr(mover_module, "make_folders", cut)
        (tmp_path / "target").mkdir()
        failed = str(fetch(mover, source, tmp_path / "target", ["first", "model"]).failed)
        assert f"became shorter while it was read: '{source}/model'" in failed
    assert fetch(mover, source, tmp_path / "target", ["model"]).failed is None


@pytest.mark.parametrize("name", ["/etc/x", "../x", ".", "", "a/../../x", "a\0b"])
def test_a_name_that_leads_out_is_refused(mover: Mover, tmp_path: Path, name: str) -> None:
    (tmp_path / "source").mkdir()
    assert fetch(mover, tmp_path / "source", tmp_path / "deep" / "target", [name]).failed
    assert not (tmp_path / "deep").exists()
    with pytest.raises(RefusedError, match="is not a file below"):
        checked_name(name)


# -- other files of the host -----------------------------------------------------------------------------------------


def bring_back(mover: Mover, tmp_path: Path, limit_bytes: int = 10**9) -> wire.OrderDone:
    run, folder = tmp_path / "run", tmp_path / "there"
    answer = mover.do(wire.BringBack(folder=str(folder), run=str(run), host="alpha", limit_bytes=limit_bytes))
    assert isinstance(answer, wire.OrderDone)
    return answer


def test_files_above_the_limit_stay_and_come_later(mover: Mover, tmp_path: Path) -> None:
    run, there = tmp_path / "run", tmp_path / "there"
    written(there / "large", bytes(3000))
    written(there / "small", bytes(1000))
    answer = bring_back(mover, tmp_path, limit_bytes=3999)
    assert str(answer.failed).startswith("1 file (3.0 kB), above the limit of 4.0 kB (--fetch-limit, ")
    assert answer.text == f"1 file (1.0 kB) came to {run}"
    assert sorted(contents(there)) == ["large"]
    assert bring_back(Mover(SERVER), tmp_path).text == f"1 file (3.0 kB) came to {run}"
    assert sorted(contents(run)) == ["large", "small"]
    assert not there.exists()


def test_nothing_is_overwritten(mover: Mover, tmp_path: Path) -> None:
    """Files of distrain itself are not, either, even if it writes them only later."""
    run, there = tmp_path / "run", tmp_path / "there"
    written(run / "notes.txt", b"of rank 0")
    for turn, folder in enumerate(("alpha", "alpha-2")):
        written(there / "plots" / "a.png", b"%d" % turn)
        written(there / "notes.txt", b"%d" % turn)
        assert bring_back(mover, tmp_path).failed is None
        assert contents(run / folder) == {"notes.txt": b"%d" % turn, "plots/a.png": b"%d" % turn}
    assert (run / "notes.txt").read_bytes() == b"of rank 0"
    written(there / "return_value.pkl", b"")
    assert bring_back(mover, tmp_path).text.endswith(f"came to {run}/alpha")
    there.mkdir()
    assert bring_back(mover, tmp_path) == wire.OrderDone(), "no files, no text"


# -- to the host -----------------------------------------------------------------------------------------------------


def file_at(path: Path) -> ShippedFile:
    return ShippedFile.found(str(path), path.stat())


def deliver_order(folder: Path, root: Path, files: list[ShippedFile], folders: tuple[str, ...] = ()) -> wire.Deliver:
    return wire.Deliver(
        folder=str(folder), root=str(root), files=[*files], staging=staging_for(folder), folders=[*folders]
    )


def deliver(mover: Mover, *order: object) -> str | None:
    answer = mover.do(deliver_order(*order))  # type: ignore[arg-type]
    assert isinstance(answer, wire.OrderDone)
    return answer.failed


def test_files_go_to_a_new_folder_with_times_and_modes(mover: Mover, tmp_path: Path) -> None:
    files = {"a/model": os.urandom(20_000_001), "empty": b"", f"a/{'n' * 255}": b"1"}
    paths = [written(tmp_path / "here" / name, data) for name, data in files.items()]
    paths[1].chmod(0o755)
    there = tmp_path / "there"
    orders = [file_at(path) for path in paths]
    assert deliver(mover, there, tmp_path / "here", orders, ("nothing/inner",)) is None
    assert contents(there) == files
    assert (there / "nothing" / "inner").is_dir()
    assert [file_at(there / name)[1:4] for name in files] == [order[1:4] for order in orders]
    assert there.stat().st_mode & 0o777 == 0o700
    before = there.stat().st_ino
    assert deliver(mover, there, tmp_path / "here", orders) is None  # another run has brought the same
    assert there.stat().st_ino == before
    assert os.listdir(staging_for(there)) == []


def test_a_host_that_cannot_store_files_says_why(mover: Mover, tmp_path: Path) -> None:
    files = [file_at(written(tmp_path / "here" / name, bytes(3_000_000))) for name in ("a", "b")]
    failed = deliver(mover, tmp_path / "there", tmp_path / "here", files, ("a",))
    assert "Is a directory: " in str(failed)
    assert not (tmp_path / "there").exists()
    assert os.listdir(staging_for(tmp_path / "there")) == []
    assert deliver(mover, tmp_path / "there", tmp_path / "here", files) is None
    assert len(contents(tmp_path / "there")) == 2


def deliver_checkpoint(mover: Mover, root: Path, there: Path) -> str | None:
    order = wire.Deliver(folder=str(there), root=str(root), staging=staging_for(there), is_checkpoint=True)
    answer = mover.do(order)
    assert isinstance(answer, wire.OrderDone)
    return answer.failed


def test_a_checkpoint_is_copied_whole_and_not_deleted_meanwhile(
    mover: Mover, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, locked = {"model/weights": b"weights", "empty": b""}, []
    root, there = tmp_path / "checkpoint_000001", tmp_path / "there"
    for name, data in (*files.items(), (".manifest.json.new", b"of num_to_keep")):
        written(root / name, data)
    (root / "nothing").mkdir()
    (root / ".manifest.json").write_text('{"attempt": 0, "files": {}, "index": 1}')

    def send_contents(stream: Stream, files: Any) -> list[int]:
        with locked_for_deletion(root) as is_unread:
            locked.append(not is_unread)
        return StreamEnd.send_contents(stream, files)

    monkeypatch.setattr(mover_module.Stream, "send_contents", send_contents)
    assert deliver_checkpoint(mover, root, there) is None
    assert locked == [True]
    assert sorted(contents(there)) == ["empty", "model/weights"]
    assert (there / "nothing").is_dir()


def test_a_checkpoint_that_has_vanished_is_said_to_be_deleted(mover: Mover, tmp_path: Path) -> None:
    failed = str(deliver_checkpoint(mover, tmp_path / "checkpoint_000001", tmp_path / "there"))
    assert failed.startswith(f"the checkpoint {tmp_path}/checkpoint_000001 cannot be copied: ")
    assert "was deleted by num_to_keep" in failed


# -- streams that end ------------------------------------------------------------------------------------------------


def staging_for(folder: Path) -> str:
    """Return a directory that the agent would have made for a run."""
    staging = next(parent for parent in folder.parents if parent.exists()) / "staging"
    staging.mkdir(exist_ok=True)
    return str(staging)


def as_ssh(before: str) -> list[str]:
    """Return the command line of a stream that does something first, as ssh and login shells do."""
    return ["sh", "-c", f"{before}; exec {shlex.join(SERVER)}"]


def test_an_order_is_carried_out_again_after_its_connection_has_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice ssh cannot connect, and later the connection ends between orders."""
    written(tmp_path / "source" / "a", b"text")
    monkeypatch.setattr(mover_module, "_RETRIES_S", (0.0, 0.0))
    mover = Mover(as_ssh(f"echo busy >> {tmp_path}/tries; test $(wc -l < {tmp_path}/tries) -gt 2 || exit 255"))
    assert fetch(mover, tmp_path / "source", tmp_path / "target", ["a"]).failed is None
    assert (tmp_path / "tries").read_text() == "busy\n" * 3
    assert mover._stream is not None
    mover._stream._link.process.kill()
    assert fetch(mover, tmp_path / "source", tmp_path / "target", ["a"]).failed is None


def test_what_ssh_says_is_in_the_answer(tmp_path: Path) -> None:
    mover = Mover(["sh", "-c", "echo 'no python here'; echo 'Permission denied' >&2; exit 255"])
    failed = str(fetch(mover, tmp_path, tmp_path / "target", []).failed)
    assert failed.startswith("the connection for files has ended (exit code 255): Permission denied; its files may")
    mover = Mover(["sh", "-c", "echo 'no python here'; exit 127"])
    assert "(exit code 127): no python here" in str(deliver(mover, tmp_path / "there", tmp_path, []))
    mover = Mover(["/no/such/ssh"])
    assert "No such file or directory: '/no/such/ssh'" in str(deliver(mover, tmp_path / "there", tmp_path, []))


def test_contents_that_were_damaged_on_the_way_are_noticed(
    mover: Mover, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, there = written(tmp_path / "source" / "a", b"text"), tmp_path / "there"
    monkeypatch.setattr(stream_module.zlib, "crc32", lambda data, crc=0: 1)
    failed = str(fetch(mover, tmp_path / "source", tmp_path / "target", ["a"]).failed)
    assert failed.startswith("a was damaged on the way")
    assert deliver(mover, there, tmp_path / "source", [file_at(path)]) == "a was damaged on the way"
    assert not there.exists()
    assert os.listdir(staging_for(there)) == []


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
    program.channel.send(deliver_order(tmp_path / "there", tmp_path, [file_at(model)]))
    answers: list[wire.Message] = []
    while len(answers) < 3:
        answers += [frame.message() for frame in program.channel.wait()]
        assert not program.channel.at_end
    assert [getattr(answer, "failed", None) is None for answer in answers] == [False, True, True]
    assert isinstance(answers[2], wire.OrderDone)
