"""Tuner with real trials: failing, stopped and continued. The census is in conftest."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import distrain
from distrain import Checkpoint, PreemptionError, Result, RunConfig, ScalingConfig, WorkerGroupError
from distrain.as_ray.tune import search_space as tune
from distrain.as_ray.tune.tuner import RunConfig as TuneRunConfig
from distrain.as_ray.tune.tuner import TuneConfig, Tuner, TuneReportCallback, report, with_parameters, with_resources
from distrain.coordinator.ranks import stop_signals
from distrain.coordinator.run.trainer import DataParallelTrainer
from tests.conftest import wait_until
from tests.stand_in import leave

leave()


def sweep(function: Any, storage: Path, **options: Any) -> Tuner:
    space = options.pop("param_space", {"lr": tune.grid_search([0.1, 0.2, 0.5])})
    tune_config = TuneConfig(metric="loss", mode="min", max_concurrent_trials=2)
    run_config = TuneRunConfig(name="sweep", storage_path=storage, **options)
    return Tuner(function, param_space=space, tune_config=tune_config, run_config=run_config)


def test_trials_report_return_fail_and_stop(storage: Path, caplog: pytest.LogCaptureFixture) -> None:
    def train(config: dict[str, Any], data: list[int]) -> dict[str, float] | None:
        for i in range(len(data)):
            report({"loss": config["lr"] * (3 - i), "nested": {"i": i}})
            if config["lr"] == 0.5:
                raise ValueError("too fast")
            if config["lr"] == 0.2:
                return {"loss": config["lr"]}
        return None

    function = with_resources(with_parameters(train, data=range(9)), {"cpu": 0.5})
    results = sweep(function, storage, stop={"training_iteration": 3}).fit()
    assert (len(results), results.num_errors, results.num_terminated) == (3, 1, 2)
    (error,) = results.errors
    assert isinstance(error, WorkerGroupError)
    assert isinstance(error.original, ValueError)
    best = results.get_best_result()
    assert (best.config, Path(best.path).parent) == ({"lr": 0.1}, storage / "sweep")
    assert Path(best.path).name.startswith("train_00000_")
    assert best.metrics["loss"] == pytest.approx(0.1)
    assert [result.metrics["training_iteration"] for result in results] == [3, 2, 1]
    frame = results.get_dataframe()
    assert frame[["config/lr", "loss"]].round(3).to_numpy().tolist() == [[0.1, 0.1], [0.2, 0.2], [0.5, 1.5]]
    assert Result.from_path(best.path).metrics["nested"] == {"i": 2}  # an ordinary run
    assert re.search(r"trial train_00002_\w+ has failed: rank 0 on \w+: ValueError: too fast", caplog.text)
    assert "trial 3 of 3: {'lr': 0.5}" in caplog.text


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
    assert [path.name for path in storage.glob("train-drive_00000_*")]


def test_a_stop_ends_the_sweep_and_the_next_fit_runs_the_other_trials(
    storage: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train(config: dict[str, Any]) -> None:
        with (tmp_path / f"began-{config['x']}").open("a") as file:
            file.write("x")
        if config["x"] and not (tmp_path / "go").exists():
            threading.Event().wait()
        report({"loss": config["x"]})

    def stop() -> None:
        wait_until(lambda: (tmp_path / "began-1").exists())
        os.kill(os.getpid(), signal.SIGTERM)

    space = {"x": tune.grid_search([0, 1])}
    stopper = threading.Thread(target=stop)
    stopper.start()
    with pytest.raises(PreemptionError):
        sweep(train, storage, param_space=space, stop_grace_s=1).fit()
    stopper.join()
    assert "stopped; a Tuner of RunConfig(name='sweep') continues" in caplog.text
    stop_signals._stopped_by.clear()
    (tmp_path / "go").touch()
    results = sweep(train, storage, param_space=space).fit()
    assert [result.metrics["loss"] for result in results] == [0, 1]
    assert "sweep of 2 trials, of which 1 have ended" in caplog.text
    assert (tmp_path / "began-0").read_text() == "x"  # it had finished


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Tuner(int), TypeError, "takes a function or a trainer"),
        (lambda: Tuner("PPO"), TypeError, "got 'PPO'"),
        (
            lambda: Tuner(DataParallelTrainer(print), param_space={"lr": 1}),
            ValueError,
            "has 'train_loop_config' and 'scaling_config', not 'lr'",
        ),
        (
            lambda: Tuner(DataParallelTrainer(print), run_config=TuneRunConfig(stop={"x": 1})),
            TypeError,
            "exit the loop in train_func instead",
        ),
        (lambda: Tuner.restore("/runs/sweep", print), TypeError, "make the Tuner as before"),
    ],
)
def test_what_is_wrong_is_said(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()
    assert not Tuner.can_restore("/runs/sweep")
