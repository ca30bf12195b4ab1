"""A script finds the interpreter that python and torchrun give it, but for what docs/migration/torchrun.md says.

Interpreter_facts.py is the script. It is run once by each of the three.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.documentation import ROOT

SCRIPT = Path(__file__).with_name("interpreter_facts.py")
_, _, SECTION = (ROOT / "docs" / "migration" / "torchrun.md").read_text().partition("\n## What differs\n")
TOLD = " ".join(SECTION.partition("\n## ")[0].split())
RUNS = {
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"],
    "distrain": [sys.executable, "-m", "distrain", "run", "--num-workers", "2"],
}
DIFFERS = {
    "**Workers are forked** from a process that has already imported torch": (
        "modules", "warnings.filters", "meta_path", "atexit", "gc.freeze"
    ),
    "`faulthandler` on": ("faulthandler", "signals, caught"),
    "`breakpoint()` opens distrain's debugger": ("breakpointhook",),
    "`input()` says why there is none": ("input",),
    "handles four real-time signals": ("real-time handlers",),
    "two further threads": ("native threads",),
    "some open files": ("open files",),
    "frames below the script's": ("depth",),
    "stdout is line-buffered": ("streams, buffering",),
    "**`ps` shows**": ("cmdline",),
}  # fmt: skip
"""By words of the documentation: the facts that differ from those under torchrun, or under python for a single rank."""


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("facts")
    environment = {**os.environ, "HOME": str(folder), "CUDA_VISIBLE_DEVICES": "", "SCRIPTS_OWN": "kept"}
    for name in ("PYTHONUNBUFFERED", "OMP_NUM_THREADS", "PYTHONPATH"):
        environment.pop(name, None)
    processes = {
        name: subprocess.Popen(
            [*command, str(SCRIPT), "--lr", "0.1 '\n"],
            cwd=ROOT,
            env={**environment, "FACTS": str(folder / name)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name, command in RUNS.items()
    }
    outputs = {name: process.communicate(timeout=120)[0] for name, process in processes.items()}
    assert {name: process.returncode for name, process in processes.items()} == dict.fromkeys(RUNS, 1), outputs
    assert "in the hook" in outputs["distrain"]
    assert outputs["distrain"].count('raise ValueError("the last line")') == 1
    ranks = {name: "" if name == "python" else "0" for name in RUNS}
    return {name: json.loads((folder / f"{name}{rank}").read_text()) for name, rank in ranks.items()}


def test_a_script_finds_what_python_gives_it_but_for_what_the_documentation_says(
    facts: dict[str, dict[str, Any]],
) -> None:
    found = facts["distrain"]
    assert facts["python"]["at exit"] == [
        "end", "hook: ValueError('the last line'), True, True, <module>", "thread", "exit handler"
    ]  # fmt: skip
    differs = {
        name: (facts["python"][name], facts["torchrun"][name], fact)
        for name, fact in found.items()
        if fact not in (facts["python"][name], facts["torchrun"][name])
    }
    differs.pop("environment")
    assert differs.keys() == {name for names in DIFFERS.values() for name in names}, differs
    assert [words for words in DIFFERS if words not in TOLD] == []


def test_the_environment_is_that_of_torchrun_and_some_of_distrain(facts: dict[str, dict[str, Any]]) -> None:
    python, torchrun, found = (facts[name]["environment"] for name in RUNS)
    changed = {name for name in python if found.get(name) != python[name]} - {"HOME"}
    assert changed == set()
    assert torchrun.keys() - found.keys() == {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
    own = {name for name in found if name.startswith("DISTRAIN_")}
    assert found.keys() - torchrun.keys() - own <= {
        "CUDA_DEVICE_ORDER", "GLOO_SOCKET_IFNAME", "NODE_RANK", "TORCH_FR_BUFFER_SIZE"
    }  # fmt: skip
