"""Command lines that start programs on a host: directly, over ssh, as a step of a Slurm job, or as the user says.

Runs in: coordinator.
"""

from __future__ import annotations

import math
import os
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distrain.hosts.hostfile import HostSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

REMOTE_LEASE_S = 15.0
LOCAL_LEASE_S = 30.0
CONNECT_TIMEOUT_S = 10
"""Seconds that ssh waits for a connection, and srun for the resources of a step."""
ALIVE_COUNT = 3
"""Number of keep-alive messages of ssh that may stay unanswered; together they take as long as the lease."""
_SSH_FAILED = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """A way to start programs on one host, often a container, connected by stdin and stdout.

    template: the words of a command line on this machine, such as ``docker exec -i {host}``. ``{host}`` stands for the
    address of the host. ``{command}`` stands for the command, quoted for a shell; without it, the words of the command
    are appended. Empty for this machine.
    program: the one on this machine that connects to the host, for messages; by default the first word.
    ssh_args: the user's arguments for ssh, if they are in the template.
    lease_s: seconds without a sign of life after which the coordinator and the agent each take the other for dead.
    ships: the host may lack distrain and the user's code, so that they are copied there.
    makes_environment: an environment is made on the host, so that the Python that it has does not matter.
    """

    host: HostSpec = field(default_factory=HostSpec)
    template: tuple[str, ...] = ()
    program: str = ""
    ssh_args: tuple[str, ...] = ()
    lease_s: float = REMOTE_LEASE_S
    ships: bool = True
    makes_environment: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "program", self.program or next(iter(self.template), ""))

    @property
    def failed_code(self) -> int | None:
        """The exit code of a program that has not connected; None if other failures have the same code."""
        return _SSH_FAILED if os.path.basename(self.program) == "ssh" else None

    def argv(self, command: Sequence[str]) -> list[str]:
        """Return the command line for this machine that runs ``command`` on the host."""
        line = shlex.join(command)
        words = [word.replace("{host}", self.host.address).replace("{command}", line) for word in self.template]
        return words if any("{command}" in word for word in self.template) else [*words, *command]


def this_machine(host: HostSpec | None = None) -> Transport:
    """Return the transport to the machine of this process.

    The lease is for the agent only. The coordinator may be silent for longer: the agent notices its death by its
    process, and users expect training to continue after they have suspended the coordinator with Ctrl-Z.
    """
    return Transport(host=host or HostSpec(), lease_s=LOCAL_LEASE_S, ships=False)


def by_ssh(
    host: HostSpec, arguments: Sequence[str] = (), *, lease_s: float = REMOTE_LEASE_S, **options: Any
) -> Transport:
    """Return a transport by the OpenSSH client, with the user's configuration of it.

    arguments: the user's, for all hosts. They come after those of the hostfile and before the settings below, as ssh
    takes the first of two values.
    """
    settings = {
        "BatchMode": "yes",  # no user can answer questions
        "ConnectTimeout": CONNECT_TIMEOUT_S,
        "ServerAliveInterval": math.ceil(lease_s / ALIVE_COUNT),
        "ServerAliveCountMax": ALIVE_COUNT,
        "RemoteCommand": "none",  # ssh refuses two commands
        "ClearAllForwardings": "yes",  # their ports may be in use by the user's own ssh
    }
    template = (
        *("ssh", "-T"),
        *(("-p", str(host.port)) if host.port is not None else ()),
        *(("-l", host.user) if host.user is not None else ()),
        *arguments,
        *(word for name, value in settings.items() for word in ("-o", f"{name}={value}")),
        *("--", "{host}", "{command}"),
    )
    return Transport(host=host, template=template, ssh_args=tuple(arguments), lease_s=lease_s, **options)


_OF_A_TASK = (
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS", "SLURM_TASK_PID"),
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
)
"""Variables about the only task of a step. Frameworks in a worker would take them for its rank and world size."""


def by_srun(host: HostSpec, job: str, cleared: Sequence[str] = (), **options: Any) -> Transport:
    """Return a transport to a node of the Slurm job of this process.

    Each agent is a step of the job, which Slurm signals and ends. One step for all nodes would have one stdin and one
    stdout for all of them, and would end with the first node that fails.

    job: its id. cleared: variables of this process that srun would take for options of the step.
    """
    settings = {
        "jobid": job,
        "nodelist": "{host}",
        "nodes": "1",
        "ntasks": "1",
        "cpu-bind": "none",  # workers may use all CPUs that the job has there
        "mem": "0",  # and all of its memory
        "mpi": "none",
        "export": "ALL",
        "immediate": str(CONNECT_TIMEOUT_S),
    }
    template = (
        *("env", *_unset(cleared), "srun", "--quiet", "--unbuffered", "--overlap"),
        *(f"--{name}={value}" for name, value in settings.items()),
        *("env", *_unset(_OF_A_TASK)),
    )
    return Transport(host=host, template=template, program="srun", **options)


def _unset(names: Sequence[str]) -> list[str]:
    return [word for name in names for word in ("-u", name)]
