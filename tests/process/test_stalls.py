"""The disk, a callback, the console or the name server stalls for longer than a host's lease, and no host is lost.

Each cell is a run in a process of its own, whose storage can really be frozen (``fsfreeze``). Ranks write down how long
each of their reports took.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.conftest import wait_until
from tests.process.conftest import records
from tests.tables import deal_cells

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@dataclass(frozen=True)
class Cell:
    what: str
    when: str
    where: str

    def __str__(self) -> str:
        return f"{self.what} at {self.when}, {self.where}"


CELLS = [
    Cell(what, when, where)
    for what, when, where in itertools.product(
        ("storage", "callback", "console", "resolver"),
        ("start", "report", "commit", "restart", "end"),
        ("local", "ssh"),
    )
    if (what != "resolver" or (where == "ssh" and when in ("start", "restart")))
    and (what not in ("callback", "console") or when != "start")  # there is nothing to call and to show yet
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    deal_cells(metafunc, CELLS, sample=2)


SCRIPT = """
import os, sys, tempfile, time
from pathlib import Path
import distrain
from distrain import Checkpoint, FailureConfig, RunConfig, ScalingConfig, UserCallback
from distrain.hosts.hostfile import HostSpec
from distrain.worker.job.job import FunctionWork
from distrain.coordinator.fit import run_work
from distrain.coordinator.connection.transport import LocalTransport, CommandTransport

place, storage, what, when, where, stall_s, lease_s = Path(sys.argv[1]), *sys.argv[2:6], *map(float, sys.argv[6:])

def ask_for_stall():
    (place / "stall").touch()
    while not (place / "stalled").exists():
        time.sleep(0.01)

def train(config):
    context = distrain.get_context()
    rank, again = context.get_world_rank(), distrain.get_checkpoint() is not None
    slowest = 0.0
    def report(metrics):
        nonlocal slowest
        began = time.monotonic()
        distrain.report(metrics)
        slowest = max(slowest, time.monotonic() - began)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "file").write_text("first")
        distrain.report({"step": -1}, checkpoint=Checkpoint(folder))
    if when in ("report", "commit", "restart") and not again:
        distrain.collective.barrier()
        if rank == 0:
            ask_for_stall()
        distrain.collective.barrier()
        if what == "console":
            print("x" * 100 + "\\n" + "\\n".join("y" * 1000 for _ in range(300)), flush=True)
        if when == "restart" and rank == 1:
            raise ValueError("restart, please")
        if when == "commit" and rank == 0:
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "file").write_text("second")
                distrain.report({"step": 0}, checkpoint=Checkpoint(folder))
    step = 0
    while when in ("report", "commit", "restart") and not (place / "over").exists():
        step += 1
        report({"step": step, "rank": rank})
        time.sleep(0.05)
    distrain.collective.barrier()
    if rank == 1 or when != "commit":
        (place / f"slowest-{rank}").write_text(str(slowest))
    if when == "end" and rank == 0:
        ask_for_stall()
        report({"step": step + 1})
        print("\\n".join("y" * 1000 for _ in range(300)), flush=True)
    return "done"

class Slow(UserCallback):
    def after_report(self, run_context, metrics, checkpoint):
        if what == "callback" and (place / "stall").exists() and not (place / "called").exists():
            (place / "called").touch()
            time.sleep(stall_s)

if where == "ssh":
    transports = [
        CommandTransport(
            host=HostSpec(name=name, address=name, slots=1),
            template=(str(place / "ssh"), "-T", name, "{command}"),
            ships=False,
            lease_s=lease_s,
        )
        for name in ("one", "two")
    ]
else:
    transports = [LocalTransport()]
try:
    result = run_work(
        FunctionWork(function=train, config={}, backend=distrain.BackendConfig()),
        ScalingConfig(num_workers=2),
        RunConfig(
            name="run",
            storage_path=storage,
            callbacks=[Slow()],
            failure_config=FailureConfig(max_failures=1, host_lease_s=lease_s),
        ),
        transports=transports,
    )
except distrain.PreemptionError as error:
    sys.exit(error.exit_code)
assert result.return_value == "done"
"""

SITECUSTOMIZE = """
import os, socket, sys, time
if os.path.exists({stall!r}) and "agent" in sys.orig_argv:
    honest = socket.getaddrinfo
    def getaddrinfo(host, *rest, **options):
        if host in ("one", "two"):
            time.sleep({stall_s})
            host = "127.0.0.1"
        return honest(host, *rest, **options)
    socket.getaddrinfo = getaddrinfo
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, which can be frozen."""
    image, place = tmp_path / "image", tmp_path / "disk"
    if shutil.which("mkfs.ext4") is None or shutil.which("fsfreeze") is None:
        pytest.skip("there is no mkfs.ext4 or fsfreeze")
    place.mkdir()
    image.touch()
    os.truncate(image, 32 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    if subprocess.run(["mount", "-o", "loop", image, place], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    with ExitStack() as undo:
        undo.callback(subprocess.run, ["umount", "--lazy", place])
        undo.callback(subprocess.run, ["fsfreeze", "-u", place], stderr=subprocess.DEVNULL)
        yield place


class Staller(threading.Thread):
    """Stalls the thing once the run asks for it; ``lift()`` is called after the time."""

    def __init__(self, place: Path, stall: Callable[[], object], lift: Callable[[], object], stall_s: float) -> None:
        super().__init__(daemon=True)
        self._place, self._stall, self._lift, self._stall_s = place, stall, lift, stall_s

    def run(self) -> None:
        while not (self._place / "stall").exists():
            time.sleep(0.005)
        self._stall()
        (self._place / "stalled").touch()
        time.sleep(self._stall_s)
        self._lift()
        (self._place / "over").touch()


def test_nothing_is_lost_when_something_stalls(
    cell: Cell, tmp_path: Path, disk: Path, request: pytest.FixtureRequest
) -> None:
    whole = request.config.getoption("--all")
    stall_s, lease_s = (30.0, 3.0) if whole else (5.0, 2.0)
    place = tmp_path / "place"
    place.mkdir()
    (place / "script.py").write_text(SCRIPT)
    body = f'touch "{place}/stall"; while [ ! -e "{place}/stalled" ]; do sleep 0.02; done'
    ssh = place / "ssh"
    ssh.write_text(
        f"#!/bin/sh\n{body if cell.when == 'start' else ''}\n"
        f'export PYTHONPATH="{place}/site"\nfor command; do :; done; cd /; exec sh -c "$command"\n'
    )
    ssh.chmod(0o755)
    (place / "site").mkdir()
    if cell.what == "resolver":
        (place / "site" / "sitecustomize.py").write_text(
            SITECUSTOMIZE.format(stall=str(place / "stall"), stall_s=stall_s)
        )
    frozen = cell.what == "storage"
    read = threading.Event()
    staller = Staller(
        place,
        lambda: subprocess.run(["fsfreeze", "-f", disk], check=True) if frozen else None,
        lambda: subprocess.run(["fsfreeze", "-u", disk], check=True) if frozen else read.set(),
        stall_s,
    )
    staller.start()
    if cell.when == "start" and cell.where == "local":
        (place / "stall").touch()  # as soon as the directory is open, or before
    arguments = [place, disk / "runs", cell.what, cell.when, cell.where, stall_s, lease_s]
    with subprocess.Popen(
        [sys.executable, place / "script.py", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=place,
    ) as user:
        assert user.stdout is not None
        if cell.what == "console":
            assert read.wait(120.0)
        text = user.stdout.read()
        assert user.wait(120.0) == 0, text[-5000:]
    assert "silent for" not in text
    run = disk / "runs" / "run"
    story = json.loads((run / "run.json").read_text())
    assert (story["status"], len(story["attempts"])) == ("finished", 2 if cell.when == "restart" else 1), text
    assert {record["rank"] for record in records(run)} == {0, 1}
    slowest_s = max(float(path.read_text()) for path in place.glob("slowest-*"))
    print(f"{cell}: the slowest report took {1000 * slowest_s:.0f} ms")
    assert slowest_s < stall_s / 4


def test_a_run_can_be_stopped_while_its_disk_stalls(tmp_path: Path, disk: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (place / "script.py").write_text(SCRIPT)
    stop = threading.Event()
    staller = Staller(
        place,
        lambda: subprocess.run(["fsfreeze", "-f", disk], check=True),
        lambda: (stop.wait(60.0), subprocess.run(["fsfreeze", "-u", disk], check=True)),
        0.0,
    )
    staller.start()
    arguments = [place, disk / "runs", "storage", "report", "local", "0", "3"]
    with subprocess.Popen(
        [sys.executable, place / "script.py", *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as user:
        wait_until((place / "stalled").exists)
        user.send_signal(signal.SIGTERM)
        wait_until(lambda: not children_of(user.pid), 50.0, "the end of the agent")
        stop.set()
        assert user.wait(60.0) == 128 + signal.SIGTERM
    assert json.loads((disk / "runs" / "run" / "run.json").read_text())["status"] == "stopped"


def children_of(pid: int) -> list[str]:
    tasks = f"/proc/{pid}/task/{pid}/children"
    with open(tasks) as file:
        return file.read().split()
