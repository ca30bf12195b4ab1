"""The sampler of a rank: what it tells the user itself."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from distrain.api.context import TrainContext
from distrain.worker import vitals

if TYPE_CHECKING:
    import pytest

STUCK = SimpleNamespace(state="stuck", place="train.py:7, in distributed_c10d.init_process_group", since=0.0)
STUCK.sample = lambda frame, now: None


def test_a_rank_that_waits_at_an_address_of_its_own_code_says_so_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vitals, "Standstill", lambda native_id: STUCK)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    sent: list[Any] = []
    context = TrainContext(
        world_rank=0, world_size=2, local_rank=0, local_world_size=2, node_rank=0, run_name="run",
        storage_path="/runs", attempt=0, devices=(),
    )  # fmt: skip
    session = SimpleNamespace(send=lambda kind, **_: sent.append(kind), context=context, hooks={})
    sampler = vitals.VitalsSampler(session, 20.0)  # type: ignore[arg-type]
    with sampler:
        monkeypatch.setenv("MASTER_ADDR", "node01")
        while not sent:
            time.sleep(0.01)
        time.sleep(0.3)
    assert capsys.readouterr().err == (
        "distrain: train.py:7, in distributed_c10d.init_process_group: no rank 0 answers at MASTER_ADDR=node01, which "
        "your code has set; leave it to distrain, which had set 10.0.0.1\n"
    )
