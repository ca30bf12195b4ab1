"""A run on a real pseudo-terminal, as a terminal emulator shows it: lines above a footer, and nothing left of it."""

from __future__ import annotations

import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from tests.terminal import Terminal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PROGRAM = """
    import sys, time
    import distrain
    from distrain.coordinator.run.trainer import DataParallelTrainer

    class Printer(distrain.UserCallback):
        def after_report(self, run_context, metrics, checkpoint):
            print("callback", metrics[0]["step"])

    def train():
        rank = distrain.get_context().get_world_rank()
        for step in range(1, 41):
            if step % 10 == 0:
                print("epoch", step // 10)
            if rank == 1 and step == 15:
                print("only one")
            sys.stderr.write(f"\\rbar {step}")
            distrain.report({"loss": 1 / step, "step": step}, progress=(step, 40))
            time.sleep(0.1)
        sys.stderr.write("\\n")
        print("bye")

    scaling = distrain.ScalingConfig(num_workers=4)
    run = distrain.RunConfig(name="run", storage_path=sys.argv[1], callbacks=[Printer()])
    DataParallelTrainer(train, scaling_config=scaling, run_config=run).fit()
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[[int, int], Terminal]]:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(PROGRAM))
    opened: list[Terminal] = []

    def start(columns: int, rows: int) -> Terminal:
        opened.append(Terminal([sys.executable, str(script), str(tmp_path / "runs")], columns, rows))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()


def test_lines_scroll_above_a_footer_of_which_nothing_is_left(run: Callable[[int, int], Terminal]) -> None:
    terminal = run(100, 24)
    beginnings = ("running · ", "━", "loss 0.", "rank 0: bar ", "ranks ●●●●", "Ctrl-C: stops the run; no")

    def is_complete(lines: list[str]) -> bool:
        matches = [line.startswith(start) for line, start in zip(lines[-6:], beginnings, strict=False)]
        return len(matches) == 6 and all(matches) and "epoch 2" in str(lines)

    footer = terminal.wait_for(is_complete)[-6:]
    assert footer[0].endswith(" · 4 workers · run")
    assert "/40 · " in footer[1]

    after = terminal.wait_for(lambda lines: False)
    assert terminal.process.wait() == 0
    assert not [line for line in after if line.startswith(("running", "━", "ranks", "Ctrl-C"))]
    stamped = [line[9:] for line in after if line[2:3] == ":" and line[5:6] == ":"]
    assert [line for line in stamped if "epoch" in line] == [f"[rank 0-3] epoch {number}" for number in range(1, 5)]
    assert [line for line in stamped if "only" in line] == ["[rank 1] only one"]
    assert [line for line in stamped if "bar" in line or "bye" in line] == ["[rank 0-3] bar 40", "[rank 0-3] bye"]
    assert [line for line in after if "callback" in line] == [f"callback {step}" for step in range(1, 41)]
    [end] = [number for number, line in enumerate(after) if line.startswith("distrain: finished after ")]
    assert any(line.strip().startswith("metrics:     loss=0.025, step=40") for line in after[end:])
