"""Workers started for TensorFlow, without TensorFlow: their environment, and errors for ranks that do not come."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

import distrain
from distrain import FailureConfig, ScalingConfig, WorkerGroupError
from distrain.tensorflow import TensorflowConfig, TensorflowTrainer
from tests.process.conftest import Fit, log_of, reported

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def tensorflow_fit(any_fit: Fit) -> Fit:
    return replace(any_fit, backend=TensorflowConfig())


def tell_the_environment() -> None:
    names = ("TF_CONFIG", "TF_USE_LEGACY_KERAS", "TF_FORCE_GPU_ALLOW_GROWTH", "CUDA_VISIBLE_DEVICES")
    distrain.report({name: os.environ.get(name) for name in names})


def train_at_our_port() -> None:
    """Listen as TensorFlow's server does."""
    config = json.loads(os.environ["TF_CONFIG"])
    host, _, port = config["cluster"]["worker"][config["task"]["index"]].partition(":")
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, int(port)))
        server.listen()
    distrain.report(config)
    distrain.collective.barrier()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise RuntimeError("once more")


def test_every_rank_finds_all_of_them_in_tf_config_at_other_ports_in_each_attempt(tensorflow_fit: Fit) -> None:
    result = tensorflow_fit(train_at_our_port, failure_config=FailureConfig(max_failures=1, retry_same_failure=True))
    ranks = [reported(result.path, rank) for rank in (0, 1)]
    addresses = []
    for first, second in zip(*ranks, strict=True):
        assert first["cluster"] == second["cluster"]
        assert [one["task"] for one in (first, second)] == [{"type": "worker", "index": rank} for rank in (0, 1)]
        addresses += first["cluster"]["worker"]
    assert {address.partition(":")[0] for address in addresses} == {"127.0.0.1"}
    assert len(set(addresses)) == 4


def test_keras_2_unless_the_user_has_chosen(tensorflow_fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_USE_LEGACY_KERAS", raising=False)
    (told,) = reported(tensorflow_fit(tell_the_environment, workers=1).path)
    assert (told["TF_USE_LEGACY_KERAS"], told["TF_FORCE_GPU_ALLOW_GROWTH"]) == ("1", "true")
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "0")
    (told,) = reported(tensorflow_fit(tell_the_environment, workers=1).path)
    assert told["TF_USE_LEGACY_KERAS"] == "0"
    run_env = {"env_vars": {"TF_USE_LEGACY_KERAS": "false"}}
    (told,) = reported(tensorflow_fit(tell_the_environment, workers=1, worker_runtime_env=run_env).path)
    assert told["TF_USE_LEGACY_KERAS"] == "false"


def test_in_this_process_the_environment_is_that_of_a_worker_and_goes(
    storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TF_USE_LEGACY_KERAS", raising=False)
    before = dict(os.environ)
    result = TensorflowTrainer(
        tell_the_environment,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=distrain.RunConfig(storage_path=storage),
    ).fit()
    (told,) = reported(result.path)
    assert len(json.loads(told["TF_CONFIG"])["cluster"]["worker"]) == 1
    assert told["TF_USE_LEGACY_KERAS"] == "1"
    assert dict(os.environ) == before


# -- ranks that do not come ------------------------------------------------------------------------------------------


class StopsRankOne:
    """Unpickling it, before the training function, stops rank 1 for good."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (stop_rank_one, ())


def stop_rank_one() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)


def test_a_rank_that_never_comes_is_named(fit: Fit) -> None:
    stopper = StopsRankOne()
    with pytest.raises(WorkerGroupError) as raised:
        replace(fit, backend=TensorflowConfig(start_timeout_s=0.5))(lambda: stopper, workers=3)
    assert "rank 1 has not come to get_worker_addresses('tensorflow') within 0.5 s" in str(raised.value)
    assert "rank 1 did not answer: stopped (SIGSTOP)" in str(raised.value)


# -- what a leaf adds to an error ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Explains(distrain.BackendConfig):
    def explain(self, error: BaseException) -> str | None:
        return "write 2 instead of 1" if isinstance(error, ZeroDivisionError) else None


def test_the_explanation_ends_the_traceback(any_fit: Fit) -> None:
    def train() -> None:
        print(1 / (distrain.get_context().get_world_rank() - 1))

    with pytest.raises(WorkerGroupError) as raised:
        replace(any_fit, backend=Explains())(train)
    assert "  ZeroDivisionError: division by zero\n  distrain: write 2 instead of 1\n" in str(raised.value)
    assert isinstance(raised.value.worker_failures[1], ZeroDivisionError)
    assert raised.value.result is not None
    assert "distrain: write 2 instead of 1\n" in log_of(raised.value.result.path, 1)


# -- where TensorFlow is not installed -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "statement", ["from distrain.tensorflow import keras", "from distrain.tensorflow.keras import *"]
)
def test_the_callback_says_what_to_install(statement: str) -> None:
    hidden = f"import sys; sys.modules['tensorflow'] = None; {statement}"
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "pip install 'distrain[tensorflow]'" in done.stderr.splitlines()[-1]
