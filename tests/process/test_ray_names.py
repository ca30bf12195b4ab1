"""Ray Train's other names, in real workers: metadata and log levels."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import distrain
from distrain import Checkpoint, DataParallelTrainer, LoggingConfig, Result, RunConfig, ScalingConfig
from tests.process.conftest import reported

Captured = pytest.CaptureFixture[str]
Train = Callable[..., Result]


@pytest.fixture
def train(storage: Path) -> Train:
    """``fit(function)`` of a trainer with one worker. What is not the trainer's goes into the RunConfig."""

    def fit(
        function: Callable[..., Any],
        *,
        workers: int = 1,
        metadata: dict[str, Any] | None = None,
        **run: Any,
    ) -> Result:
        return DataParallelTrainer(
            function,
            scaling_config=ScalingConfig(num_workers=workers),
            run_config=RunConfig(**{"storage_path": storage, **run}),
            metadata=metadata,
        ).fit()

    return fit


# -- metadata --------------------------------------------------------------------------------------------------------

METADATA = {"model": "small", "sizes": [1, 2], "nested": {"none": None}}


@pytest.mark.parametrize("workers", [0, 2])
def test_metadata_is_known_to_the_ranks_and_in_every_checkpoint(train: Train, workers: int) -> None:
    def function() -> None:
        context = distrain.get_context()
        rank = context.get_world_rank()
        for step in range(2):
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, f"of_{rank}").write_text("x")
                checkpoint = Checkpoint(folder)
                if step and rank == 0:
                    checkpoint.set_metadata({"model": "its own", "step": step})
                distrain.report({"metadata": context.get_metadata()}, checkpoint)

    result = train(function, workers=workers, metadata=METADATA)
    assert reported(result.path) == [{"metadata": METADATA}] * 2 * max(workers, 1)
    found = [checkpoint.get_metadata() for checkpoint, _ in result.best_checkpoints]
    assert found == [METADATA, {**METADATA, "model": "its own", "step": 1}]


def test_metadata_that_is_no_json_is_refused_before_anything_starts(train: Train, storage: Path) -> None:
    for metadata in ({"x": {1, 2}}, {(1, 2): 3}):
        with pytest.raises(TypeError, match="metadata must be JSON"):
            train(lambda: 1, metadata=metadata)
    assert not storage.exists()


# -- how much is said ------------------------------------------------------------------------------------------------


def talkative() -> None:
    rank = distrain.get_context().get_world_rank()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "model").write_text(f"differs: {rank}")
        distrain.report({"loss": 1}, Checkpoint(folder))
    print("printed")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("run", "progress", "notices"),
    [
        ({}, True, True),
        ({"logging_config": LoggingConfig(log_level="warning")}, False, True),
        ({"logging_config": LoggingConfig(log_level="ERROR")}, False, False),
    ],
)
def test_how_much_distrain_says(
    train: Train, capsys: Captured, run: dict[str, Any], progress: bool, notices: bool
) -> None:
    """A notice: the ranks bring different files of one name."""
    train(talkative, workers=2, **run)
    console = capsys.readouterr()
    assert sorted(console.out.splitlines()) == ["[rank 0] printed", "[rank 1] printed"]
    for words in ("starting 2 workers", "report 1: loss=1", "finished after"):
        assert (words in console.err) is progress, words
    assert ("'model'" in console.err) is notices
    train(lambda: 1)
    assert "finished after" in capsys.readouterr().err, "the level has outlived its run"
