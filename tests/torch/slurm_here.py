"""A Slurm of this machine alone, for tests that start processes with srun: one host, in a temporary directory."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from distrain.system import process

if TYPE_CHECKING:
    from collections.abc import Iterator

_SETTINGS = """
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
AuthType=auth/munge
AuthInfo=socket={base}/munge/socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool
SlurmctldPidFile={base}/state/slurmctld.pid
SlurmdPidFile={base}/state/slurmd.pid
SlurmctldLogFile={base}/log/slurmctld
SlurmdLogFile={base}/log/slurmd
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SchedulerType=sched/builtin
MpiDefault=none
SlurmdParameters=config_overrides
KillWait=5
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={host_port} CPUs=8 RealMemory=2000 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def skip_without_slurm() -> None:
    missing = [name for name in ("srun", "slurmctld", "slurmd", "munged") if _command(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (apt-get install slurm-wlm munge)")
    if os.geteuid() != 0:
        pytest.skip("only root may start a Slurm of its own")


def _command(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


@contextmanager
def slurm_here() -> Iterator[dict[str, str]]:
    """Start a Slurm, and yield the environment variables by which its commands find it."""
    with ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True)))
        for name in ("munge", "state", "spool", "log"):
            (base / name).mkdir(mode=0o755)
        host = socket.gethostname().partition(".")[0]
        controller_port, host_port = _free_ports()
        settings = _SETTINGS.format(base=base, host=host, controller_port=controller_port, host_port=host_port)
        (base / "slurm.conf").write_text(settings)
        environment = {**os.environ, "SLURM_CONF": str(base / "slurm.conf")}
        environment.pop(process.RUN_IDS, None)  # else a test would miss them at its end

        def start(*command: str) -> None:
            log = stack.enter_context((base / "log" / Path(command[0]).name).open("wb"))
            argv = [str(_command(command[0])), *command[1:]]
            child = subprocess.Popen(argv, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            stack.callback(child.wait)
            stack.callback(child.terminate)

        munge = base / "munge"
        munge.chmod(0o700)
        (munge / "key").write_bytes(os.urandom(1024))
        (munge / "key").chmod(0o600)
        files = {"key": "key-file", "socket": "socket", "pid": "pid-file", "log": "log-file", "seed": "seed-file"}
        start("munged", "--foreground", "--force", *(f"--{option}={munge / name}" for name, option in files.items()))
        start("slurmctld", "-D")
        start("slurmd", "-D", "-N", "n1")
        deadline = time.monotonic() + 30
        while _state(environment) != "idle":
            if time.monotonic() > deadline:
                logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in (base / "log").iterdir())
                raise RuntimeError(f"Slurm is not ready: {_state(environment)!r}\n{logs}")
            time.sleep(0.1)
        yield {"SLURM_CONF": environment["SLURM_CONF"]}


def _free_ports() -> list[int]:
    with socket.socket() as one, socket.socket() as other:
        for probe in (one, other):
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in (one, other)]


def _state(environment: dict[str, str]) -> str:
    run = subprocess.run(
        ["sinfo", "--noheader", "--format=%T"], env=environment, capture_output=True, text=True, timeout=20
    )
    return run.stdout.strip()
