"""A host or a container without memory, and one with a small /dev/shm: the error has the numbers and the cure."""

from __future__ import annotations

import mmap
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

import distrain
from distrain.decisions import pace
from tests.process.conftest import GROUP_BYTES, SSH_THAT_EXECUTES, Fit, make_fake_ssh

if TYPE_CHECKING:
    from pathlib import Path

LIMIT_BYTES = 512 << 20
SMALL = 'for command; do :; done; cd /; export command; exec unshare -m sh -c "{mount}; $command"'
MOUNT = "mount -t tmpfs -o size=16m tmpfs /dev/shm"

shm = pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "sh", "-c", MOUNT]).returncode != 0,
    reason="needs a mount namespace",
)


def test_a_rank_that_the_kernel_kills_says_how_much_it_used_and_how_that_grew(
    fit: Fit, memory_group: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "VITALS_S", 0.1)
    for name in ("memory.memsw.limit_in_bytes", "memory.limit_in_bytes"):
        if (memory_group / name).exists():
            (memory_group / name).write_text(str(LIMIT_BYTES))
    ssh = make_fake_ssh(tmp_path, f"echo $$ > {memory_group}/cgroup.procs\n{SSH_THAT_EXECUTES}")

    def train() -> None:
        if distrain.get_context().get_world_rank() == 1:
            take = "import time; taken = bytearray(b'x') * (160 << 20); print(flush=True); time.sleep(1000)"
            child = subprocess.Popen([sys.executable, "-c", take], stdout=subprocess.PIPE)
            assert child.stdout is not None
            child.stdout.readline()
            taken = []
            while True:
                taken.append(bytearray(b"x") * (4 << 20))
                time.sleep(0.03)  # the last look at the memory is not old then
        time.sleep(1000)

    with pytest.raises(distrain.WorkerGroupError) as raised:
        replace(fit, transport=ssh)(train)
    failure = raised.value.failures[0]
    found = re.fullmatch(
        r"was killed by the kernel for lack of memory during training: its processes used (\d+) MiB of the 512 MiB "
        rf"that the cgroup {memory_group} allows \(all ranks of the host together: (\d+) MiB\); "
        r"(\d+) MiB more than .* before",
        failure.summary,
    )
    assert found, failure.summary
    used, together, grown = map(int, found.groups())
    assert failure.kind == "memory"
    assert failure.max_rss_bytes >> 20 < used - 50, "the child counts"
    assert 350 < used < together <= 530
    assert 100 < grown <= used


def test_a_child_that_the_kernel_has_killed_is_told_with_its_ranks_exception(
    fit: Fit, memory_group: Path, tmp_path: Path
) -> None:
    """The child stands for a worker process of a DataLoader."""

    def train() -> None:
        if distrain.get_context().get_world_rank() == 1:
            eat = "taken = []\nwhile True: taken.append(bytearray(b'x') * (4 << 20))"
            raise RuntimeError(f"the child ended with {subprocess.run([sys.executable, '-c', eat]).returncode}")
        distrain.collective.barrier()

    ssh = make_fake_ssh(tmp_path, f"echo $$ > {memory_group}/cgroup.procs\n{SSH_THAT_EXECUTES}")
    with pytest.raises(distrain.WorkerGroupError) as raised:
        replace(fit, transport=ssh)(train)
    text = str(raised.value)
    assert text.startswith("rank 1 on ")
    assert "RuntimeError: the child ended with -9 (meanwhile, the kernel killed a process for lack of memory" in text
    assert f"of the {GROUP_BYTES >> 20} MiB that the cgroup " in text


@shm
def test_a_bus_error_from_a_full_dev_shm_names_it_with_its_size_and_the_cure(fit: Fit, tmp_path: Path) -> None:
    ssh = make_fake_ssh(tmp_path, SMALL.format(mount=MOUNT))

    def train() -> None:
        if distrain.get_context().get_world_rank() == 1:
            with open("/dev/shm/data", "wb+") as file:
                file.truncate(32 << 20)
                mmap.mmap(file.fileno(), 32 << 20)[:] = bytes(32 << 20)
        time.sleep(1000)

    with pytest.raises(distrain.WorkerGroupError) as raised:
        replace(fit, transport=ssh)(train)
    summary = raised.value.failures[0].summary
    assert summary.startswith(
        "was killed by SIGBUS (7) during training, not by distrain: /dev/shm is full: 16 MiB of its 16 MiB are used "
        "now; give the container more (docker run --shm-size=8g"
    )
