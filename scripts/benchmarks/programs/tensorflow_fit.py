"""A user's script with TensorflowTrainer, distrain's or Ray Train's: LAUNCHER WORKERS."""

import json
import os
import sys
import time

import benchmark_tasks


def first_all_reduce() -> None:
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    @tf.function
    def total() -> tf.Tensor:
        ones = strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.ones([])))
        return strategy.experimental_local_results(ones)[0]

    workers = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    if float(total()) != len(workers):
        raise RuntimeError(f"all_reduce of ones gave {float(total())} with {len(workers)} ranks")
    benchmark_tasks.write(f"reduced_{rank}", time.time())


def distrain_fit(workers: int, storage: str) -> None:
    import distrain
    from distrain.tensorflow import TensorflowTrainer

    TensorflowTrainer(
        first_all_reduce,
        scaling_config=distrain.ScalingConfig(num_workers=workers),
        run_config=distrain.RunConfig(storage_path=storage),
    ).fit()


def ray_fit(workers: int, storage: str) -> None:
    import ray
    import ray.train
    from ray.train.tensorflow import TensorflowTrainer

    ray.init(num_cpus=max(workers, os.cpu_count() or 1))
    benchmark_tasks.write("ray_ready", time.time())
    TensorflowTrainer(
        first_all_reduce,
        scaling_config=ray.train.ScalingConfig(num_workers=workers),
        run_config=ray.train.RunConfig(storage_path=storage),
    ).fit()
    ray.shutdown()


if __name__ == "__main__":
    {"distrain": distrain_fit, "ray": ray_fit}[sys.argv[1]](int(sys.argv[2]), os.environ["BENCHMARK_OUT"] + "/runs")
