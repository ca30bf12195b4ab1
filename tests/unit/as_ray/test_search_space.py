"""The search spaces of Ray Tune: what is drawn, in which order, and what is said of wrong ones."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest

from distrain.as_ray.constants import WithoutEffect
from distrain.as_ray.tune import search_space as tune
from distrain.as_ray.tune.search_space import configs
from distrain.as_ray.tune.tuner import ResultGrid, RunConfig, TrialResult, TuneConfig, Tuner

if TYPE_CHECKING:
    from pathlib import Path


def sample(space: dict[str, Any], seed: Any = 0) -> list[dict[str, Any]]:
    return list(configs(space, random.Random(seed)))


def test_every_combination_of_the_grids_is_a_config() -> None:
    found = sample({"b": tune.grid_search(["x", "y"]), "a": {"c": tune.grid_search([1, 2])}, "k": [0]})
    assert [(one["a"]["c"], one["b"]) for one in found] == [(1, "x"), (2, "x"), (1, "y"), (2, "y")]
    assert all(one["k"] == [0] for one in found)


SPACE = {
    "u": tune.uniform(0, 1), "q": tune.quniform(0, 10, 0.5), "l": tune.loguniform(1e-4, 1e-1),
    "c": tune.choice(["a", 2, None]), "i": tune.randint(0, 100),
    "qi": tune.qrandint(0, 100, 5), "li": tune.lograndint(1, 1000),
    "n": tune.randn(1, 2),
    "nest": {"b": [tune.uniform(0, 1), 3], "t": [1, tune.randint(0, 9)]},
}  # fmt: skip


def test_values_are_drawn_from_their_domains() -> None:
    for seed in range(20):
        (one,) = sample(SPACE, seed)
        assert 0 <= one["u"] <= 1
        assert one["q"] % 0.5 == 0
        assert 1e-4 <= one["l"] <= 1e-1
        assert one["c"] in ("a", 2, None)
        assert one["i"] in range(100)
        assert one["qi"] in range(0, 101, 5)
        assert one["li"] in range(1, 1000)
        assert isinstance(one["n"], float)
        assert (0 <= one["nest"]["b"][0] <= 1, one["nest"]["b"][1]) == (True, 3)
        assert sample(SPACE, seed) == [one]
    assert sample(SPACE, 1) != sample(SPACE, 2)


def test_functions_may_use_other_values_whenever_these_are_drawn() -> None:
    space = {
        "a": tune.sample_from(lambda config: config["z"]["b"] * 2),
        "old": tune.sample_from(lambda spec: spec.config.z.b + 1),
        "plain": tune.sample_from(lambda: 7),
        "z": {"b": tune.grid_search([1, 10])},
    }
    assert [(one["a"], one["old"], one["plain"]) for one in sample(space)] == [(2, 2, 7), (20, 11, 7)]


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(ValueError, match="both bounds must be above 0"):
        tune.loguniform(-4, -1)
    with pytest.raises(ValueError, match="num_samples must be"):
        TuneConfig(num_samples=-1)


@pytest.mark.parametrize("options", [{"search_alg": "hyperopt"}, {"scheduler": object()}, {"time_budget_s": 60}])
def test_other_searches_name_optuna(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"use Optuna, whose objective calls fit.*examples/optuna_sweep.py"):
        TuneConfig(**options)


# -- the directory of a sweep ----------------------------------------------------------------------------------------


def f(config: dict[str, Any]) -> None: ...


def open_sweep(folder: Path, first: int = 0) -> tuple[Any, Any]:
    space = {"x": tune.grid_search([first, first + 1]), "same": 1}
    return Tuner(f, param_space=space, run_config=RunConfig(name="sweep", storage_path=str(folder)))._open()


def end(trials: Any, *statuses: str) -> None:
    """Write what fit() leaves of a run, as far as a sweep looks at it."""
    for trial, status in zip(trials, itertools.cycle(statuses), strict=False):
        trial.mkdir(parents=True)
        facts = f'"status": "{status}", "run_id": "r", "attempts": [], "started": 1.0, "updated": 3.0'
        (trial / "run.json").write_text(f"{{{facts}}}")


def test_an_unfinished_sweep_goes_on(tmp_path: Path) -> None:
    location, trials = open_sweep(tmp_path)
    assert location == tmp_path / "sweep"
    assert {trial.name: config["x"] for trial, config in trials.items()} == {
        "f_00000_88c618c5": 0,
        "f_00001_1ca606b5": 1,
    }
    end(trials, "finished", "stopped")
    assert open_sweep(tmp_path) == (location, trials)


def test_a_finished_sweep_is_left_alone(tmp_path: Path) -> None:
    end(open_sweep(tmp_path)[1], "finished", "failed")
    assert open_sweep(tmp_path)[0] == tmp_path / "sweep-2"
    assert open_sweep(tmp_path)[0] == tmp_path / "sweep-2"


def test_a_config_that_has_changed_is_another_trial(tmp_path: Path) -> None:
    first, second = open_sweep(tmp_path)[1], open_sweep(tmp_path, first=1)[1]
    assert first.keys().isdisjoint(second)


def test_a_directory_has_the_same_random_configs_each_time(tmp_path: Path) -> None:
    def drawn(name: str, **options: Any) -> list[Any]:
        settings = TuneConfig(num_samples=3, search_alg=WithoutEffect(**options))
        run = RunConfig(name=name, storage_path=str(tmp_path))
        return list(
            Tuner(f, param_space={"x": tune.uniform(0, 1)}, tune_config=settings, run_config=run)._open()[1].values()
        )

    assert drawn("a") == drawn("a") != drawn("b")
    assert drawn("a", random_state=3) == drawn("b", random_state=3)


def test_a_grid_without_a_best_result() -> None:
    results = [TrialResult(metrics=metrics, checkpoint=None, path="") for metrics in ({"a": 1}, {"a": float("nan")})]
    grid = ResultGrid(results, "", "loss", None)
    assert grid.num_errors == 0
    assert grid.get_best_result("a", "min") is results[0]
    with pytest.raises(ValueError, match=r"needs a metric, and a mode"):
        grid.get_best_result()
    with pytest.raises(RuntimeError, match="no trial has reported the metric 'loss'"):
        grid.get_best_result(mode="min")
