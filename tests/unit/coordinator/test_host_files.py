"""Questions to other machines, and the files that are brought to them, with movers that only note their orders."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from distrain import wire
from distrain.coordinator import host_files
from distrain.coordinator.host_files import HostFiles, Shipping
from distrain.decisions.checkpoints.actions import Store
from distrain.decisions.events import HostLost, WorkersStart
from distrain.errors import LaunchError
from distrain.hosts.world import RankPlan, WorldPlan
from distrain.system.background import Background
from distrain.transfer.project.project import Project
from distrain.wire.shipped_file import ShippedFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

RUN = "/storage/run"
QUESTION = wire.SetUpHost(files=[], folders=[], place="run", storage=RUN, probe_file="p", nonce="n")
HOSTS = ["a", "b", "c"]


def shipped(path: str, content: str, size: int = 10) -> ShippedFile:
    return ShippedFile(path, size, 1, 0o644, int(content, 16))


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

    def __init__(self, loop: object, hear: Callable[[wire.Message], None], *argv: str, flags: tuple[str, ...]) -> None:
        self.made.append(self)
        self.argv, self.flags = argv, flags
        self.orders: list[wire.Message] = []
        self.waiting: list[Callable[[Any], None]] = []
        self.is_idle = True
        self.is_closed = False

    def order(self, order: wire.Message, then: Callable[[Any], None]) -> None:
        self.orders.append(order)
        self.waiting.append(then)
        self.is_idle = False

    def answer(self, message: wire.Message) -> None:
        self.waiting.pop(0)(message)

    def close(self) -> None:
        self.is_closed = True


class Lab:
    """The part that is tested, and all that it says."""

    def __init__(self, shipping: Shipping) -> None:
        self.found: Project | str = PROJECT
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
            self,  # type: ignore[arg-type]
            flags=("-P",),
            receive=lambda host, message: self.received.append((host, message)),
            refuse=lambda host, why: self.refused.append((host, why)),
        )

    def send(self, host: str, message: wire.Message) -> None:
        self.sent.append((host, message))

    def stream_argv(self, host: str) -> list[str]:
        return ["ssh", host]

    def find(self) -> Project:
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


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.removeprefix("distrain: ") for line in capsys.readouterr().err.splitlines()]


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
    lab.files.lost(HostLost("a", "it is gone"))
    (search,) = held
    search()
    assert [len(lab.asked(host)) for host in HOSTS] == [1, 1, 1]
    assert lab.asked("b")[0].files == [*NEWER.files]
    assert not lab.files.is_busy([])


def test_what_a_host_lacks_is_copied_there(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    lab.set_up("a")
    lab.answer("a", wanted="/cache/projects/d1", checkpoints="/cache/run")
    assert lab.orders("a") == [
        wire.Deliver(
            folder="/cache/projects/d1", root="/", files=[*PROJECT.files], staging="/cache/run", folders=["project"]
        )
    ]
    assert said(capsys) == ["copying 2 files (30 B) of your code to a", "data.bin is not shipped"]
    assert (lab.mover("a").argv, lab.mover("a").flags) == (("mover", '["ssh", "a"]'), ("-P",))
    assert len(lab.asked("a")) == 1
    lab.mover("a").answer(wire.OrderDone())
    assert lab.asked("a") == lab.asked("a")[:1] * 2
    assert not lab.is_up
    lab.answer("a")
    assert lab.is_up == ["a"]
    assert len(lab.orders("a")) == 1


def test_a_full_disk_is_no_reason_to_try_again(lab: Lab) -> None:
    lab.set_up("a", "b")
    lab.bring("a", failed="[Errno 28] No space left on device: '/cache/x'")
    lab.answer("b", failed="[Errno 28] No space left on device: '/cache/y'")
    for _, why in lab.refused:
        assert why.endswith("or name another directory with env.DISTRAIN_CACHE= in the hostfile")
    assert len(lab.refused) == 2


def test_a_project_that_changes_while_it_is_copied_is_copied_as_it_is_then(lab: Lab) -> None:
    lab.set_up("a")
    lab.found = NEWER
    lab.bring("a", failed="/project/train.py has changed while it was copied")
    assert lab.asked("a")[-1].files == [*NEWER.files]
    lab.answer("a", wanted="/cache/a/newer", checkpoints="/cache/run")
    assert lab.orders("a")[-1].files == [*NEWER.files]


def test_a_host_that_does_not_answer_is_announced_and_then_refused(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.set_up("a")
    assert lab.loop.timers["set up a"][0] == 20
    lab.loop.fire("set up a")
    assert said(capsys) == ["a has not answered for 20 s: does a file system hang there?"]
    assert (lab.loop.timers["set up a"][0], lab.refused) == (280, [])
    lab.loop.fire("set up a")
    assert lab.refused == [("a", "it has not answered for 300 s, so a file system probably hangs there")]


# -- the next attempt ------------------------------------------------------------------------------------------------


def test_if_the_project_cannot_be_found_the_next_attempt_has_the_former_one(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.set_up("a")
    lab.answer("a")
    lab.found = "the project has 3 GB to ship"
    lab.files.refresh(["a"])
    assert said(capsys) == ["the hosts keep the code of the last attempt: the project has 3 GB to ship"]
    assert lab.asked("a")[-1].files == [*PROJECT.files]
    lab.answer("a")
    assert not lab.files.is_busy(["a"])


# -- the storage -----------------------------------------------------------------------------------------------------


def test_hosts_that_do_not_see_the_storage_are_announced_once(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    lab.set_up(*HOSTS)
    lab.answer("a", storage_problem="is not there", checkpoints="/cache/a/checkpoints")
    lab.answer("b")
    lab.answer("c", storage_problem="is not there")
    assert [lab.files.lacks_storage(host) for host in [*HOSTS, "unknown"]] == [True, False, True, False]
    assert lab.files.checkpoints_on("a") == "/cache/a/checkpoints"
    for _ in range(2):
        lab.files.announce(workers_start(HOSTS))
    [line] = said(capsys)
    assert line.startswith("a, c do not see the run directory, which is not there; their checkpoints come here")
    lab.files.lost(HostLost("a", "it is gone"))
    lab.set_up("a")
    lab.answer("a", storage_problem="is not there")
    lab.files.announce(workers_start(HOSTS))
    assert not said(capsys)


# -- movers ----------------------------------------------------------------------------------------------------------


def workers_start(hosts: Iterable[str]) -> WorkersStart:
    places = {"local_rank": 0, "local_world_size": 1}
    ranks = (RankPlan(rank=n, host=host, node_rank=n, **places) for n, host in enumerate(hosts))
    return WorkersStart(WorldPlan(ranks=tuple(ranks)))


def upload(rank: int = 0) -> wire.Upload:
    return wire.Upload(attempt=0, rank=rank, ordinal=1, source="/s", files=["f"], others=[], directory="/d")


def test_the_mover_of_a_lost_host_is_ended(lab: Lab) -> None:
    lab.set_up("a")
    lab.answer("a", wanted="/w")
    former = lab.mover("a")
    lab.files.lost(HostLost("a", "it is gone"))
    lab.set_up("a")
    assert former.is_closed
    lab.answer("a", wanted="/w")
    assert lab.mover("a") is not former


def test_the_end_of_an_attempt_ends_what_is_fetched_for_it(lab: Lab) -> None:
    lab.set_up(*HOSTS)
    for host in HOSTS:
        lab.answer(host, storage_problem="is not there")
    lab.files.upload(Store("a", upload()))
    lab.files.upload(Store("b", upload()))
    lab.files.deliver("b", wire.Deliver(folder="/f", root="/r", files=[], staging="/s"), lambda failed: None)
    lab.files.upload(Store("c", upload()))
    lab.mover("c").is_idle = True
    lab.files.end_attempt()
    assert [lab.mover(host).is_closed for host in HOSTS] == [True, False, False]
    lab.files.upload(Store("a", upload(1)))
    assert not lab.mover("a").is_closed
    assert lab.mover("a").orders == [upload(1)]


def test_files_that_a_lost_host_has_kept_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    lab = Lab(Shipping(question=QUESTION))
    lab.set_up("a", "b", "c")
    for host in "abc":
        lab.answer(host, storage_problem="is not there", trial_dir=f"/cache/{host}/files")
    lab.files.announce(workers_start("abc"))
    lab.files.bring_back("b")
    for host in "bc":
        lab.files.lost(HostLost(host, "it is gone"))
    lab.set_up("c")
    lab.answer("c", storage_problem="is not there", trial_dir="/cache/c/files")  # it is back
    capsys.readouterr()
    lab.files.warn_of_lost()
    [line] = said(capsys)
    assert "files written by ranks are still on b, in /cache/b/files: the host is lost" in line
