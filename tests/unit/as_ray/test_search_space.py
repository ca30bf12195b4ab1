"""The search spaces of Ray Tune: what is drawn, in which order, and what is said of wrong ones."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import pytest

from distrain.api.config import RunConfig
from distrain.as_ray.tune import search_space as tune
from distrain.as_ray.tune.search_space import configs, generator_of
from distrain.as_ray.tune.sweep import ResultGrid, Sweep
from distrain.as_ray.tune.tuner import TuneConfig

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def sample(space: dict[str, Any], seed: Any = 0) -> list[dict[str, Any]]:
    return list(configs(space, generator_of(seed)))


def test_the_first_grid_by_name_varies_fastest() -> None:
    """As in Ray, for which the order of trials is that of its ResultGrid."""
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
OF_RAY = {
    "u": 0.6369616873214543, "q": 2.5, "l": 0.0001327151712530881, "c": "a", "i": 1, "qi": 15, "li": 547,
    "n": 3.6080000902602745, "nest": {"b": [0.7294965609839984, 3], "t": [1, 7]},
}  # fmt: skip
"""The values that Ray 2.60 draws from this space with the seed 0."""


def test_a_seed_draws_what_ray_draws() -> None:
    assert sample(SPACE) == [OF_RAY]
    assert sample(SPACE, seed=1) != sample(SPACE, seed=2)


def test_functions_may_use_other_values_whenever_these_are_drawn() -> None:
    space = {
        "a": tune.sample_from(lambda config: config["z"]["b"] * 2),
        "old": tune.sample_from(lambda spec: spec.config.z.b + 1),
        "plain": tune.sample_from(lambda: 7),
        "z": {"b": tune.grid_search([1, 10])},
    }
    assert [(one["a"], one["old"], one["plain"]) for one in sample(space)] == [(2, 2, 7), (20, 11, 7)]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: tune.loguniform(-4, -1).sample(), "both bounds must be above 0"),
        (lambda: TuneConfig(mode="best"), "min or max|min.*max"),
        (lambda: TuneConfig(num_samples=-1), "num_samples must be"),
    ],
)
def test_what_is_wrong_is_said(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"search_alg": "hyperopt"}, "use Optuna, whose objective calls fit.*examples/optuna_sweep.py"),
        ({"scheduler": object()}, "only FIFOScheduler; for others use Optuna"),
        ({"time_budget_s": 60}, "choose num_samples instead"),
    ],
)
def test_other_searches_name_optuna(options: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        TuneConfig(**options)


# -- the directory of a sweep ----------------------------------------------------------------------------------------


def open_sweep(folder: Path, name: str | None = "sweep", space: str = "x", count: int = 2) -> Sweep:
    def make() -> list[dict[str, Any]]:
        return [{"x": i, "lr": math.pi * i, "same": 1} for i in range(count)]

    return Sweep.open(RunConfig(name=name, storage_path=folder), "f", space, make)


def end(sweep: Sweep, *statuses: str) -> None:
    """Write what fit() leaves of a run, as far as a sweep looks at it."""
    for trial, status in zip(sweep.trials, itertools.cycle(statuses), strict=False):
        trial.location.mkdir()
        facts = f'"status": "{status}", "run_id": "r", "attempts": [], "started": 1.0, "updated": 3.0'
        (trial.location / "run.json").write_text(f"{{{facts}}}")  # type: ignore[union-attr]


def test_an_unfinished_sweep_goes_on_with_its_own_configs(tmp_path: Path) -> None:
    first = open_sweep(tmp_path)
    assert [trial.location.name for trial in first.trials] == ["f_00000", "f_00001"]
    assert [trial.label for trial in first.trials] == ["x=0, lr=0", "x=1, lr=3.142"]
    end(first, "finished", "stopped")
    again = open_sweep(tmp_path, count=5)
    assert again.trials == first.trials
    assert [trial.has_ended for trial in again.trials] == [True, False]


def test_a_finished_sweep_is_left_alone(tmp_path: Path) -> None:
    end(open_sweep(tmp_path), "finished", "failed")
    second = open_sweep(tmp_path, space="y")
    assert second.location == tmp_path / "sweep-2"
    assert open_sweep(tmp_path, space="y").location == second.location


def test_an_unfinished_sweep_with_another_space_is_an_error(tmp_path: Path) -> None:
    open_sweep(tmp_path)
    with pytest.raises(Exception, match="is an unfinished sweep with another param_space or num_samples"):
        open_sweep(tmp_path, space="y")


def test_a_grid_of_no_results(tmp_path: Path) -> None:
    grid = ResultGrid(open_sweep(tmp_path), "loss", None)
    assert grid.num_errors == 2
    assert "f_00000 has not begun" in str(grid.errors[0])
    with pytest.raises(ValueError, match=r"needs a metric, and a mode"):
        grid.get_best_result()
    with pytest.raises(RuntimeError, match="no trial has reported the metric 'loss'"):
        grid.get_best_result(mode="min")
    with pytest.raises(ValueError, match=r"scope='all'\): only 'last'"):
        grid.get_best_result(scope="all")
