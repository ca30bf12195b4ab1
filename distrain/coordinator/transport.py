"""How to start a program on a host, and what goes along. The only module that knows whether a host is local.

Runs in: coordinator.
"""

from __future__ import annotations

import fnmatch
import math
import os
import shlex
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from distrain.errors import HostfileError
from distrain.hosts.host import HostSettings
from distrain.hosts.hostfile import HostSpec, parse_hostfile, parse_hosts, split_ssh_args

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distrain.config import ScalingConfig

REMOTE_LEASE_S = 15.0
LOCAL_LEASE_S = 30.0
CONNECT_TIMEOUT_S = 10
ALIVE_COUNT = 3
"""So many unanswered questions of ssh's own make a lease."""

FORWARDED = (
    *("ACCELERATE_*", "CUBLAS_*", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "GLOO_*", "HF_*", "KMP_*", "MKL_*"),
    *("NCCL_*", "OMP_*", "OPENBLAS_*", "PYTHONHASHSEED", "PYTHONWARNINGS", "PYTORCH_*", "TOKENIZERS_PARALLELISM"),
    *("TORCH_*", "TORCHINDUCTOR_*", "TRANSFORMERS_*", "TRITON_*", "AWS_*", "FSSPEC_*", "WANDB_*", "LANG", "LC_*", "TZ"),
    *("KERAS_*", "TF_[!C]*", "TF_C[!O]*", "XLA_*"),  # not TF_CONFIG, which would be about the user's process
)
"""Variables of the user's process that workers of other hosts get, too; ``*`` stands for anything. ``DISTRAIN_ENV``
names more of them."""
SAME_INTERPRETER = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX")
"""Likewise, but only where the interpreter is the one of the user's process: they belong to it."""
MEETING_PLACE = ("MASTER_ADDR", "MASTER_PORT")


class Transport(Protocol):
    """A way to a host: it turns a command line for that host into one for this machine, whose stdin and stdout are the
    wire. ``lease_s``: seconds without a sign of life after which either side takes the other for dead.
    """

    @property
    def host(self) -> HostSpec: ...

    @property
    def lease_s(self) -> float: ...

    def argv(self, command: Sequence[str]) -> list[str]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTransport:
    """The user's machine.

    Its agent may not be silent for longer than the lease, but the coordinator may: the agent sees the coordinator's
    death directly, and a user who suspends the coordinator with Ctrl-Z expects training to continue afterwards.
    """

    host: HostSpec = field(default_factory=HostSpec)
    lease_s: float = LOCAL_LEASE_S

    def argv(self, command: Sequence[str]) -> list[str]:
        return list(command)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTransport:
    """A host behind a program that takes a shell command as its last argument."""

    host: HostSpec
    prefix: tuple[str, ...]
    lease_s: float = REMOTE_LEASE_S

    def argv(self, command: Sequence[str]) -> list[str]:
        return [*self.prefix, shlex.join(command)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SshTransport:
    """A host behind the system's OpenSSH client, with the user's own configuration. ``arguments`` are the user's for
    ssh on every host. Of an option that is given twice ssh takes the first: the host's own, then the user's, then
    ours.
    """

    host: HostSpec
    arguments: tuple[str, ...] = ()
    lease_s: float = REMOTE_LEASE_S

    def argv(self, command: Sequence[str]) -> list[str]:
        host = self.host
        options = {
            "BatchMode": "yes",  # nobody is there to answer a question
            "ConnectTimeout": CONNECT_TIMEOUT_S,
            "ServerAliveInterval": math.ceil(self.lease_s / ALIVE_COUNT),
            "ServerAliveCountMax": ALIVE_COUNT,
            "ClearAllForwardings": "yes",  # of the user's configuration: their ports are taken by the user's own ssh
        }
        return [
            *("ssh", "-T"),
            *(("-p", str(host.port)) if host.port is not None else ()),
            *(("-l", host.user) if host.user is not None else ()),
            *self.arguments,
            *(word for name, value in options.items() for word in ("-o", f"{name}={value}")),
            *("--", host.address, shlex.join(command)),
        ]


# -- which hosts -----------------------------------------------------------------------------------------------------


def hosts_of(scaling: ScalingConfig, environment: Mapping[str, str]) -> tuple[HostSpec, ...]:
    """The hosts to train on: those of ``scaling``, else of DISTRAIN_HOSTS, else of the file that DISTRAIN_HOSTFILE
    names, else this machine. Raises HostfileError.
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
    """Further arguments for ssh: those of ``scaling``, else of DISTRAIN_SSH_ARGS. Raises HostfileError."""
    return tuple(scaling.ssh_args) or split_ssh_args(environment.get("DISTRAIN_SSH_ARGS", ""), "DISTRAIN_SSH_ARGS")


def transports_for(
    hosts: Sequence[HostSpec], ssh_args: tuple[str, ...] = (), lease_s: float = REMOTE_LEASE_S
) -> list[Transport]:
    return [
        LocalTransport(host=host) if host.is_local else SshTransport(host=host, arguments=ssh_args, lease_s=lease_s)
        for host in hosts
    ]


# -- what goes along -------------------------------------------------------------------------------------------------


def order_for(
    transport: Transport,
    *,
    directory: str,
    sys_path: Sequence[str],
    environment: Mapping[str, str],
    own_environment: Mapping[str, str],
) -> HostSettings:
    """What a host is to do: as this process has it, ``own_environment`` being its, unless the hostfile says otherwise.
    ``environment``: what the user wants all workers to have.
    """
    host = transport.host
    variables = {**_forwarded(own_environment, host), **environment, **host.environment}
    if host.gpus:  # its agent has them in CUDA_VISIBLE_DEVICES; what is for all hosts is not as exact
        variables.pop("CUDA_VISIBLE_DEVICES", None)
    return HostSettings(
        lease_s=transport.lease_s,
        slots=host.slots,
        is_local=host.is_local,
        directory=host.cwd or directory,
        sys_path=list(sys_path) if host.python is None else _for_another_interpreter(sys_path),
        environment=variables,
    )


def _forwarded(own: Mapping[str, str], host: HostSpec) -> dict[str, str]:
    """Return the variables of this process that a remote host's workers get.

    The variables for the rendezvous count only if the user names them: those that merely stand in the environment often
    belong to another launcher.
    """
    if "TORCHELASTIC_RUN_ID" in own:  # a fit() in a worker, whose own ranks do not meet where the worker has met others
        own = {name: value for name, value in own.items() if name not in MEETING_PLACE}
    named = [pattern.strip() for pattern in own.get("DISTRAIN_ENV", "").split(",")]
    patterns = [*named, *FORWARDED, *(SAME_INTERPRETER if host.python is None else ())]
    candidates = MEETING_PLACE if host.is_local else own
    return {
        name: own[name]
        for name in candidates
        if name in own and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }


def _for_another_interpreter(sys_path: Sequence[str]) -> list[str | None]:
    """None stands for what that interpreter has itself, in place of what this one has."""
    stdlib = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    is_ours = [_is_of_an_interpreter(entry, stdlib) for entry in sys_path]
    first = is_ours.index(True) if True in is_ours else len(is_ours)
    after = [entry for entry, ours in zip(sys_path[first:], is_ours[first:], strict=True) if not ours]
    return [*sys_path[:first], None, *after]


def _is_of_an_interpreter(entry: str, stdlib: set[str]) -> bool:
    path = Path(entry)
    return (
        path.name.endswith("-packages")
        or any(entry == folder or entry.startswith(folder + os.sep) for folder in stdlib)
        or (path.suffix == ".zip" and path.stem.startswith("python"))
    )
