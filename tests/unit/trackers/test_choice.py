"""Trackers as objects, as texts, and in the environment; and what is refused before a run starts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from distrain.api.tracker import check_packages, parse_tracker, trackers_of
from distrain.errors import LaunchError
from distrain.trackers import Mlflow, TensorBoard, Tracker, Wandb

if TYPE_CHECKING:
    from pathlib import Path


class Mine(Tracker):
    pass


def test_trackers_are_objects_or_texts() -> None:
    mine = Mine()
    board, wandb, own = trackers_of(
        ["tensorboard:directory=events", "wandb:project=my,mode=offline,checkpoints=true", mine], {}
    )
    assert board == TensorBoard(directory="events")
    assert wandb == Wandb(project="my", mode="offline", checkpoints=True)
    assert own is mine


def test_the_environment_names_trackers_unless_the_config_does() -> None:
    environment = {"DISTRAIN_TRACKERS": "tensorboard; mlflow:tracking_uri=http://host:5000,experiment=a b;"}
    expected = [TensorBoard(), Mlflow(tracking_uri="http://host:5000", experiment="a b")]
    assert trackers_of(None, environment) == expected
    assert trackers_of([], environment) == []
    assert trackers_of(None, {}) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("wnadb", "--tracker: there is no tracker 'wnadb'; did you mean wandb?"),
        ("wandb:projct=x", "--tracker: wandb has no option 'projct'; did you mean project?"),
        ("tensorboard:zzz=x", "--tracker: tensorboard has no option 'zzz'; it has directory"),
        ("wandb:project", "--tracker: wandb: give project a value, project=..."),
        ("wandb:checkpoints=perhaps", "--tracker: wandb: checkpoints must be true or false, got 'perhaps'"),
        ("wandb:tags=a", "--tracker: wandb: tags can only be given in Python, RunConfig(trackers=[...])"),
    ],
)
def test_a_wrong_text_is_refused(text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        parse_tracker(text)


def test_a_wrong_environment_names_the_variable() -> None:
    with pytest.raises(ValueError, match="DISTRAIN_TRACKERS: there is no tracker 'x'"):
        trackers_of(None, {"DISTRAIN_TRACKERS": "x"})


@pytest.mark.parametrize(
    ("trackers", "kind", "text"),
    [
        ([print], TypeError, "RunConfig.trackers must hold names such as 'tensorboard', or objects of"),
        ([TensorBoard], TypeError, "TensorBoard is a class; give an object of it, TensorBoard()"),
        (["wandb:project=a", Wandb()], ValueError, "two trackers are called 'wandb'"),
    ],
)
def test_wrong_trackers_are_refused(trackers: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as raised:
        trackers_of(trackers, {})
    assert text in str(raised.value)


def test_a_missing_package_is_named_with_the_command_that_installs_it() -> None:
    class Elsewhere(Tracker):
        package = "no_such_package"

    with pytest.raises(LaunchError, match=r"the tracker elsewhere needs the package no_such_package.*pip install no_s"):
        check_packages([TensorBoard(), Elsewhere()])


def test_another_package_adds_a_tracker_by_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.dist-info").mkdir()
    (tmp_path / "mine.dist-info" / "entry_points.txt").write_text(
        "[distrain.trackers]\nboard = distrain.trackers.tensorboard:TensorBoard\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert parse_tracker("board:directory=events") == TensorBoard(directory="events")
