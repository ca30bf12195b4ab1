"""JaxConfig: its settings, the devices of a worker, and what is said of errors."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

from distrain.api.context import TrainContext
from distrain.jax import JaxConfig

CONTEXT = TrainContext(
    world_rank=1, world_size=1, local_rank=1, local_world_size=1, node_rank=0, run_name="run", storage_path="/runs",
    attempt=0, devices=(),
)  # fmt: skip


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (float("inf"), ValueError), ("1", TypeError)])
def test_a_timeout_that_is_none_is_refused(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="start_timeout_s"):
        JaxConfig(start_timeout_s=value)


def test_rays_options_are_refused_or_have_their_place() -> None:
    with pytest.raises(TypeError, match="TPUs are not supported"):
        JaxConfig(use_tpu=True)  # type: ignore[call-arg]
    assert JaxConfig(use_gpu=True) == JaxConfig()


def test_workers_that_share_a_gpu_are_refused() -> None:
    with pytest.raises(ValueError, match="workers share a GPU"):
        JaxConfig().setup(replace(CONTEXT, devices=(0,), shares_gpu=True))


@pytest.mark.skipif(find_spec("jax") is None, reason="JAX is not installed: distrain[frameworks]")
@pytest.mark.parametrize(
    ("devices", "platforms", "left", "visible"),
    [((1, 2), None, None, "1,2"), ((), None, "cpu", "all"), ((), "rocm,cpu", "rocm,cpu", "all")],
)
def test_a_worker_uses_the_devices_that_it_was_given(
    devices: tuple[int, ...], platforms: str | None, left: str | None, visible: str
) -> None:
    import jax

    names = "jax_platforms", "jax_cuda_visible_devices"
    before = {name: jax.config._read(name) for name in names}
    try:
        jax.config.update("jax_platforms", platforms)
        JaxConfig().setup(replace(CONTEXT, devices=devices))
        assert tuple(jax.config._read(name) for name in names) == (left, visible)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (ModuleNotFoundError("No module named 'jax'", name="jax"), "pip install 'distrain[jax]'"),
        (ModuleNotFoundError("No module named 'flax'", name="flax"), None),
        (RuntimeError("jax.distributed.initialize() must be called before any JAX calls"), "Make it in train_func"),
        (RuntimeError("distributed.initialize should only be called once."), "leave it out"),
        (ValueError("distributed.initialize should only be called once."), None),
    ],
)
def test_errors_are_explained(error: Exception, advice: str | None) -> None:
    said = JaxConfig().explain(error)
    assert said is None if advice is None else advice in (said or "")
