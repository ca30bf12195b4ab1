"""A Slurm cluster in a lab: slurmctld on ``head``, and a real slurmd on each of three hosts."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from distrain.system import process
from tests.conftest import wait_until
from tests.hosts.lab import ADDRESSES, Lab, end_lab, start_lab

if TYPE_CHECKING:
    from collections.abc import Iterator

NEEDED = ("slurmctld", "slurmd", "munged", "srun", "sbatch")
NODES = ("n1", "n2", "n3")
SLOTS = 2
READY_WITHIN_S = 30.0
_CGROUPS = [Path("/sys/fs/cgroup", name) for name in ("freezer", "cpuset")]  # version 1
CONFINES_JOBS = all(os.access(folder, os.W_OK) for folder in _CGROUPS)
"""True if Slurm tracks the processes of a job by cgroups here, and leaves them only the CPUs of the job."""
CONFIG = """\
ClusterName=lab
SlurmctldHost=head(10.77.0.10)
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType={proctrack}
TaskPlugin=task/{task}
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
ReturnToService=2
MpiDefault=none
SlurmdParameters=config_overrides
KillWait=2
SlurmdTimeout=5
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
"""
"""Jobs of the partition ``urgent`` preempt others, which are told 20 s before, and requeued."""


@dataclass(frozen=True, kw_only=True)
class SlurmLab(Lab):
    """A lab with the nodes n1, n2 and n3, of two CPUs each. A user of Slurm sits in ``head``."""

    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def environment(self, **more: str) -> dict[str, str]:
        return super().environment(SLURM_CONF=str(self.folder / "slurm.conf"), **more)

    def slurm(self, *argv: str) -> str:
        """Run a program of Slurm in ``head`` and return its output."""
        done = self.run("head", *argv, cwd=self.folder)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def submit(self, place: Path, script: str, *options: str) -> str:
        """Submit a batch job of one task per CPU of all nodes. Its output is ``place/out``. Return its id."""
        (place / "job.sh").write_text(f"#!/bin/bash\ncd '{place}'\n{script}\n")
        usual = (f"--nodes={len(NODES)}", f"--ntasks-per-node={SLOTS}", f"--output={place}/out", "--open-mode=append")
        done = self.run("head", "sbatch", "--parsable", *usual, *options, str(place / "job.sh"), cwd=place)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def facts(self, job: str) -> dict[str, str]:
        """Return what ``scontrol show job`` tells about a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self.slurm("scontrol", "show", "job", job)))

    def wait_for(self, job: str, *states: str, within_s: float = 60.0) -> None:
        """Wait until a job is in one of these states."""
        wait_until(lambda: self.facts(job)["JobState"] in states, within_s, f"job {job} {' or '.join(states)}")

    def start_requeued(self, job: str) -> None:
        """Let a job that was requeued start soon. Slurm lets it wait for two minutes, as nodes may be ending it.

        They refuse a job that starts in the second in which its former start was revoked ("credential revoked").
        """
        self.wait_for(job, "PENDING")
        wait_until(self.is_idle, 30.0, "no node is ending the job")
        self.slurm("scontrol", "update", f"JobId={job}", "StartTime=now+2")

    def is_idle(self) -> bool:
        states = self.slurm("sinfo", "-h", "-N", "-p", "all", "-o", "%T").split()
        return states == ["idle"] * len(NODES)


@contextlib.contextmanager
def start_slurm(folder: Path) -> Iterator[SlurmLab]:
    """Start a cluster. Skip the test where none can run."""
    missing = [name for name in NEEDED if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if missing:
        pytest.skip(f"missing here: {', '.join(missing)} (packages slurm-wlm and munge)")
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv(process.RUN_IDS, raising=False)  # that of the first test, whose census would end the daemons
            holder = start_lab(folder, *(f"{node}:{SLOTS}" for node in NODES))
            lab = SlurmLab(folder=folder)
            stack.callback(_end, lab, holder)
            _start_daemons(lab)
        yield lab


def _start_daemons(lab: SlurmLab) -> None:
    folder, munge = lab.folder, lab.folder / "munge"
    _write_config(folder)
    files = [f"--{name}={munge}/{name}" for name in ("socket", "key-file", "pid-file", "log-file", "seed-file")]
    with (folder / "logs" / "munged").open("wb") as log:
        lab.daemons.append(subprocess.Popen(["/usr/sbin/munged", "--foreground", "--force", *files], stderr=log))
    wait_until(lambda: (munge / "socket").exists(), READY_WITHIN_S, "munged")
    _start(lab, "head", "slurmctld", "-D")
    for node in NODES:
        _start(lab, node, "slurmd", "-D", "-N", node)
    wait_until(lambda: _is_up(lab), READY_WITHIN_S, "the cluster")


def _end(lab: SlurmLab, holder: subprocess.Popen[bytes]) -> None:
    for daemon in reversed(lab.daemons):
        daemon.terminate()
        daemon.wait(timeout=20)
    end_lab(holder, lab.folder)
    for folder in _CGROUPS:
        for group in sorted(folder.glob("slurm_n[123]/**"), reverse=True):
            with contextlib.suppress(OSError):  # a file, or one that Slurm has removed
                group.rmdir()


def _write_config(folder: Path) -> None:
    for name in ("state", "spool", "munge", "logs"):
        (folder / name).mkdir(mode=0o700)
    (folder / "munge" / "key-file").write_bytes(os.urandom(1024))
    (folder / "munge" / "key-file").chmod(0o600)
    nodes = [f"NodeName={node} NodeAddr={ADDRESSES[old][0]} CPUs={SLOTS} RealMemory=2000" for node, old in
             zip(NODES, ADDRESSES, strict=True)]  # fmt: skip
    text = CONFIG.format(
        folder=folder,
        user=getpass.getuser(),
        proctrack=f"proctrack/{'cgroup' if CONFINES_JOBS else 'linuxproc'}",
        task="cgroup" if CONFINES_JOBS else "none",
        nodes="\n".join(nodes),
    )
    (folder / "slurm.conf").write_text(text)
    if CONFINES_JOBS:
        (folder / "cgroup.conf").write_text("CgroupAutomount=yes\nCgroupPlugin=cgroup/v1\nConstrainCores=yes\n")


def _start(lab: SlurmLab, host: str, *argv: str) -> None:
    with (lab.folder / "logs" / f"{argv[0]}-{host}").open("wb") as log:
        path = f"{os.environ['PATH']}:/usr/sbin"
        daemon = subprocess.Popen(
            lab.argv(host, *argv), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=lab.environment(PATH=path)
        )
    lab.daemons.append(daemon)


def _is_up(lab: SlurmLab) -> bool:
    time.sleep(0.2)
    done = lab.run("head", "sinfo", "-h", "-N", "-p", "all", "-o", "%T", cwd=lab.folder)
    return done.stdout.split() == ["idle"] * len(NODES)
