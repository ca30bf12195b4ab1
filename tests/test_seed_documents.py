"""The scripts in Ray's own documents, run as they stand there, on a few images instead of a download.

The documents lie beside the project where there are any: nothing of them is in it.
"""

from __future__ import annotations

import ast
import re
import textwrap
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.test_seeds import checkpoint_files, finish_source

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCUMENTS = Path(__file__).parents[2] / "shared" / "seeds"
_IMAGES = "__import__('torchvision').datasets.FakeData(96, (1, 28, 28), 10, transform)"
_SMALLER = {
    r"FashionMNIST\(root=\S+, train=True, download=True, transform=transform\)": _IMAGES,
    "use_gpu=True": "use_gpu=False",
    r"range\(10\)": "range(2)",
}

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not DOCUMENTS.is_dir(), reason="the documents are not here"),
]


def scripts(document: str) -> Iterator[str]:
    """Yield the scripts of a document that train: each is the longest valid program from an import on."""
    [path] = DOCUMENTS.glob(f"{document}_*.txt")
    lines, start = path.read_text().splitlines(), 0
    while start < len(lines):
        longest = start
        if begin := re.match(r"( *)(?:import|from) \w", lines[start]):
            block = takewhile(lambda line: not line.strip() or line.startswith(begin[1]), lines[start:])
            for end, _ in enumerate(block, start + 1):
                if _is_valid(lines[start:end]):
                    longest = end
        script = textwrap.dedent("\n".join(lines[start:longest]))
        if "train.report(" in script or "session.report(" in script:
            for old, new in _SMALLER.items():
                script = re.sub(old, new, script)
            yield script
        start = max(start + 1, longest)


def _is_valid(lines: list[str]) -> bool:
    try:
        return bool(ast.parse(textwrap.dedent("\n".join(lines))))
    except SyntaxError:
        return False


@pytest.mark.sample(1, of="seed documents")
def test_the_first_script_of_the_first_document_saves_to_the_temporary_directory(tmp_path: Path) -> None:
    [script] = [script for script in scripts("000") if ".fit()" in script]
    assert "tempfile.gettempdir()" in script
    ran = finish_source(script, tmp_path, as_ray=True)
    [result] = ran.results
    assert result.error is None
    assert checkpoint_files(result) == ["model.checkpoint"]
    import torch  # TensorFlow's tests, which have none, import this module, too

    weights = torch.load(Path(result.checkpoint.path, "model.checkpoint"), weights_only=True)
    assert all(name.startswith("module.") for name in weights)


@pytest.mark.sample(1, of="seed documents")
@pytest.mark.parametrize("number", range(2))
def test_checkpoints_of_dicts(number: int, tmp_path: Path) -> None:
    ran = finish_source(list(scripts("001"))[number], tmp_path, as_ray=True)
    assert f"'epoch': {4 - number}" in ran.output
    assert len(ran.results) == 1 + number


@pytest.mark.sample(1, of="seed documents")
def test_the_guide_of_today(tmp_path: Path) -> None:
    [script] = [script for script in scripts("004") if ".fit()" in script]
    [result] = finish_source(script, tmp_path, as_ray=True).results
    assert checkpoint_files(result) == ["model.pt"]
