"""Event files, read back by TensorBoard's own reader."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from distrain.trackers import TensorBoard
from distrain.trackers.logging import TrackerLog

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


def start(run: RunDirectory, **options: Any) -> TrackerLog:
    log = TrackerLog(TensorBoard(**options), run.paths.root, str(run.paths.root))
    log.start()
    return log


def test_metrics_become_scalars_also_nan(run: RunDirectory, tmp_path: Path) -> None:
    run.report(1, loss=0.5, eval={"acc": True}, note="text")
    log = start(run, directory=tmp_path / "board")
    log.report({"step": 2, "metrics": {"loss": math.nan}, "time": 2.0, "attempt": 0})
    log.finish("finished")
    found = scalars(tmp_path / "board")
    assert found["eval/acc"] == [(1, 1.0)]
    assert found["loss"][0] == (1, 0.5)
    assert math.isnan(found["loss"][1][1])


def test_the_config_is_in_the_hparams(run: RunDirectory) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata

    start(run).finish("finished")
    found = EventAccumulator(str(run.paths.root / "tensorboard"))
    found.Reload()
    [content] = found.PluginTagToContent("hparams").values()
    hparams = metadata.parse_session_start_info_plugin_data(content).hparams
    assert hparams["lr"].number_value == 0.1
    assert hparams["scaling/num_workers"].number_value == 2
