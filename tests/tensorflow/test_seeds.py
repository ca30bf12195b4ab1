"""Scripts for Ray Train with TensorFlow, migrated as the README says and run as a user runs them.

See tests/test_seeds.py. Needs TensorFlow: scripts/test_tensorflow.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("tensorflow") is None:
    pytest.skip("TensorFlow is not installed; scripts/test_tensorflow", allow_module_level=True)

from tests.test_seeds import checkpoint_files, finish_source, migrated, reports

sampled = pytest.mark.sample(1, of="seeds with TensorFlow")

pytestmark = pytest.mark.timeout(300)


@sampled
def test_the_guide(tmp_path: Path) -> None:
    ran = finish_source(migrated("keras_guide"), tmp_path)
    with_callback, with_shard, with_to_tf = ran.results
    first, second = (reports(with_callback)[rank] for rank in (0, 1))
    assert first == second
    assert [list(metrics) for metrics in first] == [["loss"], ["loss"]]
    assert checkpoint_files(with_callback) == ["model.keras"]
    assert len(with_callback.best_checkpoints) == 2
    assert "2/2 [==============================]" in ran.output + ran.errors, "batches of 20 of 40 rows"
    assert "tensorflow_backend is an old name" in ran.errors

    first, second = (reports(with_shard)[rank] for rank in (0, 1))
    assert first == second
    assert [(len(metrics["loss"]), metrics["rows"]) for metrics in first] == [(1, 8), (1, 8)]

    first, second = (reports(with_to_tf)[rank] for rank in (0, 1))
    assert first == second
    assert [len(metrics["loss"]) for metrics in first] == [2]


@sampled
def test_the_checkpoints(tmp_path: Path) -> None:
    ran = finish_source(migrated("keras_checkpoints"), tmp_path)
    assert [len(result.best_checkpoints) for result in ran.results] == [3, 3]
    for result in ran.results:
        first, second = (reports(result)[rank] for rank in (0, 1))
        assert first == second
        assert checkpoint_files(result) == ["checkpoint.json", "model.keras"]
        assert result.checkpoint is not None
        assert json.loads(Path(result.checkpoint.path, "checkpoint.json").read_text()) == {"epoch": 2}
        assert f"{result.checkpoint}\n" in ran.output
    first_checkpoint = ran.results[0].checkpoint
    assert first_checkpoint is not None
    assert (ran.output + ran.errors).count(f"continues from {first_checkpoint.path}\n") == 2
    assert "different contents" not in ran.errors, "every rank saves the same model"
