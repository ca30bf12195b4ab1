"""The coordinator is killed: the agents store the newest checkpoint from memory, and leave nothing in memory."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil

from distrain.coordinator.store.local_store import LocalStore
from distrain.storage.checkpoint import Checkpoint
from distrain.system import scratch
from tests.conftest import is_alive, verify_now, wait_until

COORDINATOR = """
import os, sys, time, zlib
from pathlib import Path
from distrain import wire
from distrain.coordinator.store.local_store import LocalStore
from distrain.storage.commit import MemoryPart, MemoryRound
from distrain.storage.records import file_entry
from distrain.system import process, scratch

tmp = Path(sys.argv[1])
store = LocalStore(tmp / "run")
agents, parts, files = {}, {}, {}
for rank, name in enumerate("ab"):
    (tmp / name).mkdir()
    environment = {"TMPDIR": str(tmp / name), process.RUN_IDS: f"run-{name}"}
    agents[name] = process.spawn(process.bootstrap_argv("agent", f"run-{name}", "no-gpus"), environment=environment)
    while not (found := list((tmp / name).glob("distrain-run-*"))):
        time.sleep(0.01)
    while not (twin := scratch.memory_directory(str(found[0]))).exists():
        time.sleep(0.01)
    data = bytes([rank]) * (8 << 20)
    files[f"part{rank}"] = file_entry(len(data), zlib.crc32(data), rank)
    parts[rank] = MemoryPart(name, str(twin / f"rank_{rank}" / "0-1"), "ba"[rank])
    for folder in (twin / f"rank_{rank}" / "0-1", twin / "copies" / "checkpoint_000007" / f"rank_{1 - rank}"):
        folder.mkdir(parents=True)
    (twin / f"rank_{rank}" / "0-1" / f"part{rank}").write_bytes(data)
    other = bytes([1 - rank]) * (8 << 20)
    (twin / "copies" / "checkpoint_000007" / f"rank_{1 - rank}" / f"part{1 - rank}").write_bytes(other)
manifest = {"name": None, "index": 7, "metrics": {}, "files": files}
made = MemoryRound("checkpoint_000007", manifest, {}, {}, parts)
for rank, (name, agent) in enumerate(agents.items()):
    for message in (
        wire.KeepRound(host=name, keep=[made.name], run=str(tmp / "run"), body=made.encoded()),
        wire.HashFiles(attempt=0, rank=rank, ordinal=1, folder=parts[rank].folder, files=[f"part{rank}"]),
    ):
        agent.stdin.write(wire.encode(message))
    agent.stdin.flush()
    seen = b""
    while b"FilesCopied" not in seen:
        seen += os.read(agent.stdout.fileno(), 65536)
print("ready", flush=True)
time.sleep(30)
"""


def test_agents_without_a_coordinator_store_a_checkpoint_also_if_one_of_them_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COORDINATOR, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        twins = [Path("/dev/shm", folder.name) for folder in tmp_path.glob("[ab]/distrain-run-*")]
        assert len(twins) == 2
        hosts = psutil.Process(child.pid).children(recursive=True)
        for process in hosts:
            if process.environ()["DISTRAIN_RUN_IDS"].endswith("run-a"):
                process.send_signal(signal.SIGKILL)
        child.kill()
        wait_until(lambda: not any(is_alive(one) for one in hosts), 15.0)
    left = [twin for twin in twins if twin.exists()]
    assert len(left) <= 1  # another run on this machine may have removed it
    scratch.remove_abandoned()
    assert not any(twin.exists() for twin in left)
    store = LocalStore(tmp_path / "run")
    verify_now(store)
    [saved] = store.committed
    assert saved.path.name == "checkpoint_000007"
    assert Path(Checkpoint(saved.path).path, "part1").read_bytes() == b"\1" * (8 << 20)
    store.close()
