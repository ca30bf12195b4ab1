"""Checks of hosts: by ``--check``, and before a launch. Hosts are this
machine, names behind a program named ssh, and real hosts with something wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.conftest import wait_until
from tests.hosts.conftest import over
from tests.hosts.faults import blocked_pair, own_disk, python_with, site_of
from tests.hosts.test_training import OVER_TORCH
from tests.nvml import make_driver

if TYPE_CHECKING:
    from pathlib import Path

    from tests.hosts.one_machine import FakeSsh
    from tests.hosts.user import Ran, User

sampled = pytest.mark.sample(1, of="blocked pairs")

SILENT_HOST = "exec sleep 60"
OLD_PYTHON = "import platform\nplatform.python_version = lambda: '3.9.1'\n"
WRONG_CLOCK = "import time\nreal = time.time\ntime.time = lambda: real() - 100.0\n"


def findings(ran: Ran) -> list[str]:
    """The lines with problems. The exit code tells if any of them is fatal, and no file is left in the storage."""
    lines = [line for line in ran.out.splitlines() if line.startswith(("✗", "!"))]
    assert ran.code == any(line.startswith("✗") for line in lines), ran.err
    assert ("cannot train like this: " in ran.out.splitlines()[-1]) == bool(ran.code)
    if (ran.folder / "runs").is_dir():
        assert list((ran.folder / "runs").iterdir()) == []
    return lines


# -- hosts that are well ---------------------------------------------------------------------------------------------


def test_three_hosts_that_are_well_are_shown_with_what_they_have(user: User) -> None:
    """One greets at login, one has another interpreter."""
    (user.folder / "hosts").write_text(user.lab.hostfile.read_text())
    ran = user.checks()
    assert (findings(ran), ran.err) == ([], "")
    head, *rows, empty, verdict = ran.out.splitlines()
    assert head.split()[:6] == ["host", "reached", "python", "CPUs", "GPUs", "torch"]
    assert [row.split()[0] for row in rows] == ["alpha", "beta:2222", "gamma"]
    for row, address in zip(rows, ("10.77.0.11", "10.77.0.12", "10.77.0.13"), strict=True):
        words = row.split()
        assert words[words.index(address) + 1] == "eth0"
        assert "ok" in words, "storage"
    assert (empty, verdict) == ("", "3 hosts can train together")


@over("this_machine")
def test_gpus_that_are_ill_or_in_use_are_named(user: User, tmp_path: Path) -> None:
    """None of it keeps the host from training."""
    environment = {"LD_LIBRARY_PATH": str(make_driver(tmp_path / "driver")), "FAKE_GPUS": "gstsuf"}
    ran = user.checks(**environment, FAKE_USER=str(os.getpid()), CUDA_VISIBLE_DEVICES="0,1,2,3,4,5")
    assert ran.code == 0
    assert "6.0 GiB of 8.0 GiB" in ran.out
    assert [text.removeprefix("! localhost: ").partition(";")[0] for text in findings(ran)] == [
        "GPU 1, 3: faulty memory, which is replaced when the GPU is reset: nvidia-smi --gpu-reset, or restart the host",
        "GPU 1, 3: 2 uncorrectable memory errors since the driver was loaded",
        "GPU 1, 3: slowed down by heat and the power supply (91 °C)",
        "GPU 2: 2.0 of 8.0 GiB are taken, by graphics or by a process that cannot be seen there",
        f"GPU 4: used by {psutil.Process().name()} (pid {os.getpid()})",
        "GPU 5: faulty memory, and no spare memory left to replace it",
    ]


# -- bytes that change on their way ----------------------------------------------------------------------------------

FLIPS = """
import os, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "distrain.torch.byte_check":
            sys.meta_path.remove(self)
            from torch import distributed

            exchange = distributed.batch_isend_irecv

            def flip(both):
                for one in both:
                    if one.op is distributed.isend and distributed.get_rank() == 2 and one.peer == 1:
                        one.tensor = one.tensor.clone()
                        one.tensor[-1] ^= 1
                return exchange(both)

            distributed.batch_isend_irecv = flip

sys.meta_path.insert(0, Finder())
"""


@over("fake_ssh")
def test_bytes_that_change_between_two_hosts_are_named_with_their_direction(user: User) -> None:
    """Only those that beta sends to the second worker of alpha."""
    flipping = python_with(user.folder / "flipping", FLIPS)
    (user.folder / "hosts").write_text(f"alpha slots=2\nbeta {flipping}\n")
    cure = "replace the cable or the network adapter; for GPUs, try --env NCCL_NET_GDR_LEVEL=LOC"
    assert findings(user.checks()) == []
    ran = user.checks("--deep")
    bad, advice = findings(ran)
    assert bad.startswith("✗ beta, alpha: beta worker 0 -> alpha worker 1: 1 of 1 bytes differ, first at offset 0: 0x")
    assert advice == f"! beta, alpha: {cure}"
    assert ran.out.splitlines()[-1] == "cannot train like this: alpha, beta"
    ran = user.checks("--deep", "--json")
    fatal = {problem["host"] for problem in json.loads(ran.out)["problems"] if problem["fatal"]}
    assert (ran.code, fatal) == (1, {"alpha", "beta"})


@over("this_machine")
def test_one_worker_has_nothing_to_compare(user: User) -> None:
    (user.folder / "hosts").write_text("localhost slots=1\n")
    assert findings(user.checks("--deep")) == ["! localhost: --deep needs two slots: nothing is sent"]


# -- hosts that lack something ---------------------------------------------------------------------------------------


@over("fake_ssh")
def test_no_problem_of_a_host_hides_another_one(user: User) -> None:
    customized = {"old": OLD_PYTHON, "packages": "", "clock": WRONG_CLOCK}
    pythons = {name: python_with(user.folder / name, source) for name, source in customized.items()}
    for package in ("torch-2.0.0", "cloudpickle-1.0.0"):
        installed = site_of(user.folder / "packages") / f"{package}.dist-info"
        installed.mkdir()
        (installed / "METADATA").write_text("Name: {}\nVersion: {}\n".format(*package.split("-")))
    (user.folder / "hosts").write_text(
        f"good\nnowhere cwd=/nowhere\nnothing python=/nowhere/python\nold {pythons['old']}\n"
        f"packages {pythons['packages']}\nclock {pythons['clock']}\n"
    )
    ran = user.checks()
    for beginning in (
        "✗ old: it has Python 3.9.1, this machine 3.",
        "✗ nothing: distrain's process there has ended: exit code 127, there is no such program: correct",
        "✗ nowhere: no worker can run in /nowhere: No such file or directory; create it, or set cwd=",
        "✗ packages: it has cloudpickle 1.0.0, this machine ",
        "! packages: it has torch 2.0.0, this machine ",
        "! clock: its clock is 100.0 s behind this machine's",
    ):
        assert any(line.startswith(beginning) for line in findings(ran)), beginning
    assert len(findings(ran)) == 6
    assert ran.out.splitlines()[-1] == "cannot train like this: nowhere, nothing, old, packages"


def test_a_storage_that_is_not_shared_is_found_although_the_path_exists(user: User) -> None:
    with own_disk(user.lab, "beta", user.folder / "runs"):
        ran = user.checks("--hosts", "alpha:1,beta:1")
    [text] = findings(ran)
    assert text.startswith("! beta: it does not see the storage, which cannot be opened: No such file")


@sampled
def test_a_pair_that_is_blocked_is_named_both_ways(user: User) -> None:
    with blocked_pair(user.lab):
        alpha, beta = findings(user.checks("--hosts", "alpha:1,beta:1,localhost:1"))
    assert alpha.startswith("✗ alpha: beta cannot connect to it at 10.77.0.11 (eth0): no answer within 4 s; allow TCP")
    assert beta.startswith("✗ beta: alpha cannot connect to it at 10.77.0.12 (eth0): no answer within 4 s; allow TCP")


@over("this_machine")
def test_gpus_are_counted_for_as_many_workers_as_are_asked_for(user: User) -> None:
    [text] = findings(user.checks("--use-gpu", "--num-workers", "3", CUDA_VISIBLE_DEVICES=""))
    assert text.startswith("✗ localhost: localhost has 0 GPUs, but 3 workers with 1 each need 3.")


@over("fake_ssh")
def test_ctrl_c_ends_a_check_and_leaves_nothing(lab: FakeSsh, user: User) -> None:
    lab.make_ssh(f"touch {user.folder}/started\n{SILENT_HOST}")
    argv = [sys.executable, "-m", "distrain.launch", "--check", "--hosts", "one:1", "--storage-path", "runs"]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, cwd=user.folder, env=lab.environment(), stdout=pipe) as running:
        wait_until((user.folder / "started").exists, what="ssh")
        running.send_signal(signal.SIGINT)
        assert running.wait(timeout=4) == 130  # nobody is waited for who has not even answered
    assert list((user.folder / "runs").iterdir()) == []


# -- before a launch --------------------------------------------------------------------------------------------------


@sampled
def test_a_launch_is_refused_when_a_pair_is_blocked_long_before_the_framework_gives_up(user: User) -> None:
    began = time.monotonic()
    with blocked_pair(user.lab):
        ran = user.trains(OVER_TORCH, "TorchTrainer, num_workers=2, hosts='alpha:1,beta:1'")
    assert time.monotonic() - began < 30.0
    assert ran.code == 1
    assert " cannot connect to it at 10.77.0.1" in ran.err
    assert "no answer within 4 s" in ran.err
