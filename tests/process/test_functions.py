"""Sources of a train_func. The workers always run the version that the user sees in the editor."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from distrain import DataParallelTrainer, RunConfig
from tests.process.conftest import Fit, reported

if TYPE_CHECKING:
    from pathlib import Path

sampled = pytest.mark.sample(3, of="scripts and their functions")

Script = Callable[..., "subprocess.CompletedProcess[str]"]

PREAMBLE = """
import functools, os, sys
import distrain
from distrain import DataParallelTrainer, RunConfig, ScalingConfig

def fit(function, config=None, **scaling):
    run_config = RunConfig(storage_path=os.environ["RUNS"])
    scaling_config = ScalingConfig(num_workers=2, **scaling)
    trainer = DataParallelTrainer(
        function, train_loop_config=config, scaling_config=scaling_config, run_config=run_config
    )
    return trainer.fit().return_value
"""


@pytest.fixture(autouse=True)
def runs(monkeypatch: pytest.MonkeyPatch, storage: Path) -> Path:
    monkeypatch.setenv("RUNS", str(storage))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return storage


def output(completed: subprocess.CompletedProcess[str]) -> str:
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


# -- in one's own process --------------------------------------------------------------------------------------------


class Trainer:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def method(self, config: dict[str, Any]) -> int:
        return int(self.factor * config["x"]) + 1


def with_two_arguments(factor: int, config: dict[str, Any]) -> int:
    return int(factor * config["x"])


def closure(factor: int) -> Callable[[dict[str, Any]], int]:
    def train(config: dict[str, Any]) -> int:
        return int(factor * config["x"])

    return train


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        pytest.param(lambda: "nothing", "nothing", id="no argument"),
        pytest.param(closure(3), 6, id="closure"),
        pytest.param(functools.partial(with_two_arguments, 3), 6, id="partial"),
        pytest.param(Trainer(3).method, 7, id="method"),
        pytest.param(lambda *args, **kwargs: (args, kwargs), (({"x": 2},), {}), id="variadic"),
    ],
)
def test_functions_of_many_kinds(fit: Fit, function: Callable[..., Any], expected: Any) -> None:
    trainer = DataParallelTrainer(function, train_loop_config={"x": 2}, run_config=RunConfig(storage_path=fit.storage))
    assert trainer.fit().return_value == expected


# -- from a script ---------------------------------------------------------------------------------------------------


@sampled
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_from_main_with_its_own_classes_and_globals(user_script: Script, start_method: str) -> None:
    source = """
import pickle
from dataclasses import dataclass

FACTOR = 3

@dataclass
class Answer:
    value: int

def helper(x):
    return Answer(FACTOR * x)

def train(config):
    answer = pickle.loads(pickle.dumps(helper(config["x"])))
    assert type(answer) is Answer
    assert sys.modules["__main__"].Answer is Answer
    print("in", __name__)
    return answer

value = fit(train, {"x": 2}, start_method=sys.argv[1])
assert type(value) is Answer, type(value)
print("value", value.value)
"""
    lines = output(user_script(PREAMBLE + source, start_method)).splitlines()
    assert sorted(lines) == ["[rank 0] in __main__", "[rank 1] in __main__", "value 6"]


@sampled
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_from_a_child_of_multiprocessing(user_script: Script, method: str) -> None:
    """The child calls its main module ``__mp_main__``, and workers do not have it."""
    source = """
import multiprocessing
from distrain import Checkpoint, ValidationConfig
from distrain.data import from_items

class Box:
    def __init__(self, value):
        self.value = value

class Wrong(Exception):
    pass

def double(box):
    return Box(box.value * 2)

def in_a_child(box):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.map(double, [box])[0].value

def triple(row):
    return {"x": row["x"] * 3}

def validate(checkpoint):
    return {"validated": in_a_child(Box(checkpoint.to_dict()["box"].value))}

def train(config):
    [batch] = distrain.get_dataset_shard("train").iter_batches(batch_size=10)
    distrain.report({"rows": batch["x"].tolist()}, Checkpoint.from_dict({"box": config["box"]}), validation=True)
    if config["fails"]:
        raise Wrong(config["box"])
    return Box([type(config["box"]) is Box, __name__, in_a_child(config["box"])])

def trial(fails):
    trainer = DataParallelTrainer(
        train,
        train_loop_config={"box": Box(7), "fails": fails},
        run_config=RunConfig(storage_path=os.environ["RUNS"]),
        datasets={"train": from_items([{"x": 1}, {"x": 2}]).map(triple)},
        validation_config=ValidationConfig(validate),
    )
    result = trainer.fit()
    assert type(result.checkpoint.to_dict()["box"]) is Box
    print("value", result.return_value.value, result.metrics)

def both():
    trial(False)
    try:
        trial(True)
    except distrain.WorkerGroupError as error:
        print(type(error.original) is Wrong, type(error.original.args[0]) is Box)

if __name__ == "__main__":
    child = multiprocessing.get_context(sys.argv[1]).Process(target=both)
    child.start()
    child.join()
"""
    lines = output(user_script(PREAMBLE + source, method)).splitlines()
    assert lines == ["value [True, '__mp_main__', 14] {'rows': [3, 6], 'validated': 14}", "True True"]


@sampled
def test_an_edited_module_is_picked_up(user_script: Script, tmp_path: Path) -> None:
    """By a new process, and by the next fit() of the same process, which still has the old one."""
    module = tmp_path / "model.py"
    source = """
from pathlib import Path
import model
print(fit(model.train))
Path("model.py").write_text("def train():\\n    return 'edited in between'\\n")
print(fit(model.train))
"""
    for version in ("first", "the second one"):
        module.write_text(f"def train():\n    return {version!r}\n")
        assert output(user_script(PREAMBLE + source)).splitlines() == [version, "edited in between"]


@sampled
def test_a_users_own_queue_module_is_the_users(user_script: Script, tmp_path: Path) -> None:
    """Beside the script, where it hides the standard library's for the user, and for nobody else."""
    for name in ("queue", "psutil", "utils", "process", "worker"):
        (tmp_path / f"{name}.py").write_text(f"MINE = 'my {name}'\n")
    source = """
import queue, utils, process, worker, psutil
def train():
    import queue, utils, process, worker, psutil
    return [module.MINE for module in (queue, utils, process, worker, psutil)]
assert fit(train) == fit(train, start_method="spawn") == train()
"""
    output(user_script(PREAMBLE + source))


@sampled
def test_interpreter_flags_are_handed_on(tmp_path: Path) -> None:
    source = (
        PREAMBLE
        + """
def train():
    distrain.report({"flags": [sys.flags.optimize, sys.flags.utf8_mode, sys.flags.dev_mode], "x": sys._xoptions})
fit(train)
fit(train, start_method="spawn")
"""
    )
    flags = ["-O", "-X", "utf8", "-X", "dev", "-W", "ignore"]
    output(subprocess.run([sys.executable, *flags, "-c", source], capture_output=True, text=True, cwd=tmp_path))
    for run in (tmp_path / "runs").iterdir():
        assert reported(run) == [{"flags": [1, 1, True], "x": {"utf8": True, "dev": True}}] * 2
