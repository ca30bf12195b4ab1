"""Settings of each host's workers: directory, module path and environment variables. Runs in: coordinator."""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING

from distrain.hosts.host import HostSettings
from distrain.transfer.project.module_origins import is_library

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distrain.coordinator.connection.transport import Transport
    from distrain.hosts.hostfile import HostSpec

FORWARDED_VARIABLES = (
    *("ACCELERATE_*", "CUBLAS_*", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "GLOO_*", "HF_*", "KMP_*", "MKL_*"),
    *("NCCL_*", "OMP_*", "OPENBLAS_*", "PYTHONHASHSEED", "PYTHONWARNINGS", "PYTORCH_*", "TOKENIZERS_PARALLELISM"),
    *("TORCH_*", "TORCHINDUCTOR_*", "TRANSFORMERS_*", "TRITON_*", "AWS_*", "FSSPEC_*", "WANDB_*", "LANG", "LC_*", "TZ"),
    *("SLURM_ARRAY_*", "SLURM_JOB_*", "SLURM_RESTART_COUNT", "SLURM_SUBMIT_*"),
    *("KERAS_*", "TF_[!C]*", "TF_C[!O]*", "XLA_*"),  # not TF_CONFIG, which would be about the user's process
    "DISTRAIN_AS_RAY",
)
"""Patterns of variables of this process that workers of other hosts get, too. ``DISTRAIN_ENV`` adds others."""
INTERPRETER_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX")
"""Further ones, for hosts that use the same interpreter as this process."""
RENDEZVOUS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")


def settings_for(
    transports: Sequence[Transport],
    *,
    directory: str,
    sys_path: Sequence[str],
    environment: Mapping[str, str],
    own_environment: Mapping[str, str],
    interface: str = "",
) -> dict[str, HostSettings]:
    """Return the settings of each host's workers: those of this process, unless the hostfile has others.

    environment: variables that the user has set for all workers.
    own_environment: the environment of this process.
    interface: see :class:`~distrain.hosts.host.HostSettings`; the ranks of a single host need none.
    """
    forwarded: dict[tuple[bool, bool], dict[str, str]] = {}  # by kind of host, as it takes long
    settings = {}
    for transport in transports:
        host = transport.host
        kind = (host.is_local, host.python is None)
        if kind not in forwarded:
            forwarded[kind] = {**_forwarded(own_environment, host), **environment}
        variables = {**forwarded[kind], **host.environment}
        if host.gpus:  # the agent is started with them; a value for all hosts would replace them
            variables.pop("CUDA_VISIBLE_DEVICES", None)
        settings[host.name] = HostSettings(
            lease_s=transport.lease_s,
            slots=host.slots,
            is_local=host.is_local,
            directory=host.cwd or directory,
            sys_path=list(sys_path) if host.python is None else for_another_interpreter(sys_path),
            environment=variables,
            interface=interface if len(transports) > 1 else "",
            rack=host.rack,
        )
    return settings


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


def for_another_interpreter(sys_path: Sequence[str]) -> list[str | None]:
    """Replace the entries that belong to this interpreter by None, which stands for those of the other one."""
    replaced = [None if is_library(entry) else entry for entry in sys_path]
    first = replaced.index(None) if None in replaced else len(replaced)
    return [*replaced[:first], None, *(entry for entry in replaced[first:] if entry is not None)]
