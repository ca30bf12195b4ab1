"""Addresses, interfaces and ports under which others reach this host. Runs in: agent, coordinator, worker."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.hosts.host import collective_variables

if TYPE_CHECKING:
    from collections.abc import Iterator

_ANY_PORT = 9
_ANYWHERE = "192.0.2.1"
"""An address that no host has (RFC 5737). Packets to it would take the default route."""


def machine_id(*namespaces: str) -> str:
    """Return an id of this machine, its boot, and namespaces of this process, such as ``net``; empty if unknown.

    Processes with the same id of ``net`` share a loopback interface.
    """
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return " ".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in namespaces)])
    return ""


def own_address() -> str:
    """Return the address under which other hosts probably reach this one; empty if there is none but loopback.

    It is the one that ssh has used; else that of the route to the node where srun runs, or of the default route; else
    the first address of an interface.
    """
    return next((text for text in _addresses() if not is_loopback(text)), "")


def _addresses() -> Iterator[str]:
    parts = os.environ.get("SSH_CONNECTION", "").split()
    if len(parts) == 4:
        yield parts[2]
    for peer in filter(None, (os.environ.get("SLURM_LAUNCH_NODE_IPADDR"), _ANYWHERE)):
        with contextlib.suppress(OSError):
            yield address_toward(peer)
    yield from interfaces().values()


def is_loopback(address: str) -> bool:
    """Tell if the address is only for connections within a host."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interfaces() -> dict[str, str]:
    """Return the address of each interface that is up, but not of loopback: IPv4, or else IPv6 of global scope."""
    import psutil

    found: dict[str, str] = {}
    with contextlib.suppress(OSError):  # a sandbox does not tell
        running = {name for name, state in psutil.net_if_stats().items() if state.isup}
        for name, entries in psutil.net_if_addrs().items():
            for entry in entries if name in running else ():
                is_global = entry.family in (socket.AF_INET, socket.AF_INET6) and "%" not in entry.address
                if is_global and not is_loopback(entry.address):
                    found.setdefault(name, entry.address)
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
    return collective_variables(interface_of(address_toward(peer)))


def reserve_port() -> socket.socket:
    """Return a socket that reserves a free TCP port as long as it is open, until a process group binds it.

    The socket has SO_REUSEADDR and does not listen, so that the store of rank 0 can bind the same port.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", 0))
    return reserved
