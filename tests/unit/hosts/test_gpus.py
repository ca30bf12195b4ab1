"""GPUs that a process sees, depending on the machine and CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distrain.hosts import gpus
from distrain.hosts.host import Gpu, gpu_problem
from tests.nvml import make_driver

FOUR = [Gpu(name="NVIDIA H100", uuid=f"GPU-{number}f3a", pci=f"0000:{number}0:00.0") for number in range(4)]


@pytest.mark.parametrize(
    ("listed", "seen"),
    [
        (None, "0123"),
        ("", ""),
        ("0, 1, 2", "012"),
        ("-1", ""),
        ("0,-1,1", "0"),
        ("NoDevFiles", ""),
        ("GPU-2f3a,1", "2"),
        ("GPU-2f3a,GPU-0", "20"),
        ("GPU-2f3a,GPU-2", ""),
        ("GPU-", ""),
        ("1,1", ""),
        ("\u00b2", ""),
    ],
)
def test_gpus_are_seen_as_cuda_shows_them(listed: str | None, seen: str) -> None:
    assert [gpu.uuid for gpu in gpus.visible(FOUR, listed)] == [f"GPU-{number}f3a" for number in seen]


def test_a_process_has_one_mig_instance_at_most() -> None:
    [gpu] = gpus.visible(FOUR, "MIG-21ab,MIG-10ab")
    assert (gpu.uuid, gpu.name, gpu.is_mig) == ("MIG-21ab", "NVIDIA H100", True)
    assert gpus.visible([], "MIG-21ab") == ()


@pytest.mark.parametrize(
    ("named", "bad"),
    [
        ("0,2", None),
        ("0,7", "GPU 7"),
        ("GPU-0,GPU-none", "GPU-none"),
        ("GPU-0,GPU-0f3a", "GPU-0"),
        ("MIG-99", None),
    ],
)
def test_the_first_gpu_of_a_hostfile_that_is_not_there_is_named(named: str, bad: str | None) -> None:
    problem = gpu_problem(named.split(","), gpus.visible(FOUR, named))
    assert problem is None if bad is None else f"gpus={named} in the hostfile, but it has no {bad}, or" in str(problem)


# -- the driver ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a fake NVML, whose GPUs are set by environment variables."""
    return make_driver(tmp_path_factory.mktemp("driver"))


def found_by(**environment: str) -> tuple[list[str], str]:
    """Return the UUIDs and PCI addresses, and the problem, that a new process finds."""
    code = (
        "import os; from distrain.hosts.gpus import find_gpus; found, problem = find_gpus(os.environ);"
        "result = [f'{gpu.uuid} {gpu.pci}' for gpu in found], problem"
    )
    return in_new_process(code, **environment)


def in_new_process(code: str, **environment: str) -> tuple[Any, str]:
    """Return what a piece of code calls ``result``. The driver library is loaded once in a process."""
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(9)))}
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; import json; print(json.dumps(result))"],
        env={**os.environ, **visible, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    found, problem = json.loads(done.stdout)
    return found, problem


@pytest.mark.parametrize(
    ("gpus", "found", "problem"),
    [
        ("gg", ["GPU-1 0000:01:00.0", "GPU-2 0000:02:00.0"], ""),
        (
            "glg",
            ["GPU-1 0000:01:00.0", "GPU-3 0000:03:00.0"],
            "GPU 1 cannot be used: GPU is lost (NVML error 15)",
        ),
        ("gpg", ["GPU-1 0000:01:00.0", "GPU-3 0000:03:00.0"], ""),
        ("", [], ""),
    ],
)
def test_only_gpus_that_work_are_found(driver: Path, gpus: str, found: list[str], problem: str) -> None:
    assert found_by(LD_LIBRARY_PATH=str(driver), FAKE_GPUS=gpus) == (found, problem)


def test_the_health_of_gpus_is_that_of_the_ones_that_are_shown(driver: Path) -> None:
    """GPU 3 is lost, 4 belongs to another container, and 6 is hidden."""
    code = (
        "import os; from dataclasses import asdict; from distrain.hosts.gpus import find_gpus;"
        "from distrain.hosts.gpu_health import gpu_health; gpus, _ = find_gpus(os.environ);"
        "result = [asdict(gpu) for gpu in gpu_health({gpu.uuid for gpu in gpus})], ''"
    )
    environment = {"FAKE_GPUS": "gsulpgg", "FAKE_USER": str(os.getpid()), "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    health, _ = in_new_process(code, LD_LIBRARY_PATH=str(driver), **environment)
    well = {"memory_bytes": 8 << 30, "free_bytes": 8 << 30, "processes": [], "memory_errors": 0, "repair": ""}
    well |= {"slowed_by": [], "celsius": 91}
    unwell = {"memory_errors": 2, "repair": "pending", "slowed_by": ["heat", "the power supply"]}
    name = Path("/proc/self/comm").read_text().strip()
    assert health == [
        {**well, "index": 0, "uuid": "GPU-1"},
        {**well, **unwell, "index": 1, "uuid": "GPU-2"},
        {**well, "index": 2, "uuid": "GPU-3", "free_bytes": 6 << 30, "processes": [f"{name} (pid {os.getpid()})"]},
        {**well, "index": 5, "uuid": "GPU-6"},
    ]


def test_a_driver_of_another_version_than_its_library_is_named(driver: Path) -> None:
    found, problem = found_by(LD_LIBRARY_PATH=str(driver), FAKE_INIT="18", FAKE_GPUS="g")
    assert found == []
    assert problem == (
        "the NVIDIA driver cannot be used: RM has detected an NVML/RM version mismatch (NVML error 18); its libraries "
        "were updated since its kernel module was loaded; restart the host"
    )


def test_without_a_driver_there_is_no_gpu_and_nothing_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this host has a driver, a file that is no library shadows its library."""
    (tmp_path / "libnvidia-ml.so.1").touch()
    assert found_by(LD_LIBRARY_PATH=str(tmp_path)) == ([], "")
