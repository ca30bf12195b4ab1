"""Under which address and interface this host is reached by the others. Runs in: agent."""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path

_ANY_PORT = 9


def network_id() -> str:
    """The same for all who share a network stack, loopback included, and for nobody else; empty where that cannot be
    told.
    """
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return ""


def ssh_address() -> str:
    """The address of this host at which ssh has reached it; empty if there is none, or none for others."""
    parts = os.environ.get("SSH_CONNECTION", "").split()
    if len(parts) < 4 or ipaddress.ip_address(parts[2].partition("%")[0]).is_loopback:
        return ""
    return parts[2]


def address_toward(peer: str) -> str:
    """The address of this host that a connection to ``peer`` would have. Raises OSError if there is no way."""
    try:
        [(family, kind, _, _, address), *_] = socket.getaddrinfo(peer, _ANY_PORT, type=socket.SOCK_DGRAM)
    except UnicodeError as error:  # a part of the name is empty, or too long
        raise OSError(f"{peer!r} is not a host name: {error}") from error
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # asks the kernel for the route, and sends nothing
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """The interface that has this address of ours. Raises OSError if none has."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return str(name)
    raise OSError(f"no interface has the address {address}")


def interface_variables(peer: str) -> dict[str, str]:
    """What ties the collectives to the interface over which ``peer`` is reached.

    Gloo binds to loopback when the host's name does not resolve, and its peers then wait for minutes; NCCL takes the
    first interface that looks usable. Raises OSError if there is no way to ``peer``.
    """
    name = interface_of(address_toward(peer))
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}  # '=': not also eth10 for eth1
