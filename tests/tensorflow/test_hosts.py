"""TensorFlow on several hosts, each with a network, processes and an sshd of its own.

Needs TensorFlow (scripts/test_tensorflow), and what the lab needs.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from tests.hosts.lab import Lab, end_lab, start_lab
from tests.hosts.user import User

if TYPE_CHECKING:
    from pathlib import Path

if find_spec("tensorflow") is None:
    pytest.skip("TensorFlow is not installed; scripts/test_tensorflow", allow_module_level=True)

TRAIN = """
from distrain import FailureConfig
from distrain.tensorflow import TensorflowTrainer

def train():
    import signal
    import tensorflow as tf

    checkpoint = distrain.get_checkpoint()
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    total = strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(lambda: tf.constant(1.0)), axis=None)
    config = json.loads(os.environ["TF_CONFIG"])
    metrics = {"sum": float(total), "host": socket.gethostname(), "tf_config": config}
    distrain.report(metrics, distrain.Checkpoint.from_dict({"trained": True}))
    if not checkpoint and distrain.get_context().get_world_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.constant(1.0)))
"""


@pytest.mark.timeout(180)
@pytest.mark.sample(1, of="restarts with TensorFlow")
def test_two_hosts_train_at_their_addresses_also_after_rank_0_was_killed(tmp_path: Path) -> None:
    """With rank 0, TensorFlow's workers meet."""
    holder = start_lab(tmp_path / "lab", "one", "two")
    try:
        user = User(Lab(folder=tmp_path / "lab"), tmp_path)
        call = "TensorflowTrainer, num_workers=2, hosts='one:1,two:1', run={'failure_config': FailureConfig(1)}"
        ran = user.trains(TRAIN, call)
    finally:
        end_lab(holder, tmp_path / "lab")
    assert ran.code == 0, ran.err
    assert "rank 0 on one was killed by SIGKILL (9)" in ran.err
    attempts = ran.reports_in_turn()
    assert [[(report["host"], report["sum"]) for report in ranks] for ranks in attempts] == [
        [("one", 2.0), ("two", 2.0)]
    ] * 2
    for configs in ([report["tf_config"] for report in ranks] for ranks in attempts):
        assert [config["task"] for config in configs] == [{"type": "worker", "index": rank} for rank in (0, 1)]
        assert configs[0]["cluster"] == configs[1]["cluster"]
        met = [worker.partition(":")[0] for worker in configs[0]["cluster"]["worker"]]
        assert met == ["10.77.0.11", "10.77.0.12"]
