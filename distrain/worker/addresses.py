"""Addresses that the ranks reserve for frameworks that connect them. Runs in: worker."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from distrain.hosts.network import address_toward, is_loopback, reserve_port
from distrain.system.arguments import check_type

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from distrain.api.context import TrainContext

_PROXIES, _WITHOUT_PROXY = ("grpc_proxy", "https_proxy", "http_proxy"), "no_grpc_proxy"
"""The variables that gRPC reads."""


class ReservedAddresses:
    """The addresses that the ranks of one attempt have agreed on.

    meet: enters a collective, and returns a line of rank 0, or with ``gathers=True`` of every rank.
    """

    def __init__(self, context: TrainContext, meet: Callable[..., bytes]) -> None:
        self._context = context
        self._meet = meet
        self._rank_0_host = os.environ.get("MASTER_ADDR", "127.0.0.1")  # train_func may change it
        self._agreed: dict[str, list[str]] = {}
        """By the call that asked for them."""

    def by_name(
        self, call: str, name: str, *, on_every_rank: bool = False, timeout_s: float | None = None
    ) -> list[str]:
        """Return the address of rank 0, or of every rank. The first such call is a collective.

        A port is free for whatever listens there next only if nothing holds it: not every framework sets SO_REUSEADDR,
        as process groups of torch do. So it is held until all ranks have come, but no longer.
        """
        check_type(f"{call}(name)", name, str)
        operation = f"{call}({name!r})"
        if operation not in self._agreed:
            own = b""
            with contextlib.ExitStack() as held:
                if on_every_rank or self._context.world_rank == 0:
                    own = self._reserve(held).encode()
                agreed = self._meet(operation, own, timeout_s, gathers=on_every_rank)
            self._agreed[operation] = agreed.decode().splitlines()
        return list(self._agreed[operation])

    def _reserve(self, held: contextlib.ExitStack) -> str:
        """Return an address of this rank with a port that no name has. The port is held until ``held`` is closed."""
        taken = {address.rpartition(":")[2] for agreed in self._agreed.values() for address in agreed}
        while True:
            port = str(held.enter_context(reserve_port()).getsockname()[1])
            if port not in taken:
                host = self._own_host()
                return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _own_host(self) -> str:
        """Return the address by which the other ranks reach this one: that by which it reaches rank 0's host.

        Rank 0's host may know itself by a loopback address, where the others know it by its name.
        """
        address = address_toward(self._rank_0_host)
        is_one_host = self._context.local_world_size == self._context.world_size
        return self._rank_0_host if is_loopback(address) and not is_one_host else address


def bypass_proxies(addresses: Iterable[str]) -> None:
    """If there is a proxy, name the hosts of these addresses in gRPC's list of hosts to reach without it.

    gRPC uses ``http_proxy`` even for a port on this machine, and frameworks would wait without end. gRPC compares IPv6
    addresses without their brackets.
    """
    if not any(map(os.environ.get, _PROXIES)):
        return
    hosts = dict.fromkeys(address.rpartition(":")[0].strip("[]") for address in addresses)
    others = os.environ.get(_WITHOUT_PROXY) or os.environ.get("no_proxy")
    os.environ[_WITHOUT_PROXY] = ",".join([*([others] if others else []), *hosts])
