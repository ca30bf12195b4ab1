"""Trackers of real runs: every step once in one tracked run, whatever happens to the workers, fit() or the tracker."""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import distrain
from distrain import Checkpoint, FailureConfig, WorkerGroupError
from distrain.coordinator import observers
from distrain.trackers import Mlflow, Report, TrackedRun, Tracker, Wandb

if TYPE_CHECKING:
    import subprocess

    from tests.process.conftest import Fit

STEPS = 12
EXPECTED = [(step, 1 / step) for step in range(1, STEPS + 1)]
TWICE = FailureConfig(max_failures=2)


def train(config: dict[str, Any]) -> None:
    """Report every step, with a checkpoint after each fourth; fail in step 6 and 10, once each."""
    checkpoint = distrain.get_checkpoint()
    first = checkpoint.to_dict()["step"] if checkpoint else 0
    for step in range(first + 1, STEPS + 1):
        stored = Checkpoint.from_dict({"step": step}) if step % 4 == 0 else None
        distrain.report({"loss": 1 / step, "eval": {"even": step % 2 == 0}}, checkpoint=stored)
        marker = Path(config["place"], f"failed-{step}")
        if distrain.get_context().get_world_rank() == 0 and step in (6, 10) and not marker.exists():
            marker.touch()
            raise ValueError("on purpose")


class Lines(Tracker):
    """The ten lines of the documentation, nearly."""

    def start(self, run: TrackedRun) -> None:
        self.file = (run.directory / "lines.txt").open("a")
        self.file.write(f"start {run.config['lr']}\n")

    def log(self, report: Report) -> None:
        self.file.write(f"{report.step} {report.metrics['loss']}\n")

    def flush(self) -> None:
        self.file.flush()

    def finish(self, status: str) -> None:
        self.file.write(f"{status}\n")
        self.file.close()


def lines_of(run: str | Path) -> list[str]:
    return Path(run, "lines.txt").read_text().splitlines()


REPORTED = [f"{step} {value}" for step, value in EXPECTED]


# -- restarts --------------------------------------------------------------------------------------------------------


def test_the_next_fit_goes_on_in_the_same_tracked_run(fit: Fit, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tests.unit.trackers.test_tensorboard import scalars

    config = {"place": str(tmp_path), "lr": 0.1}
    for _ in range(2):
        with pytest.raises(WorkerGroupError):
            fit(train, config, name="run", trackers=["tensorboard", Lines()])
    run = fit(train, config, name="run", trackers=["tensorboard", Lines()]).path
    assert [step for step, _ in scalars(Path(run, "tensorboard"))["loss"]] == list(range(1, STEPS + 1))
    assert scalars(Path(run, "tensorboard"))["eval/even"] == [(step, step % 2 == 0) for step, _ in EXPECTED]
    assert [line for line in lines_of(run) if line[0].isdigit()] == REPORTED
    assert [line for line in lines_of(run) if line.startswith("f")] == ["failed", "failed", "finished"]


# -- a tracker that fails or hangs -----------------------------------------------------------------------------------


class Failing(Tracker):
    def log(self, report: Report) -> None:
        raise ConnectionError("no network")


class Hanging(Tracker):
    def log(self, report: Report) -> None:
        time.sleep(1000)


class ExitingAtStart(Tracker):
    name = "exiting"

    def start(self, run: TrackedRun) -> None:
        sys.exit("no key")


def test_a_tracker_has_every_step_once_in_spite_of_restarts_and_others_that_fail(
    fit: Fit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"place": str(tmp_path), "lr": 0.1}
    trackers = [Failing(), ExitingAtStart(), Lines()]
    run = fit(train, config, trackers=trackers, failure_config=TWICE).path
    assert len(list(tmp_path.glob("failed-*"))) == 2
    assert lines_of(run) == ["start 0.1", *REPORTED, "finished"]
    shown = capsys.readouterr().err
    assert shown.count("the tracker failing failed: ConnectionError: no network; the run continues; ") == 1
    assert shown.count("the tracker exiting failed: SystemExit: no key; the run continues; ") == 1
    assert shown.count("the tracker failing may lack reports: ConnectionError: no network; metrics.jsonl has ") == 1
    assert shown.count("the tracker exiting has logged nothing: SystemExit: no key; metrics.jsonl has all ") == 1
    assert shown.count('raise ConnectionError("no network")') == 1


def test_a_tracker_that_hangs_does_not_keep_the_run(
    fit: Fit, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observers, "_NOTICE_AFTER_S", 0.5)
    monkeypatch.setattr(observers, "_LONGEST_WAIT_S", 2.0)
    config = {"place": str(tmp_path), "lr": 0.1}
    run = fit(train, config, workers=0, trackers=[Hanging(), Lines()], failure_config=TWICE).path
    assert lines_of(run)[-1] == "finished"
    shown = capsys.readouterr().err
    assert shown.count("waiting for the tracker hanging; Ctrl-C ends the waiting") == 1
    assert shown.count("the tracker hanging has not returned; ") == 1


# -- the other trackers, read back by their own libraries ------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # those of MLflow and SQLAlchemy
def test_mlflow_has_every_step_once(fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not find_spec("mlflow"):
        pytest.skip("needs mlflow")
    monkeypatch.chdir(tmp_path)  # MLflow writes artifacts there
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    tracker, config = Mlflow(tracking_uri=uri, experiment="mnist", tags={"mine": "1"}, checkpoints=True), {"lr": 0.1}
    with pytest.raises(WorkerGroupError):
        fit(train, {**config, "place": str(tmp_path)}, name="run", trackers=[tracker])
    fit(train, {**config, "place": str(tmp_path)}, name="run", trackers=[tracker], failure_config=TWICE)
    found = _output(READ_MLFLOW, uri)
    assert [tuple(point) for point in found["points"]] == EXPECTED
    assert (found["status"], found["name"], found["lr"], found["mine"]) == ("FINISHED", "run", "0.1", "1")
    assert {"checkpoint_000000", "checkpoint_000002"} <= set(found["artifacts"])


READ_MLFLOW = """
import json, sys, mlflow
client = mlflow.MlflowClient(tracking_uri=sys.argv[1])
[run] = client.search_runs([client.get_experiment_by_name("mnist").experiment_id])
print(json.dumps({
    "points": sorted((m.step, m.value) for m in client.get_metric_history(run.info.run_id, "loss")),
    "artifacts": [item.path for item in client.list_artifacts(run.info.run_id)],
    "status": run.info.status, "name": run.info.run_name, "lr": run.data.params["lr"], "mine": run.data.tags["mine"],
}))
"""


def test_wandb_has_every_step_once(fit: Fit, tmp_path: Path) -> None:
    """Offline, where each fit() has a file of its own."""
    if not find_spec("wandb"):
        pytest.skip("needs wandb")
    config = {"place": str(tmp_path), "lr": 0.1}
    tracker = Wandb(project="mnist", mode="offline", checkpoints=True)
    run = Path(fit(train, config, trackers=[tracker], failure_config=TWICE).path)
    import_module("wandb").teardown()  # it ends its process only when ours exits
    [file] = (run / "trackers" / "wandb").glob("offline-run-*/*.wandb")
    points = _output(READ_WANDB, str(file))
    assert [(point["_step"], point["loss"], point["eval/even"]) for point in points] == [
        (step, value, step % 2 == 0) for step, value in EXPECTED
    ]


READ_WANDB = """
import json, struct, sys
from wandb.proto import wandb_internal_pb2

data, points, record, at = open(sys.argv[1], "rb").read(), [], b"", 7  # records in LevelDB's format, after a header
while at + 7 <= len(data):
    if 32768 - at % 32768 < 7:
        at += 32768 - at % 32768
        continue
    _, size, kind = struct.unpack_from("<IHB", data, at)
    record += data[at + 7 : at + 7 + size]
    at += 7 + size
    if kind in (1, 4):
        found, record = wandb_internal_pb2.Record.FromString(record), b""
        if found.WhichOneof("record_type") == "history":
            points.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in found.history.item})
print(json.dumps(points))
"""


def _output(code: str, *arguments: str) -> Any:
    """Run code in another process, so that this one does not import the library."""
    import subprocess

    command = [sys.executable, "-c", code, *arguments]
    done: subprocess.CompletedProcess[str] = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
