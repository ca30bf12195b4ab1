"""The table of ``distrain check``, made of facts about hosts. No process, no network."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from distrain import wire
from distrain.cli.run.check import show
from distrain.coordinator.host_check import HostFacts
from distrain.hosts.gpu_health import GpuHealth
from distrain.hosts.host import Gpu, HostInfo
from distrain.hosts.host_info import hello_of

GPUS = [GpuHealth(index=0, uuid="a", memory_bytes=8 << 30, free_bytes=6 << 30)]
PROBED = wire.HostProbed(
    nonce="nonce", versions={"torch": "2.13.0", "cloudpickle": None}, memory_free_bytes=60 << 30,
    disk_free_bytes=1 << 30, address="10.0.0.1", interface="eth0",
)  # fmt: skip
GOOD = HostFacts(
    hello=hello_of(HostInfo(name="alpha", cpus=4, memory_bytes=64 << 30, gpus=(Gpu(name="T4", uuid="a"),))),
    probed=PROBED,
    gpus=GPUS,
    sees_storage=True,
    ahead_s=-100.04,
)


@pytest.mark.parametrize(("columns", "tables"), [(40, range(4, 9)), (80, range(2, 5)), (200, (1,))])
def test_the_table_is_as_wide_as_the_terminal(columns: int, tables: range) -> None:
    """It continues below where it does not fit; nothing is cut off."""
    file = io.StringIO()
    show([], {"alpha": GOOD}, Console(file=file, width=columns, highlight=False))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= columns
    assert not any("…" in line for line in lines)
    assert sum(line.startswith("host ") for line in lines) in tables
    assert lines[-1] == "this host can train"
