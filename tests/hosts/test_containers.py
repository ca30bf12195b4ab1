"""Runs in real containers of podman, over ``podman exec -i {host}``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from typing import TYPE_CHECKING

import psutil
import pytest

from distrain.system import process
from tests.conftest import run_members, wait_until
from tests.hosts.lab import ROOT
from tests.hosts.test_transports import SCRIPT, last_hosts, reports

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PODMAN = ("podman", "--runtime", "runc")
TEMPLATE = "podman --runtime runc exec -i {host}"
LIMITS = ("--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096")
"""Those of podman itself are higher than a container on a CI machine may set."""
OWN_FILES = ("--rootfs", "/:O")
"""The container sees the files of this machine as they are when it starts. What it writes stays in the container."""


@pytest.fixture
def containers() -> Iterator[list[str]]:
    """The names of three containers, with /tmp for themselves."""
    if any(shutil.which(name) is None for name in ("podman", "runc")) or os.geteuid() != 0:
        pytest.skip("missing here: root, or podman and runc (packages podman and runc)")
    names = [f"box{number}-{uuid.uuid4().hex[:6]}" for number in (1, 2, 3)]
    environment = {name: value for name, value in os.environ.items() if name != process.RUN_IDS}
    try:
        for name in names:
            kinds = (
                "--network=host",
                "--uts=private",
                f"--hostname={name}",
                "--mount=type=tmpfs,destination=/tmp,notmpcopyup",
            )
            argv = [*PODMAN, "run", "--detach", f"--name={name}", *kinds, *LIMITS, *OWN_FILES, "sleep", "infinity"]
            done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=environment)
            if done.returncode and name == names[0]:
                pytest.skip(f"podman starts no container here: {done.stderr.strip()}")
            assert done.returncode == 0, done.stderr
        yield names
    finally:
        subprocess.run([*PODMAN, "rm", "--force", "--time=0", *names], capture_output=True, timeout=60)


@pytest.mark.parametrize("what", ["the container", "the client"])
@pytest.mark.sample(1, of="lost hosts of other engines")
def test_containers_train_and_a_spare_one_takes_the_place_of_one_that_is_lost(
    containers: list[str], tmp_path: Path, test_run_id: str, what: str
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    hosts = ",".join(f"{name}:2" for name in containers)
    user = subprocess.Popen(
        [sys.executable, "script.py", str(tmp_path), json.dumps(["lose", 4, hosts, TEMPLATE])],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_until(lambda: user.poll() is not None or reports(tmp_path) >= 8, 60.0, "training")
        if what == "the container":
            subprocess.run([*PODMAN, "kill", containers[1]], check=True, capture_output=True, timeout=60)
        else:
            clients = psutil.Process(user.pid).children()
            [client] = [one for one in clients if "podman" in one.name() and containers[1] in one.cmdline()]
            client.kill()
        output, _ = user.communicate(timeout=90)
    finally:
        user.kill()
    assert user.returncode == 0, output
    first, _, third = containers
    assert last_hosts(tmp_path) == [first, first, third, third]
    wait_until(lambda: not run_members(test_run_id), 20.0, "the end of all processes")
