"""The coordinator is killed: the agents store the newest checkpoint from memory, and leave nothing in memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

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
sys.stdin.readline()
if sys.argv[2] == "closes":
    for agent in agents.values():
        agent.stdin.write(wire.encode(wire.Close()))
        agent.stdin.close()
time.sleep(30)
"""


@pytest.mark.parametrize("what", ["closes", "is killed", "is killed with host a"])
def test_agents_without_a_coordinator(tmp_path: Path, what: str) -> None:
    command = [sys.executable, "-c", COORDINATOR, str(tmp_path), what]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        twins = [Path("/dev/shm", folder.name) for folder in tmp_path.glob("[ab]/distrain-run-*")]
        assert len(twins) == 2
        hosts = [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)]
        if what == "is killed with host a":
            for process in hosts[1:]:
                if process.environ()["DISTRAIN_RUN_IDS"].endswith("run-a"):
                    process.send_signal(signal.SIGKILL)
        if what == "closes":
            child.stdin.write(b"go\n")
        else:
            child.kill()
        wait_until(lambda: not any(is_alive(one) for one in hosts[1:]), 15.0)
        child.kill()
    left = [twin for twin in twins if twin.exists()]
    assert len(left) <= (what == "is killed with host a")  # another run on this machine may have removed it
    scratch.remove_abandoned()
    assert not any(twin.exists() for twin in left)
    store = LocalStore(tmp_path / "run")
    verify_now(store)
    assert [saved.path.name for saved in store.committed] == ([] if what == "closes" else ["checkpoint_000007"])
    if what != "closes":
        assert Path(Checkpoint(store.committed[0].path).path, "part1").read_bytes() == b"\1" * (8 << 20)
    store.close()
    assert os.path.exists(tmp_path / "run")
