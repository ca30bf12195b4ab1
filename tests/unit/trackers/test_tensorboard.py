"""Event files, read back by TensorBoard's own reader."""

from __future__ import annotations

import math
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from distrain.trackers import TensorBoard
from distrain.trackers.follower import Follower

pytest.importorskip("tensorboard")

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.trackers.conftest import RunDirectory


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return step and value of all points, by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0})
    found.Reload()
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def follow(run: RunDirectory, **options: Any) -> Follower:
    follower = Follower(TensorBoard(**options), run.paths, str(run.paths.root))
    follower.start()
    while follower.advance(is_over=False):
        pass
    return follower


def test_metrics_become_scalars(run: RunDirectory) -> None:
    run.report(1, loss=0.5, eval={"acc": True}, note="text")
    run.report(2, loss=0.25)
    follow(run)
    assert scalars(run.paths.tensorboard) == {"loss": [(1, 0.5), (2, 0.25)], "eval/acc": [(1, 1.0)]}


def test_nan_is_kept(run: RunDirectory) -> None:
    run.paths.metrics.write_text(
        '{"time":1.0,"attempt":0,"rank":0,"index":1,"metrics":{"loss":null},"nonfinite":{"/loss":"nan"}}\n'
    )
    follow(run)
    [(step, value)] = scalars(run.paths.tensorboard)["loss"]
    assert step == 1
    assert math.isnan(value)


def test_each_rank_is_a_run_of_tensorboard(run: RunDirectory, tmp_path: Path) -> None:
    for rank in (0, 1):
        run.report(1, rank=rank, loss=float(rank))
    follow(run, ranks="all", directory=tmp_path / "board")
    for rank in (0, 1):
        assert scalars(tmp_path / "board" / f"rank_{rank}") == {"loss": [(1, float(rank))]}


def test_the_config_is_in_the_hparams(run: RunDirectory) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata

    follow(run)
    found = EventAccumulator(str(run.paths.tensorboard))
    found.Reload()
    [content] = found.PluginTagToContent("hparams").values()
    hparams = metadata.parse_session_start_info_plugin_data(content).hparams
    assert hparams["lr"].number_value == 0.1
    assert hparams["scaling/num_workers"].number_value == 2


def test_events_that_were_written_but_not_noted_do_not_come_twice(run: RunDirectory) -> None:
    """The process was killed between the two."""
    run.report(1, loss=1.0)
    follow(run)
    noted = run.paths.tracker_state("tensorboard").read_bytes()
    run.report(2, loss=2.0)
    follow(run)
    run.paths.tracker_state("tensorboard").write_bytes(noted)
    run.report(3, loss=3.0)
    follow(run)
    assert scalars(run.paths.tensorboard)["loss"] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert len(list(run.paths.tensorboard.iterdir())) == 1


def test_if_the_event_file_is_gone_a_new_one_goes_on(run: RunDirectory) -> None:
    run.report(1, loss=1.0)
    follow(run)
    shutil.rmtree(run.paths.tensorboard)
    run.report(2, loss=2.0)
    follow(run)
    assert scalars(run.paths.tensorboard)["loss"] == [(2, 2.0)]
