"""Addresses and interfaces under which other hosts reach this one. Runs in: agent."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_ANY_PORT = 9
_ANYWHERE = "192.0.2.1"
"""An address that no host has (RFC 5737). Packets to it would take the default route."""
_SIOCGIFADDR, _IFREQ_BYTES = 0x8915, 40
"""Linux: the request for the address of an interface, and the size of its struct ifreq."""


def network_id() -> str:
    """Return an id of the network stack: processes with the same id share a loopback interface; empty if unknown."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return ""


def own_address() -> str:
    """Return the address under which other hosts probably reach this one; empty if there is none but loopback.

    It is the one that ssh has used; else that of the route to the node where srun runs, or of the default route; else
    the first address of an interface.
    """
    return next((text for text in _addresses() if not _is_loopback(text)), "")


def _addresses() -> Iterator[str]:
    parts = os.environ.get("SSH_CONNECTION", "").split()
    if len(parts) == 4:
        yield parts[2]
    for peer in filter(None, (os.environ.get("SLURM_LAUNCH_NODE_IPADDR"), _ANYWHERE)):
        with contextlib.suppress(OSError):
            yield address_toward(peer)
    yield from _interface_addresses()


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _interface_addresses() -> list[str]:
    """Return the IPv4 address of each interface that has one."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, name.encode().ljust(_IFREQ_BYTES, b"\0"))
                found.append(socket.inet_ntoa(answer[20:24]))
    return found


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
