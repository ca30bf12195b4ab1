"""``distrain drill`` on scripts that forget one thing, and on some that resume exactly.

A normal run takes a sample; ``scripts/drill_table`` runs them all.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

import distrain
from tests.drill.cases import CORRECT, EXAMPLES, FAULTY, Case, drill

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(400)
EXACT_EXAMPLES = ("accelerate_example", "checkpoints", "exact_resume", "streaming_data")


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", FAULTY)
def test_what_a_script_forgets_is_named(tmp_path: Path, name: str) -> None:
    seen = drill(FAULTY[name], tmp_path)
    assert seen.causes == {FAULTY[name].cause}, seen.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CORRECT)
def test_a_script_that_resumes_exactly_causes_no_alarm(tmp_path: Path, name: str) -> None:
    if name == "tensorflow" and find_spec("tensorflow") is None:
        pytest.skip("needs TensorFlow")
    seen = drill(Case(("--only", "kill,all", *CORRECT[name].arguments)), tmp_path)
    assert seen.report["ok"], seen.output
    assert [one["outcome"] for one in seen.report["verdicts"][:2]] == ["exact", "exact"], seen.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", EXACT_EXAMPLES)
def test_an_example_resumes_exactly(tmp_path: Path, name: str) -> None:
    seen = drill(Case(("--workers", "2", "--only", "kill", str(EXAMPLES / f"{name}.py"))), tmp_path)
    assert seen.report["ok"], seen.output


def test_a_trainer_is_drilled_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train_func(config: dict[str, float]) -> None:
        checkpoint = distrain.get_checkpoint()
        total = checkpoint.to_dict()["total"] if checkpoint else 0.0
        for step in range(int(total), 12):
            total += config["rate"]
            distrain.report({"total": total}, checkpoint=distrain.Checkpoint.from_dict({"total": total - step % 2}))

    monkeypatch.chdir(tmp_path)
    trainer = distrain.DataParallelTrainer(
        train_func, train_loop_config={"rate": 1.0}, scaling_config=distrain.ScalingConfig(num_workers=1)
    )
    report = distrain.drill(trainer, only=["kill"])
    assert [one.outcome for one in report.verdicts] == ["exact", "drift"]
    assert report.directory is None
    assert list(tmp_path.iterdir()) == []


def test_bad_command_lines_are_explained(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    for arguments, words in {
        ("--only", "kil", str(script)): "did you mean",
        (): "nothing to drill",
        ("--as-ray", str(tmp_path / "none.py")): "there is no file",
    }.items():
        seen = drill(Case(arguments), tmp_path)
        assert words in seen.output
    script.write_text("raise ValueError('my own mistake')")
    assert "fails without any disturbance: ValueError: my own mistake" in drill(Case((str(script),)), tmp_path).output
    script.write_text("print('nothing to see')")
    assert "too little to compare" in drill(Case((str(script),)), tmp_path).output
    script.write_text(f"open({str(script)!r}, 'a')")
    assert "which may be yours" in drill(Case((str(script),)), tmp_path).output
