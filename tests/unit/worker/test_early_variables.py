"""Variables that libraries read when they are imported, and the scripts that set them before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from distrain.worker.job.early_variables import sets_early

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
        ("import os, transformers\nos.environ['OMP_NUM_THREADS'] = '7'\nimport torch", True),
        ("import os, torch\nos.environ['OMP_NUM_THREADS'] = '7'", False),
        ("import torch\nimport os\ndef main():\n    os.environ['OMP_NUM_THREADS'] = '7'\nmain()", False),
        ("import os\nos.environ['TOKENIZERS_PARALLELISM'] = 'false'\nimport torch", False),
        ("import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'\nimport torch", False),
        ("import os\nos.environ['HF_HOME'] = 'hf'\nimport torch, transformers", False),
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
