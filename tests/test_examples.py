"""The examples, run as the README says."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from distrain import Result
from tests.conftest import wait_until

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

quick_starts = pytest.mark.sample(1, of="quick starts")

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
QUICKSTART = EXAMPLES / "quickstart.py"

pytestmark = pytest.mark.timeout(240)
sampled = pytest.mark.sample(1, of="examples")
of_frameworks = pytest.mark.sample(1, of="frameworks")


def quickstart(storage: Path, epochs: int) -> subprocess.Popen[str]:
    options = ["--num-workers", "2", "--epochs", str(epochs), "--name", "digits", "--storage-path", str(storage)]
    return subprocess.Popen(
        [sys.executable, str(QUICKSTART), *options],
        cwd=storage,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def reported(run: Path) -> list[tuple[int, int]]:
    """Rank and epoch of every report, sorted."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return sorted((record["rank"], record["metrics"]["epoch"]) for record in map(json.loads, lines))


def check_a_finished_run(process: subprocess.Popen[str], run: Path, *, epochs: int, accuracy: float) -> None:
    """It has learnt something, and the checkpoint that it names holds what it has learnt."""
    output, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert reported(run) == [(rank, epoch) for rank in (0, 1) for epoch in range(epochs)]
    result = Result.from_path(run)
    assert result.metrics is not None
    assert result.metrics["accuracy"] > accuracy
    assert result.checkpoint is not None
    assert f"checkpoint: {result.checkpoint.path}\n" in output
    loaded = re.search(r"accuracy of the loaded checkpoint: ([\d.]+)", output)
    assert loaded is not None
    assert float(loaded[1]) == pytest.approx(result.metrics["accuracy"], abs=0.01)


@quick_starts
def test_the_quickstart_learns_also_when_it_is_stopped_in_between(storage: Path) -> None:
    """The same name continues the stopped run."""
    storage.mkdir()
    with quickstart(storage, epochs=2) as stopped:
        deadline = time.monotonic() + 60
        while not (storage / "digits" / "checkpoint_000000").exists():
            assert stopped.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(stopped.pid, signal.SIGTERM)
        stopped.communicate(timeout=20)
        assert stopped.returncode != 0
    assert reported(storage / "digits") == [(0, 0), (1, 0)]

    with quickstart(storage, epochs=2) as continued:
        check_a_finished_run(continued, storage / "digits", epochs=2, accuracy=0.5)


# -- the others ------------------------------------------------------------------------------------------------------


def output_of(name: str, home: Path, *options: str) -> str:
    """Run an example as somebody would who has just cloned the repository, from a directory of theirs, offline."""
    nowhere = "http://127.0.0.1:9"
    environment = {**os.environ, "HOME": str(home), "http_proxy": nowhere, "https_proxy": nowhere}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *options],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        timeout=220,
    )
    assert done.returncode == 0, done.stderr
    left = [name for name in os.listdir(home) if not name.startswith(".")]  # caches of libraries
    assert left == ["distrain_results"], "something is left where the example was started"
    return done.stdout


def number(label: str, output: str) -> float:
    found = re.search(rf"^{re.escape(label)}:? (-?[\d.]+)", output, re.MULTILINE)
    assert found is not None, output
    return float(found[1])


def only_run(home: Path) -> Result:
    (run,) = (home / "distrain_results").iterdir()
    return Result.from_path(run)


def test_every_example_is_run_here() -> None:
    others = Path(__file__).with_name("tensorflow") / "test_examples.py"
    here = Path(__file__).read_text() + others.read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f'"{path.stem}"' in here or path == QUICKSTART, f"nothing runs examples/{path.name}"


@sampled
def test_first_steps(tmp_path: Path) -> None:
    output = output_of("first_steps", tmp_path)
    assert number("accuracy of one process", output) > 0.9
    assert number("accuracy of 4 workers", output) > 0.9


@sampled
def test_measure_hosts(tmp_path: Path) -> None:
    first, second = re.findall(r"rank \d on .*", output_of("measure_hosts", tmp_path))
    assert re.search(r"TFLOP/s [\d.e-]+$", first), first
    assert re.search(r"TFLOP/s [\d.e-]+, GB/s to rank 0 [\d.e-]+$", second), second


@sampled
def test_the_notebook(tmp_path: Path) -> None:
    """As in Colab and Kaggle, without its cell that installs distrain."""
    code = (
        "import nbclient, nbformat, sys\n"
        "notebook = nbformat.read(sys.argv[1], as_version=4)\n"
        "notebook.cells = [cell for cell in notebook.cells if not cell.source.startswith('%pip')]\n"
        "nbclient.NotebookClient(notebook, timeout=100).execute()\n"
        "print(*(cell.outputs for cell in notebook.cells if cell.cell_type == 'code'), sep='\\n')\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, EXAMPLES / "notebook.ipynb"],
        capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "HOME": str(tmp_path)},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "{'module.weight': (1, 8), 'module.bias': (1,)}" in ran.stdout, ran.stdout


@sampled
def test_checkpoints(tmp_path: Path) -> None:
    output = output_of("checkpoints", tmp_path)
    assert number("after epoch 19: loss", output) > number("a second run continued to epoch 39: loss", output)
    weights = re.findall(r"^weights in the (?:dict|directory): \[(.*)\]$", output, re.MULTILINE)
    assert len(weights) == 2
    assert weights[0] == weights[1]
    assert [round(float(weight)) for weight in weights[0].split(",")] == [1, -2, 3, -4]


@sampled
def test_sharded_checkpoints(tmp_path: Path) -> None:
    output = output_of("sharded_checkpoints", tmp_path)
    resumed = number("3 workers went on to 80 steps: loss", output)
    assert resumed == pytest.approx(number("1 worker, 80 steps at a stretch: loss", output), rel=0.05)
    assert resumed < number("2 workers, 40 steps: loss", output)


@sampled
def test_async_dcp(tmp_path: Path) -> None:
    output = output_of("async_dcp", tmp_path)
    assert number("steps trained while a checkpoint was written", output) > 0
    straight = number("2 workers, 30 steps: loss", output)
    assert straight < 0.5 * number("the first checkpoint was saved at step 10: loss", output)
    assert number("3 workers went on from it to step 30: loss", output) == pytest.approx(straight, rel=1e-3)


@sampled
def test_fsdp_with_tensor_parallelism(tmp_path: Path) -> None:
    output = output_of("fsdp_tensor_parallel", tmp_path)
    assert output.startswith("each of 4 workers has 256 of 1024 weights\n")
    assert number("after 20 steps: loss", output) < number("after 10 steps: loss", output) < 1
    assert output.endswith("the same, to the last bit\n")


@sampled
def test_exact_resume(tmp_path: Path) -> None:
    output = output_of("exact_resume", tmp_path)
    assert "killed, and resumed at epoch 3: loss" in output
    assert "the same, to the last bit\n" in output


@sampled
def test_amp(tmp_path: Path) -> None:
    output = output_of("amp", tmp_path)
    assert "weights: torch.float32\n" in output
    assert "products: torch.bfloat16\n" in output
    assert number("accuracy", output) > 0.85


@sampled
def test_reproducibility(tmp_path: Path) -> None:
    output = output_of("reproducibility", tmp_path)
    runs = re.findall(r"^(?:first|second) run: +(\[.*\])$", output, re.MULTILINE)
    assert len(json.loads(runs[0])) == 3
    assert json.loads(runs[0]) == json.loads(runs[1])
    assert "the same, to the last bit\n" in output


@sampled
def test_torchmetrics(tmp_path: Path) -> None:
    output = output_of("torchmetrics_example", tmp_path)
    assert number("valid_r2", output) > 0.95
    assert number("valid_loss", output) < 0.2
    reports = [json.loads(line) for line in (Path(only_run(tmp_path).path) / "metrics.jsonl").read_text().splitlines()]
    last = [report["metrics"] for report in reports if report["metrics"]["epoch"] == 4]
    assert len(last) == 2
    assert last[0] == last[1]  # what both workers report is of both


@sampled
def test_transformer(tmp_path: Path) -> None:
    output = output_of("transformer", tmp_path, "--epochs", "2")
    assert number("loss of the model", output) < 0.65 * number("loss of guessing", output)


@sampled
def test_compile(tmp_path: Path) -> None:
    """With torch's default backend where C++ can be compiled."""
    has_headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    has_compiler = shutil.which(os.environ.get("CXX", "g++")) is not None
    backend = "inductor" if has_compiler and has_headers else "aot_eager"
    output = output_of("compile", tmp_path, "--backend", backend)
    assert "the model runs compiled: True\n" in output
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert losses[-1] < 0.5 * losses[0]


@sampled
def test_lightning(tmp_path: Path) -> None:
    output = output_of("lightning_example", tmp_path)
    result = only_run(tmp_path)
    assert result.metrics is not None
    assert result.metrics["accuracy"] > 0.85
    assert number("accuracy of the loaded checkpoint", output) == pytest.approx(result.metrics["accuracy"], abs=0.001)


@sampled
def test_transformers(tmp_path: Path) -> None:
    output = output_of("transformers_example", tmp_path)
    losses = re.findall(r"^after step (\d+): training loss ([\d.]+), test loss ([\d.]+)$", output, re.MULTILINE)
    assert [int(step) for step, _, _ in losses] == [60, 120]
    assert float(losses[1][2]) < float(losses[0][2]) < 3
    assert "The value of " in output


@sampled
def test_accelerate(tmp_path: Path) -> None:
    output = output_of("accelerate_example", tmp_path)
    assert number("accuracy after epoch 7", output) > number("accuracy after epoch 3", output) > 0.7


@sampled
def test_parquet_data(tmp_path: Path) -> None:
    output = output_of("parquet_data", tmp_path)
    assert output.startswith("2 workers: one was killed in the second epoch\n")
    assert number("3 workers went on: loss", output) < 0.1
    assert output.endswith("each row was used 2 times in 2 epochs\n")


@sampled
@pytest.mark.parametrize("options", [(), ("--streaming",)])
def test_huggingface_data(options: tuple[str, ...], tmp_path: Path) -> None:
    output = output_of("huggingface_data", tmp_path, *options)
    assert number("a worker was killed in epoch 2, and the run went on: loss", output) < 1
    assert output.endswith("each image was used 6 times in 6 epochs\n")


@sampled
def test_streaming_data(tmp_path: Path) -> None:
    output = output_of("streaming_data", tmp_path)
    assert number("without interruption: loss", output) < number("first loss", output) - 0.5
    assert "the weights are the same, to the last bit\n" in output
    assert output.endswith("each of 3000 rows was used 2 times in 2 epochs\n")


# -- other frameworks ------------------------------------------------------------------------------------------------


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed: distrain[frameworks]")


@needs("jax")
@of_frameworks
def test_jax(tmp_path: Path) -> None:
    output = output_of("jax_example", tmp_path)
    assert number("a worker was killed in epoch 2, and the run went on: loss", output) < 0.5
    assert number("accuracy on the test images", output) > 0.9


@needs("xgboost")
@of_frameworks
def test_xgboost(tmp_path: Path) -> None:
    check_boosting(output_of("xgboost_example", tmp_path), only_run(tmp_path))


@needs("lightgbm")
@of_frameworks
def test_lightgbm(tmp_path: Path) -> None:
    check_boosting(output_of("lightgbm_example", tmp_path), only_run(tmp_path))


def check_boosting(output: str, result: Result) -> None:
    """Both workers have trained one model, and went on after the checkpoint of round 5."""
    assert number("a worker was killed in round 7, and the run went on: rmse", output) < 0.1
    assert number("30 rounds; rmse on other rows", output) < 0.12
    logs = [Path(result.path, "logs", "attempt_1", f"rank_{rank}.log").read_text() for rank in (0, 1)]
    assert all("begins after round 5\n" in log for log in logs)


@needs("deepspeed")
@of_frameworks
@pytest.mark.parametrize("stage", ["1", "2"])
def test_deepspeed(stage: str, tmp_path: Path) -> None:
    output = output_of("deepspeed_example", tmp_path, "--stage", stage)
    assert number("after 30 steps: loss", output) < 0.6 * number("after 15 steps: loss", output)
    assert "zero_pp_rank_0_mp_rank_00_optim_states.pt, zero_pp_rank_1_mp_rank_00_optim_states.pt\n" in output
    assert output.endswith("the same, to the last bit\n")


@needs("trl")
@needs("peft")
@of_frameworks
def test_trl(tmp_path: Path) -> None:
    output = output_of("trl_example", tmp_path)
    learnt = number("after step 24: loss", output)
    assert learnt < 0.2 * number("after step 12: loss", output)
    assert learnt == number("resumed in the middle: loss", output)
    assert output.endswith("two plus three is five\n")


def sweep(folder: Path) -> subprocess.Popen[str]:
    script = (EXAMPLES / "optuna_sweep").with_suffix(".py")
    command = [sys.executable, str(script), "--trials", "4", "--folder", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@needs("optuna")
@of_frameworks
def test_an_optuna_sweep_goes_on_after_a_stop_in_the_middle_of_a_trial(tmp_path: Path) -> None:
    from optuna import load_study
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend
    from optuna.trial import TrialState

    def trials() -> list[FrozenTrial]:
        storage = JournalStorage(JournalFileBackend(str(tmp_path / "study.log")))
        return load_study(study_name="sweep", storage=storage).trials

    with sweep(tmp_path) as stopped:
        wait_until(lambda: (tmp_path / "trial-1" / "checkpoint_000000").exists(), 100, "a checkpoint of a trial")
        stopped.send_signal(signal.SIGTERM)
        output, errors = stopped.communicate(timeout=30)
    assert stopped.returncode == 128 + signal.SIGTERM, errors
    assert output == "stopped; start the script again to continue\n"
    (interrupted,) = (trial for trial in trials() if trial.state is TrialState.FAIL)

    with sweep(tmp_path) as continued:
        output, errors = continued.communicate(timeout=150)
    assert continued.returncode == 0, errors
    ended = [trial for trial in trials() if trial.state in (TrialState.COMPLETE, TrialState.PRUNED)]
    assert len(ended) == 4
    assert interrupted.params in [trial.params for trial in ended]
    epochs = reported(tmp_path / interrupted.user_attrs["run"])
    assert epochs == [(rank, epoch) for rank in (0, 1) for epoch in range(len(epochs) // 2)], "an epoch ran twice"
