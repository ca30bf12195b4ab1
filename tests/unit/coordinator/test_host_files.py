"""Questions to other machines, and the files that are brought to them, with movers that only note their orders."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from distrain import wire
from distrain.coordinator import host_files
from distrain.coordinator.host_files import HostFiles, Shipping
from distrain.coordinator.store.local_store import LocalStore
from distrain.errors import LaunchError
from distrain.system.background import Background
from distrain.transfer.project.project import Project
from distrain.wire.shipped_file import ShippedFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

RUN = "/storage/run"
QUESTION = wire.SetUpHost(files=[], folders=[], place="run", storage=RUN, probe_file="p", nonce="n")
HOSTS = ["a", "b", "c"]


def shipped(path: str, content: str, size: int = 10) -> ShippedFile:
    return ShippedFile(path, size, 1, 0o644, f"{content:0<40}")


def project(*files: ShippedFile) -> Project:
    return Project(files=files, folders=("/project",), notes=("data.bin is not shipped",))


CODE, MODEL = shipped("/project/train.py", "c0de"), shipped("/project/model.py", "30de1", size=20)
PROJECT = project(MODEL, CODE)
NEWER = project(MODEL, shipped("/project/train.py", "ed17ed"))


class Timers:
    """A loop whose time the test lets pass."""

    def __init__(self) -> None:
        self.timers: dict[str, tuple[float, Callable[[], None]]] = {}

    def call_in(self, name: str, delay_s: float, callback: Callable[[], None]) -> None:
        self.timers[name] = (delay_s, callback)

    def cancel(self, name: str) -> None:
        self.timers.pop(name, None)

    def fire(self, name: str) -> None:
        self.timers.pop(name)[1]()


class Mover:
    """Stands for the process of a mover and the link to it."""

    made: list[Mover]

    def __init__(
        self, loop: object, answer: Callable[[wire.Message], None], *argv: str, flags: tuple[str, ...]
    ) -> None:
        self.made.append(self)
        self.answer = answer
        self.argv, self.flags = argv, flags
        self.orders: list[wire.Message] = []
        self.is_idle = True
        self.is_closed = False

    def order(self, order: wire.Message) -> None:
        self.orders.append(order)
        self.is_idle = False

    def close(self) -> None:
        self.is_closed = True


class Lab:
    """The part that is tested, and all that it says."""

    def __init__(self, shipping: Shipping) -> None:
        self.found: Project | str = PROJECT
        self.searches = 0
        self.loop = Timers()
        self.sent: list[tuple[str, wire.Message]] = []
        self.received: list[tuple[str, wire.Message]] = []
        self.refused: list[tuple[str, str]] = []
        self.is_up: list[str] = []
        self.background: Any = Background(None, "files")
        self.files = HostFiles(
            self.loop,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            replace(shipping, find_project=self.find),
            flags=("-P",),
            send=lambda host, message: self.sent.append((host, message)),
            stream=lambda host: ["ssh", host],
            receive=lambda host, message: self.received.append((host, message)),
            refuse=lambda host, why: self.refused.append((host, why)),
        )

    def find(self) -> Project:
        self.searches += 1
        if isinstance(self.found, str):
            raise LaunchError(self.found)
        return self.found

    def do(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Do the work, as the files' thread does."""
        self.background.do(work, then)

    def set_up(self, *hosts: str) -> None:
        for host in hosts:
            self.files.set_up(host, partial(self.is_up.append, host))

    def answer(self, host: str, **fields: Any) -> None:
        self.files.on_set_up(host, wire.HostSetUp(**fields))

    def bring(self, host: str, failed: str | None = None) -> None:
        """The host lacks the project, and it is copied there, or not."""
        self.answer(host, wanted=f"/cache/{host}/project", checkpoints=f"/cache/{host}/run")
        self.mover(host).answer(wire.OrderDone(failed=failed))

    def mover(self, host: str) -> Mover:
        return [mover for mover in Mover.made if mover.argv[1] == json.dumps(["ssh", host])][-1]

    def asked(self, host: str) -> list[wire.SetUpHost]:
        return [message for name, message in self.sent if name == host and isinstance(message, wire.SetUpHost)]

    def orders(self, host: str) -> list[Any]:
        return [order for mover in Mover.made if mover.argv[1] == json.dumps(["ssh", host]) for order in mover.orders]


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    Mover.made = []
    monkeypatch.setattr(host_files, "OrderLink", Mover)


@pytest.fixture
def lab() -> Lab:
    return Lab(Shipping(question=QUESTION, project=PROJECT, takes_project=("a", "b")))


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """The lines that the user reads."""
    records: list[str] = []

    class Noted(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    handler = Noted()
    logging.getLogger("distrain").addHandler(handler)
    yield records
    logging.getLogger("distrain").removeHandler(handler)


# -- the question ----------------------------------------------------------------------------------------------------


def test_only_hosts_that_take_the_project_are_told_its_files(lab: Lab) -> None:
    lab.set_up(*HOSTS)
    for host in ("a", "b"):
        (question,) = lab.asked(host)
        assert (question.files, question.folders) == ([*PROJECT.files], ["/project"])
    (question,) = lab.asked("c")
    assert (question.files, question.folders) == ([], [])
    assert (question.storage, question.probe_file, question.nonce) == (RUN, "p", "n")


def test_hosts_that_may_be_one_machine_get_different_directories(lab: Lab) -> None:
    places = [lab.files.question_for(host).place for host in HOSTS]
    assert len(set(places)) == len(HOSTS)
    assert all(place.startswith("run-") for place in places)
    assert places[0] == lab.files.question_for("a").place


def test_files_of_the_run_are_no_files_of_the_project() -> None:
    inside, beside = shipped(f"{RUN}/log", "1"), shipped(f"{RUN}2/data.py", "2")
    lab = Lab(Shipping(question=QUESTION, project=project(CODE, inside, beside), takes_project=HOSTS))
    assert lab.files.question_for("a").files == [CODE, beside]
    lab = Lab(Shipping(question=replace(QUESTION, storage=""), project=project(CODE, inside), takes_project=HOSTS))
    assert lab.files.question_for("a").files == [CODE, inside]


def test_the_directory_of_a_run_is_named_after_its_storage(tmp_path: Path) -> None:
    shipping = Shipping(question=QUESTION)
    places = []
    for name in ("one/.my run", "two/.my run"):
        store = LocalStore(tmp_path / name)
        question = shipping.for_run(store, "id").question
        assert (question.storage, question.nonce) == (str(store.paths.root), "id")
        assert question.probe_file == str(store.paths.manifest)
        places.append(question.place)
        store.close()
    assert places[0] != places[1]
    assert all(place.startswith("_my_run-") for place in places)


# -- setting up ------------------------------------------------------------------------------------------------------


def test_a_host_that_joins_while_the_project_is_searched_is_asked_afterwards(lab: Lab) -> None:
    held: list[Callable[[], None]] = []
    lab.set_up("a")
    lab.background = type("Held", (), {"do": lambda self, work, then: held.append(lambda: then(work()))})()
    lab.answer("a")
    lab.found = NEWER
    lab.files.refresh(["a"])
    lab.files.refresh(["a"])
    lab.set_up("b", "c")
    assert [len(lab.asked(host)) for host in HOSTS] == [1, 0, 1]
    assert lab.files.is_busy([])
    lab.files.lost("a")
    (search,) = held
    search()
    assert [len(lab.asked(host)) for host in HOSTS] == [1, 1, 1]
    assert lab.asked("b")[0].files == [*NEWER.files]
    assert not lab.files.is_busy([])


def test_what_a_host_lacks_is_copied_there(lab: Lab, lines: list[str]) -> None:
    lab.set_up("a")
    lab.answer("a", wanted="/cache/projects/d1", checkpoints="/cache/run")
    assert lab.orders("a") == [
        wire.Deliver(
            folder="/cache/projects/d1",
            root="/",
            files=[*PROJECT.files],
            staging="/cache/run",
            folders=["project"],
        )
    ]
    assert lines == ["copying 2 files (30 B) of your code to a", "data.bin is not shipped"]
    assert (lab.mover("a").argv, lab.mover("a").flags) == (("mover", '["ssh", "a"]'), ("-P",))
    assert len(lab.asked("a")) == 1
    lab.mover("a").answer(wire.OrderDone())
    assert lab.asked("a") == lab.asked("a")[:1] * 2
    assert not lab.is_up
    lab.answer("a")
    assert lab.is_up == ["a"]
    assert len(lab.orders("a")) == 1


def test_a_delivery_that_fails_is_tried_again_with_the_project_as_it_is_then(lab: Lab) -> None:
    lab.set_up("a")
    assert (lab.searches, len(lab.asked("a"))) == (0, 1)
    lab.found = NEWER
    lab.bring("a", failed="train.py has changed while it was copied, or was damaged on the way")
    assert not lab.refused
    assert [question.files for question in lab.asked("a")] == [[*PROJECT.files], [*NEWER.files]]
    lab.bring("a")
    lab.answer("a")
    assert lab.is_up == ["a"]


def test_the_third_delivery_that_fails_is_the_last(lab: Lab, lines: list[str]) -> None:
    lab.set_up("a")
    for number in range(3):
        assert not lab.refused
        lab.bring("a", failed=f"reason {number}")
    assert lab.refused == [("a", "your code cannot be copied there: reason 2")]
    assert len(lines) <= 2  # not one for each
    assert not lab.is_up


def test_a_full_disk_is_no_reason_to_try_again(lab: Lab) -> None:
    lab.set_up("a", "b")
    lab.bring("a", failed="[Errno 28] No space left on device: '/cache/x'")
    lab.answer("b", failed="[Errno 28] No space left on device: '/cache/y'")
    for _, why in lab.refused:
        assert why.endswith("or name another directory with env.DISTRAIN_CACHE= in the hostfile")
    assert len(lab.refused) == 2


def test_a_host_that_is_set_up_has_all_its_tries_again(lab: Lab) -> None:
    lab.set_up("a")
    for _ in range(2):
        for _ in range(2):
            lab.bring("a", failed="no")
        lab.answer("a")
        lab.files.refresh(["a"])
    assert not lab.refused


def test_if_the_project_cannot_be_found_again_the_former_one_is_tried(lab: Lab) -> None:
    lab.set_up("a")
    lab.found = "too large"
    lab.bring("a", failed="the connection was turned away")
    assert [question.files for question in lab.asked("a")] == [[*PROJECT.files]] * 2


def test_a_host_that_cannot_be_set_up_is_refused(lab: Lab) -> None:
    lab.set_up("a")
    lab.answer("a", failed="Permission denied: '/cache'")
    assert lab.refused == [("a", "Permission denied: '/cache'")]
    assert not lab.is_up
    assert not lab.loop.timers


def test_a_host_gets_the_files_that_it_was_asked_about(lab: Lab) -> None:
    """Meanwhile the project was found anew for another host."""
    lab.set_up("a", "b")
    lab.found = NEWER
    lab.bring("b", failed="/project/train.py has changed while it was copied")
    lab.answer("a", wanted="/cache/projects/d1", checkpoints="/cache/run")
    assert lab.orders("a")[0].files == [*PROJECT.files]


def test_a_host_that_never_finds_what_was_copied_is_refused(lab: Lab) -> None:
    lab.set_up("a")
    lab.bring("a")
    lab.answer("a", wanted="/cache/a/project")
    lab.bring("a")
    assert not lab.refused
    lab.answer("a", wanted="/cache/a/project")
    why = "files have changed meanwhile, or have vanished from /cache/a/project"
    assert lab.refused == [("a", f"your code cannot be copied there: {why}")]


def test_a_project_that_changes_while_it_is_copied_is_copied_as_it_is_then(lab: Lab) -> None:
    """The host compares what has arrived with the digests."""
    lab.set_up("a")
    lab.bring("a")
    lab.found = NEWER
    lab.answer("a", wanted="/cache/a/project")
    assert lab.asked("a")[-1].files == [*NEWER.files]
    lab.answer("a", wanted="/cache/a/newer", checkpoints="/cache/run")
    assert lab.orders("a")[-1].files == [*NEWER.files]


def test_a_host_that_does_not_answer_is_announced_and_then_refused(lab: Lab, lines: list[str]) -> None:
    lab.set_up("a")
    assert lab.loop.timers["set up a"][0] == 20
    lab.loop.fire("set up a")
    assert lines == ["a has not answered for 20 s: does a file system hang there?"]
    assert (lab.loop.timers["set up a"][0], lab.refused) == (280, [])
    lab.loop.fire("set up a")
    assert lab.refused == [("a", "it has not answered for 300 s, so a file system probably hangs there")]


def test_the_wait_begins_again_when_files_have_been_brought_and_ends_with_the_answer(lab: Lab) -> None:
    lab.set_up("a")
    lab.loop.fire("set up a")
    lab.answer("a", wanted="/w")
    assert "set up a" not in lab.loop.timers
    lab.mover("a").answer(wire.OrderDone())
    assert lab.loop.timers["set up a"][0] == 20
    lab.answer("a")
    assert "set up a" not in lab.loop.timers


def test_a_host_that_makes_an_environment_may_take_its_time(lines: list[str]) -> None:
    """It says itself how far it is."""
    lab = Lab(Shipping(question=replace(QUESTION, requirements="torch\n")))
    lab.set_up("a")
    if "set up a" in lab.loop.timers:
        lab.loop.fire("set up a")
    assert not lines


# -- the next attempt ------------------------------------------------------------------------------------------------


def test_the_next_attempt_gets_the_project_as_it_is_then(lab: Lab) -> None:
    lab.set_up(*HOSTS)
    for host in HOSTS:
        lab.answer(host)
    lab.found = NEWER
    lab.files.refresh([*HOSTS, "unknown"])
    assert [len(lab.asked(host)) for host in HOSTS] == [2, 2, 1]
    assert lab.asked("b")[-1].files == [*NEWER.files]
    assert lab.files.is_busy(["b"])
    assert not lab.files.is_busy(["c"])
    lab.answer("a")
    lab.answer("b")
    assert not lab.files.is_busy(HOSTS)
    assert lab.is_up == HOSTS  # not called again


def test_only_the_answer_to_the_latest_question_counts(lab: Lab) -> None:
    """A host that joins for the next attempt is asked about the former project, and at once about the new one."""
    lab.set_up("a")
    lab.found = NEWER
    lab.files.refresh(["a"])
    assert len(lab.asked("a")) == 2
    lab.answer("a")
    assert lab.files.is_busy(["a"])
    assert not lab.is_up
    lab.answer("a")
    assert not lab.files.is_busy(["a"])
    assert lab.is_up == ["a"]


def test_workers_wait_while_the_project_is_searched(lab: Lab) -> None:
    held: list[Callable[[], None]] = []
    lab.set_up("a", "b")
    lab.background = type("Held", (), {"do": lambda self, work, then: held.append(lambda: then(work()))})()
    lab.answer("a")
    lab.answer("b")
    lab.files.refresh(["a", "b"])
    assert lab.files.is_busy([])
    lab.files.lost("a")
    held[0]()
    assert not lab.files.is_busy([])
    assert [len(lab.asked(host)) for host in ("a", "b")] == [1, 2]


def test_if_the_project_cannot_be_found_the_next_attempt_has_the_former_one(lab: Lab, lines: list[str]) -> None:
    lab.set_up("a")
    lab.answer("a")
    lab.found = "the project has 3 GB to ship"
    lab.files.refresh(["a"])
    assert lines == ["the hosts keep the code of the last attempt: the project has 3 GB to ship"]
    assert lab.asked("a")[-1].files == [*PROJECT.files]
    lab.answer("a")
    assert not lab.files.is_busy(["a"])


def test_nothing_is_searched_for_hosts_with_files_of_their_own(lab: Lab) -> None:
    lab.set_up("c")
    lab.answer("c")
    lab.files.refresh(["c"])
    assert lab.searches == 0
    assert not lab.files.is_busy(["c"])


# -- the storage -----------------------------------------------------------------------------------------------------


def test_hosts_that_do_not_see_the_storage_are_announced_once(lab: Lab, lines: list[str]) -> None:
    lab.set_up(*HOSTS)
    lab.answer("a", storage_problem="is not there", checkpoints="/cache/a/checkpoints")
    lab.answer("b")
    lab.answer("c", storage_problem="is not there")
    assert [lab.files.lacks_storage(host) for host in [*HOSTS, "unknown"]] == [True, False, True, False]
    assert lab.files.checkpoints_on("a") == "/cache/a/checkpoints"
    for _ in range(2):
        lab.files.announce(HOSTS)
    [line] = lines
    assert line.startswith("a, c do not see the run directory, which is not there; their checkpoints come here")
    lab.files.lost("a")
    lab.set_up("a")
    lab.answer("a", storage_problem="is not there")
    lab.files.announce(HOSTS)
    assert len(lines) == 1


# -- movers ----------------------------------------------------------------------------------------------------------


def upload(rank: int = 0) -> wire.Upload:
    return wire.Upload(attempt=0, rank=rank, ordinal=1, source="/s", files=["f"], others=[], directory="/d")


def copied(rank: int = 0) -> wire.FilesCopied:
    return wire.FilesCopied(attempt=0, rank=rank, ordinal=1, files=[("f", 1, 2)], skipped=[])


def test_each_host_has_one_mover_whose_answers_go_to_who_waits(lab: Lab) -> None:
    lab.set_up("a", "b")
    brought: list[tuple[str, str | None]] = []
    deliver = wire.Deliver(folder="/f", root="/r", files=[], staging="/s")
    lab.files.upload("a", upload())
    lab.files.deliver("a", deliver, lambda failed: brought.append(("first", failed)))
    lab.files.deliver("a", deliver, lambda failed: brought.append(("second", failed)))
    lab.files.deliver("b", deliver, lambda failed: brought.append(("of b", failed)))
    assert len(Mover.made) == 2
    assert lab.orders("a") == [upload(), deliver, deliver]
    for answer in (copied(), wire.OrderDone(failed="no"), wire.OrderDone()):
        lab.mover("a").answer(answer)
    assert lab.received == [("a", copied())]
    assert brought == [("first", "no"), ("second", None)]


def test_a_host_that_is_lost_is_forgotten(lab: Lab) -> None:
    lab.set_up("a", "b")
    lab.answer("b", wanted="/w")
    lab.bring("a", failed="no")
    assert lab.loop.timers.keys() == {"set up a"}
    lab.files.lost("a")
    assert not lab.loop.timers
    assert lab.mover("a").is_closed
    assert not lab.mover("b").is_closed
    assert not lab.files.is_busy(["a"])
    assert not lab.files.lacks_storage("a")
    lab.files.lost("a")
    lab.files.lost("never asked")
    lab.set_up("a")
    lab.files.lost("a")
    assert not lab.loop.timers
    assert lab.is_up == []


def test_answers_of_the_mover_of_a_lost_host_are_ignored(lab: Lab) -> None:
    lab.set_up("a")
    lab.answer("a", wanted="/w")
    former = lab.mover("a")
    lab.files.lost("a")
    lab.set_up("a")
    before = list(lab.sent)
    former.answer(wire.OrderDone())
    former.answer(copied())
    assert lab.sent == before
    assert not lab.received
    lab.answer("a", wanted="/w")
    assert lab.mover("a") is not former


def test_a_host_that_is_lost_before_the_project_is_found_is_not_asked(lab: Lab) -> None:
    held: list[Callable[[], None]] = []
    lab.background = type("Held", (), {"do": lambda self, work, then: held.append(lambda: then(work()))})()
    lab.set_up("a")
    lab.bring("a", failed="no")
    lab.files.lost("a")
    held[0]()
    assert len(lab.asked("a")) == 1


def test_the_end_of_an_attempt_ends_what_is_fetched_for_it(lab: Lab) -> None:
    lab.set_up(*HOSTS)
    lab.files.upload("a", upload())
    lab.files.upload("b", upload())
    lab.files.deliver("b", wire.Deliver(folder="/f", root="/r", files=[], staging="/s"), lambda failed: None)
    lab.files.upload("c", upload())
    lab.mover("c").is_idle = True
    lab.files.end_attempt()
    assert [lab.mover(host).is_closed for host in HOSTS] == [True, False, False]
    lab.files.upload("a", upload(1))
    assert not lab.mover("a").is_closed
    assert lab.mover("a").orders == [upload(1)]


def test_the_end_of_the_run_ends_all_movers(lab: Lab) -> None:
    lab.set_up(*HOSTS)
    for host in ("a", "b"):
        lab.files.upload(host, upload())
    lab.files.close()
    assert [mover.is_closed for mover in Mover.made] == [True, True]
    assert not lab.loop.timers


def test_a_storage_path_need_not_be_utf_8(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / os.fsdecode(b"caf\xe9") / "run")
    assert Shipping(question=QUESTION).for_run(store, "id").question.place.startswith("run-")
    store.close()


def test_files_that_a_lost_host_has_kept_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    lab = Lab(Shipping(question=QUESTION))
    lab.set_up("a", "b", "c")
    for host in "abc":
        lab.answer(host, storage_problem="is not there", trial_dir=f"/cache/{host}/files")
    lab.files.announce("abc")
    lab.files.bring_back("b")
    for host in "bc":
        lab.files.lost(host)
    lab.set_up("c")
    lab.answer("c", storage_problem="is not there", trial_dir="/cache/c/files")  # it is back
    capsys.readouterr()
    lab.files.warn_of_lost()
    [line] = capsys.readouterr().err.splitlines()
    assert "files written by ranks are still on b, in /cache/b/files: the host is lost" in line
