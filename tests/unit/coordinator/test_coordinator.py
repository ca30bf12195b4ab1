"""The coordinator with replayed ranks: the life of a run without any process, at the port that all ranks have."""

from __future__ import annotations

import json
import pickle
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from distrain import CheckpointConfig, FailureConfig, ScalingConfig, wire
from distrain.api.backend import BackendConfig
from distrain.api.job import Job
from distrain.coordinator.coordinator import Coordinator
from distrain.coordinator.host_files import Shipping
from distrain.coordinator.observers import Observers
from distrain.coordinator.report_handler import ReportHandler
from distrain.coordinator.run.facts import RunFacts
from distrain.coordinator.run.manifest import RunManifest
from distrain.coordinator.store.local_store import LocalStore
from distrain.decisions.events import HostLost, RunRequest
from distrain.decisions.run_status import RunStatus
from distrain.decisions.states import RunState
from distrain.hosts.host import HostSettings
from tests.replay import ReplayedRanks

if TYPE_CHECKING:
    from pathlib import Path

    from tests.replay import Recorded


def run(folder: Path, ranks: ReplayedRanks, hosts: tuple[str, ...], workers: Any, **failure: Any) -> Coordinator:
    request = RunRequest(
        run_id="id", run_name="run", storage_path=str(folder), job=Job(blob=b""), backend=BackendConfig(),
        scaling=ScalingConfig(num_workers=workers), failure_config=FailureConfig(**failure), stop_grace_s=1.0,
        argv=[], python_flags=[],
        hosts={
            name: HostSettings(lease_s=15, slots=1, is_local=True, directory="/", sys_path=[]) for name in hosts
        },
    )  # fmt: skip
    with closing(LocalStore(folder / "run")) as store:
        manifest = RunManifest(store, run_id="id", configs={}, facts=RunFacts("train.py", {}))
        observers = Observers(RunStatus("run", 0.0))
        shipping = Shipping(question=wire.SetUpHost(files=[], folders=[], place=""))
        coordinator = Coordinator(request, store, ranks, CheckpointConfig(), observers, manifest, shipping)
        ranks.drive(coordinator.run)
        manifest.write(coordinator.end.state.value)
        return coordinator


def begins(rank: int) -> Recorded:
    return host_of(rank), wire.Running(attempt=0, rank=rank)


def reports(rank: int, index: int, **metrics: Any) -> Recorded:
    body = json.dumps(metrics).encode()
    return host_of(rank), wire.Reported(attempt=0, rank=rank, index=index, time=0.0, ordinal=None, files=[], body=body)


def returns(rank: int, value: object = None) -> Recorded:
    return host_of(rank), wire.Outcome(
        attempt=0, rank=rank, ok=True, stage="run", error=None, traceback="", exit_code=0, body=pickle.dumps(value)
    )


def raises(rank: int, error: str) -> list[Recorded]:
    outcome = wire.Outcome(
        attempt=0, rank=rank, ok=False, stage="run", error=error, traceback=f"{error}\n", exit_code=1, body=b""
    )
    return [(host_of(rank), outcome), (host_of(rank), wire.Exited(attempt=0, rank=rank, exit_code=1))]


def host_of(rank: int) -> str:
    return ("one", "two")[rank]


BOTH = ("one", "two")
SUCCESS = [begins(0), begins(1), reports(0, 1, loss=2), reports(1, 1, loss=3), returns(0, "value"), returns(1)]


def attempts(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "run" / "run.json").read_text())["attempts"]
    return found


def test_a_run_that_succeeds(tmp_path: Path) -> None:
    ranks = ReplayedRanks(BOTH, SUCCESS)
    coordinator = run(tmp_path, ranks, BOTH, 2)
    end = coordinator.end
    assert (end.state, end.finished) == (RunState.FINISHED, [0, 1])
    assert coordinator.report_handler.last is not None
    assert coordinator.report_handler.last["metrics"] == {"loss": 2}
    assert end.value is not None
    assert pickle.loads(end.value) == "value"
    kinds = [type(message) for host, message in ranks.heard if host == "one"]
    assert kinds == [wire.Prepare, wire.ReservePorts, wire.Start, wire.Release]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [(line["rank"], line["metrics"]) for line in map(json.loads, lines)] == [(0, {"loss": 2}), (1, {"loss": 3})]
    assert ranks.is_closed


def test_a_rank_that_fails_and_the_next_attempt(tmp_path: Path) -> None:
    ranks = ReplayedRanks(BOTH, [begins(0), begins(1), *raises(1, "ValueError: once")], SUCCESS)
    coordinator = run(tmp_path, ranks, BOTH, 2, max_failures=1)
    end = coordinator.end
    assert (end.state, end.attempt) == (RunState.FINISHED, 1)
    assert [attempt["failure"] for attempt in attempts(tmp_path)] == ["rank 1 on two: ValueError: once", None]
    starts = [message.attempt for _, message in ranks.heard if isinstance(message, wire.Start)]
    assert starts == [0, 0, 1, 1]


def test_a_rank_that_fails_for_good(tmp_path: Path) -> None:
    ranks = ReplayedRanks(BOTH, [begins(0), begins(1), *raises(1, "ValueError: no")])
    coordinator = run(tmp_path, ranks, BOTH, 2)
    end = coordinator.end
    assert end.state is RunState.FAILED
    [failure] = end.failures
    assert (failure.rank, failure.host, failure.summary) == (1, "two", "ValueError: no")
    assert end.stopped_ranks == [0]
    assert wire.Stop in {type(message) for _, message in ranks.heard}


@pytest.mark.parametrize("max_failures", [0, 1])
def test_a_host_that_is_lost(tmp_path: Path, max_failures: int) -> None:
    """The run continues with the workers that are left, if it may."""
    alone = [begins(0), returns(0)]
    ranks = ReplayedRanks(["one", "two"], [begins(0), begins(1), HostLost("two", "its lease has expired")], alone)
    coordinator = run(tmp_path, ranks, BOTH, (1, 2), max_failures=max_failures, host_wait_s=0.0)
    end = coordinator.end
    if max_failures:
        assert (end.state, end.attempt) == (RunState.FINISHED, 1)
        assert "its lease has expired" in attempts(tmp_path)[0]["failure"]
    else:
        assert end.state is RunState.FAILED
        assert "its lease has expired" in (end.problem or "")


@pytest.mark.parametrize("begins_with", ["fails", "is lost"])
def test_an_attempt_ends_whose_ranks_were_never_started(tmp_path: Path, begins_with: str) -> None:
    class Refusing(ReplayedRanks):
        def send(self, name: str, message: wire.Message) -> None:
            if isinstance(message, wire.ReservePorts):
                text = "there is no port"
                self._say((name, wire.HostFailed(text=text)) if begins_with == "fails" else HostLost(name, text))

    coordinator = run(tmp_path, Refusing(["one"]), ("one",), 1)
    assert coordinator.end.state is RunState.FAILED
    [attempt] = attempts(tmp_path)
    assert attempt["ended"] is not None
    assert "there is no port" in attempt["failure"]


@pytest.mark.parametrize(("asks", "is_busy", "is_due"), [(False, True, True), (True, True, False), (True, False, True)])
def test_only_a_rank_that_waits_for_an_upload_is_excused_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks: bool, is_busy: bool, is_due: bool
) -> None:
    """One upload that never ends must not hide the hangs of all ranks."""
    deadlines: list[float | None] = []
    handle = Coordinator._on_message

    def look(self: Coordinator, host: str, message: wire.Message) -> None:
        handle(self, host, message)
        if isinstance(message, wire.Standstill):
            deadlines.append(self._hang_deadline())

    monkeypatch.setattr(Coordinator, "_on_message", look)
    monkeypatch.setattr(ReportHandler, "is_busy", is_busy)
    state = "asks" if asks else "stuck"
    stands = "one", wire.Standstill(attempt=0, rank=0, state=state, place="report (a.py:1)", seconds=3.0)
    run(tmp_path, ReplayedRanks(BOTH, [begins(0), begins(1), stands, returns(0), returns(1)]), BOTH, 2)
    assert [deadline is not None for deadline in deadlines] == [is_due]
