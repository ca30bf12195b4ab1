"""TensorFlow in real workers, on the CPU. Needs TensorFlow: scripts/test_tensorflow."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cloudpickle
import numpy
import pytest

import distrain
from distrain.tensorflow import TensorflowConfig
from tests.process.conftest import Fit, log_of, make_fake_ssh, reported

restarts = pytest.mark.sample(1, of="restarts with TensorFlow")

sampled = pytest.mark.sample(3, of="training with TensorFlow")

if find_spec("tensorflow") is None:
    pytest.skip("TensorFlow is not installed; scripts/test_tensorflow", allow_module_level=True)

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

pytestmark = pytest.mark.timeout(180)
KERAS_3 = {"env_vars": {"TF_USE_LEGACY_KERAS": "0"}}


@pytest.fixture
def fit(storage: Path) -> Fit:
    return Fit(storage=storage, backend=TensorflowConfig())


def make_data() -> tuple[Any, Any]:
    features = numpy.random.default_rng(0).normal(size=(96, 4)).astype("float32")
    return features, features @ numpy.array([[1.0], [-2.0], [3.0], [-4.0]], "float32")


def make_model(keras: Any) -> Any:
    """The same weights wherever it is made."""
    keras.utils.set_random_seed(7)
    layers = [keras.layers.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
    return keras.Sequential(layers)


def flat(weights: list[Any]) -> list[float]:
    return [float(value) for array in weights for value in numpy.ravel(array)]


# -- training --------------------------------------------------------------------------------------------------------


def train_with_fit(config: dict[str, Any]) -> None:
    """Keras' own loop over global batches of 16; ``strategy``: its name and arguments, or None for no strategy.
    ``longer``: a rank that goes on alone."""
    import tensorflow as tf

    name, *arguments = config["strategy"] or ["get_strategy"]
    strategy = getattr(tf.distribute, name)(*arguments)
    features, targets = make_data()
    with strategy.scope():
        model = make_model(tf.keras)
        model.compile(tf.keras.optimizers.SGD(0.05, momentum=0.5), "mse")
    history = model.fit(features, targets, batch_size=16, epochs=3, shuffle=False)
    if config.get("longer") == distrain.get_context().get_world_rank():
        model.fit(features, targets)
    distrain.report(
        {
            "losses": history.history["loss"],
            "weights": flat(model.get_weights()),
            "replicas": strategy.num_replicas_in_sync,
            "keras": type(model).__module__.partition(".")[0],
            "tensors": [tf.reduce_mean(tf.ones(3)), tf.Variable(2)],
        }
    )


MULTI_WORKER = {"strategy": ["MultiWorkerMirroredStrategy"]}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The metrics that one process without a strategy reports."""
    fit = Fit(storage=tmp_path_factory.mktemp("alone"), backend=TensorflowConfig())
    (report,) = reported(fit(train_with_fit, {"strategy": None}, workers=1).path)
    assert report["replicas"] == 1
    return report


def check_that_it_trained_like(alone: dict[str, Any], report: dict[str, Any]) -> None:
    assert report["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert report["weights"] == pytest.approx(alone["weights"], rel=1e-4, abs=1e-5)
    assert report["losses"][-1] < 0.5 * report["losses"][0]


@sampled
@pytest.mark.parametrize("way", ["local", "ssh"])
def test_two_workers_train_as_one_process_does_on_the_global_batch(
    fit: Fit, alone: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    if way == "ssh":
        fit = replace(fit, transport=make_fake_ssh(tmp_path))
        for name in ("http_proxy", "https_proxy"):  # to which gRPC sends also what is for this machine
            monkeypatch.setenv(name, "http://127.0.0.1:9")
    result = fit(train_with_fit, MULTI_WORKER)
    first, second = (reported(result.path, rank) for rank in (0, 1))
    assert first == second, "losses and weights of the ranks differ"
    assert (first[0]["replicas"], first[0]["keras"], first[0]["tensors"]) == (2, "tf_keras", [1.0, 2])
    check_that_it_trained_like(alone, first[0])
    assert "6/6 [==============================]" in log_of(result.path, 1)


# -- the generations of Keras ----------------------------------------------------------------------------------------


@sampled
def test_the_fit_of_keras_3_is_known_to_fail_and_what_works_is_told(fit: Fit) -> None:
    with pytest.raises(distrain.WorkerGroupError) as raised:
        fit(train_with_fit, MULTI_WORKER, worker_runtime_env=KERAS_3)
    (line,) = {line for line in str(raised.value).splitlines() if line.startswith("  distrain: ")}
    assert "keras issue 20585" in line
    assert "strategy.run()" in line


# -- failures --------------------------------------------------------------------------------------------------------


def train_with_checkpoints(config: dict[str, Any]) -> None:
    """Four epochs, continued from the checkpoint; rank 1 is killed in epoch ``kill_in``, in the middle, the first
    time."""
    import tensorflow as tf

    from distrain.tensorflow import TensorflowCheckpoint
    from distrain.tensorflow.keras import ReportCheckpointCallback

    class Killer(tf.keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and distrain.get_context().get_world_rank() == 1
            if first and (self.epoch, batch) == (config["kill_in"], 3):
                os.kill(os.getpid(), signal.SIGKILL)

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    checkpoint, start = distrain.get_checkpoint(), 0
    with strategy.scope():
        if checkpoint is None:
            model = make_model(tf.keras)
            model.compile(tf.keras.optimizers.SGD(0.05, momentum=0.5), "mse")
        else:
            model = TensorflowCheckpoint.from_checkpoint(checkpoint).get_model()
            start = checkpoint.get_metadata()["epoch"] + 1
    callbacks = [ReportCheckpointCallback(), Killer()]
    features, targets = make_data()
    model.fit(
        *(features, targets),
        batch_size=16,
        epochs=4,
        initial_epoch=start,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    distrain.report({"start": start, "weights": flat(model.get_weights())})


@restarts
def test_a_killed_worker_is_answered_by_a_restart_at_the_right_epoch(fit: Fit) -> None:
    result = fit(train_with_checkpoints, {"kill_in": 2}, failure_config=distrain.FailureConfig(max_failures=1))
    whole = fit(train_with_checkpoints, {"kill_in": None})
    lines = [json.loads(line) for line in Path(result.path, "metrics.jsonl").read_text().splitlines()]
    assert {line["attempt"] for line in lines} == {0, 1}
    ends = [reported(run.path, rank)[-1] for run in (result, whole) for rank in (0, 1)]
    assert [end["start"] for end in ends] == [2, 2, 0, 0]
    assert ends[0] == ends[1]
    assert ends[2] == ends[3]
    assert ends[0]["weights"] == pytest.approx(ends[2]["weights"], rel=1e-4, abs=1e-5), "momentum was lost"
    losses = [[report["loss"] for report in reported(run.path, 0)[:-1]] for run in (result, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert len(losses[0]) == 4
    check_that_the_model_is_stored_once(result)


def check_that_the_model_is_stored_once(result: distrain.Result) -> None:
    """Although every rank saves it."""
    assert len(result.best_checkpoints) == 4
    for epoch, (checkpoint, _) in enumerate(result.best_checkpoints):
        files = json.loads(Path(checkpoint.path, ".manifest.json").read_text())["files"]
        assert {name: entry["rank"] for name, entry in files.items()} == {"model.keras": 0, ".metadata.json": 0}
        assert checkpoint.get_metadata()["epoch"] == epoch


@sampled
def test_who_waits_for_a_rank_that_has_finished_is_no_culprit(fit: Fit) -> None:
    with pytest.raises(distrain.WorkerGroupError, match="rank 0 had finished train_func while other ranks"):
        fit(train_with_fit, MULTI_WORKER | {"longer": 1})


# -- stopping --------------------------------------------------------------------------------------------------------


class StopsAtReport(distrain.UserCallback):
    """Sends SIGTERM to this process, as a preemption does."""

    def __init__(self, number: int) -> None:
        self.reports_left = number

    def after_report(self, *arguments: Any, **keywords: Any) -> None:
        self.reports_left -= 1
        if self.reports_left == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def train_until_stopped() -> None:
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    features, targets = make_data()
    with strategy.scope():
        model = make_model(tf.keras)
        model.compile("sgd", "mse")
    try:
        for epoch in range(2):
            model.fit(features, targets, batch_size=16, verbose=0)
            distrain.report({"epoch": epoch})
        while True:
            time.sleep(0.01)
    finally:
        print("is unwound")


@sampled
def test_a_stop_unwinds_the_training_function(fit: Fit) -> None:
    """Although TensorFlow has a SIGTERM handler of its own. It is interrupted between two fits: within one,
    TensorFlow 2.21 itself crashed in one of fourteen runs."""
    with pytest.raises(distrain.PreemptionError) as raised:
        fit(train_until_stopped, callbacks=[StopsAtReport(2)])
    assert "killed" not in str(raised.value)
    assert raised.value.result is not None
    logs = [log_of(raised.value.result.path, rank) for rank in (0, 1)]
    assert all("is unwound\n" in log for log in logs)
