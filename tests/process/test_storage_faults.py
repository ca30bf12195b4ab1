"""Real faults of the storage. After each one no half checkpoint is offered, nothing committed is lost, and the message
names what happened, where, and how to continue.
"""

from __future__ import annotations

import atexit
import importlib
import inspect
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import distrain
from distrain import Checkpoint, ControllerError, FailureConfig, StorageError, TrainingFailedError
from tests.conftest import wait_until
from tests.process.conftest import Fit, assert_no_half_checkpoint, records
from tests.tables import SEED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGE_BYTES = 4096
EPOCHS = 5


def train(config: dict[str, Any]) -> str:
    """Each rank brings one file per epoch. The fault strikes when two epochs are committed; says where it began."""
    rank = distrain.get_context().get_world_rank()
    checkpoint = distrain.get_checkpoint()
    begin = 0 if checkpoint is None else int(Path(checkpoint.path, f"shard-{rank}").read_text()) + 1
    for epoch in range(begin, begin + config["epochs"]):
        distrain.collective.barrier()
        if epoch == 2 and rank == 0 and config["strike"]:
            distrain.get_all_reported_checkpoints()  # returns when two epochs are committed
            config["strike"]()
        distrain.collective.barrier()
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, f"shard-{rank}").write_text(str(epoch))
            distrain.report({"epoch": epoch}, checkpoint=Checkpoint.from_directory(folder))
    return f"began at {begin}"


def committed(run: Path) -> dict[str, bytes]:
    """Every byte that is committed, by path. All checkpoints are complete, and each is the one after the one before."""
    assert_no_half_checkpoint(run.parent)
    for folder in run.glob("checkpoint_*"):
        assert {path.name: path.read_text() for path in folder.glob("shard-*")} == {
            f"shard-{rank}": str(int(folder.name[-6:])) for rank in range(2)
        }
    files = [path for path in run.glob("checkpoint_*/**/*") if path.is_file()]
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def newest(run: Path) -> int:
    return max((int(path.name[-6:]) for path in run.glob("checkpoint_*")), default=-1)


def assert_reports_are_kept_once(run: Path) -> None:
    found = [(line["attempt"], line["rank"], line["index"]) for line in records(run)]
    assert len(found) == len(set(found))


# -- where it happens ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Disk:
    """A file system of its own, or a directory."""

    place: Path
    device: str = ""

    @property
    def run(self) -> Path:
        return self.place / "runs" / "run"


def mount(place: Path, undo: ExitStack, *options: str) -> Disk:
    """Skips where nothing can be mounted."""
    place.mkdir()
    done = subprocess.run(["mount", *options, place], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting needs root: {done.stderr.strip()}")
    undo.callback(subprocess.run, ["umount", "--lazy", place], capture_output=True)
    shown = subprocess.run(["findmnt", "-no", "SOURCE", place], capture_output=True, text=True)
    return Disk(place=place, device=Path(shown.stdout.strip()).name)


def small_disk(folder: Path, undo: ExitStack) -> Disk:
    return mount(folder / "disk", undo, "-t", "tmpfs", "-o", "size=256k", "tmpfs")


def disk_with_few_inodes(folder: Path, undo: ExitStack) -> Disk:
    return mount(folder / "disk", undo, "-t", "tmpfs", "-o", "size=1m,nr_inodes=60", "tmpfs")


def disk_that_breaks(folder: Path, undo: ExitStack) -> Disk:
    """The kernel makes it read-only when it finds an error there; ``mount -o remount,ro`` refuses while files are open
    for writing."""
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("there is no mkfs.ext4")
    image = folder / "image"
    image.touch()
    os.truncate(image, 8 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    disk = mount(folder / "disk", undo, "-o", "loop,errors=remount-ro", str(image))
    if not trigger(disk).exists():
        pytest.skip("this kernel's ext4 cannot be told to find an error")
    return disk


def trigger(disk: Disk) -> Path:
    return Path("/sys/fs/ext4", disk.device, "trigger_fs_error")


def mounted_directory(folder: Path, undo: ExitStack) -> Disk:
    (folder / "elsewhere").mkdir()
    return mount(folder / "disk", undo, "--bind", str(folder / "elsewhere"))


def directory(folder: Path, undo: ExitStack) -> Disk:
    (folder / "disk").mkdir()
    return Disk(place=folder / "disk")


# -- what happens there, and what mends it ---------------------------------------------------------------------------


def fill(disk: Disk, *, pages_left: int) -> None:
    ballast = disk.place / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(PAGE_BYTES))
        except OSError:
            file.truncate(file.tell() - pages_left * PAGE_BYTES)


def fill_with_files(disk: Disk, *, inodes_left: int) -> None:
    made = []
    try:
        while True:
            path = disk.place / f"ballast-{len(made)}"
            path.touch()
            made.append(path)
    except OSError:
        for path in made[:inodes_left]:
            path.unlink()


def empty(disk: Disk) -> None:
    for path in disk.place.glob("ballast*"):
        path.unlink()


def find_an_error(disk: Disk) -> None:
    trigger(disk).write_text("a test of distrain")


def repair(disk: Disk) -> None:
    subprocess.run(["umount", disk.place], check=True)
    subprocess.run(["mount", "-o", "loop", disk.place.parent / "image", disk.place], check=True)


def unmount(disk: Disk) -> None:
    subprocess.run(["umount", "--lazy", disk.place], check=True)


def mount_again(disk: Disk) -> None:
    subprocess.run(["mount", "--bind", disk.place.parent / "elsewhere", disk.place], check=True)


def move_away(disk: Disk) -> None:
    disk.run.rename(disk.place / "moved")


def move_back(disk: Disk) -> None:
    shutil.rmtree(disk.run, ignore_errors=True)  # stacks and logs of the end
    (disk.place / "moved").rename(disk.run)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """``gone``: the run directory is not there until it is mended."""

    disk: Callable[[Path, ExitStack], Disk]
    strike: Callable[[Disk], None]
    mend: Callable[[Disk], None]
    says: str
    gone: bool = False


NO_SPACE = "No space left on device"
FAULTS = {
    "no page left": Fault(disk=small_disk, strike=partial(fill, pages_left=0), mend=empty, says=NO_SPACE),
    "one page left": Fault(disk=small_disk, strike=partial(fill, pages_left=1), mend=empty, says=NO_SPACE),
    "two pages left": Fault(disk=small_disk, strike=partial(fill, pages_left=2), mend=empty, says=NO_SPACE),
    "three pages left": Fault(disk=small_disk, strike=partial(fill, pages_left=3), mend=empty, says=NO_SPACE),
    **{
        f"{left} inodes left": Fault(
            disk=disk_with_few_inodes, strike=partial(fill_with_files, inodes_left=left), mend=empty, says=NO_SPACE
        )
        for left in range(9)
    },
    "an error of the disk": Fault(
        disk=disk_that_breaks, strike=find_an_error, mend=repair, says="Read-only file system"
    ),
    "unmounted": Fault(
        disk=mounted_directory, strike=unmount, mend=mount_again, says="No such file or directory", gone=True
    ),
    "moved away": Fault(disk=directory, strike=move_away, mend=move_back, says="No such file or directory", gone=True),
}
SAMPLE = (
    "no page left",
    "two pages left",
    "0 inodes left",
    "5 inodes left",
    "an error of the disk",
    "unmounted",
    "moved away",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "fault" in metafunc.fixturenames:
        names = list(FAULTS) if metafunc.config.getoption("--all") else SAMPLE
        metafunc.parametrize("fault", [FAULTS[name] for name in names], ids=names)


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def fails(fit: Fit, strike: Callable[[], None] | None = None) -> TrainingFailedError | StorageError:
    with pytest.raises((TrainingFailedError, StorageError)) as raised:
        fit(train, {"strike": strike, "epochs": EPOCHS}, name="run")
    return raised.value


@pytest.mark.sample(3)
def test_a_storage_that_fails_in_the_middle(fault: Fault, tmp_path: Path, undo: ExitStack) -> None:
    disk = fault.disk(tmp_path, undo)
    fit = Fit(storage=disk.run.parent)
    error = fails(fit, partial(fault.strike, disk))
    assert fault.says in str(error)
    assert str(disk.run) in str(error)
    if isinstance(error, ControllerError):
        assert "checkpoint: checkpoint_" in str(error)
        assert "once that is fixed, start the run again with RunConfig(name='run')" in str(error)
    if fault.says == NO_SPACE:
        assert isinstance(error, ControllerError), error
        assert "free some space there" in str(error)
        assert json.loads((disk.run / "run.json").read_text())["status"] == "failed"
        assert json.loads((disk.run / "error.json").read_text())["type"] == "ControllerError"
        assert list(disk.run.glob("*.new")) == []
        assert max(line["metrics"]["epoch"] for line in records(disk.run)) > newest(disk.run), "the last reports, too"
    if not fault.gone:
        before = committed(disk.run)
        assert error.result.checkpoint.path == str(disk.run / f"checkpoint_{newest(disk.run):06d}")
        still = fails(fit)
        assert fault.says in str(still)
        assert str(disk.run) in str(still)
        assert committed(disk.run).items() >= before.items()
    fault.mend(disk)
    before, goes_on_at = committed(disk.run), newest(disk.run) + 1
    assert goes_on_at >= 2
    result = fit(train, {"strike": None, "epochs": EPOCHS}, name="run")
    assert result.return_value == f"began at {goes_on_at}"
    assert result.path == str(disk.run)
    assert result.error is None
    assert committed(disk.run).items() >= before.items()
    assert newest(disk.run) == goes_on_at + EPOCHS - 1
    assert not (disk.run / ".staging").exists()
    assert_reports_are_kept_once(disk.run)


def test_reports_that_fill_the_disk_leave_space_for_how_the_run_ended(tmp_path: Path, undo: ExitStack) -> None:
    """More reports wait for space than the run has reserved."""

    def report_much() -> None:
        for _ in range(500):
            distrain.report({"pad": "x" * 1000})

    disk = small_disk(tmp_path, undo)
    for kind in (ControllerError, StorageError):  # the second run does not get its reserve, and leaves nothing of it
        with pytest.raises(kind, match=r"No space left on device; free some space there"):
            Fit(storage=disk.run.parent)(report_much, workers=1, name="run")
        assert not (disk.run / ".reserve").exists()
        assert json.loads((disk.run / "run.json").read_text())["status"] == "failed"
        assert "cannot write metrics" in json.loads((disk.run / "error.json").read_text())["message"]


def test_a_rank_that_cannot_store_its_part_says_how_to_go_on(tmp_path: Path, undo: ExitStack) -> None:
    disk = small_disk(tmp_path, undo)
    error = fails(Fit(storage=disk.run.parent), partial(fill, disk, pages_left=0))
    assert "checkpoint: checkpoint_000001, at report 2\n" in str(error)


OBJECT_STORE = """
import time
from pathlib import Path
from fsspec.implementations.local import LocalFileSystem

class ObjectStore(LocalFileSystem):
    # A disk that distrain takes for an object store, and that is filled once before a second manifest is written.
    protocol, cachable = "objects", False

    def __init__(self, disk):
        super().__init__(auto_mkdir=True)
        self.disk = disk

    def pipe_file(self, path, value, mode="overwrite", **options):
        was_full = Path(f"{self.disk} was full")
        if path.endswith("000001/.manifest.json") and not was_full.exists():
            while not Path(self.disk).with_name("ended").exists():  # the process of rank 0
                time.sleep(0.01)
            was_full.touch()
            with Path(self.disk, "ballast").open("wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError:
                    pass
        super().pipe_file(path, value, mode=mode, **options)
"""


@pytest.fixture
def object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Disk], Any]:
    """A class that the uploaders can import, too."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "object_store.py").write_text(OBJECT_STORE)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    monkeypatch.delitem(sys.modules, "object_store", raising=False)
    return lambda disk: importlib.import_module("object_store").ObjectStore(str(disk.place))


@pytest.mark.parametrize(("workers", "where"), [(0, "local"), (2, "local"), (2, "remote")])
def test_a_run_is_not_finished_if_its_last_checkpoint_cannot_be_committed(
    tmp_path: Path, undo: ExitStack, workers: int, where: str, object_store: Callable[[Disk], Any]
) -> None:
    """train_func has returned then, as its files were taken from it."""

    def leave_no_room_for_the_manifest() -> str:
        checkpoint = distrain.get_checkpoint()
        if where == "remote" and distrain.get_context().get_world_rank() == 0:
            atexit.register(disk.place.with_name("ended").touch)
        for number in range(2 if checkpoint is None else 1):
            distrain.collective.barrier()
            if number == 1 and where == "local" and distrain.get_context().get_world_rank() == 0:
                files = [disk.run / "metrics.jsonl", disk.run / "events.jsonl"]
                while not all(file.exists() and file.stat().st_size for file in files):  # each first line needs a page
                    time.sleep(0.01)
                fill(disk, pages_left=max(workers, 1))
            distrain.collective.barrier()
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, f"shard-{distrain.get_context().get_world_rank()}").write_bytes(bytes(PAGE_BYTES))
                distrain.report({"number": number}, checkpoint=Checkpoint.from_directory(folder))
        return "done" if checkpoint is None else "again"

    disk = small_disk(tmp_path, undo)
    storage: dict[str, Any] = {} if where == "local" else {"storage_filesystem": object_store(disk)}
    fit = partial(Fit(storage=disk.run.parent), leave_no_room_for_the_manifest, workers=workers, name="run", **storage)
    with pytest.raises(
        ControllerError, match=r"cannot (write|store) a checkpoint\b.*No space left on device"
    ) as raised:
        fit()
    assert "checkpoint: checkpoint_000000, " in str(raised.value)
    assert json.loads((disk.run / "run.json").read_text())["status"] != "finished"
    empty(disk)
    assert fit().return_value == "again"
    assert newest(disk.run) == 1


def test_a_storage_that_fails_while_a_rank_does_is_named(tmp_path: Path, undo: ExitStack) -> None:
    def fill_and_fail() -> None:
        distrain.report({}, checkpoint=Checkpoint.from_dict({}))
        distrain.get_all_reported_checkpoints()  # what is written before it is committed is on the disk, too
        fill(disk, pages_left=1)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "shard").write_bytes(bytes(PAGE_BYTES))
            distrain.report({}, checkpoint=Checkpoint.from_directory(folder))
        raise ValueError("of the rank")

    disk = small_disk(tmp_path, undo)
    with pytest.raises(TrainingFailedError) as raised:
        Fit(storage=disk.run.parent)(fill_and_fail, workers=1, failure_config=FailureConfig(max_failures=3))
    assert re.search(r"cannot (write|store) a checkpoint in", str(raised.value))  # the commit fails, or the copy
    assert NO_SPACE in str(raised.value)


# -- user's processes ------------------------------------------------------------------------------------------------

USERS_SCRIPT = f"""
from __future__ import annotations
import os, signal, sys, tempfile, time
from pathlib import Path
import distrain
from distrain import Checkpoint

{inspect.getsource(train)}
def fit(strike=None, epochs={EPOCHS}, num_to_keep=None):
    run = distrain.RunConfig(
        name="run",
        storage_path=sys.argv[1],
        checkpoint_config=distrain.CheckpointConfig(num_to_keep=num_to_keep),
    )
    trainer = distrain.DataParallelTrainer(
        train,
        train_loop_config={{"strike": strike, "epochs": epochs}},
        scaling_config=distrain.ScalingConfig(num_workers=2),
        run_config=run,
    )
    return trainer.fit()
"""


@dataclass(frozen=True, kw_only=True)
class User:
    """Starts user's processes that end with ``fit()`` in one run directory."""

    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "run"

    def start(self, source: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
        script = self.folder / "script.py"
        script.write_text(USERS_SCRIPT + source)
        command = [sys.executable, str(script), str(self.run.parent), *map(str, arguments)]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=self.folder, **options
        )

    def __call__(self, source: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
        user = self.start(source, *arguments, **options)
        said, complained = user.communicate(timeout=60)
        return subprocess.CompletedProcess(user.args, user.returncode, said, complained)


@pytest.fixture
def user(tmp_path: Path) -> User:
    return User(folder=tmp_path)


# -- killed at each step ---------------------------------------------------------------------------------------------

KILLED_AT_A_STEP = """
import psutil, threading
from distrain.coordinator.store.local_store import LocalStore

method, step, victims = sys.argv[2], int(sys.argv[3]), sys.argv[4]
CHANGES = {"mkdir", "rename", "replace", "open", "write", "flush", "fsync", "close", "unlink", "rmdir"}
original, calls, steps = getattr(LocalStore, method), [], []

def die():
    if victims == "user and agent":
        for child in psutil.Process().children():
            for process in (*child.children(), child):  # the agent, and its guard
                process.kill()
    os.kill(os.getpid(), signal.SIGKILL)

def before_each_call(frame, event, function):
    if event == "c_call" and function.__name__ in CHANGES:
        if len(steps) == step:
            die()
        steps.append(function.__name__)

def stepwise(self, *arguments, **options):
    calls.append(arguments)
    if len(calls) < 2:
        return original(self, *arguments, **options)
    sys.setprofile(before_each_call)
    threading.setprofile(before_each_call)
    value = original(self, *arguments, **options)
    sys.setprofile(None)
    for thread in threading.enumerate():
        if thread.name == "distrain-delete":
            thread.join()
    Path(sys.argv[1], "steps").write_text(" ".join(steps))
    die()

setattr(LocalStore, method, stepwise)
fit(num_to_keep=1 if method == "_delete" else None)
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("method", "must_have", "sampled"),
    [("_rename", "rename write fsync", 3), ("_delete", "rename unlink rmdir", 2)],
    ids=["commit", "delete"],
)
@pytest.mark.timeout(300)
def test_killed_at_each_step_of_a(
    method: str, must_have: str, sampled: int, user: User, request: pytest.FixtureRequest
) -> None:
    """One user's process after the other continues the run, commits once more, and dies before the n-th system call
    that its second commit or deletion makes, alone or with its agent. The first one dies after the last, and counts."""

    def live(step: int, victims: str) -> None:
        before, reached = committed(user.run), newest(user.run)
        died = user(KILLED_AT_A_STEP, method, step, victims)
        assert died.returncode == -signal.SIGKILL, died.stderr
        if reached >= 0:
            assert f"continuing the unfinished run {user.run} at checkpoint_{reached:06d}" in died.stderr
        after = committed(user.run)
        assert newest(user.run) > reached
        if method == "_rename":
            assert after.items() >= before.items()

    live(1_000_000, "user and agent")
    steps = (user.run.parent / "steps").read_text().split()
    assert set(must_have.split()) <= set(steps), steps
    cells = [(step, victims) for step in range(len(steps)) for victims in ("user", "user and agent")]
    if not request.config.getoption("--all"):
        cells = sorted(random.Random(SEED).sample(cells, sampled))
    for step, victims in cells:
        live(step, victims)
    before, reached = committed(user.run), newest(user.run)
    last = user(f"print(fit(num_to_keep={1 if method == '_delete' else None}).return_value)")
    assert last.stdout == f"began at {reached + 1}\n", last.stderr
    names = sorted(path.name for path in user.run.glob("*checkpoint*"))
    every = [f"checkpoint_{index:06d}" for index in range(reached + EPOCHS + 1)]
    assert names == (every if method == "_rename" else every[-1:])
    if method == "_rename":
        assert committed(user.run).items() >= before.items()
    assert not (user.run / ".staging").exists()
    assert_reports_are_kept_once(user.run)


# -- two coordinators, and the clock ---------------------------------------------------------------------------------

WAITS = """
def wait():
    Path(sys.argv[1], "waits").touch()
    while not Path(sys.argv[1], "end").exists():
        time.sleep(0.001)
print(fit(wait).return_value)
"""


def test_the_second_goes_on_as_soon_as_the_first_is_dead_though_its_agent_hangs(user: User) -> None:
    first = user.start(WAITS)
    wait_until((user.run.parent / "waits").exists)
    (guard,) = psutil.Process(first.pid).children()
    (agent,) = guard.children()
    agent.suspend()
    first.kill()
    first.communicate(timeout=60)
    before = committed(user.run)
    assert user("print(fit().return_value)").stdout == "began at 2\n"
    assert committed(user.run).items() > before.items()
