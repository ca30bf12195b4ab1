"""Command lines that start programs on a host: directly, over ssh, as a step of a Slurm job, or as the user says.

Runs in: coordinator.
"""

from __future__ import annotations

import math
import os
import shlex
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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
class Transport(ABC):
    """A way to start programs on one host, connected by stdin and stdout.

    lease_s: seconds without a sign of life after which the coordinator and the agent each take the other for dead.
    ships: the host may lack distrain and the user's code, so that they are copied there.
    makes_environment: an environment is made on the host, so that the Python that it has does not matter.
    """

    host: HostSpec
    lease_s: float = REMOTE_LEASE_S
    ships: bool = True
    makes_environment: bool = False

    @property
    def program(self) -> str:
        """The program on this machine that connects to the host, for messages; empty if there is none."""
        return ""

    @property
    def failed_code(self) -> int | None:
        """The exit code of a program that has not connected; None if other failures have the same code."""
        return _SSH_FAILED if os.path.basename(self.program) == "ssh" else None

    @abstractmethod
    def argv(self, command: Sequence[str]) -> list[str]:
        """Return the command line for this machine that runs ``command`` on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTransport(Transport):
    """The machine of this process.

    The lease is for the agent only. The coordinator may be silent for longer: the agent notices its death by its
    process, and users expect training to continue after they have suspended the coordinator with Ctrl-Z.
    """

    host: HostSpec = field(default_factory=HostSpec)
    lease_s: float = LOCAL_LEASE_S
    ships: bool = False

    def argv(self, command: Sequence[str]) -> list[str]:
        return list(command)


@dataclass(frozen=True, slots=True, kw_only=True)
class SshTransport(Transport):
    """A host that is reached with the OpenSSH client and the user's configuration of it.

    arguments: the user's arguments for ssh, for all hosts. They come after those of the hostfile and before the options
    below, as ssh takes the first of two values for an option.
    """

    program = "ssh"
    arguments: tuple[str, ...] = ()

    def argv(self, command: Sequence[str]) -> list[str]:
        host = self.host
        options = {
            "BatchMode": "yes",  # no user can answer questions
            "ConnectTimeout": CONNECT_TIMEOUT_S,
            "ServerAliveInterval": math.ceil(self.lease_s / ALIVE_COUNT),
            "ServerAliveCountMax": ALIVE_COUNT,
            "RemoteCommand": "none",  # ssh refuses two commands
            "ClearAllForwardings": "yes",  # their ports may be in use by the user's own ssh
        }
        return [
            *("ssh", "-T"),
            *(("-p", str(host.port)) if host.port is not None else ()),
            *(("-l", host.user) if host.user is not None else ()),
            *self.arguments,
            *(word for name, value in options.items() for word in ("-o", f"{name}={value}")),
            *("--", host.address, shlex.join(command)),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandTransport(Transport):
    """A host, often a container, in which a program of the user's choice runs commands: ``docker exec -i {host}``.

    template: the words of its command line. ``{host}`` stands for the address of the host. ``{command}`` stands for the
    command, quoted for a shell; without it, the words of the command are appended.
    """

    template: tuple[str, ...]

    @property
    def program(self) -> str:
        return self.template[0]

    def argv(self, command: Sequence[str]) -> list[str]:
        line = shlex.join(command)
        words = [word.replace("{host}", self.host.address).replace("{command}", line) for word in self.template]
        return words if any("{command}" in word for word in self.template) else [*words, *command]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmTransport(Transport):
    """A node of the Slurm job of this process. Each agent is a step of the job, which Slurm signals and ends.

    One step for all nodes would have one stdin and one stdout for all of them, and would end with the first node that
    fails.

    job: its id. cleared: variables of this process that srun would take for options of the step.
    """

    program = "srun"
    job: str
    cleared: tuple[str, ...] = ()

    def argv(self, command: Sequence[str]) -> list[str]:
        options = {
            "jobid": self.job,
            "nodelist": self.host.address,
            "nodes": "1",
            "ntasks": "1",
            "cpu-bind": "none",  # workers may use all CPUs that the job has there
            "mem": "0",  # and all of its memory
            "mpi": "none",
            "export": "ALL",
            "immediate": str(CONNECT_TIMEOUT_S),
        }
        return [
            *("env", *_unset(self.cleared), "srun", "--quiet", "--unbuffered", "--overlap"),
            *(f"--{name}={value}" for name, value in options.items()),
            *("env", *_unset(_OF_A_TASK), *command),
        ]


_OF_A_TASK = (
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS", "SLURM_TASK_PID"),
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
)
"""Variables about the only task of a step. Frameworks in a worker would take them for its rank and world size."""


def _unset(names: Sequence[str]) -> list[str]:
    return [word for name in names for word in ("-u", name)]
