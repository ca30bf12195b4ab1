"""Addresses of ranks: the host by which others reach one, and no proxy on the way."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from distrain.worker import addresses
from distrain.worker.addresses import ReservedAddresses, bypass_proxies


@pytest.mark.parametrize(
    ("rank_0s_host", "toward", "local", "host"),
    [
        ("localhost", "127.0.0.1", 2, "127.0.0.1"),
        ("alpha", "127.0.1.1", 1, "alpha"),
        ("alpha", "10.0.0.2", 1, "10.0.0.2"),
    ],
    ids=["all ranks on one host", "the name of the host itself", "another host"],
)
def test_a_rank_is_known_by_the_address_from_which_it_reaches_rank_0(
    monkeypatch: pytest.MonkeyPatch, rank_0s_host: str, toward: str, local: int, host: str
) -> None:
    monkeypatch.setenv("MASTER_ADDR", rank_0s_host)
    monkeypatch.setattr(addresses, "address_toward", {rank_0s_host: toward}.__getitem__)
    context = SimpleNamespace(local_world_size=local, world_size=2)
    assert ReservedAddresses(context, meet=None)._own_host() == host  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("variables", "without"),
    [
        ({}, ""),
        ({"no_proxy": "a"}, ""),
        ({"http_proxy": "p"}, "10.0.0.1,fd77::12"),
        ({"http_proxy": "p", "no_proxy": "a,b"}, "a,b,10.0.0.1,fd77::12"),
        ({"grpc_proxy": "p", "no_proxy": "a", "no_grpc_proxy": "c"}, "c,10.0.0.1,fd77::12"),
    ],
)
def test_grpc_reaches_the_ranks_without_a_proxy(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], without: str
) -> None:
    """gRPC knows IPv6 addresses without their brackets."""
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "no_proxy", "no_grpc_proxy"):
        monkeypatch.setenv(name, variables.get(name, ""))
    bypass_proxies(["10.0.0.1:5000", "10.0.0.1:5001", "[fd77::12]:5000"])
    assert os.environ[addresses._WITHOUT_PROXY] == without
