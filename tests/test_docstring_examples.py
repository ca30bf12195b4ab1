"""Every public class and function has an example in its docstring, and every example runs.

A ``>>>`` example is a doctest. A block after ``::`` runs in a worker, or in this process if it calls fit().
"""

from __future__ import annotations

import ast
import doctest
import inspect
import os
import re
import textwrap
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import pytest

import distrain
from distrain import DataParallelTrainer, RunConfig, ScalingConfig, ValidationConfig
from distrain.torch import TorchTrainer
from tests.docstring_names import names_for_examples, public_names, run_examples, train_and_report, validate

if TYPE_CHECKING:
    from collections.abc import Iterator

NEEDS = {
    "TrainDeepSpeedStrategy": "deepspeed",
    "iter_tf_batches": "tensorflow",
    "to_tf": "tensorflow",
}
"""Packages that an example needs and the tests do without."""
ELSEWHERE = ("distrain.drill",)
"""Examples that take too long here: tests/torch/test_drill.py drills a trainer."""
FIRST = ("accelerate", "restore")
"""Examples that must run before all others of their worker, the second one before there is a checkpoint."""


def public_code() -> dict[str, Any]:
    """Every public class and function, by its own name."""
    found: dict[str, Any] = {}
    for name, value in public_names().items():
        is_code = isinstance(value, (type, FunctionType)) and value.__module__.startswith("distrain")
        if is_code and value.__name__ == name.rpartition(".")[2] and value not in found.values():
            found[name] = value
    return found


CODE = public_code()
os.environ.pop("DISTRAIN_LIGHTNING", None)  # which package the import has found: workers of later tests choose again


def docstrings() -> Iterator[tuple[str, str]]:
    """The docstrings of public classes, their methods, and public functions."""
    for name, thing in CODE.items():
        yield name, inspect.getdoc(thing) or ""
        for attribute, value in vars(thing).items():
            function = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(function, FunctionType) and function.__doc__:
                yield f"{name}.{attribute}", inspect.getdoc(function) or ""


def blocks(text: str) -> list[str]:
    """The indented blocks after ``::``."""
    return [textwrap.dedent(block) for block in re.findall(r"::\n\n((?:    .*\n|\n)+)", text + "\n")]


DOCTESTS = {name: text for name, text in docstrings() if ">>>" in text}
BLOCKS = {
    f"{name} {number}": block
    for name, text in docstrings()
    for number, block in enumerate(blocks(text))
    if name not in ELSEWHERE and find_spec(NEEDS.get(name.rpartition(".")[2], "distrain"))
}
WITH_FIT = {name: block for name, block in BLOCKS.items() if ".fit()" in block}
IN_WORKERS = {name: block for name, block in BLOCKS.items() if name not in WITH_FIT}


@pytest.mark.parametrize("name", CODE)
def test_a_public_name_has_an_example(name: str) -> None:
    text = inspect.getdoc(CODE[name]) or ""
    assert ">>>" in text or blocks(text)


def test_a_block_of_code_is_indented() -> None:
    """Else it is shown as text."""
    named = (ast.Module, ast.ClassDef, ast.FunctionDef)
    trees = {path: ast.walk(ast.parse(path.read_text())) for path in Path(distrain.__file__).parent.rglob("*.py")}
    texts = [
        (path, ast.get_docstring(node) or "")
        for path, tree in trees.items()
        for node in tree
        if isinstance(node, named)
    ]
    assert [path.name for path, text in texts if re.search(r"::\n\n\S", text)] == []


@pytest.mark.parametrize("name", DOCTESTS)
def test_a_doctest_passes(name: str) -> None:
    test = doctest.DocTestParser().get_doctest(DOCTESTS[name], names_for_examples(name), name, None, None)
    failures: list[str] = []
    doctest.DocTestRunner().run(test, out=failures.append)
    assert not failures, "".join(failures)


@pytest.mark.parametrize("name", WITH_FIT)
def test_an_example_with_fit_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    names = names_for_examples(name)
    names["trainer"] = DataParallelTrainer(train_and_report, scaling_config=ScalingConfig(num_workers=0))
    exec(compile(WITH_FIT[name], name, "exec"), names)


@pytest.mark.sample(1, of="the whole documentation")
def test_examples_for_workers_run(tmp_path: Path) -> None:
    first = [name for part in FIRST for name in IN_WORKERS if part in name]
    examples = {name: IN_WORKERS[name] for name in (*first, *IN_WORKERS)}
    result = TorchTrainer(
        run_examples,
        train_loop_config={"examples": examples},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=tmp_path),
        validation_config=ValidationConfig(validate),
        datasets={"train": distrain.data.range(100).map(lambda row: {"x": float(row["id"])})},
    ).fit()
    assert len(examples) > 10
    assert not result.return_value, "\n".join(result.return_value.values())
