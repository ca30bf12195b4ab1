"""Names that only Ray Train has: accepted where they make no difference, else one clear line."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

import pytest

import distrain
from distrain import (
    CheckpointConfig,
    DataConfig,
    DataParallelTrainer,
    FailureConfig,
    LoggingConfig,
    RunConfig,
    ScalingConfig,
)
from distrain.api.ray_names import IGNORED, MISSING
from distrain.tensorflow import TensorflowTrainer
from distrain.torch import TorchConfig, TorchTrainer


def train() -> None: ...


CONSTRUCTORS: list[tuple[Any, dict[str, Any], list[str]]] = [
    (ScalingConfig, {}, ["elastic_resize_monitor_interval_s", "label_selector", "placement_strategy"]),
    (ScalingConfig, {}, ["topology", "trainer_resources", "use_tpu"]),
    (FailureConfig, {}, ["controller_failure_limit", "fail_fast", "max_preemption_failures"]),
    (CheckpointConfig, {}, ["checkpoint_at_end", "checkpoint_frequency"]),
    (RunConfig, {}, ["local_dir", "log_to_file", "progress_reporter", "stop", "sync_config", "verbose"]),
    (DataParallelTrainer, {"train_loop_per_worker": train}, ["preprocessor"]),
    (TorchTrainer, {"train_loop_per_worker": train}, ["preprocessor"]),
    (TensorflowTrainer, {"train_loop_per_worker": train}, ["preprocessor"]),
    (DataConfig, {}, ["enable_shard_locality", "execution_options"]),
]
CASES = [
    pytest.param(make, own, name, id=f"{make.__name__}-{name}") for make, own, names in CONSTRUCTORS for name in names
]


@pytest.mark.parametrize(("make", "own", "name"), CASES)
def test_an_argument_of_rays_is_explained(make: Any, own: dict[str, Any], name: str) -> None:
    if name in MISSING:
        with pytest.raises(TypeError) as raised:
            make(**own, **{name: 5})
        assert str(raised.value) == f"{make.__name__}({name}=...): {MISSING[name]}"
    else:
        with pytest.warns(UserWarning, match="has no effect") as warned:
            make(**own, **{name: 5})
        assert IGNORED[name] in str(warned[0].message)
        assert warned[0].filename == __file__


@pytest.mark.parametrize(("make", "own", "name"), CASES)
def test_a_value_that_asks_for_nothing_is_accepted_silently(make: Any, own: dict[str, Any], name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for value in (None, False, {}):
            make(**own, **{name: value})


@pytest.mark.parametrize(
    ("make", "own", "typo", "name"),
    [
        (ScalingConfig, {}, "num_worker", "num_workers"),
        (TorchConfig, {}, "timeout", "timeout_s"),
        (ScalingConfig, {}, "xyz", None),
        (TorchTrainer, {"train_loop_per_worker": train}, "torch_conf", "torch_config"),
        (TorchTrainer, {"train_loop_per_worker": train}, "num_workers", "ScalingConfig(num_workers=...)"),
        (ScalingConfig, {}, "storage_path", "RunConfig(storage_path=...)"),
    ],
)
def test_other_names_are_refused_with_the_one_that_may_be_meant(
    make: Any, own: dict[str, Any], typo: str, name: str | None
) -> None:
    with pytest.raises(TypeError) as raised:
        make(**own, **{typo: 1})
    meant = f"; did you mean {name}?" if name else ""
    assert str(raised.value) == f"{make.__name__}() got an unexpected keyword argument {typo!r}{meant}"


MODULES = ["distrain", "distrain.tensorflow", "distrain.torch"]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("name", ["Tuner", "init", "XGBoostTrainer"])
def test_a_name_of_rays_is_explained(module: str, name: str) -> None:
    with pytest.raises(AttributeError) as raised:
        getattr(import_module(module), name)
    assert str(raised.value) == f"module {module!r} has no attribute {name!r}: {MISSING[name]}"


@pytest.mark.parametrize("module", ["tune", "tune.schedulers", "train.torch", "air"])
def test_importing_a_module_of_rays_shows_the_sentence(module: str) -> None:
    with pytest.raises(ModuleNotFoundError) as raised:
        import_module(f"distrain.{module}")
    assert MISSING[module.partition(".")[0]] in str(raised.value)


def test_no_sentence_is_for_a_name_that_is_there() -> None:
    public = [(module, name) for module in MODULES for name in import_module(module).__all__]
    known = {name for module, name in public if MISSING.get(name) != f"it is {module}.{name}"}
    assert not (MISSING.keys() | IGNORED.keys()) & {*known, *dir(distrain)}
    assert not MISSING.keys() & IGNORED.keys()


@pytest.mark.parametrize("trainer", [DataParallelTrainer, TorchTrainer])
def test_restore_names_the_way_to_continue(trainer: Any, tmp_path: Any) -> None:
    with pytest.raises(TypeError, match=r"RunConfig\(name='run', storage_path=...\)"):
        trainer.restore(f"{tmp_path}/run/")
    assert not trainer.can_restore(tmp_path / "run")


def test_the_first_argument_of_some_configs_needs_no_name() -> None:
    assert RunConfig("a") == RunConfig(name="a")
    assert ScalingConfig((1, 2)).num_workers == (1, 2)
    assert FailureConfig(3, retry_same_failure=True).max_failures == 3
    with pytest.raises(TypeError, match="got multiple values for keyword argument 'num_workers'"):
        ScalingConfig(4, num_workers=4)
    for make in (lambda: FailureConfig(3, 5), lambda: LoggingConfig("DEBUG")):
        with pytest.raises(TypeError, match="positional argument"):
            make()
    with pytest.raises(TypeError, match=r"DataParallelTrainer\(label_column=...\): pass a train_func, as in docs"):
        DataParallelTrainer(params={"a": 1}, label_column="y")  # type: ignore[call-arg]


def test_resources_as_ray_counts_them() -> None:
    scaling = ScalingConfig(num_workers=4, resources_per_worker={"CPU": 2, "TPU": 0})
    assert scaling.worker_resources == {"CPU": 2}
    assert scaling.gpus_per_worker == 0


def test_what_is_in_another_module_is_named() -> None:
    for name in ("TorchTrainer", "prepare_model"):
        with pytest.raises(ImportError, match=f"distrain has no '{name}': it is distrain.torch.{name}"):
            exec(f"from distrain import {name}")
    with pytest.raises(TypeError, match=r"scaling_config must be a distrain\.ScalingConfig or None, got 3"):
        TorchTrainer(train, scaling_config=3)  # type: ignore[arg-type]
