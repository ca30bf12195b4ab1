"""Addresses and interfaces under which other hosts reach this one. Runs in: agent."""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path

_ANY_PORT = 9


def network_id() -> str:
    """Return an id of the network stack: processes with the same id share a loopback interface; empty if unknown."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return ""


def ssh_address() -> str:
    """Return the address under which ssh has reached this host; empty without ssh, or if it is a loopback address."""
    parts = os.environ.get("SSH_CONNECTION", "").split()
    if len(parts) < 4 or ipaddress.ip_address(parts[2].partition("%")[0]).is_loopback:
        return ""
    return parts[2]


def address_toward(peer: str) -> str:
    """Return the address that this host uses in connections to ``peer``. Raises OSError if there is no route."""
    try:
        [(family, kind, _, _, address), *_] = socket.getaddrinfo(peer, _ANY_PORT, type=socket.SOCK_DGRAM)
    except UnicodeError as error:  # a part of the name is empty, or too long
        raise OSError(f"{peer!r} is not a host name: {error}") from error
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # looks up the route; nothing is sent
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """Return the interface of this host that has the address. Raises OSError if there is none."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return str(name)
    raise OSError(f"no interface has the address {address}")


def interface_variables(peer: str) -> dict[str, str]:
    """Return variables that make Gloo and NCCL use the interface over which this host reaches ``peer``.

    By default, Gloo binds to loopback if the name of the host does not resolve, and its peers then wait for minutes;
    NCCL takes the first interface that looks usable. Raises OSError if there is no route to ``peer``.
    """
    name = interface_of(address_toward(peer))
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}  # '=' excludes eth10 for eth1
