"""Restarts: which failures have one, from which checkpoint, and what is kept of earlier attempts."""

from __future__ import annotations

import json
import mmap
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import distrain
from distrain import Checkpoint, FailureConfig, Result, RunConfig, ScalingConfig, WorkerGroupError
from distrain.api.backend import BackendConfig
from distrain.coordinator.fit import run_work
from distrain.worker.job.job import FunctionWork, ScriptWork
from tests.process.conftest import files_of, log_of, records

if TYPE_CHECKING:
    from tests.process.conftest import Fit

SAME_FAILURE = (
    "no restart: the same rank has failed twice in the same way at the same place, which is probably a bug "
    "(FailureConfig(retry_same_failure=True) restarts anyway)"
)


MAP_POPULATE = 0x8000  # linux/mman.h


def rank() -> int:
    return distrain.get_context().get_world_rank()


def attempt() -> int:
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def wait_for_the_end() -> None:
    time.sleep(1000)


def failure(fit: Fit, function: Any, *args: Any, **options: Any) -> WorkerGroupError:
    with pytest.raises(WorkerGroupError) as raised:
        fit(function, *args, **options)
    return raised.value


def attempts_of(error: WorkerGroupError) -> int:
    assert error.result is not None
    return 1 + max(int(record["attempt"]) for record in records(error.result.path))


def fail_once() -> None:
    if attempt() == 0 and rank() == 1:
        raise ValueError("only once")
    if attempt() == 0:
        wait_for_the_end()


def test_the_run_manifest_tells_of_every_attempt(fit: Fit) -> None:
    before = time.time()
    result = fit(fail_once, name="run", failure_config=FailureConfig(max_failures=1))
    manifest = json.loads(Path(result.path, "run.json").read_text())
    first, second = manifest["attempts"]
    assert (first["attempt"], second["attempt"]) == (0, 1)
    assert first["hosts"] == second["hosts"] == {"localhost": [0, 1]}
    assert first["failure"] == "rank 1 on localhost: ValueError: only once"
    assert second["failure"] is None
    moments = [first["started"], first["ended"], second["started"], second["ended"]]
    assert [before, manifest["started"], *moments, manifest["updated"]] == sorted(
        [before, manifest["started"], *moments, manifest["updated"]]
    )
    assert manifest["status"] == "finished"


# -- whether there is another attempt --------------------------------------------------------------------------------


def raise_the_same() -> None:
    distrain.report({"attempt": attempt()})
    if rank() == 1:
        raise ValueError("a bug")
    wait_for_the_end()


def test_the_same_exception_twice_ends_the_run(fit: Fit) -> None:
    error = failure(fit, raise_the_same, failure_config=FailureConfig(max_failures=5))
    assert SAME_FAILURE in str(error).splitlines()
    assert attempts_of(error) == 2
    assert (error.culprit, type(error.worker_failures[1])) == (1, ValueError)


def test_kills_are_retried_until_the_budget_is_used_up(fit: Fit, capsys: pytest.CaptureFixture[str]) -> None:
    def train() -> None:
        distrain.report({"attempt": attempt()})
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for_the_end()

    error = failure(fit, train, failure_config=FailureConfig(max_failures=4))
    assert "was killed by SIGKILL (9)" in str(error)
    assert "no restart" not in str(error)
    assert attempts_of(error) == 5
    shown = capsys.readouterr().err
    assert [f"restart {n} of 4" in shown for n in (1, 2, 3, 4, 5)] == [True, True, True, True, False]
    assert "from scratch (no checkpoint yet)" in shown


class BrokenBackend(BackendConfig):
    def setup(self, context: Any) -> None:
        with Path(os.environ["ATTEMPTS"]).open("a") as file:
            file.write(f"{context.get_world_rank()}\n")
        raise RuntimeError("no such interface")


def fit_with_a_broken_backend(fit: Fit, place: Path, **failure_config: Any) -> WorkerGroupError:
    with pytest.raises(WorkerGroupError) as raised:
        run_work(
            FunctionWork(function=lambda: None, config={}, backend=BrokenBackend()),
            distrain.ScalingConfig(num_workers=1),
            distrain.RunConfig(
                storage_path=fit.storage,
                failure_config=FailureConfig(**failure_config),
                worker_runtime_env={"env_vars": {"ATTEMPTS": str(place / "attempts")}},
            ),
        )
    return raised.value


def test_there_is_no_restart_when_no_rank_ever_got_into_train_func(fit: Fit, tmp_path: Path) -> None:
    error = fit_with_a_broken_backend(fit, tmp_path, max_failures=-1)
    assert "no restart: no rank has ever entered train_func" in str(error).splitlines()
    assert "RuntimeError: no such interface" in str(error)
    assert (tmp_path / "attempts").read_text() == "0\n"


# -- when ------------------------------------------------------------------------------------------------------------


def begun_and_failed(result: Result | None) -> tuple[list[float], list[float]]:
    """Times of rank 0's first and last report in each attempt."""
    assert result is not None
    lines = records(result.path, rank=0)
    attempts = sorted({line["attempt"] for line in lines})
    times = [[line["time"] for line in lines if line["attempt"] == attempt] for attempt in attempts]
    return [each[0] for each in times], [each[-1] for each in times]


def die_at_once() -> None:
    distrain.report({"attempt": attempt()})
    os._exit(3)


def test_a_backoff_is_waited_for_and_doubled(fit: Fit, capsys: pytest.CaptureFixture[str]) -> None:
    error = failure(fit, die_at_once, workers=1, failure_config=FailureConfig(max_failures=2, backoff_s=0.4))
    begun, failed = begun_and_failed(error.result)
    waited = [begin - fail for begin, fail in zip(begun[1:], failed, strict=False)]
    assert 0.4 <= waited[0] < 0.8 + 2.0
    assert 0.8 <= waited[1] < 0.8 + 2.0
    shown = capsys.readouterr().err
    assert "the next attempt starts in 0.4 s" in shown
    assert "the next attempt starts in 0.8 s" in shown


def test_ctrl_c_ends_the_wait_before_an_attempt(user_script: Any, storage: Path) -> None:
    source = """
import os, signal, sys, threading, time, distrain
from distrain import FailureConfig, RunConfig, UserCallback
class CtrlC(UserCallback):
    def after_exception(self, *arguments):
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
def train():
    os._exit(3)
config = FailureConfig(max_failures=1, backoff_s=1000.0)
run = RunConfig(storage_path=sys.argv[1], failure_config=config, callbacks=[CtrlC()])
began = time.monotonic()
try:
    distrain.DataParallelTrainer(train, run_config=run).fit()
except KeyboardInterrupt:
    print("INTERRUPTED", time.monotonic() - began < 20.0)
"""
    done = user_script(source, str(storage))
    assert "INTERRUPTED True" in done.stdout, done.stderr
    assert "the next attempt starts in 300 s" in done.stderr


SCRIPT_WITH_HANDLER = """
import os, pathlib, signal, sys, time
rank, place = int(os.environ["RANK"]), pathlib.Path(sys.argv[1])

def save(number, frame):
    (place / "saved.new").touch()
    time.sleep(0.3)
    (place / "saved.new").rename(place / "saved")
    sys.exit(1)  # which is not what the run has failed of

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if rank == 1:
        signal.signal(signal.SIGTERM, save)
    (place / f"ready-{rank}").touch()
    while rank > 0 or not all((place / f"ready-{other}").exists() for other in (1, 2)):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
assert (place / "saved").exists()
"""
LONG_S = 600.0
"""Seconds that no test waits for."""


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_the_other_ranks_of_a_script_can_save_when_one_fails(
    storage: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], start_method: Any
) -> None:
    """Rank 1 handles SIGTERM. Rank 2 does not, so nobody waits for it."""
    (tmp_path / "train.py").write_text(SCRIPT_WITH_HANDLER)
    began = time.monotonic()
    result = run_work(
        ScriptWork(path=str(tmp_path / "train.py"), argv=[str(tmp_path)], backend=BackendConfig()),
        ScalingConfig(num_workers=3, start_method=start_method),
        RunConfig(storage_path=storage, failure_config=FailureConfig(max_failures=1, peer_failure_grace_s=LONG_S)),
    )
    assert result.error is None
    assert time.monotonic() - began < LONG_S / 10
    [line] = [line for line in capsys.readouterr().err.splitlines() if "its log" in line]
    assert "rank 0 was killed by SIGKILL" in line


@pytest.mark.parametrize("grace_s", [0.0, LONG_S])
def test_the_other_ranks_of_a_train_func_are_unwound_when_one_fails_if_that_is_wanted(
    fit: Fit, tmp_path: Path, grace_s: float
) -> None:
    def train() -> None:
        (tmp_path / f"ready-{rank()}").touch()
        try:
            while rank() > 0 or not all((tmp_path / f"ready-{other}").exists() for other in (1, 2)):
                time.sleep(0.01)
            raise OSError("the disk of rank 0")
        finally:
            if rank() > 0:
                time.sleep(0.2)
                (tmp_path / f"unwound-{rank()}").touch()

    error = failure(fit, train, workers=3, failure_config=FailureConfig(peer_failure_grace_s=grace_s))
    assert len(list(tmp_path.glob("unwound-*"))) == (2 if grace_s else 0)
    assert (error.culprit, list(error.stopped)) == (0, [1, 2])
    assert len(error.failures) == 1


# -- from where, and what is kept ------------------------------------------------------------------------------------


def train_with_checkpoints(config: dict[str, Any]) -> list[int]:
    """Rank 1 is killed in every attempt, the first step after the checkpoint that it has resumed from."""
    place = Path(config["place"])
    checkpoint = distrain.get_checkpoint()
    first = 0 if checkpoint is None else int(Path(checkpoint.path, "step.txt").read_text()) + 1
    print(f"attempt {attempt()} begins at step {first}")
    for step in range(first, 3):
        folder = place / f"model-{rank()}-{attempt()}-{step}"
        folder.mkdir()
        (folder / ("step.txt" if rank() == 0 else f"rank-{rank()}.txt")).write_text(str(step))
        distrain.report({"step": step, "first": first}, checkpoint=Checkpoint(folder))
        while (latest := distrain.get_checkpoint()) is None or int(Path(latest.path, "step.txt").read_text()) < step:
            time.sleep(0.001)
        distrain.collective.barrier()
        if rank() == 1 and step < 2:
            os.kill(os.getpid(), signal.SIGKILL)
        distrain.collective.barrier()
    return [first, attempt()]


def test_every_attempt_goes_on_at_the_last_checkpoint_and_all_are_joined(any_fit: Fit, tmp_path: Path) -> None:
    config = FailureConfig(max_failures=2)
    result = any_fit(train_with_checkpoints, {"place": str(tmp_path)}, failure_config=config)
    assert result.return_value == [2, 2]
    assert result.metrics == {"step": 2, "first": 2}
    assert files_of(result.checkpoint) == {"step.txt": "2", "rank-1.txt": "2"}
    assert len(result.best_checkpoints) == 3
    for number in (0, 1):
        lines = [(line["attempt"], line["metrics"]["step"]) for line in records(result.path, rank=number)]
        assert lines == [(0, 0), (1, 1), (2, 2)]
        logs = [log_of(result.path, number, attempt) for attempt in range(3)]
        assert logs == [f"attempt {attempt} begins at step {attempt}\n" for attempt in range(3)]
    assert Result.from_path(result.path).metrics == result.metrics


def save_and_raise(config: dict[str, Any]) -> int:
    """Ray's documented example of a recovery: rank 0 saves every epoch, and epoch 1 raises after its report. Rank 1 has
    raised, and its process is gone, while rank 0 is still saving the checkpoint of that epoch, or storing it."""
    storing, failed = Path(config["place"], "storing"), Path(config["place"], "failed")
    fsync = os.fsync

    def wait_for_the_failure() -> None:
        while not failed.exists() or psutil.pid_exists(int(failed.read_text() or "1")):
            time.sleep(0.01)

    def slow_fsync(fd: int) -> None:
        storing.write_text("")
        wait_for_the_failure()
        fsync(fd)

    checkpoint = distrain.get_checkpoint()
    first = 0 if checkpoint is None else checkpoint.to_dict()["epoch"] + 1
    for epoch in range(first, 3):
        distrain.collective.barrier()
        if epoch == 1 and rank() == 0 and config["saving"]:
            wait_for_the_failure()
        elif epoch == 1 and rank() == 0:
            os.fsync = slow_fsync
        while epoch == 1 and rank() == 1 and not storing.exists() and not config["saving"]:
            time.sleep(0.01)
        distrain.report({"epoch": epoch}, Checkpoint.from_dict({"epoch": epoch}) if rank() == 0 else None)
        if epoch == 1 and rank() == 1:
            failed.write_text(str(os.getpid()))
            raise RuntimeError("on purpose")
    return first


def test_the_others_make_the_reports_that_a_failed_rank_has_made(any_fit: Fit) -> None:
    """Rank 1, which only reports metrics, is far ahead."""

    def train() -> None:
        for step in range(4):
            if rank() == 0:
                time.sleep(0.3)
            distrain.report({"step": step}, Checkpoint.from_dict({"step": step}) if rank() == 0 else None)
        raise RuntimeError("on purpose")

    with pytest.raises(WorkerGroupError) as caught:
        any_fit(train)
    result = caught.value.result
    assert result is not None
    assert result.metrics == {"step": 3}
    assert [checkpoint.to_dict()["step"] for checkpoint, _ in result.best_checkpoints] == [0, 1, 2, 3]


def start_late() -> None:
    """Be unpickled slowly by rank 0, as a large config is."""
    if os.environ.get("RANK") == "0":
        time.sleep(1.5)


class StartsLate:
    def __reduce__(self) -> tuple[object, tuple[()]]:
        return start_late, ()


def test_a_failed_rank_lets_one_that_is_still_starting_report(fit: Fit) -> None:
    def train(config: dict[str, object]) -> None:
        distrain.report({"loss": 1.0})
        if rank() == 1:
            raise RuntimeError("on purpose")

    with pytest.raises(WorkerGroupError) as caught:
        fit(train, {"late": StartsLate()})
    assert caught.value.result is not None
    assert caught.value.result.metrics == {"loss": 1.0}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("saving", "said"),
    [
        (False, "30 s for rank 0 to store a checkpoint"),
        (True, "60 s for rank 0 to make as many reports"),
    ],
)
def test_a_checkpoint_that_is_being_stored_when_another_rank_fails_is_kept(
    any_fit: Fit, tmp_path: Path, capsys: pytest.CaptureFixture[str], *, saving: bool, said: str
) -> None:
    config = {"place": str(tmp_path), "saving": saving}
    result = any_fit(save_and_raise, config, failure_config=FailureConfig(max_failures=1))
    assert result.return_value == 2
    assert f"rank 1 failed; waiting up to {said}" in capsys.readouterr().err


def test_a_run_that_is_continued_has_its_budget_anew_and_its_attempts_apart(fit: Fit, tmp_path: Path) -> None:
    options: dict[str, Any] = {"name": "run", "failure_config": FailureConfig(max_failures=0)}
    failure(fit, train_with_checkpoints, {"place": str(tmp_path)}, **options)
    options["failure_config"] = FailureConfig(max_failures=1)
    again = tmp_path / "again"
    again.mkdir()
    result = fit(train_with_checkpoints, {"place": str(again)}, **options)
    lines = [(line["attempt"], line["metrics"]["step"]) for line in records(result.path, rank=0)]
    assert lines == [(0, 0), (1, 1), (2, 2)]
    assert log_of(result.path, 0, 2) == "attempt 1 begins at step 2\n"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
def test_a_forkserver_whose_workers_need_long_to_die_is_kept(fit: Fit) -> None:
    """Rank 0 has so many page tables that the kernel needs two seconds to free them."""

    def train() -> dict[str, int]:
        if attempt() == 0 and rank() == 0:
            size = 64 << 20
            memory = os.memfd_create("many pages")
            os.ftruncate(memory, size)
            keep = [mmap.mmap(memory, size, flags=mmap.MAP_SHARED | MAP_POPULATE) for _ in range(1600)]
            (place / "ready").touch()
            wait_for_the_end()
            del keep
        if attempt() == 0:
            while not (place / "ready").exists():
                time.sleep(0.01)
            (place / "forkserver").write_text(str(os.getppid()))
            raise ValueError("only once")
        return {"forkserver": os.getppid()}

    place = fit.storage
    place.mkdir()
    result = fit(train, failure_config=FailureConfig(max_failures=1))
    assert result.return_value == {"forkserver": int((place / "forkserver").read_text())}
