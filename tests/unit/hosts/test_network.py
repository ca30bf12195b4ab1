"""Addresses and interfaces, as the kernel of this machine has them."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import psutil
import pytest

from distrain.hosts.network import address_toward, interface_variables, own_address

if TYPE_CHECKING:
    from collections.abc import Sequence


@pytest.mark.parametrize(
    ("connection", "address"),
    [
        ("10.0.0.9 50000 10.0.0.1 22", "10.0.0.1"),
        ("fd77::1 50000 fd77::2 2222", "fd77::2"),
        ("fe80::1%eth0 50000 fe80::2%eth0 22", "fe80::2%eth0"),
    ],
)
def test_ssh_tells_the_address_at_which_others_reach_us(
    connection: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSH_CONNECTION", connection)
    assert own_address() == address


@pytest.mark.parametrize("connection", ["127.0.0.1 50000 127.0.0.1 22", "::1 50000 ::1 22", "", "nonsense"])
def test_otherwise_it_is_an_address_of_an_interface_but_not_of_loopback(
    connection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSH_CONNECTION", connection)
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
    assert own_address() in {address for name, address in own_addresses() if name != "lo"} | {""}


def own_addresses(families: Sequence[int] = (socket.AF_INET,)) -> list[tuple[str, str]]:
    return [(n, a.address) for n, entries in psutil.net_if_addrs().items() for a in entries if a.family in families]


def test_the_way_to_an_address_of_ours_is_its_interface() -> None:
    found = own_addresses()
    assert found
    for name, address in found:
        assert address_toward(address) == address
        assert interface_variables(address) == {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
