"""Helpers of the tests: training functions on real ranks, and this process in the place of a rank."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import distrain
from distrain.api import current
from distrain.api.context import TrainContext
from distrain.torch import TorchConfig, TorchTrainer
from distrain.worker.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def fit(
    train: Callable[..., Any],
    storage: Path,
    *,
    workers: int = 2,
    start_method: Any = "forkserver",
    config: dict[str, Any] | None = None,
    torch_config: TorchConfig | None = None,
    max_failures: int = 0,
) -> distrain.Result:
    """Train; equal failures restart, too."""
    failures = distrain.FailureConfig(max_failures=max_failures, retry_same_failure=True)
    return TorchTrainer(
        train,
        train_loop_config=config,
        torch_config=torch_config,
        scaling_config=distrain.ScalingConfig(num_workers=workers, start_method=start_method),
        run_config=distrain.RunConfig(storage_path=storage, failure_config=failures),
    ).fit()


def reports(result: distrain.Result) -> list[dict[str, Any]]:
    """Every report of every rank and attempt."""
    return [json.loads(line) for line in (Path(result.path) / "metrics.jsonl").read_text().splitlines()]


def last_by_rank(result: distrain.Result) -> dict[int, dict[str, Any]]:
    return {line["rank"]: line["metrics"] for line in reports(result)}


def run_on_ranks(train: Callable[..., Any], storage: Path, *, workers: int = 2) -> list[dict[str, Any]]:
    """The last report of each rank."""
    last = last_by_rank(fit(train, storage, workers=workers))
    return [last[rank] for rank in sorted(last)]


def fit_on_gpus(train: Callable[..., Any], storage: Path, workers: int, gpus_each: float = 1) -> Any:
    """The return value of train_func on rank 0."""
    scaling = distrain.ScalingConfig(num_workers=workers, use_gpu=True, resources_per_worker={"GPU": gpus_each})
    run = distrain.RunConfig(storage_path=storage)
    return TorchTrainer(train, scaling_config=scaling, run_config=run).fit().return_value


def a_session(rank: int = 0, ranks: int = 1, devices: tuple[int, ...] = ()) -> Session:
    context = TrainContext(
        world_rank=rank, world_size=ranks, local_rank=rank, local_world_size=ranks, node_rank=0, run_name="run",
        storage_path="nowhere", attempt=0, devices=devices,
    )  # fmt: skip
    return Session(None, context, None)  # type: ignore[arg-type]


@contextlib.contextmanager
def acting_as(rank: int, ranks: int, devices: tuple[int, ...] = ()) -> Iterator[Session]:
    """This process, as far as the public functions can tell, is that rank of so many."""
    before = current.session
    session = current.session = a_session(rank, ranks, devices)
    try:
        yield session
    finally:
        current.session = before
