"""Variables that libraries read when they are imported, and the scripts that set them before."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from types import SimpleNamespace

import pytest

from distrain.api import current
from distrain.worker.job.early_variables import sets_early, watch


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import os\nos.environ['OMP_NUM_THREADS'] = '7'\nimport torch", True),
        ("import os; os.environ['OMP_NUM_THREADS'] = '7'\nimport numpy as np", True),
        ("from os import environ\nenviron.setdefault('PYTORCH_JIT', '0')\nimport torch.nn as nn", True),
        ("import os\nos.environ.update(MKL_NUM_THREADS='1')", True),
        ("import os\nos.environ |= {'MKL_NUM_THREADS': '1'}", True),
        ("import os\ndel os.environ['OMP_NUM_THREADS']\nimport torch", True),
        ("import os\ndef main():\n    os.environ['OMP_NUM_THREADS'] = '7'\n    import torch\nmain()", True),
        ("import os, transformers\nos.environ['OMP_NUM_THREADS'] = '7'\nimport torch", True),
        ("import os, torch\nos.environ['OMP_NUM_THREADS'] = '7'", False),
        ("import torch\nimport os\ndef main():\n    os.environ['OMP_NUM_THREADS'] = '7'\nmain()", False),
        ("import os\nos.environ['TOKENIZERS_PARALLELISM'] = 'false'\nimport torch", False),
        ("import (", False),
        ("", False),
    ],
)
def test_the_source_shows_if_a_variable_is_set_above_the_import(source: str, expected: bool) -> None:
    assert sets_early(source) is expected


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import torch", []),
        ("environ['OMP_NUM_THREADS'] = '7'; import torch", ["torch: OMP_NUM_THREADS"]),
        ("environ.pop('OMP_NUM_THREADS'); import torch.nn", ["torch: OMP_NUM_THREADS"]),
        ("environ.update(TORCH_LOGS='x', KMP_A='1'); from torch.utils import data", ["torch: KMP_A, TORCH_LOGS"]),
        ("import numpy; environ['PYTORCH_JIT'] = '0'; import_module('torch.nn')", ["torch: PYTORCH_JIT"]),
        ("environ['HF_HOME'] = environ['CUDA_VISIBLE_DEVICES'] = '0'; import torch", []),
        ("environ['OMP_NUM_THREADS'] = '7'", ["torch: OMP_NUM_THREADS"]),
        ("assert not {'torch', 'torch.nn'} & {*sys.modules}; assert find_spec('torch').origin", []),
    ],
)
def test_what_comes_too_late_for_a_forked_rank_is_told_at_its_import(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: str, told: list[str]
) -> None:
    import torch

    names = {name for name in sys.modules if name.partition(".")[0] == "torch"}
    loader = torch.__spec__.loader
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": "5"})
    monkeypatch.setattr(current, "session", SimpleNamespace(context=SimpleNamespace(world_rank=0)))
    show_torch = watch()
    user = {"environ": os.environ, "sys": sys, **vars(importlib), "find_spec": importlib.util.find_spec}
    try:
        exec(code, user)
    finally:
        show_torch()
    lines = [line for line in capsys.readouterr().err.splitlines() if "may not notice" in line]
    assert [f"{line.split()[1]}: {line.partition('value of ')[2].partition(', which')[0]}" for line in lines] == told
    assert sys.modules["torch"] is torch
    assert names <= {*sys.modules}
    assert type(torch.__spec__.loader) is type(loader)
    assert not any(type(finder).__name__ == "_Hidden" for finder in sys.meta_path)
