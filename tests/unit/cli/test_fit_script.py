"""Which scripts call fit() themselves, told by reading them."""

from __future__ import annotations

import zipapp
from typing import TYPE_CHECKING

import pytest

from distrain.cli.fit_script import calls_fit, file_of_module

if TYPE_CHECKING:
    from pathlib import Path

DRIVERS = [
    "from distrain.torch import TorchTrainer\nTorchTrainer(f).fit()",
    "from distrain.torch import TorchTrainer as T\ndef main():\n    trainer = T(f)\n    trainer.fit()",
    "from distrain import DataParallelTrainer\nDataParallelTrainer(f).fit()",
    "import distrain.torch\ndistrain.torch.TorchTrainer(f).fit()",
    "import distrain.torch as dt\ndt.TorchTrainer(f).fit()",
    "from distrain import tensorflow\ntensorflow.TensorflowTrainer(f).fit()",
    "from distrain.tensorflow import TensorflowTrainer\nTensorflowTrainer(f).fit()",
]
SCRIPTS = [
    "",
    "import torch\ntorch.distributed.init_process_group()",
    "import lightning\nfrom distrain.lightning import RayDDPStrategy\nlightning.Trainer().fit(model)",
    "import distrain\ndistrain.report({})\nSVC().fit(x, y)",
    "from distrain.torch import TorchTrainer\nhelp(TorchTrainer)",
    "from other import TorchTrainer\nTorchTrainer().fit()",
    "import distrain, other\nfrom other import TorchTrainer\nTorchTrainer().fit()",
    "import other\nother.TorchTrainer().fit()",
    "# TorchTrainer(f).fit() of distrain",
    "TorchTrainer(f).fit(",
    "\0",
]


@pytest.mark.parametrize("source", DRIVERS)
def test_a_script_that_calls_fit_is_a_driver(source: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(source)
    assert calls_fit(str(tmp_path / "script.py"))


@pytest.mark.parametrize("source", SCRIPTS)
def test_any_other_script_is_for_the_workers(source: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(source)
    assert not calls_fit(str(tmp_path / "script.py"))


def test_a_file_that_cannot_be_read_is_no_driver(tmp_path: Path) -> None:
    assert not calls_fit(str(tmp_path / "none.py"))


def test_modules_are_found_where_python_would(tmp_path: Path) -> None:
    (tmp_path / "pack" / "tool").mkdir(parents=True)
    (tmp_path / "pack" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "pack" / "train.py").touch()
    (tmp_path / "pack" / "tool" / "__main__.py").touch()
    path = ["/nowhere", str(tmp_path)]
    assert file_of_module("pack.train", path) == str(tmp_path / "pack" / "train.py")
    assert file_of_module("pack.tool", path) == str(tmp_path / "pack" / "tool" / "__main__.py")
    assert file_of_module("pack.none", path) is None


@pytest.mark.parametrize("source", [DRIVERS[0], SCRIPTS[1]])
def test_directories_and_zip_files_are_read_too(tmp_path: Path, source: str) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text(source)
    zipapp.create_archive(tmp_path / "app", tmp_path / "app.pyz")
    for name in ("app", "app.pyz"):
        assert calls_fit(str(tmp_path / name)) is (source == DRIVERS[0])
