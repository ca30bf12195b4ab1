"""The inherited_state of train_func in a worker: the same for every start method and transport."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import pytest

import distrain
from distrain.hosts import host_info
from tests.process.conftest import OPPOSITE_WAYS, Fit, make_fit, records, reported

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ODD_NAME = 'it\'s a "dir"\nwith $HOME `odd` names\\'


def look_around(config: dict[str, Any]) -> dict[str, Any]:
    context = distrain.get_context()
    if context.get_world_rank() == 0:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
            sock.listen()  # as rank 0's store does
    try:
        answer = input("> ")
    except EOFError as error:
        answer = str(error)
    distrain.report(
        {
            "environment": dict(os.environ),
            "world": [context.get_world_rank(), context.get_world_size()],
            "local": [context.get_local_rank(), context.get_local_world_size(), context.get_node_rank()],
            "directory": os.getcwd(),
            "path": sys.path,
            "arguments": sys.argv,
            "main thread": threading.current_thread() is threading.main_thread(),
            "threads": threading.active_count(),
            "executable": sys.executable,
            "stdin": answer,
            "pid": os.getpid(),
            "session": os.getsid(0),
            "modules": list(sys.modules),
        }
    )
    return config | {"greeting": config["greeting"] * 2}


@pytest.fixture(scope="module", params=OPPOSITE_WAYS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run of :func:`look_around` per way, and what the user's process looked like."""
    folder = tmp_path_factory.mktemp("run")
    directory = folder / ODD_NAME
    directory.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        patch.syspath_prepend("/nowhere/of the user")
        patch.setattr(sys, "argv", ["train.py", "--lr", "0.1 ' \n"])
        patch.setenv("USERS_OWN", "value with 'quotes' \n and ümläuts")
        patch.delenv("OMP_NUM_THREADS", raising=False)
        patch.delenv("PYTHONPATH", raising=False)
        cloudpickle.register_pickle_by_value(sys.modules[__name__])
        result = make_fit(request.param, folder)(look_around, {"greeting": "grüß"}, workers=3)
        user = {
            "path": list(sys.path),
            "arguments": list(sys.argv),
            "directory": os.getcwd(),
            "executable": sys.executable,
        }
    ranks = [reported(result.path, rank)[0] for rank in range(3)]
    return {"result": result, "ranks": ranks, "user": user}


def test_every_rank_knows_its_place_also_as_torchrun_tells_it(run: dict[str, Any]) -> None:
    assert [facts["world"] for facts in run["ranks"]] == [[0, 3], [1, 3], [2, 3]]
    assert [facts["local"] for facts in run["ranks"]] == [[0, 3, 0], [1, 3, 0], [2, 3, 0]]
    assert len({facts["pid"] for facts in run["ranks"]}) == 3
    assert len({facts["environment"]["MASTER_PORT"] for facts in run["ranks"]}) == 1
    for rank, facts in enumerate(run["ranks"]):
        environment = facts["environment"]
        expected = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": 3,
            "LOCAL_WORLD_SIZE": 3,
            "NODE_RANK": 0,
            "GROUP_RANK": 0,
            "GROUP_WORLD_SIZE": 1,
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": 3,
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
            "MASTER_ADDR": "127.0.0.1",
        }
        assert {name: environment.get(name) for name in expected} == {k: str(v) for k, v in expected.items()}
        assert environment["TORCHELASTIC_RUN_ID"]
        assert environment["OMP_NUM_THREADS"] == str(max(1, host_info.usable_cpus() // 3))


def test_train_func_finds_what_the_user_has(run: dict[str, Any]) -> None:
    """And what it returns comes back."""
    assert run["result"].return_value == {"greeting": "grüßgrüß"}
    assert run["result"].error is None
    for facts in run["ranks"]:
        assert {name: facts[name] for name in run["user"]} == run["user"]
        assert facts["environment"]["USERS_OWN"] == "value with 'quotes' \n and ümläuts"
        assert facts["main thread"]
        assert facts["threads"] == 1, "no other is ours"
        assert facts["session"] == facts["pid"], "it leads a session of its own"
        assert not {"torch", "pandas", "rich", "IPython"} & set(facts["modules"])
        assert "no terminal" in facts["stdin"]


def test_random_numbers_differ_between_ranks_and_attempts(any_fit: Fit) -> None:
    def train() -> None:
        distrain.report({"python": random.random(), "numpy": float(np.random.random())})
        if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) == 0:
            (place / f"drawn-{distrain.get_context().get_world_rank()}").touch()
            while len(list(place.glob("drawn-*"))) < 2:
                pass
            raise ValueError("once more")

    place = any_fit.storage
    place.mkdir()
    result = any_fit(train, failure_config=distrain.FailureConfig(max_failures=1))
    drawn = reported(result.path)
    assert len(drawn) == 4
    assert {record["attempt"] for record in records(result.path)} == {0, 1}
    for source in ("python", "numpy"):
        assert len({draw[source] for draw in drawn}) == 4, source


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], int]:
    """Install a module: its name and its source."""
    site = tmp_path / "site-packages"
    site.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.syspath_prepend(str(site))
    return lambda name, source: (site / f"{name}.py").write_text(source)


def test_a_preload_that_starts_a_thread_means_fresh_interpreters_and_is_said_once(
    fit: Fit, install: Callable[[str, str], int], capsys: pytest.CaptureFixture[str]
) -> None:
    install(
        "threaded_package",
        "import threading, time, os\nPID = os.getpid()\n"
        "threading.Thread(target=time.sleep, args=(1e6,), daemon=True, name='watcher').start()\n",
    )

    def train() -> None:
        import threaded_package

        distrain.report({"own": os.getpid() == threaded_package.PID, "threads": threading.active_count()})

    for _ in range(2):
        result = fit(train, workers=3)
        assert reported(result.path) == [{"own": True, "threads": 2}] * 3
    [notice] = [line for line in capsys.readouterr().err.splitlines() if "new interpreters" in line]
    assert "importing threaded_package started 1 thread (watcher)" in notice
    assert 'ScalingConfig(start_method="spawn")' in notice


@pytest.mark.parametrize(("answer", "forks"), [(0, False), (3, True)], ids=["initialised", "not initialised"])
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler here")
def test_a_preload_that_initialises_cuda_means_fresh_interpreters(
    fit: Fit,
    tmp_path: Path,
    install: Callable[[str, str], int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: int,
    forks: bool,
) -> None:
    """The driver that a module has loaded says whether it has."""
    source, driver = tmp_path / "cuda.c", tmp_path / "libcuda.so.1"
    source.write_text(f"int cuDeviceGetCount(int *count) {{ *count = 1; return {answer}; }}")
    subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", driver, source], check=True, timeout=60)
    install(
        "cuda_package",
        f"import ctypes, os\nPID = os.getpid()\nDRIVER = ctypes.CDLL({str(driver)!r})\n"
        f"CHECK = os.environ.get('PYTORCH_NVML_BASED_CUDA_CHECK')\n",
    )
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)

    def train() -> None:
        import cuda_package

        now = os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK")
        distrain.report(
            {"own": os.getpid() == cuda_package.PID, "imported with": cuda_package.CHECK, "trains with": now}
        )

    result = fit(train, workers=1)
    expected = {"own": not forks, "imported with": "1" if forks else None, "trains with": None}
    assert reported(result.path) == [expected]
    assert ("an imported module initialised CUDA" in capsys.readouterr().err) is not forks
