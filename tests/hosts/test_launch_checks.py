"""Checks of the hosts before a launch, and the errors and warnings for what they find."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.hosts.faults import blocked_pair, own_disk

if TYPE_CHECKING:
    from tests.hosts.user import User

sampled = pytest.mark.sample(2, of="checks before a launch")

TRAIN = "def train():\n    distrain.report({'place': place()})\n"
OVER_TORCH = "from distrain.torch import TorchTrainer\n" + TRAIN
UNTIL_SHOWN = """
import logging, time

class Listener(logging.Handler):
    def emit(self, record):
        if {phrase!r} in record.getMessage():
            Path("shown").touch()

logging.getLogger("distrain").addHandler(Listener())

def train():
    while not Path("shown").exists():
        time.sleep(0.01)
    distrain.report({{'place': place()}})
"""
"""Trains until its user is shown a line with this phrase."""
TWO = "hosts='alpha:1,beta:1'"


@sampled
@pytest.mark.parametrize("where", [f"num_workers=2, {TWO}", "num_workers=1, hosts='beta'"])
def test_a_launch_says_which_hosts_do_not_see_the_storage(user: User, where: str) -> None:
    with own_disk(user.lab, "beta", user.folder / "runs"):
        ran = user.trains(TRAIN, where)
    assert ran.code == 0
    assert "beta does not see the run directory, which cannot be opened: No such file or directory; its" in ran.err


@sampled
def test_a_launch_is_refused_when_a_pair_is_blocked_long_before_the_framework_gives_up(user: User) -> None:
    began = time.monotonic()
    with blocked_pair(user.lab):
        ran = user.trains(OVER_TORCH, f"TorchTrainer, num_workers=2, {TWO}")
    assert time.monotonic() - began < 30.0
    assert ran.code == 1
    assert " cannot connect to it at 10.77.0.1" in ran.err
    assert "no answer within 4 s" in ran.err


@sampled
def test_a_host_that_takes_the_place_of_a_lost_one_is_looked_at_too(user: User) -> None:
    """Beta's agent freezes; the spare host has a disk of its own where the run directory should be."""
    train = """
def train():
    import psutil, signal, time
    if socket.gethostname() == "beta":
        os.kill(psutil.Process().parents()[1].pid, signal.SIGSTOP)
    distrain.report({'place': place()})
"""
    call = "run={'failure_config': distrain.FailureConfig(max_failures=2, host_lease_s=2)}, num_workers=3"
    with own_disk(user.lab, "gamma", user.folder / "runs"):
        ran = user.trains(train, f"{call}, hostfile=hostfile")
    assert ran.code == 0
    assert "on beta:2222 was lost: it has been silent for 2 s" in ran.err
    assert "gamma does not see the run directory, which cannot be opened: No such file or directory; its" in ran.err


@sampled
def test_ranks_that_need_not_meet_train_although_they_could_not(user: User) -> None:
    shown = "alpha: beta cannot connect to it at 10.77.0.11 (eth0): no answer within 4 s"
    with blocked_pair(user.lab):
        ran = user.trains(UNTIL_SHOWN.format(phrase=shown), f"num_workers=2, {TWO}")
    assert len(ran.reports()) == 2
    assert f"distrain: {shown}" in ran.err
