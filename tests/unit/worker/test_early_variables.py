"""Variables that libraries read when they are imported: which scripts set them in time, and who sets them too late."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from distrain.worker.job.early_variables import _reader_of, sets_early

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import os\nos.environ['OMP_NUM_THREADS'] = '7'\nimport torch", True),
        ("import os; os.environ['OMP_NUM_THREADS'] = '7'\nimport numpy as np", True),
        ("import os\nos.environ['TORCH_LOGS'] = '+dynamo'\nfrom torch import nn", True),
        ("from os import environ\nenviron.setdefault('PYTORCH_JIT', '0')\nimport torch.nn as nn", True),
        ("import os\nif True:\n    os.environ.update({'MKL_NUM_THREADS': '1'})\nimport torch", True),
        ("import os\nos.environ.update(MKL_NUM_THREADS='1')", True),
        ("import os\nos.environ |= {'MKL_NUM_THREADS': '1'}", True),
        ("import os\nos.putenv('OMP_NUM_THREADS', '1')", True),
        ("import os\ndel os.environ['OMP_NUM_THREADS']\nimport torch", True),
        ("import os\ndef main():\n    os.environ['OMP_NUM_THREADS'] = '7'\n    import torch\nmain()", True),
        ("import os\nfor name in names:\n    os.environ[name] = '7'\nimport torch", True),
        ("import os, transformers\nos.environ['OMP_NUM_THREADS'] = '7'\nimport torch", True),
        ("import os, torch\nos.environ['OMP_NUM_THREADS'] = '7'", False),
        ("import torch\nimport os\ndef main():\n    os.environ['OMP_NUM_THREADS'] = '7'\nmain()", False),
        ("import os\nos.environ['TOKENIZERS_PARALLELISM'] = 'false'\nimport torch", False),
        ("import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'\nimport torch", False),
        ("import os\nos.environ['HF_HOME'] = 'hf'\nimport torch, transformers", False),
        ("import os\nprint(os.environ['OMP_NUM_THREADS'])\nimport torch", False),
        ("import os\nconfig['OMP_NUM_THREADS'] = '1'\nimport torch", False),
        ("import (", False),
        ("", False),
    ],
)
def test_the_source_shows_if_a_variable_is_set_above_the_import(tmp_path: Path, source: str, expected: bool) -> None:
    (tmp_path / "train.py").write_text(source)
    assert sets_early(str(tmp_path / "train.py")) is expected


def test_a_script_that_is_not_there_or_not_python_sets_nothing(tmp_path: Path) -> None:
    (tmp_path / "app.pyz").write_bytes(b"PK\x03\x04\0\xff")
    assert not sets_early(str(tmp_path / "app.pyz"))
    assert not sets_early(str(tmp_path / "missing.py"))


PROGRAM = """
import os, sys
import numpy
from distrain.worker.job.early_variables import watch
del numpy
watch()
{code}
"""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("os.environ['OPENBLAS_NUM_THREADS'] = '3'", True),
        ("os.environ['OPENBLAS_NUM_THREADS'] = '3'\nos.environ['OPENBLAS_NUM_THREADS'] = '3'", True),
        ("os.putenv('OPENBLAS_NUM_THREADS', '3')", True),
        ("def train():\n    os.environ['OPENBLAS_NUM_THREADS'] = '3'\n    import numpy\ntrain()", True),
        ("def train():\n    import numpy\n    os.environ['OPENBLAS_NUM_THREADS'] = '3'\ntrain()", False),
        ("from numpy import zeros\nos.environ['OPENBLAS_NUM_THREADS'] = '3'", False),
        ("os.environ['OPENBLAS_NUM_THREADS'] = os.environ.get('OPENBLAS_NUM_THREADS', '')", False),
        ("os.environ['TORCH_LOGS'] = '+dynamo'", False),
        ("if os.fork() == 0:\n    os.environ['OPENBLAS_NUM_THREADS'] = '3'\n    os._exit(0)\nos.wait()", False),
    ],
)
def test_a_variable_that_comes_too_late_is_said_once_with_its_line(tmp_path: Path, code: str, said: bool) -> None:
    (tmp_path / "train.py").write_text(PROGRAM.format(code=code))
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    if not said:
        assert done.stderr == ""
        return
    line = 1 + next(number for number, text in enumerate(PROGRAM.format(code=code).splitlines()) if "OPENBLAS" in text)
    assert done.stderr == (
        f"distrain: OPENBLAS_NUM_THREADS, which train.py:{line} sets, has no effect on numpy: it was imported before. "
        "Set it with --env OPENBLAS_NUM_THREADS=3, or RunConfig(worker_runtime_env=...)\n"
    )


def test_tokens_are_not_among_the_variables_whose_values_are_shown() -> None:
    packages = ["huggingface_hub"]
    assert _reader_of("HF_HOME", packages) == "huggingface_hub"
    assert [_reader_of(name, packages) for name in ("HF_TOKEN", "HUGGINGFACE_HUB_TOKEN", "HF_API_TOKEN")] == [None] * 3
