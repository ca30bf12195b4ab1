"""Hosts and scaling config -> ranks, devices and their environment."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrain.api.config import ScalingConfig
from distrain.decisions.placement import make_plan
from distrain.errors import ResourcesError
from distrain.hosts.host import Gpu, HostInfo

GIB = 1 << 30


def host(
    name: str = "one", *, cpus: int = 4, gpus: int | None = None, memory_bytes: int = 16 * GIB, **facts: Any
) -> HostInfo:
    found = None if gpus is None else tuple(gpu(f"GPU-{index}") for index in range(gpus))
    return HostInfo(name=name, cpus=cpus, memory_bytes=memory_bytes, gpus=found, **facts)


def gpu(uuid: str, *, name: str = "NVIDIA A100-SXM4-40GB") -> Gpu:
    return Gpu(name=name, uuid=uuid)


# -- placement -------------------------------------------------------------------------------------------------------


def test_more_workers_than_slots_is_an_error_that_names_both() -> None:
    text = r"num_workers is 7, but the hosts have only 3 slots: one 2, two 1\. Ask for fewer"
    with pytest.raises(ResourcesError, match=text):
        make_plan([host("one", slots=2), host("two", slots=1)], ScalingConfig(num_workers=7))


@given(slots=st.lists(st.integers(1, 9), min_size=1, max_size=7), data=st.data())
def test_ranks_are_numbered_in_order_and_fill_their_hosts(slots: list[int], data: st.DataObject) -> None:
    workers = data.draw(st.integers(1, sum(slots)))
    hosts = [host(f"host{n}", slots=most) for n, most in enumerate(slots)]
    plan = make_plan(hosts, ScalingConfig(num_workers=workers))
    assert [rank.rank for rank in plan.ranks] == list(range(workers))
    shares = [len(plan.on(name)) for name in plan.hosts]
    assert plan.hosts == tuple(f"host{n}" for n in range(len(shares)))
    assert shares[:-1] == slots[: len(shares) - 1]
    assert shares[-1] <= slots[len(shares) - 1]
    for name in plan.hosts:
        assert [rank.local_rank for rank in plan.on(name)] == list(range(len(plan.on(name))))


# -- devices ---------------------------------------------------------------------------------------------------------


def devices(gpus_per_worker: float | None, workers: int, gpus: int) -> list[tuple[int, ...]]:
    resources = None if gpus_per_worker is None else {"GPU": gpus_per_worker}
    scaling = ScalingConfig(num_workers=workers, use_gpu=True, resources_per_worker=resources)
    return [rank.devices for rank in make_plan([host(gpus=gpus)], scaling).ranks]


@pytest.mark.parametrize(
    ("each", "workers", "gpus", "expected"),
    [
        (1, 2, 4, [(0,), (1,)]),
        (2, 2, 4, [(0, 1), (2, 3)]),
        (0.5, 4, 2, [(0,), (0,), (1,), (1,)]),
        (0.4, 3, 2, [(0,), (0,), (1,)]),
        (0.1, 10, 1, [(0,)] * 10),
    ],
)
def test_gpus_are_dealt_by_local_rank(
    each: float | None, workers: int, gpus: int, expected: list[tuple[int, ...]]
) -> None:
    assert devices(each, workers, gpus) == expected


# -- resources -------------------------------------------------------------------------------------------------------


def refusal(facts: HostInfo, scaling: ScalingConfig) -> str:
    with pytest.raises(ResourcesError) as error:
        make_plan([facts], scaling)
    return str(error.value)


def test_too_many_gpus_says_what_was_asked_and_what_there_is() -> None:
    text = refusal(host("gpubox", gpus=2), ScalingConfig(num_workers=3, use_gpu=True))
    assert re.search(r"gpubox has 2 GPUs, but 3 workers with 1 each need 3", text)
    assert "num_workers" in text


def test_no_gpu_at_all_says_why_that_may_be() -> None:
    text = refusal(host(gpus=0), ScalingConfig(use_gpu=True))
    assert "use_gpu=True" in text
    assert "CUDA_VISIBLE_DEVICES" in text
    text = refusal(replace(host(gpus=0), driver_problem="the driver is broken"), ScalingConfig(use_gpu=True))
    assert text.endswith(" the driver is broken.")


# -- GPUs that are shared ----------------------------------------------------------------------------------------------


def with_gpus(workers: int, each: float = 1) -> ScalingConfig:
    return ScalingConfig(num_workers=workers, use_gpu=True, resources_per_worker={"GPU": each})


@pytest.mark.parametrize(
    ("facts", "workers", "each", "shares"),
    [
        (host(gpus=2), 2, 1, False),
        (host(gpus=2), 2, 0.5, True),
        (host(gpus=2), 2, 0.6, False),
        (host(gpus=1), 1, 0.5, False),
        (host(gpus=0), 2, 0, False),
    ],
)
def test_whether_workers_share_a_gpu(facts: HostInfo, workers: int, each: float, shares: bool) -> None:
    scaling = with_gpus(workers, each) if each else ScalingConfig(num_workers=workers)
    assert make_plan([facts], scaling).shares_gpu is shares


@pytest.mark.parametrize(("uuids", "shares"), [(("GPU-0", "GPU-1"), False), (("GPU-0", "GPU-0"), True)])
def test_a_gpu_is_known_by_its_uuid_whatever_its_host_is_called(uuids: tuple[str, str], shares: bool) -> None:
    """localhost and 127.0.0.1 may stand in one hostfile."""
    hosts = [
        HostInfo(name=name, cpus=1, memory_bytes=GIB, gpus=(gpu(uuid),), slots=1)
        for name, uuid in zip(("one", "two"), uuids, strict=True)
    ]
    assert make_plan(hosts, with_gpus(2)).shares_gpu is shares


# -- accelerator_type ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "name", "matches"),
    [
        ("A100", "NVIDIA A100-SXM4-40GB", True),
        ("A100-40G", "NVIDIA A100-SXM4-40GB", True),
        ("A100-40G", "NVIDIA A100-SXM4-80GB", False),
        ("a100", "NVIDIA A100-PCIE-40GB", True),
        ("A10", "NVIDIA A100-SXM4-40GB", False),
        ("A10", "NVIDIA A10G", False),
        ("A10G", "NVIDIA A10G", True),
        ("H100", "NVIDIA H100 80GB HBM3", True),
        ("H100", "NVIDIA H200", False),
        ("H200", "NVIDIA GH200 480GB", False),
        ("B200", "NVIDIA GB200", False),
        ("L4", "NVIDIA L40S", False),
        ("L40S", "NVIDIA L40", False),
        ("T4", "NVIDIA T400 4GB", False),
        ("RTX-PRO-6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition", True),
        ("RTX-PRO-6000", "NVIDIA RTX 6000 Ada Generation", False),
    ],
)
def test_accelerator_types_are_products_as_ray_writes_them(wanted: str, name: str, matches: bool) -> None:
    facts = HostInfo(name="one", cpus=1, memory_bytes=GIB, gpus=(gpu("GPU-0", name=name),))
    scaling = ScalingConfig(use_gpu=True, accelerator_type=wanted)
    if matches:
        assert make_plan([facts], scaling).world_size == 1
    else:
        text = refusal(facts, scaling)
        assert f"one has {name}, but accelerator_type is '{wanted}'" in text
        assert "CUDA_VISIBLE_DEVICES" in text
