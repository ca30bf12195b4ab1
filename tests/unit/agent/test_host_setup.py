"""The setup of a host for its workers, with a real loop, real directories, and no agent."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distrain import wire
from distrain.agent.host_setup import HostSetup
from distrain.hosts.host import MIRROR
from distrain.storage.checkpoint import locked_for_reading
from distrain.system.loop import Loop
from distrain.transfer.host_side import environments
from distrain.wire.shipped_file import ShippedFile, project_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

PLACE = "run-1234"
NONCE = "this run"


class Host:
    """A host, and the user's project, which it sees or not."""

    def __init__(self, tmp_path: Path) -> None:
        self.loop = Loop()
        self.sent: list[wire.Message] = []
        self.setup = HostSetup(self.loop, self.sent.append)
        self.cache = tmp_path / "cache"
        self.there = tmp_path / "project"
        """The path of the project on the user's machine."""
        self.elsewhere = tmp_path / "user's machine"
        """The path of the project while the host does not see it."""
        self.storage = tmp_path / "run"
        (self.there / "package").mkdir(parents=True)
        (self.there / "train.py").write_text("train")
        (self.there / "package" / "model.py").write_text("model")
        self.files = [self._shipped(name) for name in ("train.py", "package/model.py")]
        self.storage.mkdir()
        (self.storage / "manifest").write_text(f'{{"id": "{NONCE}"}}')

    def _shipped(self, name: str) -> ShippedFile:
        path = self.there / name
        return ShippedFile.found(str(path), path.stat())

    @property
    def mirror(self) -> str:
        """The copy of the project that workers use."""
        return str(self.setup._project)

    def hide(self) -> None:
        """The host does not see the project."""
        self.there.rename(self.elsewhere)

    def question(self, **fields: Any) -> wire.SetUpHost:
        usual = wire.SetUpHost(
            files=list[tuple[str, int, int, int, int]](self.files),
            folders=[str(self.there)],
            place=PLACE,
            executable=sys.executable,
        )
        return replace(usual, **fields)

    def of_storage(self, **fields: Any) -> wire.SetUpHost:
        probe = str(self.storage / "manifest")
        return self.question(storage=str(self.storage), probe_file=probe, nonce=NONCE, **fields)

    def ask(self, question: wire.SetUpHost) -> wire.HostSetUp:
        before = len(self.answers)
        self.setup.begin(question)
        self.wait_until(lambda: len(self.answers) > before)
        (answer,) = self.answers[before:]
        return answer

    @property
    def answers(self) -> list[wire.HostSetUp]:
        return [message for message in self.sent if isinstance(message, wire.HostSetUp)]

    def wait_until(self, done: Callable[[], object]) -> None:
        late: list[bool] = []
        self.loop.call_in("late", 20, lambda: late.append(True))
        while not done():
            self.loop.step()
            assert not late
        self.loop.cancel("late")

    def settle(self) -> None:
        """Wait until the thread has nothing to do."""
        self.wait_until(lambda: not self.setup._thread.pending)

    def deliver(self, answer: wire.HostSetUp, folders: Sequence[str] = ()) -> None:
        """Do what the mover does."""
        for folder in folders:
            Path(answer.wanted, folder[1:]).mkdir(parents=True, exist_ok=True)
        for file in self.files:
            target = Path(answer.wanted, file.path[1:])
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file.path.replace(str(self.there), str(self.elsewhere)), target)

    def bring(self, question: wire.SetUpHost) -> wire.HostSetUp:
        """Set up the host, which does not see the project."""
        self.deliver(self.ask(question), question.folders)
        answer = self.ask(question)
        assert (answer.wanted, answer.failed) == ("", None)
        return answer


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    made = Host(tmp_path)
    monkeypatch.setenv("DISTRAIN_CACHE", str(made.cache))
    yield made
    made.setup.end()
    made.loop.close()


def spec(directory: Path | str, *sys_path: str | None, **environment: str) -> wire.WorkerSpec:
    return wire.WorkerSpec(
        attempt=0, rank=0, context={"world_rank": 0}, environment=environment, defaults={}, checkpoint=None,
        directory=str(directory), sys_path=list(sys_path), argv=["train.py"], vitals_s=10.0,
    )  # fmt: skip


def prepare(directory: Path | str, **environment: str) -> wire.Prepare:
    return wire.Prepare(
        start_method="fork", preload=[], environment=environment, python_flags=[], directory=str(directory),
        lease_s=1.0, is_local=False, workers=1, body=b"",
    )  # fmt: skip


# -- the user's files ------------------------------------------------------------------------------------------------


def test_a_host_that_sees_the_project_uses_it_where_it_is(host: Host) -> None:
    assert host.ask(host.question()) == wire.HostSetUp()
    asked, told = prepare(host.there, PATH="/bin"), spec(host.there, str(host.there), None, A="a")
    assert host.setup.prepare(asked) == asked
    assert host.setup.worker(told) == told
    assert not host.cache.exists()


def test_a_host_that_sees_none_of_the_files_gets_copies(host: Host) -> None:
    host.hide()
    question = host.question(folders=[str(host.there), str(host.there / "empty")])
    answer = host.ask(question)
    assert answer.wanted == f"{host.cache}/projects/{project_digest(host.files, question.folders)}"
    assert answer.checkpoints == f"{host.cache}/runs/{PLACE}/checkpoints"
    assert host.bring(question).storage_problem is None
    for file in host.files:
        copy = Path(f"{host.mirror}{file.path}")
        assert copy.read_bytes() == Path(file.path.replace(str(host.there), str(host.elsewhere))).read_bytes()
        assert copy.stat().st_mtime_ns == file.mtime_ns
    assert Path(f"{host.mirror}{host.there}/empty").is_dir()


def test_paths_of_the_project_become_paths_of_the_copies(host: Host) -> None:
    host.hide()
    host.bring(host.question())
    inner, near = f"{host.there}/package", f"{host.there}2"
    told = host.setup.worker(spec(inner, str(host.there), near, "/usr/lib", "relative", None, A="a"))
    assert told.directory == f"{host.mirror}{inner}"
    assert told.sys_path == [f"{host.mirror}{host.there}", near, "/usr/lib", "relative", None]
    assert told.environment == {"A": "a", MIRROR: host.mirror}
    assert told.context == {"world_rank": 0}
    assert host.setup.prepare(prepare(host.there)).directory == f"{host.mirror}{host.there}"
    assert host.setup.prepare(prepare("/usr")).directory == "/usr"
    asked = wire.ProbeHost(nonce="nonce", sys_path=[str(host.there), None], packages=["a"])
    assert host.setup.probe(asked) == replace(asked, sys_path=[f"{host.mirror}{host.there}", None])


# -- the interpreter -------------------------------------------------------------------------------------------------


def test_another_interpreter_has_entries_and_variables_of_its_own(host: Host) -> None:
    host.ask(
        host.question(
            executable="/users/python",
            interpreter_path=["/users/lib", "/users/site-packages"],
            interpreter_variables=["PATH", "VIRTUAL_ENV"],
        )
    )
    told = host.setup.worker(spec(host.there, "/first", "/users/lib", "/mine", "/users/site-packages", "/last"))
    assert told.sys_path == ["/first", None, "/mine", "/last"]
    prepared = host.setup.prepare(prepare(host.there, PATH="/users/bin", VIRTUAL_ENV="/users", NCCL_DEBUG="INFO"))
    assert prepared.environment == {"NCCL_DEBUG": "INFO"}
    assert prepared.python == ""


def test_workers_use_the_environment_that_was_made_for_them(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Path, str, str]] = []

    def make(folder: Path, requirements: str, *, python: str, show: Callable[[str], None]) -> Path:
        made.append((folder, requirements, python))
        show("installing")
        return folder / "key" / "bin" / "python"

    monkeypatch.setattr(environments, "make_environment", make)
    monkeypatch.setenv("PATH", "/agents/bin")
    question = host.question(
        requirements="torch\n",
        python="3.11",
        interpreter_path=["/users/lib"],
        interpreter_variables=["PATH", "LD_LIBRARY_PATH"],
    )
    for _ in range(2):
        assert host.ask(question).failed is None
    folder = host.cache / "environments"
    python = folder / "key" / "bin" / "python"
    assert made == [(folder, "torch\n", "3.11")]
    assert host.sent[0] == wire.Notice(text="installing")
    assert host.setup.worker(spec(host.there, "/users/lib", "/mine")).sys_path == [None, "/mine"]
    prepared = host.setup.prepare(prepare(host.there, PATH="/users/bin", LD_LIBRARY_PATH="/users/lib", A="a"))
    assert prepared.python == str(python)
    assert prepared.environment == {
        "A": "a",
        "VIRTUAL_ENV": str(folder / "key"),
        "PATH": f"{python.parent}{os.pathsep}/agents/bin",
    }
    assert host.setup.worker(spec(host.there)).directory == str(host.there)  # the project is in place


# -- the storage -----------------------------------------------------------------------------------------------------


def test_a_host_that_does_not_see_the_storage_has_a_directory_for_checkpoints(host: Host) -> None:
    shutil.rmtree(host.storage)
    answer = host.ask(host.of_storage())
    assert answer.storage_problem == "cannot be opened: No such file or directory"
    assert answer.checkpoints == f"{host.cache}/runs/{PLACE}/checkpoints"
    assert os.path.isdir(answer.checkpoints)
    assert (answer.wanted, answer.failed) == ("", None)
    told = host.setup.worker(spec(host.there, str(host.there), A="a"))
    assert told.context == {"world_rank": 0, "sees_storage": False, "trial_dir": answer.trial_dir}
    assert answer.trial_dir == f"{host.cache}/runs/{PLACE}/files{host.storage}"
    assert os.path.isdir(answer.trial_dir)
    assert (told.directory, told.environment) == (str(host.there), {"A": "a"})  # the project is in place


def test_a_storage_of_the_same_path_that_is_another_one_is_not_seen(host: Host) -> None:
    (host.storage / "manifest").write_text("another run")
    assert host.ask(host.of_storage()).storage_problem == "is not the launching machine's"


# -- failures --------------------------------------------------------------------------------------------------------


def test_a_cache_that_cannot_be_made_is_a_failure_with_a_cure(host: Host) -> None:
    host.hide()
    host.cache.write_text("a file")
    failed = host.ask(host.question()).failed
    assert failed is not None
    assert str(host.cache) in failed
    assert "env.DISTRAIN_CACHE=" in failed


# -- checkpoints, and the end ----------------------------------------------------------------------------------------


def test_a_checkpoint_is_deleted_unless_a_worker_reads_it(host: Host) -> None:
    shutil.rmtree(host.storage)
    folder = Path(host.ask(host.of_storage()).checkpoints, "checkpoint_1")
    folder.mkdir()
    (folder / "model").write_text("x")
    with locked_for_reading(folder):
        host.setup.delete_checkpoints([str(folder)])
        host.settle()
        assert (folder / "model").exists()
    host.setup.delete_checkpoints([str(folder)])
    host.settle()
    assert not folder.exists()
    host.setup.delete_checkpoints([str(folder)])  # it is gone
    host.settle()
