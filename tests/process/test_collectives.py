"""barrier() and broadcast_from_rank_zero() between real workers, when they meet and when they cannot."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import distrain
from distrain import Checkpoint, CollectiveError, FailureConfig, PreemptionError, WorkerGroupError
from distrain.collective import barrier, broadcast_from_rank_zero
from distrain.decisions import barriers
from tests.process.conftest import Fit, assert_no_half_checkpoint, files_of, log_of, records, reported

LARGEST = 16 << 20


def failures(error: WorkerGroupError) -> dict[int, str]:
    return {rank: str(failure) for rank, failure in error.worker_failures.items()}


# -- they meet -------------------------------------------------------------------------------------------------------


def test_nobody_leaves_a_barrier_before_the_last_has_come(any_fit: Fit) -> None:
    def train() -> None:
        if distrain.get_context().get_world_rank() == 1:
            time.sleep(0.3)
        came = time.monotonic()
        distrain.collective.barrier()
        distrain.report({"came": came, "left": time.monotonic()})

    metrics = reported(any_fit(train, workers=3).path)
    assert len(metrics) == 3
    assert min(line["left"] for line in metrics) >= max(line["came"] for line in metrics)


def test_all_get_what_rank_0_has(any_fit: Fit) -> None:
    class Plan:
        def __init__(self, folder: Path) -> None:
            self.folder = folder

    def train() -> None:
        rank = distrain.get_context().get_world_rank()
        mine = Plan(Path("/from", str(rank)))
        plan = broadcast_from_rank_zero(mine)
        function = broadcast_from_rank_zero(lambda x: x + rank)
        distrain.report({"folder": str(plan.folder), "value": function(10), "none": broadcast_from_rank_zero(None)})

    assert reported(any_fit(train, workers=3).path) == [{"folder": "/from/0", "value": 10, "none": None}] * 3


@pytest.mark.parametrize("workers", [1, 8])
def test_many_collectives_one_after_the_other(fit: Fit, workers: int) -> None:
    def train() -> list[int]:
        rank = distrain.get_context().get_world_rank()
        received = []
        for step in range(50):
            received.append(broadcast_from_rank_zero(step * 100 + rank))
            if step % 10 == 0:
                barrier()
        distrain.report({"received": received})
        return received

    result = fit(train, workers=workers)
    assert result.return_value == [step * 100 for step in range(50)]
    assert reported(result.path) == [{"received": result.return_value}] * workers


def test_checkpoints_are_reported_between_barriers(any_fit: Fit) -> None:
    def train() -> None:
        rank = distrain.get_context().get_world_rank()
        for step in range(3):
            folder = broadcast_from_rank_zero(tempfile.mkdtemp() if rank == 0 else None)
            Path(folder, f"rank_{rank}").write_text(f"{step}")
            barrier()
            distrain.report({"step": step}, Checkpoint(folder) if rank == 0 else None)
            barrier()
            distrain.report({"files": sorted(os.listdir(folder))})

    result = any_fit(train, workers=3)
    assert len(result.best_checkpoints) == 3
    assert files_of(result.checkpoint) == {f"rank_{rank}": "2" for rank in range(3)}
    assert_no_half_checkpoint(any_fit.storage)
    assert [line["index"] for line in records(result.path, 2)] == [1, 2, 3, 4, 5, 6]


def test_reports_that_wait_for_a_barrier_of_another_thread_arrive(fit: Fit) -> None:
    """Evaluation in a thread is no reason for a deadlock."""

    def train() -> None:
        thread = threading.Thread(target=barrier)
        thread.start()
        for step in range(20):
            distrain.report({"step": step})
        thread.join()

    assert len(reported(fit(train).path)) == 40


# -- what cannot be sent ---------------------------------------------------------------------------------------------


def test_what_cannot_be_sent_is_refused_and_does_not_count(any_fit: Fit) -> None:
    """The other rank goes on waiting for its first collective, which a smaller one then is."""

    def train(config: dict[str, int]) -> list[str]:
        said = []
        if distrain.get_context().get_world_rank() == 0:
            for data in (bytes(config["largest"]), threading.Lock()):
                try:
                    broadcast_from_rank_zero(data)
                except (ValueError, TypeError) as error:
                    said.append(f"{type(error).__name__}: {error}")
        size = len(broadcast_from_rank_zero(b"x" * (config["largest"] - 100)))
        distrain.report({"size": size})
        return said

    result = any_fit(train, {"largest": LARGEST})
    too_large, unpicklable = result.return_value
    assert too_large.startswith("ValueError: broadcast_from_rank_zero(): the data is 16,777,2")
    assert "16,777,216 are allowed; use torch.distributed" in too_large
    assert unpicklable.startswith("TypeError")
    assert reported(result.path) == [{"size": LARGEST - 100}] * 2


def test_what_other_ranks_hand_in_need_not_be_picklable(fit: Fit) -> None:
    def train() -> None:
        mine = "plan" if distrain.get_context().get_world_rank() == 0 else threading.Lock()
        distrain.report({"got": broadcast_from_rank_zero(mine)})

    assert reported(fit(train).path) == [{"got": "plan"}] * 2


# -- they cannot meet ------------------------------------------------------------------------------------------------


def test_ranks_that_mix_up_their_calls_are_named(any_fit: Fit) -> None:
    def train() -> None:
        barrier()
        if distrain.get_context().get_world_rank() == 1:
            broadcast_from_rank_zero(1)
        else:
            barrier()

    with pytest.raises(WorkerGroupError, match="do not meet in the same collective") as raised:
        any_fit(train, workers=3)
    assert all(type(error) is CollectiveError for error in raised.value.worker_failures.values())
    first = failures(raised.value)[raised.value.culprit]
    assert "called barrier()" in first
    assert "rank 1 called broadcast_from_rank_zero()" in first
    assert "call number 2" in first


def test_a_mix_up_can_be_caught_and_the_ranks_go_on_in_step(fit: Fit) -> None:
    def train() -> None:
        rank = distrain.get_context().get_world_rank()
        try:
            barrier() if rank else broadcast_from_rank_zero(0)
        except CollectiveError as error:
            distrain.report({"error": str(error)})
        distrain.report({"got": broadcast_from_rank_zero(f"from {rank}")})

    result = fit(train)
    assert [line["got"] for line in reported(result.path) if "got" in line] == ["from 0"] * 2
    assert len([line for line in reported(result.path) if "error" in line]) == 2


def test_a_rank_that_has_finished_is_named(any_fit: Fit) -> None:
    def train() -> None:
        if distrain.get_context().get_world_rank() != 2:
            barrier()

    with pytest.raises(WorkerGroupError, match=r"rank 2 finished train_func without calling barrier\(\)") as raised:
        any_fit(train, workers=3)
    assert raised.value.culprit in (0, 1)
    assert "every rank must call it" in str(raised.value)


def test_a_rank_that_finishes_long_before_is_named_too(fit: Fit) -> None:
    def train() -> str:
        rank = distrain.get_context().get_world_rank()
        if rank == 1:
            return ""
        time.sleep(0.3)
        with pytest.raises(CollectiveError, match=r"rank 1 finished"):
            barrier()
        return "caught"

    assert fit(train).return_value == "caught"


def test_when_a_rank_fails_those_in_the_barrier_are_not_to_blame(any_fit: Fit) -> None:
    def train() -> None:
        rank = distrain.get_context().get_world_rank()
        if rank == 2:
            time.sleep(0.2)
            raise ValueError("the real reason")
        barrier()

    started = time.monotonic()
    with pytest.raises(WorkerGroupError, match="ValueError: the real reason") as raised:
        any_fit(train, workers=3)
    assert time.monotonic() - started < 15
    assert raised.value.culprit == 2
    assert set(raised.value.worker_failures) == {2}


def test_a_stop_unwinds_a_rank_that_waits_in_a_barrier(any_fit: Fit) -> None:
    def train(config: dict[str, int]) -> None:
        try:
            barrier()  # nobody is past it before both have come here
            if distrain.get_context().get_world_rank() == 1:
                os.kill(config["user"], signal.SIGTERM)
                time.sleep(60)
            barrier()
        finally:
            print("unwound", flush=True)

    with pytest.raises(PreemptionError) as raised:
        any_fit(train, {"user": os.getpid()})
    assert raised.value.result is not None
    for rank in (0, 1):
        assert "unwound" in log_of(raised.value.result.path, rank)


def test_a_rank_that_is_killed_in_the_barrier_ends_the_run(any_fit: Fit) -> None:
    def train() -> None:
        if distrain.get_context().get_world_rank() == 1:
            threading.Timer(0.3, os.kill, (os.getpid(), 9)).start()
        else:
            time.sleep(60)
        barrier()

    with pytest.raises(WorkerGroupError, match="SIGKILL") as raised:
        any_fit(train)
    assert raised.value.culprit == 1


def test_a_rank_that_is_late_is_named_once_and_nothing_fails(
    fit: Fit, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train() -> None:
        if distrain.get_context().get_world_rank() == 1:
            time.sleep(0.8)
        barrier()

    monkeypatch.setattr(barriers, "WARN_AFTER_S", 0.2)
    fit(train, workers=3)
    console = capsys.readouterr().err
    assert "distrain: ranks 0, 2 have waited in barrier() for 0.2 s; rank 1 has not called it. " in console
    assert console.count("have waited") == 1


# -- more than one attempt -------------------------------------------------------------------------------------------


def test_after_a_restart_collectives_begin_anew(any_fit: Fit) -> None:
    """Although the ranks were out of step when one failed."""

    def train() -> list[Any]:
        rank = distrain.get_context().get_world_rank()
        attempt = broadcast_from_rank_zero(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if attempt == "0":
            if rank == 0:
                raise RuntimeError("a second attempt, please")
            barrier()
        barrier()
        return [attempt, broadcast_from_rank_zero("second")]

    result = any_fit(train, workers=3, failure_config=FailureConfig(max_failures=1))
    assert result.return_value == ["1", "second"]


@pytest.mark.parametrize("name", ["barrier", "broadcast_from_rank_zero"])
def test_outside_of_a_worker_the_error_says_where_to_call(name: str) -> None:
    arguments: list[Any] = [1] if name == "broadcast_from_rank_zero" else []
    with pytest.raises(RuntimeError, match=rf"distrain\.collective\.{name}\(\) only works inside a worker"):
        getattr(distrain.collective, name)(*arguments)
