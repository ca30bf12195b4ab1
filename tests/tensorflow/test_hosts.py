"""TensorFlow on several hosts, each with a network, processes and an sshd of its own: what goes along, and what happens
when a worker or a whole host is lost. Needs TensorFlow (scripts/test_tensorflow), and what the lab needs."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import wait_until
from tests.hosts.lab import Lab, end_lab, start_lab
from tests.hosts.running import Running, cut_power
from tests.process.conftest import log_of, records

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

restarts = pytest.mark.sample(1, of="restarts with TensorFlow")

if find_spec("tensorflow") is None:
    pytest.skip("TensorFlow is not installed; scripts/test_tensorflow", allow_module_level=True)

pytestmark = pytest.mark.timeout(180)
HOSTS, SPARE = ["one", "two"], ["three"]
ADDRESSES = {"one": "10.77.0.11", "two": "10.77.0.12", "three": "10.77.0.13"}
EPOCHS, STRUCK_IN = 4, 2
STARTS_WITHIN_S = 60.0
"""Two interpreters that import TensorFlow, on a machine that does other things, too."""

SCRIPT = """
import json, os, signal, socket, sys
from pathlib import Path
import distrain
from distrain import FailureConfig, RunConfig, ScalingConfig
from distrain.tensorflow import TensorflowTrainer

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
                if rank == VICTIM:
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


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """For one test, as it may lose a host."""
    folder = tmp_path / "the lab"
    holder = start_lab(folder, *HOSTS, *SPARE)
    try:
        yield Lab(folder=folder, other_python=Path(sys.executable))
    finally:
        end_lab(holder, folder)


@pytest.fixture
def start(lab: Lab, tmp_path: Path, test_run_id: str) -> Iterator[Callable[[int | None], Running]]:
    """``start(victim)``: a run whose rank ``victim``, if any, stands still in the middle of an epoch."""
    started: list[Running] = []

    def start(victim: int | None) -> Running:
        names = {"STRUCK_IN": STRUCK_IN, "EPOCHS": EPOCHS, "VICTIM": victim}
        script = "\n".join([*(f"{name} = {value}" for name, value in names.items()), SCRIPT])
        started.append(Running(lab, tmp_path, test_run_id, script, hosts=HOSTS, spare=SPARE, max_failures=1))
        return started[-1]

    yield start
    for running in started:
        running.close()


def wait_for_the_standstill(running: Running) -> None:
    """Then all before that epoch is committed."""
    running.wait_until_it_trains(STARTS_WITHIN_S)
    wait_until(folder_of(running, STRUCK_IN - 1).exists, what="the checkpoint of the epoch before")


def folder_of(running: Running, epoch: int) -> Path:
    return running.place / "runs" / "run" / f"checkpoint_{epoch:06d}"


def check_that_it_trained(running: Running, hosts: list[str], attempts: list[int]) -> str:
    """On these hosts at last, each epoch once: ``attempts`` says in which attempt. Returns what was printed."""
    output, _ = running.end()
    assert output.splitlines()[-1] == f"FINISHED {folder_of(running, EPOCHS - 1)}", output
    run, last = running.place / "runs" / "run", attempts[-1]
    ends = []
    for rank, host in enumerate(hosts):
        *epochs, end = records(run, rank)
        assert [record["attempt"] for record in epochs] == attempts
        losses = [record["metrics"]["loss"] for record in epochs]
        assert losses == sorted(losses, reverse=True)
        assert f"trains on {host}\n" in log_of(run, rank, attempt=last)
        ends.append(end["metrics"])
    assert [end["host"] for end in ends] == hosts
    assert [end["start"] for end in ends] == [attempts.index(last)] * 2
    assert [end["replicas"] for end in ends] == [2, 2]
    assert ends[0]["weights"] == ends[1]["weights"]
    check_where_they_met([end["tf_config"] for end in ends], [ADDRESSES[host] for host in hosts])
    return output


def check_where_they_met(configs: list[dict[str, Any]], addresses: list[str]) -> None:
    assert [config["task"] for config in configs] == [{"type": "worker", "index": rank} for rank in (0, 1)]
    assert configs[0]["cluster"] == configs[1]["cluster"]
    assert [worker.partition(":")[0] for worker in configs[0]["cluster"]["worker"]] == addresses


@pytest.mark.slow
def test_two_hosts_train_with_the_addresses_that_they_have(start: Callable[[int | None], Running]) -> None:
    running = start(None)
    check_that_it_trained(running, ["one", "two"], attempts=[0, 0, 0, 0])
    for epoch in range(EPOCHS):
        files = json.loads((folder_of(running, epoch) / ".manifest.json").read_text())["files"]
        assert {name: entry["rank"] for name, entry in files.items()} == {"model.keras": 0, ".metadata.json": 0}


@restarts
def test_a_killed_worker_of_another_host_is_answered_by_a_restart_at_the_right_epoch(
    start: Callable[[int | None], Running],
) -> None:
    running = start(1)
    wait_for_the_standstill(running)
    running.worker("two").kill()
    output = check_that_it_trained(running, ["one", "two"], attempts=[0, 0, 1, 1])
    assert "rank 1 on two was killed by SIGKILL (9)" in output


@pytest.mark.slow
def test_a_spare_host_takes_the_place_of_one_without_power(lab: Lab, start: Callable[[int | None], Running]) -> None:
    """The lost one has rank 0, with whom TensorFlow's workers meet."""
    running = start(0)
    wait_for_the_standstill(running)
    cut_power(lab, "one")
    output = check_that_it_trained(running, ["two", "three"], attempts=[0, 0, 1, 1])
    assert "2 workers on two, three, without one\n" in output
