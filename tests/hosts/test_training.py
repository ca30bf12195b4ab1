"""Training on three hosts with different slots, homes and interpreters: placement, rendezvous, and environment."""

from __future__ import annotations

import pytest

from tests.hosts.user import MAIN, User

sampled = pytest.mark.sample(4, of="training on several hosts")

OVER_TORCH = """
from distrain.torch import TorchTrainer

def train():
    import torch
    total = torch.tensor(float(distrain.get_context().get_world_rank() + 1))
    torch.distributed.all_reduce(total)
    distrain.report({"sum": total.item(), "place": place(), "address": os.environ["MASTER_ADDR"],
                     "interface": os.environ["GLOO_SOCKET_IFNAME"], "nccl": os.environ.get("NCCL_SOCKET_IFNAME")})
"""


# -- placement and rendezvous ----------------------------------------------------------------------------------------


@sampled
def test_torch_trains_over_three_hosts_with_different_slots(user: User) -> None:
    reports = user.trains(OVER_TORCH, "TorchTrainer, num_workers=6, hostfile=hostfile").reports()
    assert [report["place"] for report in reports] == user.lab.places
    assert [report["sum"] for report in reports] == [21.0] * 6
    network = {(report["address"], report["interface"], report["nccl"]) for report in reports}
    assert network == {("10.77.0.11", "eth0", "=eth0")}


@pytest.mark.slow
def test_hosts_may_meet_over_ipv6(user: User) -> None:
    reports = user.trains(OVER_TORCH, 'TorchTrainer, num_workers=2, hosts="[fd77::11]:1,[fd77::12]:1"').reports()
    assert [(report["address"], report["sum"]) for report in reports] == [("fd77::11", 3.0)] * 2


NETWORK = """
def train():
    names = ("MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    distrain.report({name: os.environ[name] for name in names})
"""


@sampled
def test_the_users_own_network_variables_win(user: User) -> None:
    (user.folder / "hosts").write_text("alpha env.GLOO_SOCKET_IFNAME=lo\nbeta\n")
    call = 'num_workers=2, hostfile="hosts", run={"worker_runtime_env": {"env_vars": {"MASTER_ADDR": "alpha"}}}'
    reports = user.trains(NETWORK, call, NCCL_SOCKET_IFNAME="ib0").reports()
    assert [report["MASTER_ADDR"] for report in reports] == ["alpha"] * 2
    assert [report["GLOO_SOCKET_IFNAME"] for report in reports] == ["lo", "eth0"]
    assert [report["NCCL_SOCKET_IFNAME"] for report in reports] == ["ib0"] * 2


# -- what goes along -------------------------------------------------------------------------------------------------


SPY = """
def train():
    distrain.report({"found": found(), "it": os.environ["TOKEN"]})
    Path(f"seen-{place()[0]}").touch()
    while not Path("looked").exists():
        time.sleep(0.01)
"""

LOOK = """
import contextlib, threading, time

def found():
    seen = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # processes end
            seen += [str(path)] if b"pass" + b"word-7" in path.read_bytes() else []
    return seen

def look():
    while len(list(Path(".").glob("seen-*"))) < 2:
        time.sleep(0.01)
    Path("looked").write_text(str(found()))
"""


@sampled
def test_no_value_is_in_the_arguments_of_any_process(user: User) -> None:
    """Which every user of a host can read. Processes of all hosts are looked at from here, too."""
    (user.folder / "hosts").write_text("alpha\nbeta env.TOKEN=password-7\n")
    variables = '{"worker_runtime_env": {"env_vars": {"TOKEN": os.environ["NCCL_TOKEN"]}}}'
    main = f"    threading.Thread(target=look).start()\n    main(num_workers=2, hostfile='hosts', run={variables})\n"
    source = LOOK + SPY + MAIN + "if __name__ == '__main__':\n" + main
    reports = user.runs(source, NCCL_TOKEN="password-7").reports()
    assert reports == [{"found": [], "it": "password-7"}] * 2
    assert (user.folder / "looked").read_text() == "[]"


# -- the command line ------------------------------------------------------------------------------------------------


@sampled
def test_hosts_may_be_named_on_the_command_line(user: User) -> None:
    (user.folder / "train.py").write_text("import os, socket; print(socket.gethostname(), os.environ['WORLD_SIZE'])")
    common = ("--storage-path", "runs", "--hosts", "beta:2,alpha:2")
    ran = user.launches(*common, "--num-workers", "3", "--ranks-shown", "0,2", "--nnodes", "2", "train.py")
    assert sorted(ran.out.splitlines()) == ["[rank 0 beta] beta 3", "[rank 2 alpha] alpha 3"]
    ran = user.launches(*common, "--num-workers", "5", "train.py")
    assert ran.code == 2
    assert "--num-workers is 5, but the hosts have only 4 slots: beta 2, alpha 2." in ran.err
