"""TensorFlow on several hosts, each with a network, processes and an sshd of its own, one of which is lost.

Needs TensorFlow (scripts/test_tensorflow), and what the lab needs.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.hosts.lab import Lab, end_lab, start_lab
from tests.hosts.running import Running, cut_power
from tests.process.conftest import log_of, records

if find_spec("tensorflow") is None:
    pytest.skip("TensorFlow is not installed; scripts/test_tensorflow", allow_module_level=True)

pytestmark = pytest.mark.timeout(180)
HOSTS, SPARE = ["one", "two"], ["three"]
EPOCHS, STRUCK_IN = 4, 2
STARTS_WITHIN_S = 60.0
"""Two interpreters that import TensorFlow, on a machine that does other things, too."""

SCRIPT = """
import json, os, signal, socket, sys
from pathlib import Path
import distrain
from distrain import FailureConfig, RunConfig, ScalingConfig
from distrain.tensorflow import TensorflowTrainer

EPOCHS, STRUCK_IN = 4, 2
place, scaling, failures = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])

def train():
    import numpy
    import tensorflow as tf
    from distrain.tensorflow import TensorflowCheckpoint
    from distrain.tensorflow.keras import ReportCheckpointCallback

    rank, checkpoint = distrain.get_context().get_world_rank(), distrain.get_checkpoint()

    class Victim(tf.keras.callbacks.Callback):
        # Comes to a standstill in the middle of an epoch, while the others wait for it in the all-reduce.
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_begin(self, batch, logs=None):
            if checkpoint is None and (self.epoch, batch) == (STRUCK_IN, 1):
                (place / f"ready-0-{rank}").touch()
                if rank == 0:
                    signal.pause()

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    print("trains on", socket.gethostname())
    start = checkpoint.get_metadata()["epoch"] + 1 if checkpoint else 0
    with strategy.scope():
        if checkpoint:
            model = TensorflowCheckpoint.from_checkpoint(checkpoint).get_model()
        else:
            tf.keras.utils.set_random_seed(7)
            model = tf.keras.Sequential([tf.keras.layers.Input((4,)), tf.keras.layers.Dense(1)])
            model.compile(tf.keras.optimizers.SGD(0.05, momentum=0.5), "mse")
    features = numpy.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    options = {"batch_size": 16, "shuffle": False, "verbose": 0, "epochs": EPOCHS, "initial_epoch": start}
    model.fit(features, features.sum(1), callbacks=[ReportCheckpointCallback(), Victim()], **options)
    weights = [value for array in model.get_weights() for value in array.ravel().tolist()]
    distrain.report({"start": start, "weights": weights, "replicas": strategy.num_replicas_in_sync,
                     "host": socket.gethostname(), "tf_config": json.loads(os.environ["TF_CONFIG"])})

run = RunConfig(name="run", storage_path=place / "runs", failure_config=FailureConfig(**failures))
result = TensorflowTrainer(train, scaling_config=ScalingConfig(**scaling), run_config=run).fit()
print("FINISHED", result.checkpoint.path, flush=True)
"""


@pytest.mark.sample(1, of="restarts with TensorFlow")
def test_a_spare_host_takes_the_place_of_one_without_power(tmp_path: Path, test_run_id: str) -> None:
    """The lost one has rank 0, with whom TensorFlow's workers meet."""
    folder = tmp_path / "the lab"
    holder = start_lab(folder, *HOSTS, *SPARE)
    try:
        lab = Lab(folder=folder, other_python=Path(sys.executable))
        running = Running(lab, tmp_path, test_run_id, SCRIPT, hosts=HOSTS, spare=SPARE, max_failures=1)
        try:
            running.wait_until_it_trains(STARTS_WITHIN_S)
            run = tmp_path / "runs" / "run"
            wait_until((run / f"checkpoint_{STRUCK_IN - 1:06d}").exists, what="the checkpoint of the epoch before")
            cut_power(lab, "one")
            output, _ = running.end()
        finally:
            running.close()
    finally:
        end_lab(holder, folder)
    assert output.splitlines()[-1] == f"FINISHED {run}/checkpoint_{EPOCHS - 1:06d}", output
    assert "2 workers on two, three, without one\n" in output
    ends = []
    for rank, host in enumerate(("two", "three")):
        *epochs, end = records(run, rank)
        assert [record["attempt"] for record in epochs] == [0, 0, 1, 1]
        losses = [record["metrics"]["loss"] for record in epochs]
        assert losses == sorted(losses, reverse=True)
        assert f"trains on {host}\n" in log_of(run, rank, attempt=1)
        ends.append(end["metrics"])
    assert [(end["host"], end["start"], end["replicas"]) for end in ends] == [("two", 2, 2), ("three", 2, 2)]
    assert ends[0]["weights"] == ends[1]["weights"]
    configs = [end["tf_config"] for end in ends]
    assert [config["task"] for config in configs] == [{"type": "worker", "index": rank} for rank in (0, 1)]
    assert configs[0]["cluster"] == configs[1]["cluster"]
    assert [worker.partition(":")[0] for worker in configs[0]["cluster"]["worker"]] == ["10.77.0.12", "10.77.0.13"]
