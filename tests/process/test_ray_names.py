"""Ray Train's other names, in real workers: metadata, worker_runtime_env, log levels."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import distrain
from distrain import Checkpoint, DataParallelTrainer, LoggingConfig, Result, RunConfig, ScalingConfig
from distrain.api.backend import BackendConfig
from distrain.coordinator.fit import run_work
from tests.process.conftest import make_fit, reported

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
        resume_from: Checkpoint | None = None,
        **run: Any,
    ) -> Result:
        return DataParallelTrainer(
            function,
            scaling_config=ScalingConfig(num_workers=workers),
            run_config=RunConfig(**{"storage_path": storage, **run}),
            metadata=metadata,
            resume_from_checkpoint=resume_from,
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
    for checkpoint, _ in result.best_checkpoints:
        files = json.loads(Path(checkpoint.path, ".manifest.json").read_text())["files"]
        data = Path(checkpoint.path, ".metadata.json").read_bytes()
        assert (files[".metadata.json"]["size"], files[".metadata.json"]["crc32"]) == (
            len(data),
            f"{zlib.crc32(data):08x}",
        )


def test_metadata_that_is_no_json_is_refused_before_anything_starts(train: Train, storage: Path) -> None:
    for metadata in ({"x": {1, 2}}, {(1, 2): 3}):
        with pytest.raises(TypeError, match="metadata must be JSON"):
            train(lambda: 1, metadata=metadata)
    assert not storage.exists()


# -- worker_runtime_env ----------------------------------------------------------------------------------------------


class PreloadsProbe(BackendConfig):
    """A framework that reads its settings from the environment when it is imported."""

    preload = ("probe_of_the_environment",)


@pytest.mark.parametrize("way", ["forkserver-local", "spawn-ssh"])
def test_variables_are_there_when_libraries_are_imported(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "probe_of_the_environment.py").write_text(
        "import os\nSEEN = os.environ.get('FOR_THE_WORKERS'), os.environ.get('OMP_NUM_THREADS')\nPID = os.getpid()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FOR_THE_WORKERS", "from outside")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def function(config: dict[str, Any]) -> list[Any]:
        import probe_of_the_environment as probe

        return [*probe.SEEN, os.environ["FOR_THE_WORKERS"], os.getpid() == probe.PID]

    fit = make_fit(way, tmp_path)
    variables = {"FOR_THE_WORKERS": "from the run", "OMP_NUM_THREADS": "3"}
    result = run_work(
        distrain.worker.job.job.FunctionWork(function=function, config={}, backend=PreloadsProbe()),
        ScalingConfig(num_workers=2, start_method=fit.start_method),
        RunConfig(storage_path=fit.storage, worker_runtime_env={"env_vars": variables}),
        transports=(fit.transport,),
        sys_path=[str(tmp_path), *sys.path],
    )
    imported_by_itself = way.startswith("spawn")
    assert result.return_value == ["from the run", "3", "from the run", imported_by_itself]
    assert os.environ["FOR_THE_WORKERS"] == "from outside"


def test_a_ranks_own_variables_win_and_defaults_do_not(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)

    def function() -> None:
        names = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "GLOO_SOCKET_IFNAME", "CUDA_DEVICE_ORDER")
        distrain.report({name: os.environ[name] for name in names})

    # As of env_vars=dict(os.environ) under another launcher.
    variables = {"RANK": "7", "WORLD_SIZE": "9", "TORCHELASTIC_RESTART_COUNT": "x", "GLOO_SOCKET_IFNAME": "eth7"}
    result = train(function, workers=2, worker_runtime_env={"env_vars": variables})
    assert sorted(reported(result.path), key=lambda metrics: metrics["RANK"]) == [
        {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "GLOO_SOCKET_IFNAME": "eth7",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the order in which GPUs are dealt
        }
        for rank in range(2)
    ]


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
