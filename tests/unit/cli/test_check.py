"""The table of ``distrain check``, made of facts about hosts. No process, no network."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from distrain import wire
from distrain.cli.run.check import show
from distrain.coordinator.host_check import HostFacts
from distrain.decisions.host_checks import Finding
from distrain.hosts.gpu_health import GpuHealth
from tests.unit.decisions.test_run_machine import hello

GPUS = [GpuHealth(index=0, board="a", memory_bytes=8 << 30, free_bytes=6 << 30)]
PROBED = wire.HostProbed(
    nonce="nonce", versions={"torch": "2.13.0", "cloudpickle": None}, memory_free_bytes=60 << 30,
    disk_free_bytes=1 << 30, address="10.0.0.1", interface="eth0",
)  # fmt: skip
GOOD = HostFacts(
    hello=replace(hello(), memory_bytes=64 << 30, gpus=[{"name": "T4", "uuid": "a", "board": "a", "pci": ""}]),
    probed=PROBED,
    gpus=GPUS,
    sees_storage=True,
    ahead_s=-100.04,
)


def shown(*findings: Finding, columns: int = 400, **hosts: HostFacts) -> list[str]:
    file = io.StringIO()
    show(findings, hosts, Console(file=file, width=columns, highlight=False))
    return file.getvalue().splitlines()


def test_a_host_is_one_row_with_all_that_is_known() -> None:
    head, _, alpha, beta, empty, verdict = shown(alpha=GOOD, beta=HostFacts())
    assert head.split()[:4] == ["host", "reached", "python", "CPUs"]
    for cell in (
        "2.13.0",
        "none",
        "60 of 64 GiB",
        "1.0 GiB",
        "1 T4",
        "6.0 of 8.0 GiB",
        "eth0",
        "-100.0 s",
        "ok",
    ):
        assert cell in alpha
    assert beta.split() == ["beta", "no"]
    assert (empty, verdict) == ("", "2 hosts can train together")


def test_equal_problems_share_a_line_and_those_that_keep_a_host_from_training_come_first() -> None:
    findings = [Finding("alpha", "slow\nvery", is_fatal=False), Finding("gamma", "down"), Finding("beta", "down")]
    *_, down, slow, more, verdict = shown(*findings, alpha=GOOD, beta=GOOD, gamma=GOOD)
    assert (down, slow, more) == ("✗ gamma, beta: down", "! alpha: slow", "    very")
    assert verdict == "cannot train like this: beta, gamma"


@pytest.mark.parametrize(("columns", "tables"), [(40, range(5, 9)), (80, range(2, 5)), (200, (1,))])
def test_the_table_is_as_wide_as_the_terminal(columns: int, tables: range) -> None:
    """It continues below where it does not fit; nothing is cut off."""
    lines = shown(columns=columns, alpha=GOOD)
    assert max(map(len, lines)) <= columns
    assert not any("…" in line for line in lines)
    assert sum(line.startswith("host ") for line in lines) in tables
    assert lines[-1] == "this host can train"
