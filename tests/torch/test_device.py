"""get_device and local_rank_zero_first."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest
from torch import distributed

import distrain
from distrain.api.context import TrainContext
from distrain.torch import TorchTrainer, get_device, get_devices, local_rank_zero_first
from distrain.worker.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests


def run_on_ranks(train: Callable[..., Any], storage: Path, *, workers: int = 2) -> list[dict[str, Any]]:
    """What each rank reported last, by rank."""
    result = TorchTrainer(
        train,
        scaling_config=distrain.ScalingConfig(num_workers=workers),
        run_config=distrain.RunConfig(storage_path=storage),
    ).fit()
    lines = [json.loads(line) for line in (Path(result.path) / "metrics.jsonl").read_text().splitlines()]
    last = {line["rank"]: line["metrics"] for line in lines}
    return [last[rank] for rank in sorted(last)]


def a_session(
    *, local_rank: int = 0, local_world_size: int = 1, host: int = 0, devices: tuple[int, ...] = ()
) -> Session:
    context = TrainContext(
        world_rank=host * local_world_size + local_rank, world_size=2 * local_world_size, local_rank=local_rank,
        local_world_size=local_world_size, node_rank=host, run_name="run", storage_path="nowhere", attempt=0,
        devices=devices,
    )  # fmt: skip
    return Session(None, context, None)  # type: ignore[arg-type]


def test_devices_are_those_of_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "current", a_session(devices=(3, 5)))
    assert [str(device) for device in get_devices()] == ["cuda:3", "cuda:5"]
    assert str(get_device()) == "cuda:3"
    monkeypatch.setattr(Session, "current", a_session())
    assert [str(device) for device in get_devices()] == ["cpu"]


def test_outside_of_a_worker_they_say_where_they_belong() -> None:
    for function in (get_device, get_devices, local_rank_zero_first().__enter__):
        with pytest.raises(RuntimeError, match="only works inside a worker"):
            function()


def test_the_first_rank_has_left_before_the_others_enter(storage: Path) -> None:
    def train(config: dict[str, Any]) -> None:
        context = distrain.get_context()
        found = []
        for name in ("first", "second"):
            file = Path(context.storage_path, name)
            with local_rank_zero_first():
                found.append(file.exists())
                if context.get_world_rank() == 0:
                    time.sleep(0.3)
                    file.touch()
        outcome = "entered"
        try:
            with local_rank_zero_first():
                if context.get_world_rank() == 0:
                    raise ConnectionError("no such data set")
        except (ConnectionError, RuntimeError) as error:
            outcome = repr(error)
        with local_rank_zero_first():
            after = True
        distributed.barrier()  # as rank 0 keeps the store that the others look into
        distributed.destroy_process_group()
        try:
            with local_rank_zero_first():
                pass
        except RuntimeError as error:
            without_group = str(error)
        distrain.report({"found": found, "outcome": outcome, "after": after, "without group": without_group})

    ranks = run_on_ranks(train, storage, workers=3)
    assert [rank["found"] for rank in ranks] == [[False, False], [True, True], [True, True]]
    assert ranks[0]["outcome"] == "ConnectionError('no such data set')"
    for rank in ranks[1:]:
        assert "RuntimeError" in rank["outcome"]
        assert (
            "rank 0, which runs it first on this host, failed: ConnectionError('no such data set')" in rank["outcome"]
        )
    assert all(rank["after"] for rank in ranks)
    assert all("init_process_group" in rank["without group"] for rank in ranks)


def test_ranks_of_other_hosts_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    store = distributed.HashStore()
    monkeypatch.setattr("distrain.torch.device._store", lambda: store)
    first, second, elsewhere = (
        a_session(local_rank=rank, local_world_size=2, host=host) for rank, host in ((0, 1), (1, 1), (1, 0))
    )
    for _ in range(2):
        for session in (first, second):
            monkeypatch.setattr(Session, "current", session)
            with local_rank_zero_first():
                pass
    monkeypatch.setattr(Session, "current", elsewhere)
    entered = threading.Event()

    def enter() -> None:
        with local_rank_zero_first():
            entered.set()

    thread = threading.Thread(target=enter, daemon=True)
    thread.start()
    assert not entered.wait(0.3)  # its own local rank 0 has not been there
    monkeypatch.setattr(Session, "current", a_session(local_rank=0, local_world_size=2, host=0))
    with local_rank_zero_first():
        pass
    assert entered.wait(10)
    thread.join()


def test_a_rank_alone_on_its_host_needs_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "current", a_session())
    with local_rank_zero_first():
        assert not distributed.is_initialized()
