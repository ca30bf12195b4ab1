"""Tuner with real trials: in sequence and side by side, failing, stopped and continued. The census is in conftest."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import distrain
from distrain import Checkpoint, PreemptionError, Result, RunConfig, ScalingConfig, WorkerGroupError
from distrain.as_ray.tune import search_space as tune
from distrain.as_ray.tune.sweep import Trial
from distrain.as_ray.tune.trainables import (
    Trainable,
    TuneReportCallback,
    TuneRunConfig,
    report,
    with_parameters,
    with_resources,
)
from distrain.as_ray.tune.tuner import TuneConfig, Tuner
from distrain.coordinator import stop_signals
from distrain.coordinator.trainer import DataParallelTrainer
from distrain.errors import ResourcesError
from tests.conftest import wait_until
from tests.stand_in import leave

leave()

SIDE_BY_SIDE, IN_SEQUENCE = 2, 1
both_ways = pytest.mark.parametrize("lanes", [IN_SEQUENCE, SIDE_BY_SIDE])


def small(function: Any) -> Any:
    """A trial that fits twice into a machine with one CPU."""
    return with_resources(function, {"cpu": 0.5})


def sweep(function: Any, storage: Path, lanes: int = SIDE_BY_SIDE, **options: Any) -> Tuner:
    space = options.pop("param_space", {"lr": tune.grid_search([0.1, 0.2, 0.5])})
    tune_config = TuneConfig(metric="loss", mode="min", max_concurrent_trials=lanes)
    run_config = RunConfig(name="sweep", storage_path=storage, **options)
    return Tuner(function, param_space=space, tune_config=tune_config, run_config=run_config)


@both_ways
def test_trials_report_return_and_fail(storage: Path, lanes: int, caplog: pytest.LogCaptureFixture) -> None:
    def train(config: dict[str, Any], data: list[int]) -> dict[str, float] | None:
        for i in range(len(data)):
            report({"loss": config["lr"] * (3 - i), "nested": {"i": i}})
        if config["lr"] == 0.5:
            raise ValueError("too fast")
        return {"loss": config["lr"]} if config["lr"] == 0.2 else None

    results = sweep(small(with_parameters(train, data=[1, 2, 3])), storage, lanes).fit()
    assert (len(results), results.num_errors, results.num_terminated) == (3, 1, 2)
    (error,) = results.errors
    assert isinstance(error, WorkerGroupError)
    assert isinstance(error.original, ValueError)
    best = results.get_best_result()
    assert (best.config, best.path) == ({"lr": 0.1}, str(storage / "sweep" / "train_00000"))
    assert best.metrics["loss"] == pytest.approx(0.1)
    assert [result.metrics["training_iteration"] for result in results] == [3, 4, 3]
    assert results.get_best_result("nested/i", "max", scope="avg").config == {"lr": 0.1}
    frame = results.get_dataframe(filter_metric="loss", filter_mode="max")
    assert frame[["config/lr", "loss"]].round(3).to_numpy().tolist() == [[0.1, 0.3], [0.2, 0.6], [0.5, 1.5]]
    assert best.metrics_dataframe["training_iteration"].tolist() == [1, 2, 3]
    assert Result.from_path(best.path).metrics["nested"] == {"i": 2}  # an ordinary run
    assert "trial train_00002 has failed (lr=0.5): rank 0: ValueError: too fast" in caplog.text
    assert "1 of 3 trials have failed" in caplog.text


def test_trials_of_a_trainer(storage: Path) -> None:
    def train(config: dict[str, Any]) -> None:
        size = distrain.get_context().get_world_size()
        distrain.report({"loss": config["lr"] * config["scale"], "size": size}, Checkpoint.from_dict(config))

    trainer = DataParallelTrainer(
        train,
        train_loop_config={"lr": 1, "scale": 10},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name="sweep", storage_path=storage),
    )
    space = {
        "train_loop_config": {"lr": tune.grid_search([3, 2])},
        "scaling_config": {"num_workers": 2, "resources_per_worker": {"CPU": 0.1}},
    }
    results = Tuner(trainer, param_space=space).fit()
    assert [(one.metrics["loss"], one.metrics["size"]) for one in results] == [(30, 2), (20, 2)]
    best = results.get_best_result("loss", "min")
    assert best.checkpoint is not None
    assert best.checkpoint.to_dict()["lr"] == 2
    assert results.experiment_path == str(storage / "sweep")


def test_a_trial_may_start_a_run_of_its_own(storage: Path) -> None:
    """As Ray's documentation has it since Train and Tune are apart."""

    def train(config: dict[str, Any]) -> None:
        for i in range(2):
            distrain.report({"loss": config["lr"] / (i + 1)})

    def drive(config: dict[str, Any]) -> None:
        name = f"train-{distrain.get_context().get_trial_name()}"
        DataParallelTrainer(
            train,
            train_loop_config=config["train_loop_config"],
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(name=name, storage_path=storage, callbacks=[TuneReportCallback()]),
        ).fit()

    space = {"train_loop_config": {"lr": tune.grid_search([4])}}
    (result,) = sweep(drive, storage, param_space=space).fit()
    assert (result.metrics["loss"], result.metrics["training_iteration"]) == (2, 2)
    assert (storage / "train-drive_00000").is_dir()


class Steps(Trainable):
    def setup(self, config: dict[str, Any], **parameters: Any) -> None:
        self.x = config["x"] + parameters["more"]

    def step(self) -> dict[str, Any]:
        return {"score": self.x * (self.iteration + 1), "done": self.iteration == 4}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        (Path(checkpoint_dir) / "steps").write_text(str(self.iteration))


def test_a_class_takes_steps_until_it_has_enough(storage: Path) -> None:
    run_config = TuneRunConfig(name="sweep", storage_path=storage, stop={"score": 12})
    trainable = with_parameters(Steps, more=1)
    results = Tuner(small(trainable), param_space={"x": tune.grid_search([1, 3])}, run_config=run_config).fit()
    assert [(one.metrics["score"], one.metrics["training_iteration"]) for one in results] == [(10, 5), (12, 3)]
    assert results[1].checkpoint is not None
    assert (Path(results[1].checkpoint.path) / "steps").read_text() == "3"


def test_a_function_is_stopped_at_a_report(storage: Path) -> None:
    def train(config: dict[str, Any]) -> None:
        for i in range(100):
            distrain.report({"i": i})

    stop = TuneRunConfig(storage_path=storage, stop=lambda _, metrics: metrics["training_iteration"] == 3)
    (result,) = Tuner(train, run_config=stop).fit()
    assert (result.metrics["i"], result.error) == (2, None)


STOPS = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: PreemptionError}


@pytest.mark.parametrize(
    ("lanes", "number"),
    [(IN_SEQUENCE, signal.SIGTERM), (SIDE_BY_SIDE, signal.SIGINT), (SIDE_BY_SIDE, signal.SIGTERM)],
)
def test_a_stop_ends_all_trials_and_the_next_fit_runs_the_others(
    storage: Path, tmp_path: Path, lanes: int, number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    def train(config: dict[str, Any]) -> None:
        with (tmp_path / f"began-{config['x']}").open("a") as file:
            file.write("x")
        while config["x"] and not (tmp_path / "go").exists():
            time.sleep(0.01)
        report({"loss": config["x"]})

    tuner = sweep(small(train), storage, lanes, param_space={"x": tune.grid_search([0, 1, 2])}, stop_grace_s=1)
    begun = {f"began-{i}" for i in range(1 + lanes)}
    stopper = threading.Thread(target=_stop_when, args=(tmp_path, begun, number))
    stopper.start()
    with pytest.raises(STOPS[number]):
        tuner.fit()
    stopper.join()
    assert {path.name for path in tmp_path.glob("began-*")} == begun
    assert "stopped; a Tuner of RunConfig(name='sweep') goes on" in caplog.text
    stop_signals.forget_stop()
    (tmp_path / "go").touch()
    results = sweep(small(train), storage, lanes, param_space={"x": tune.grid_search([0, 1, 2])}).fit()
    assert [result.metrics["loss"] for result in results] == [0, 1, 2]
    assert "continuing the unfinished sweep" in caplog.text
    assert (tmp_path / "began-0").read_text() == "x"  # it had finished


def _stop_when(folder: Path, names: set[str], number: signal.Signals) -> None:
    wait_until(lambda: names <= {path.name for path in folder.iterdir()})
    os.kill(os.getpid(), number)


def test_failed_trials_can_be_resumed(storage: Path, tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> None:
        checkpoint = distrain.get_checkpoint()
        distrain.report({"loss": config["lr"], "resumed": checkpoint is not None}, Checkpoint.from_dict({}))
        if config["lr"] == 0.5 and not (tmp_path / "cured").exists():
            raise ValueError("ill")

    assert sweep(train, storage).fit().num_errors == 1
    path = storage / "sweep"
    assert Tuner.can_restore(path)
    assert not Tuner.can_restore(storage)
    assert Tuner.restore(path, train).fit().num_errors == 1  # nothing is left to do
    (tmp_path / "cured").touch()
    results = Tuner.restore(path, train, resume_errored=True).fit()
    assert [(result.metrics["resumed"], result.error) for result in results] == [
        (False, None),
        (False, None),
        (True, None),
    ]
    assert Tuner.restore(path, train).get_results().get_best_result(mode="max").config == {"lr": 0.5}


@both_ways
def test_a_trial_that_cannot_begin_ends_the_sweep(storage: Path, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(config: dict[str, Any]) -> None:
        while config["lr"] != 0.2:
            time.sleep(0.01)

    def scaling(config: dict[str, Any]) -> dict[str, float]:
        if config["lr"] == 0.2:
            wait_until(lambda: lanes == IN_SEQUENCE or Trial(config={}, label="", location=running).status == "running")
        return {"cpu": 0.5, "memory": 1e18 if config["lr"] == 0.2 else 1}

    running = storage / "sweep" / "train_00000"
    values = [0.2, 0.1] if lanes == IN_SEQUENCE else [0.1, 0.2, 0.3]
    with pytest.raises(ResourcesError, match="memory"):
        sweep(with_resources(train, scaling), storage, lanes, param_space={"lr": tune.grid_search(values)}).fit()


@pytest.mark.parametrize(
    ("trainable", "space", "error", "text"),
    [
        (int, {}, TypeError, "takes a function, a class of ray.tune.Trainable, or a trainer"),
        ("PPO", {}, TypeError, "got 'PPO'"),
        (DataParallelTrainer(print), {"lr": 1}, ValueError, "has 'train_loop_config' and 'scaling_config', not 'lr'"),
    ],
)
def test_what_is_no_trainable_is_refused(trainable: Any, space: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Tuner(trainable, param_space=space)
