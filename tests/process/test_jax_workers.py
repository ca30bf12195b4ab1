"""JaxTrainer with real processes of JAX, on the CPU."""

from __future__ import annotations

import os
import signal
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

import distrain
from distrain import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from distrain.jax import JaxTrainer
from tests.process.conftest import reported

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(find_spec("jax") is None, reason="JAX is not installed: distrain[frameworks]")
STEPS, KILLED_AT = 6, 3


def train(config: dict[str, Any]) -> None:
    """Sum over the processes in every step. Rank 0, which all others depend on, is killed once in between."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    rank, checkpoint = distrain.get_context().get_world_rank(), distrain.get_checkpoint()
    mesh = Mesh(jax.devices(), ("data",))
    spread, everywhere = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    total = jax.jit(lambda array: array.sum(), out_shardings=everywhere)
    for step in range(checkpoint.to_dict()["step"] if checkpoint else 0, STEPS):
        own = jax.numpy.asarray([float(step + 10 * rank)])
        if step == KILLED_AT and checkpoint is None and rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        metrics = {
            "step": step,
            "sum": float(total(jax.make_array_from_process_local_data(spread, own))),
            "processes": jax.process_count(),
            "handler": signal.getsignal(signal.SIGTERM).__name__,
        }
        distrain.report(metrics, Checkpoint.from_dict({"step": step + 1}))


def test_processes_compute_together_also_after_rank_0_was_killed(
    storage: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = JaxTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=storage, failure_config=FailureConfig(max_failures=1)),
    ).fit()
    for rank in (0, 1):
        sums = {(line["step"], line["sum"]) for line in reported(result.path, rank)}
        assert sums == {(step, 2.0 * step + 10) for step in range(STEPS)}
    assert {(line["processes"], line["handler"]) for line in reported(result.path)} == {(2, "terminate")}
    shown = capfd.readouterr().err
    assert "rank 0 was killed by SIGKILL" in shown
    assert "new interpreters" not in shown  # an import of JAX survives a fork
