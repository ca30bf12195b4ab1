"""Command lines that start programs on a host, directly or over ssh, and the settings of its workers.

Runs in: coordinator.
"""

from __future__ import annotations

import fnmatch
import math
import os
import shlex
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from distrain.errors import HostfileError
from distrain.hosts.host import HostSettings
from distrain.hosts.hostfile import HostSpec, parse_hostfile, parse_hosts, split_ssh_args
from distrain.shipping.module_origins import is_library

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from distrain.config import ScalingConfig

REMOTE_LEASE_S = 15.0
LOCAL_LEASE_S = 30.0
CONNECT_TIMEOUT_S = 10
"""Seconds that ssh waits for a connection."""
ALIVE_COUNT = 3
"""Number of keep-alive messages of ssh that may stay unanswered; together they take as long as the lease."""

FORWARDED_VARIABLES = (
    *("ACCELERATE_*", "CUBLAS_*", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "GLOO_*", "HF_*", "KMP_*", "MKL_*"),
    *("NCCL_*", "OMP_*", "OPENBLAS_*", "PYTHONHASHSEED", "PYTHONWARNINGS", "PYTORCH_*", "TOKENIZERS_PARALLELISM"),
    *("TORCH_*", "TORCHINDUCTOR_*", "TRANSFORMERS_*", "TRITON_*", "AWS_*", "FSSPEC_*", "WANDB_*", "LANG", "LC_*", "TZ"),
    *("KERAS_*", "TF_[!C]*", "TF_C[!O]*", "XLA_*"),  # not TF_CONFIG, which would be about the user's process
)
"""Patterns of variables of this process that workers of other hosts get, too. ``DISTRAIN_ENV`` adds others."""
INTERPRETER_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX")
"""Further ones, for hosts that use the same interpreter as this process."""
RENDEZVOUS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")


class Transport(Protocol):
    """A way to start programs on one host, connected by stdin and stdout."""

    @property
    def host(self) -> HostSpec: ...

    @property
    def lease_s(self) -> float:
        """Seconds without a sign of life after which the coordinator and the agent each take the other for dead."""
        ...

    @property
    def ships(self) -> bool:
        """True if the host may lack distrain and the user's code, so that they are brought there."""
        ...

    @property
    def makes_environment(self) -> bool:
        """True if an environment is made on the host, so that the Python that it has does not matter."""
        ...

    def argv(self, command: Sequence[str]) -> list[str]:
        """Return the command line for this machine that runs ``command`` on the host."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTransport:
    """The machine of this process, where no ssh is needed.

    The lease is for the agent only. The coordinator may be silent for longer: the agent notices its death by its
    process, and users expect training to continue after they have suspended the coordinator with Ctrl-Z.
    """

    host: HostSpec = field(default_factory=HostSpec)
    lease_s: float = LOCAL_LEASE_S
    ships: bool = False
    makes_environment: bool = False

    def argv(self, command: Sequence[str]) -> list[str]:
        return list(command)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTransport:
    """A host behind a program that takes a shell command as its last argument. Only tests use it."""

    host: HostSpec
    prefix: tuple[str, ...]
    lease_s: float = REMOTE_LEASE_S
    ships: bool = False
    makes_environment: bool = False

    def argv(self, command: Sequence[str]) -> list[str]:
        return [*self.prefix, shlex.join(command)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SshTransport:
    """A host that is reached with the OpenSSH client and the user's configuration of it.

    arguments: the user's arguments for ssh, for all hosts. They come after those of the hostfile and before the options
    below, as ssh takes the first of two values for an option.
    """

    host: HostSpec
    arguments: tuple[str, ...] = ()
    lease_s: float = REMOTE_LEASE_S
    ships: bool = True
    makes_environment: bool = False

    def argv(self, command: Sequence[str]) -> list[str]:
        host = self.host
        options = {
            "BatchMode": "yes",  # no user can answer questions
            "ConnectTimeout": CONNECT_TIMEOUT_S,
            "ServerAliveInterval": math.ceil(self.lease_s / ALIVE_COUNT),
            "ServerAliveCountMax": ALIVE_COUNT,
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


# -- hosts ---------------------------------------------------------------------------------------------------------


def hosts_of(scaling: ScalingConfig, environment: Mapping[str, str]) -> tuple[HostSpec, ...]:
    """Return the hosts to train on. Raises HostfileError.

    They are those of ``scaling``, else of DISTRAIN_HOSTS, else of the file that DISTRAIN_HOSTFILE names, else this
    machine.
    """
    if scaling.hosts is not None:
        return parse_hosts(scaling.hosts, "ScalingConfig.hosts")
    if scaling.hostfile is not None:
        return _read(os.fspath(scaling.hostfile), "")
    if hosts := environment.get("DISTRAIN_HOSTS"):
        return parse_hosts(hosts, "DISTRAIN_HOSTS")
    if path := environment.get("DISTRAIN_HOSTFILE"):
        return _read(path, "DISTRAIN_HOSTFILE: ")
    return (HostSpec(),)


def _read(path: str, named_by: str) -> tuple[HostSpec, ...]:
    try:
        text = Path(path).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise HostfileError(f"{named_by}the hostfile {path!r} cannot be read: {error}") from error
    return parse_hostfile(text, path)


def ssh_args_of(scaling: ScalingConfig, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the user's arguments for ssh: of ``scaling``, else of DISTRAIN_SSH_ARGS. Raises HostfileError."""
    return tuple(scaling.ssh_args) or split_ssh_args(environment.get("DISTRAIN_SSH_ARGS", ""), "DISTRAIN_SSH_ARGS")


def transports_for(
    hosts: Sequence[HostSpec],
    ssh_args: tuple[str, ...] = (),
    lease_s: float = REMOTE_LEASE_S,
    *,
    ships: bool = True,
    makes_environment: bool = False,
) -> list[Transport]:
    """Return a transport for each host."""
    remote = partial(
        SshTransport, arguments=ssh_args, lease_s=lease_s, ships=ships, makes_environment=makes_environment
    )
    return [LocalTransport(host=host) if host.is_local else remote(host=host) for host in hosts]


# -- settings of workers ---------------------------------------------------------------------------------------------


def settings_for(
    transports: Iterable[Transport],
    *,
    directory: str,
    sys_path: Sequence[str],
    environment: Mapping[str, str],
    own_environment: Mapping[str, str],
) -> dict[str, HostSettings]:
    """Return the settings of each host's workers: those of this process, unless the hostfile has others.

    environment: variables that the user has set for all workers.
    own_environment: the environment of this process.
    """
    forwarded: dict[tuple[bool, bool], dict[str, str]] = {}  # by kind of host, as it takes long
    settings = {}
    for transport in transports:
        host = transport.host
        kind = (host.is_local, host.python is None)
        if kind not in forwarded:
            forwarded[kind] = {**_forwarded(own_environment, host), **environment}
        settings[host.name] = _settings(transport, directory, sys_path, forwarded[kind])
    return settings


def _settings(
    transport: Transport, directory: str, sys_path: Sequence[str], environment: Mapping[str, str]
) -> HostSettings:
    host = transport.host
    variables = {**environment, **host.environment}
    if host.gpus:  # the agent is started with them; a value for all hosts would replace them
        variables.pop("CUDA_VISIBLE_DEVICES", None)
    return HostSettings(
        lease_s=transport.lease_s,
        slots=host.slots,
        is_local=host.is_local,
        directory=host.cwd or directory,
        sys_path=list(sys_path) if host.python is None else for_another_interpreter(sys_path),
        environment=variables,
    )


def _forwarded(own: Mapping[str, str], host: HostSpec) -> dict[str, str]:
    """Return the variables of this process that a remote host's workers get.

    Rendezvous variables are forwarded only if DISTRAIN_ENV names them: often they belong to another launcher.
    """
    if "TORCHELASTIC_RUN_ID" in own:  # fit() in a worker: these variables are about the ranks of the outer run
        own = {name: value for name, value in own.items() if name not in RENDEZVOUS_VARIABLES}
    named = [pattern.strip() for pattern in own.get("DISTRAIN_ENV", "").split(",")]
    patterns = [*named, *FORWARDED_VARIABLES, *(INTERPRETER_VARIABLES if host.python is None else ())]
    candidates = RENDEZVOUS_VARIABLES if host.is_local else own
    return {
        name: own[name]
        for name in candidates
        if name in own and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }


def interpreter_entries(sys_path: Sequence[str]) -> list[str]:
    """Return the entries of ``sys_path`` that belong to this interpreter."""
    return [entry for entry in sys_path if is_library(entry)]


def for_another_interpreter(sys_path: Sequence[str]) -> list[str | None]:
    """Replace the entries that belong to this interpreter by None, which stands for those of the other one."""
    replaced = [None if is_library(entry) else entry for entry in sys_path]
    first = replaced.index(None) if None in replaced else len(replaced)
    return [*replaced[:first], None, *(entry for entry in replaced[first:] if entry is not None)]
