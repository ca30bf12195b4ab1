"""Validation of checkpoints in processes of their own, and what workers learn about the checkpoints of their run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import distrain
from distrain import (
    BackendConfig,
    Checkpoint,
    CheckpointConsistencyMode,
    JobError,
    Result,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    ValidationConfig,
    ValidationTaskConfig,
)
from distrain.coordinator.run.fit import run_work
from distrain.worker.job.job import FunctionWork
from tests.conftest import wait_until
from tests.process.conftest import Fit

Function = Callable[..., Any]
MODES = CheckpointConsistencyMode


@pytest.fixture(params=[0, 2])
def every_fit(request: pytest.FixtureRequest, storage: Path) -> Callable[..., Result]:
    """``fit(function, config, validation)`` in this process and with workers."""
    return fit_of(Fit(storage=storage), request.param)


@pytest.fixture
def fit(storage: Path) -> Callable[..., Result]:
    return fit_of(Fit(storage=storage), 2)


def fit_of(fit: Fit, workers: int) -> Callable[..., Result]:
    def start(function: Function, config: dict[str, Any], validation: ValidationConfig | None, **run: Any) -> Result:
        return run_work(
            FunctionWork(function=function, config=config, backend=BackendConfig()),
            ScalingConfig(num_workers=workers, start_method=fit.start_method),
            RunConfig(**{"storage_path": fit.storage, "name": "run", **run}),
            validation=validation,
            transports=(fit.transport,),
        )

    return start


def report(step: int, validation: bool | ValidationTaskConfig, **metrics: Any) -> None:
    folder = tempfile.mkdtemp()
    Path(folder, "step.txt").write_text(str(step))
    distrain.report({"step": step, **metrics}, Checkpoint(folder), validation=validation)


def train(config: dict[str, Any]) -> list[tuple[int, str]]:
    """A checkpoint for each of the tasks."""
    for step, task in enumerate(config["tasks"]):
        report(step, task)
    known = distrain.get_all_reported_checkpoints(MODES(config.get("mode", "VALIDATED")), config.get("timeout_s"))
    return [(one.metrics["step"], one.status.value) for one in known]


def score(checkpoint: Checkpoint, factor: float = 1.0, shift: float = 0.0) -> dict[str, Any]:
    with checkpoint.as_directory() as folder:
        return {"score": float(Path(folder, "step.txt").read_text()) * factor + shift, "pid": os.getpid()}


def manifest_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / ".manifest.json").read_text())
    return found


def metrics_of(run: str, number: int) -> dict[str, Any]:
    found: dict[str, Any] = manifest_of(Path(run, f"checkpoint_{number:06d}"))["metrics"]
    return found


def test_metrics_of_the_validation_are_added_to_those_of_the_checkpoint(every_fit: Callable[..., Result]) -> None:
    """Settings of a call take the place of the usual ones, one by one."""
    tasks = [True, ValidationTaskConfig(fn_kwargs={"factor": 10.0}), False]
    usual = ValidationTaskConfig(fn_kwargs={"factor": 2.0, "shift": 0.5})
    result = every_fit(train, {"tasks": tasks}, ValidationConfig(score, usual))
    assert result.return_value == [(0, "VALIDATED"), (1, "VALIDATED"), (2, "COMMITTED")]
    found = [metrics_of(result.path, number) for number in range(3)]
    assert [metrics.get("score") for metrics in found] == [0.5, 10.5, None]
    assert len({metrics.get("pid") for metrics in found[:2]} - {os.getpid()}) == 2, "each in a process of its own"
    assert [metrics.get("score") for _, metrics in result.best_checkpoints] == [0.5, 10.5, None]
    assert Result.from_path(result.path).best_checkpoints[1][1]["score"] == 10.5
    assert result.metrics == {"step": 2}, "these are what rank 0 reported last"


def hopeless(checkpoint: Checkpoint, how: str) -> Any:
    print("I am about to", how)
    if how == "raise":
        raise ValueError("on purpose")
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        sys.exit(3)
    return {"nothing": None, "a tensor": {"score": object()}}.get(how)


def test_a_validation_that_fails_is_told_and_costs_nothing_else(
    fit: Callable[..., Result], capsys: pytest.CaptureFixture[str]
) -> None:
    reasons = {
        "raise": "ValueError: on purpose",
        "die": "the validator has died (exit code -9)",
        "exit": "SystemExit: 3",
        "return None": "TypeError: the function must return a dict of metrics, got None (NoneType)",
        "a tensor": "TypeError: report(): metrics['score'] is a builtins.object, which cannot be recorded",
    }
    tasks = [ValidationTaskConfig(fn_kwargs={"how": how}) for how in reasons]
    result = fit(train, {"tasks": tasks}, ValidationConfig(hopeless))
    said = capsys.readouterr().err
    for step, (how, why) in enumerate(reasons.items()):
        name = f"checkpoint_{step:06d}"
        assert result.return_value[step] == (step, "VALIDATION_FAILED")
        assert result.best_checkpoints[step][1] == {"step": step}
        assert manifest_of(Path(result.path, name))["validation"]["status"] == "VALIDATION_FAILED"
        log = f"{result.path}/logs/validation/{name}.log"
        assert f"the validation of {name} has failed: {why}" in said
        assert f"(its output: {log})" in said
        assert "I am about to" in Path(log).read_text() or how == "die"


def test_a_validation_without_a_log_fails_and_writes_through_no_link(
    fit: Callable[..., Result], storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, victim = storage / "run/logs/validation", storage / "victim"
    folder.mkdir(parents=True)
    victim.write_text("precious")
    (folder / "checkpoint_000000.log").symlink_to(victim)
    result = fit(train, {"tasks": [True]}, ValidationConfig(score))
    assert result.return_value == [(0, "VALIDATION_FAILED")]
    assert "checkpoint_000000.log is a link, and distrain does not write through links" in capsys.readouterr().err
    assert victim.read_text() == "precious"


def sleep(checkpoint: Checkpoint, pids: str) -> dict[str, Any]:
    child = subprocess.Popen(["sleep", "60"])
    Path(pids).write_text(json.dumps([os.getpid(), child.pid]))
    child.wait()
    return {}


def test_one_that_takes_too_long_is_ended_with_its_children(fit: Callable[..., Result], tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    task = ValidationTaskConfig(fn_kwargs={"pids": str(pids)}, timeout_s=1.5)
    result = fit(train, {"tasks": [task]}, ValidationConfig(sleep))
    assert result.return_value == [(0, "VALIDATION_TIMEOUT")]
    wait_until(lambda: not any(Path("/proc", str(pid)).exists() for pid in json.loads(pids.read_text())))


def wait_for_file(checkpoint: Checkpoint, go: str) -> dict[str, Any]:
    while not Path(go).exists():
        time.sleep(0.01)
    return {"score": 1.0}


def ask_in_vain(config: dict[str, Any]) -> list[Any]:
    """The state of a run at once, after a while, and at the end."""
    report(0, True)
    known = [distrain.get_all_reported_checkpoints(MODES.COMMITTED)]
    began = time.monotonic()
    known.append(distrain.get_all_reported_checkpoints(timeout_s=0.5))
    waited_s = time.monotonic() - began
    distrain.collective.barrier()  # both ranks have their answers
    Path(config["go"]).touch()
    known.append(distrain.get_all_reported_checkpoints())
    return [waited_s, *((one.metrics, one.status.value) for [one] in known)]


def test_a_worker_is_told_what_it_asks_for(every_fit: Callable[..., Result], tmp_path: Path) -> None:
    go = str(tmp_path / "go")
    result = every_fit(ask_in_vain, {"go": go}, ValidationConfig(wait_for_file, ValidationTaskConfig({"go": go})))
    waited_s, *known = result.return_value
    assert 0.5 <= waited_s < 5.0
    assert known == [
        ({"step": 0}, "PENDING_VALIDATION"),
        ({"step": 0}, "PENDING_VALIDATION"),
        ({"step": 0, "score": 1.0}, "VALIDATED"),
    ]


def test_what_was_not_validated_is_when_the_run_goes_on(fit: Callable[..., Result], tmp_path: Path) -> None:
    go = str(tmp_path / "go")

    def fails(config: dict[str, Any]) -> None:
        report(0, True)
        distrain.get_all_reported_checkpoints(MODES.COMMITTED)
        distrain.collective.barrier()
        raise RuntimeError("on purpose")

    with pytest.raises(TrainingFailedError) as raised:
        fit(fails, {}, ValidationConfig(wait_for_file, ValidationTaskConfig({"go": go})))
    assert raised.value.result is not None
    assert manifest_of(Path(raised.value.result.path, "checkpoint_000000"))["validation"]["status"] == (
        "PENDING_VALIDATION"
    )
    result = fit(lambda config: None, {}, ValidationConfig(score))
    assert metrics_of(result.path, 0)["score"] == 0.0


def test_a_function_that_cannot_travel_is_named_before_anything_starts(fit: Callable[..., Result]) -> None:
    lock = threading.Lock()
    with pytest.raises(JobError, match="variable 'lock'"):
        fit(train, {}, ValidationConfig(lambda checkpoint: {"locked": lock.locked()}))


INTERRUPTED = """
import sys, tempfile, time
import distrain

def train():
    for step in range(2):
        with tempfile.TemporaryDirectory() as folder:
            distrain.report({"step": step}, checkpoint=distrain.Checkpoint(folder), validation=True)

distrain.DataParallelTrainer(
    train,
    scaling_config=distrain.ScalingConfig(num_workers=1),
    run_config=distrain.RunConfig(name="run", storage_path=sys.argv[1]),
    validation_config=distrain.ValidationConfig(lambda checkpoint: time.sleep(3600)),
).fit()
"""


def interrupt_the_wait(storage: str) -> None:
    """Ctrl-C while a run that has finished waits for the validations of two checkpoints."""
    argv = [sys.executable, "-c", INTERRUPTED, storage]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as user:
        assert user.stderr is not None
        try:
            shown = next(line for line in user.stderr if "waiting for the validation" in line)
            user.send_signal(signal.SIGINT)
            shown += user.communicate(timeout=20)[1]
        finally:
            user.kill()
    assert shown.count("has ended the wait for it") == 2


def test_ctrl_c_ends_the_wait_for_validations_and_they_have_failed(storage: Path) -> None:
    interrupt_the_wait(str(storage))
    assert json.loads((storage / "run" / "run.json").read_text())["status"] == "finished"
    for number in range(2):
        manifest = manifest_of(storage / "run" / f"checkpoint_{number:06d}")
        assert manifest["validation"]["status"] == "VALIDATION_FAILED"
