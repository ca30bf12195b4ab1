"""Open ports while several hosts train or are checked, and what a stranger on the network can do with them."""

from __future__ import annotations

import contextlib
import json
import pickle
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from tests.conftest import wait_until
from tests.hosts.lab import ADDRESSES, HOSTS, ROOT
from tests.strangers import ANY_ADDRESS, Listener, Visit, messages

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.hosts.lab import Lab
    from tests.hosts.user import User

Answers = dict[tuple[str, int], list[str]]
"""By address and port, to each message; empty if nobody could be reached there."""


@contextlib.contextmanager
def stranger_in(lab: Lab, host: str, bomb: Path, where: Sequence[tuple[str, int]]) -> Iterator[Answers]:
    """The answer to the stranger, who stays connected, silent, until the end."""
    argv = lab.argv(host, str(lab.other_python), "-m", "tests.strangers", "visit", str(bomb), json.dumps(where))
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(argv, cwd=lab.folder, env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}, **pipes) as who:
        try:
            assert who.stdout is not None
            visits = [Visit(**fields) for fields in json.loads(who.stdout.readline())]
            yield {(visit.address, visit.port): visit.answers for visit in visits}
        finally:
            assert who.stdin is not None
            who.stdin.close()
            who.wait(timeout=20)


TRAIN = """
import time
from distrain.torch import TorchTrainer

def train():
    import torch
    rank = distrain.get_context().get_world_rank()
    for moment in ("before", "after"):
        total = torch.tensor(float(rank + 1))
        torch.distributed.all_reduce(total)
        Path(f"{moment}-{rank}").touch()
        while not Path("go").exists():
            time.sleep(0.01)
    distrain.report({"sum": total.item(), "place": place(), "pid": os.getpid(), "port": os.environ["MASTER_PORT"]})
"""


def test_only_torch_listens_and_a_stranger_can_have_nothing_unpickled(user: User) -> None:
    """As the README's table says: the store on all interfaces of one host, gloo on each host's own; and for some
    seconds the agents."""
    lab, hosts, ranks = user.lab, list(HOSTS), sum(HOSTS.values())
    bomb = user.folder / "bomb"
    first: dict[str, list[Listener]] = {}
    later: dict[str, list[Listener]] = {}

    def come_by() -> Answers:
        wait_until(lambda: len(list(user.folder.glob("before-*"))) == ranks, 60.0, "the first all_reduce")
        first.update({host: lab.listeners(host) for host in ("head", *hosts)})
        where = [(to, found.port) for host in hosts for found in first[host] for to in ADDRESSES[host]]
        with stranger_in(lab, "head", bomb, where) as answered:
            wait_until(lambda: not any(agents_of(lab.listeners(host)) for host in hosts), what="PORT_OPEN_S")
            later.update({host: lab.listeners(host) for host in ("head", *hosts)})
            (user.folder / "go").touch()
            wait_until(lambda: len(list(user.folder.glob("after-*"))) == ranks, 60.0, "the second all_reduce")
            return answered

    with ThreadPoolExecutor(1) as pool:
        trained = pool.submit(user.trains, TRAIN, f"TorchTrainer, num_workers={ranks}, hostfile=hostfile")
        try:
            answered = come_by()
        finally:
            (user.folder / "go").touch()
        reports = trained.result().reports()
    assert [report["place"] for report in reports] == lab.places
    assert [report["sum"] for report in reports] == [ranks * (ranks + 1) / 2] * ranks, "strangers do not disturb"
    nonces = [answered[agent.address, agent.port] for host in hosts for agent in agents_of(first[host])]
    assert all(len(set(got) - {""}) <= 1 for got in nonces), "whatever is sent to an agent, it answers one number"
    assert not bomb.exists()
    pickle.loads(messages(bomb)[0])
    assert bomb.exists(), "it would have been seen"

    assert first["head"] == later["head"] == [], "nor the coordinator"
    workers = {(report["place"][0], report["pid"]) for report in reports}
    assert {(host, found.pid) for host in hosts for found in later[host]} == workers
    open_to_all = {(host, f.port, f.pid) for host in hosts for f in first[host] if f.address in ANY_ADDRESS}
    assert open_to_all == {(hosts[0], int(reports[0]["port"]), reports[0]["pid"])}, "the store"
    own = {(host, found.address) for host in hosts for found in first[host] if found.address not in ANY_ADDRESS}
    assert own == {(host, ADDRESSES[host][0]) for host in hosts}
    lasting = {
        (to, found.port)
        for host in hosts
        for found in later[host]
        for to in (ADDRESSES[host] if found.address in ANY_ADDRESS else [found.address])
    }
    assert {where for where, answers in answered.items() if answers} >= lasting, "the stranger has reached them"


def agents_of(found: list[Listener]) -> list[Listener]:
    return [listener for listener in found if "agent" in listener.command and "forkserver" not in listener.command]
