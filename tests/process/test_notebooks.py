"""fit() in the kernel of a notebook: code from cells, one block for the progress, no red text, short errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

RUN_NOTEBOOK = """
import json, sys, nbformat, nbclient
cells = [nbformat.v4.new_code_cell(source) for source in json.load(sys.stdin)]
notebook = nbformat.v4.new_notebook(cells=cells)
nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3", allow_errors=True).execute()
print(json.dumps([[dict(o) for o in cell.outputs] for cell in notebook.cells]))
"""
FIT = """
import asyncio, os, pickle, signal, sys, time
import distrain
from distrain import DataParallelTrainer, RunConfig, ScalingConfig

def fit(function, config=None, num_workers=2, **scaling):
    trainer = DataParallelTrainer(
        function,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=num_workers, **scaling),
        run_config=RunConfig(storage_path="runs"),
    )
    return trainer.fit().return_value
"""


@dataclass(frozen=True)
class Cell:
    """The outputs of a cell."""

    outputs: list[dict[str, Any]]

    def text(self, name: str = "stdout") -> str:
        return "".join(part["text"] for part in self.outputs if part.get("name") == name)

    @property
    def block(self) -> dict[str, str]:
        """The only output that is neither text nor an error."""
        (block,) = [part["data"] for part in self.outputs if part["output_type"] == "display_data"]
        return dict(block)

    @property
    def error(self) -> list[str]:
        """The lines of the error, without colours."""
        (error,) = [part for part in self.outputs if part["output_type"] == "error"]
        return re.sub(r"\x1b\[[\d;]*m", "", "\n".join(error["traceback"])).split("\n")


def run_notebook(cells: list[str], directory: Path) -> list[Cell]:
    completed = subprocess.run(
        [sys.executable, "-c", RUN_NOTEBOOK], input=json.dumps(cells), capture_output=True, text=True, cwd=directory
    )
    assert completed.returncode == 0, completed.stderr
    return [Cell(outputs) for outputs in json.loads(completed.stdout.splitlines()[-1])]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Cell]:
    cells = {
        "fit": FIT,
        "functions": """
def divide(x):
    return 1 / x

def train(config):
    for step in range(1, 4):
        print("step", step)
        print("warning", step, file=sys.stderr)
        sys.stderr.write(f"\\rbar {step}\\n")
        distrain.report({"loss": 1 / step}, progress=(step, 3))
    return divide(config["x"])
""",
        "success": "value = fit(train, {'x': 2})",
        "failure": "fit(train, {'x': 0})",
        "failure in this process": "fit(train, {'x': 0}, num_workers=0)",
        "pickled error": """
try:
    fit(lambda: divide(0))
except distrain.WorkerGroupError as error:
    print(type(pickle.loads(pickle.dumps(error))))
""",
        "much output": "fit(lambda: [print('line', number) for number in range(10_000)] and None)",
        "interrupt": """
def wait():
    if distrain.get_context().get_world_rank() == 0:
        os.kill(KERNEL, signal.SIGINT)
    while not distrain.should_stop():
        time.sleep(0.01)
KERNEL = os.getpid()
fit(wait)
""",
        "name": "NAME = 'first'\ndef train(config):\n    print('hello from', NAME)\n    return NAME, config",
        "first": "print(fit(train, {'x': 1}))",
        "other name": "NAME = 'second'",
        "second": (
            "async def main():\n    return fit(train, {'x': 2}, start_method='spawn')\n"
            "print(await main())\nawait asyncio.sleep(0.01)\nprint('the kernel still works')"
        ),
    }
    return dict(zip(cells, run_notebook(list(cells.values()), tmp_path_factory.mktemp("notebook")), strict=True))


def test_cells_that_are_edited_in_between(shown: dict[str, Cell]) -> None:
    assert "('first', {'x': 1})" in shown["first"].text()
    assert "] hello from first" in shown["first"].text()
    assert "('second', {'x': 2})" in shown["second"].text()
    assert "] hello from second" in shown["second"].text()
    assert "the kernel still works" in shown["second"].text()


def test_a_healthy_run_shows_one_block_and_no_red_text(shown: dict[str, Cell]) -> None:
    success = shown["success"]
    assert success.text("stderr") == ""
    for line in ("step 1", "warning 3", "bar 2"):
        assert f"] {line}\n" in success.text()
    assert success.block["text/plain"].startswith("finished after ")
    assert "metrics:     loss=0.333333" in success.block["text/plain"]
    assert [part["output_type"] for part in success.outputs[:2]] == ["stream", "display_data"]


def test_an_error_is_one_screen_that_names_cells(shown: dict[str, Cell]) -> None:
    error = shown["failure"].error
    assert len(error) <= 30
    assert not [line for line in error if "coordinator/run/trainer.py" in line or "ipykernel" in line]
    assert "Cell In[4], line 1" in error
    assert error.index('    File "Cell In[2]", line 2, in divide') + 1 == error.index("      return 1 / x")
    assert shown["failure"].block["text/plain"].startswith("failed after ")
    said = shown["failure"].text("stderr").splitlines()
    assert [line for line in said if "; waiting up to " not in line] == []  # one rank may fail first


def test_without_workers_cells_have_their_names_and_errors_can_be_pickled(shown: dict[str, Cell]) -> None:
    assert '    File "Cell In[2]", line 2, in divide' in shown["failure in this process"].error
    assert "<class 'distrain.errors.WorkerGroupError'>" in shown["pickled error"].text()


def test_a_notebook_stays_small(shown: dict[str, Cell]) -> None:
    much = shown["much output"]
    assert len(json.dumps(much.outputs)) < 100_000
    assert "] line 10\n" in much.text()
    assert "] line 2000\n" not in much.text()
    assert re.search(r"distrain: the output from here on is in \S+/runs/\S+/logs\n", much.text())


def test_an_interrupt_is_one_screen(shown: dict[str, Cell]) -> None:
    interrupt = shown["interrupt"]
    assert interrupt.block["text/plain"].startswith("stopped by Ctrl-C after ")
    assert "    continue:    start the run again with RunConfig(name=" in interrupt.block["text/plain"]
    assert interrupt.error[-1].startswith("KeyboardInterrupt")
    assert not [line for line in interrupt.error if "coordinator/run/trainer.py" in line]
