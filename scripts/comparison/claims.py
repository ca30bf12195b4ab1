"""The claims of docs/comparison.md and other pages about other people's packages, each with a fact that proves it.

A fact reads the sources of a package. What they don't tell is ``read_in(DOCUMENTATION)``: a person has read it there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from comparison.sources import Sources

    Fact = Callable[[Sources], bool]

RAY, TORCHRUN, ACCELERATE, TORCHRUNX = "Ray Train", "torchrun", "accelerate", "torchrunx"
PACKAGES = {RAY: "ray", TORCHRUN: "torch", ACCELERATE: "accelerate", TORCHRUNX: "torchrunx"}
"""The package whose sources a column of the table is about."""
HOST_PACKAGES = {
    "DeepSpeed's launcher": "deepspeed",
    "SkyPilot": "skypilot",
    "dstack": "dstack",
    "Monarch's SSHJob": "torchmonarch",
}
"""The package whose sources a row of the table of hosts is about."""
TITLES = {
    "ray": "Ray",
    "deepspeed": "DeepSpeed",
    "skypilot": "SkyPilot",
    "torchmonarch": "Monarch (torchmonarch)",
    "submitit": "submitit",
}
"""The names of packages beside their versions in docs/comparison.md, where they differ."""

TRAIN = "ray/train/v2"
ELASTIC = "torch/distributed/elastic"
LAUNCH = "torch/distributed/launcher/api.py"
RUN = "torch/distributed/run.py"
ACCELERATE_LAUNCH = "accelerate/commands/launch.py"
ACCELERATE_ARGUMENTS = "accelerate/utils/launch.py"
ACCELERATE_COMMANDS = {
    "accelerate",
    "accelerate-config",
    "accelerate-estimate-memory",
    "accelerate-launch",
    "accelerate-merge-weights",
}
WORKER_GROUP = f"{TRAIN}/_internal/execution/worker_group/worker_group.py"
ERRORS = f"{ELASTIC}/multiprocessing/errors/__init__.py"
RESUME_PROOF = r"(?i)\bdrill|resumes? exactly|bit[- ]exact|resum\w+ (test|check)"


@dataclass(frozen=True)
class Claim:
    """A cell of a table, or a phrase of a page, and the fact behind it. package: whose sources the fact reads."""

    place: str
    text: str
    package: str
    fact: Fact


def read_in(documentation: str) -> Fact:
    """Return the fact of something that only documentation tells, with the date when it was read."""
    assert documentation
    return lambda sources: True


def without_ssh(sources: Sources) -> bool:
    return sources.lacks(RUN, r"\bssh\b|pdsh") and sources.lacks(LAUNCH, r"\bssh\b|pdsh")


def accelerate_is_torchrun(sources: Sources) -> bool:
    """Tell whether accelerate starts GPU processes by torchrun's code, with a fixed number of hosts."""
    return sources.says(ACCELERATE_LAUNCH, "import torch.distributed.run as distrib_run") and sources.says(
        ACCELERATE_ARGUMENTS, "args.nnodes = str(num_machines)"
    )


def accelerate_starts_hosts(sources: Sources) -> bool:
    launchers = sources.default("accelerate/utils/constants.py", "DEEPSPEED_MULTINODE_LAUNCHERS")
    return (
        launchers[0] == "pdsh"
        and "multi-CPU" in sources.option(ACCELERATE_LAUNCH, "--mpirun_hostfile")["help"]
        and sources.lacks(ACCELERATE_ARGUMENTS, r"\"ssh\"")
    )


def torch_serves_stacks(sources: Sources) -> bool:
    return sources.defines("torch/distributed/debug/__init__.py", "start_debug_server") and (
        "torchfrtrace" in sources.commands("torch")
    )


def nothing_starts_the_debug_server(sources: Sources) -> bool:
    return torch_serves_stacks(sources) and sources.lacks(RUN, "start_debug_server")


def torchrunx_is_fixed(sources: Sources) -> bool:
    return sources.says("torchrunx/launcher.py", "worker_world_size=sum(workers_per_host)")


def pdsh_is_the_default(sources: Sources) -> bool:
    return sources.says("deepspeed/launcher/runner.py", "default=PDSH_LAUNCHER")


def dstack_runs_containers(sources: Sources) -> bool:
    path = "dstack/_internal/core/models/configurations.py"
    types = (sources.default(path, f"RunConfigurationType.{name}") for name in ("TASK", "SERVICE"))
    return [*types] == ["task", "service"] and sources.says(path, "The name of the Docker image to run")


def elastic(sources: Sources) -> bool:
    return sources.option(RUN, "--nnodes")["default"] == "1:1" and sources.says(
        f"{ELASTIC}/agent/server/api.py", "num_nodes_waiting > 0", "self._restart_workers(self._worker_group)"
    )


CELLS: dict[str, dict[str, tuple[str, Fact]]] = {
    "starts many hosts": {
        RAY: ("after `ray up`", lambda s: s.defines("ray/scripts/scripts.py", "up")),
        TORCHRUN: ("no", without_ssh),
        ACCELERATE: ("with DeepSpeed, or on CPUs [1]", accelerate_starts_hosts),
        TORCHRUNX: ("ssh", lambda s: s.says("torchrunx/utils/environment.py", "fabric.Connection(")),
    },
    "other hosts need": {
        RAY: (
            "the same Ray and Python, in a cluster",
            lambda s: s.says("ray/_private/utils.py", "Version mismatch: ", "Python and Ray versions"),
        ),
        TORCHRUN: ("torchrun, started there", without_ssh),
        ACCELERATE: ("accelerate, started there", accelerate_is_torchrun),
        TORCHRUNX: (
            "torchrunx at the same path",
            lambda s: s.says("torchrunx/utils/environment.py", "shlex.quote(sys.executable)", "-m torchrunx"),
        ),
    },
    "proves an exact resume": {
        RAY: ("no", lambda s: s.commands("ray") == {"ray", "serve", "tune"} and s.lacks(TRAIN, RESUME_PROOF)),
        TORCHRUN: ("no", lambda s: s.commands("torch") == {"torchrun", "torchfrtrace"}),
        ACCELERATE: (
            "no",
            lambda s: s.commands("accelerate") == ACCELERATE_COMMANDS and s.lacks("accelerate/commands", RESUME_PROOF),
        ),
        TORCHRUNX: ("no", lambda s: s.lacks("torchrunx", RESUME_PROOF)),
    },
    "restarts": {
        RAY: ("yes", lambda s: s.default("ray/air/config.py", "FailureConfig.max_failures") == 0),
        TORCHRUN: ("yes", lambda s: s.option(RUN, "--max-restarts")["default"] == 0),
        ACCELERATE: ("yes", lambda s: "restart" in s.option(ACCELERATE_LAUNCH, "--max_restarts")["help"]),
        TORCHRUNX: ("no", lambda s: s.lacks("torchrunx", r"(?i)restart|\bretr(y|ies)")),
    },
    "continues without a lost host": {
        RAY: (
            "yes [2]",
            lambda s: (
                s.defines(f"{TRAIN}/torch/torchft_config.py", "TorchftConfig")
                and not s.defines("ray/train/torch/__init__.py", "TorchftConfig")
                and s.defines(WORKER_GROUP, "WorkerGroup.replace_replica_group")
                and s.says(WORKER_GROUP, "replica_group_size=1 if")
            ),
        ),
        TORCHRUN: ("`--nnodes MIN:MAX` [3]", elastic),
        ACCELERATE: ("no", accelerate_is_torchrun),
        TORCHRUNX: ("no", torchrunx_is_fixed),
    },
    "grows while it runs": {
        RAY: (
            "yes",
            lambda s: s.default(f"{TRAIN}/api/config.py", "ScalingConfig.elastic_resize_monitor_interval_s") == 60,
        ),
        TORCHRUN: ("`--nnodes MIN:MAX`", elastic),
        ACCELERATE: ("no", accelerate_is_torchrun),
        TORCHRUNX: ("no", torchrunx_is_fixed),
    },
    "outlives the machine that started it": {
        RAY: ("on a cluster", lambda s: s.defines("ray/dashboard/modules/job/cli.py", "submit")),
        TORCHRUN: ("yes [3]", without_ssh),
        ACCELERATE: ("no", accelerate_is_torchrun),
        TORCHRUNX: ("no", lambda s: s.says("torchrunx/launcher.py", "AgentFailedError")),
    },
    "checkpoints are atomic": {
        RAY: (
            "recorded after upload",
            lambda s: s.defines(
                f"{TRAIN}/_internal/execution/checkpoint/checkpoint_manager.py", "CheckpointManager.register_checkpoint"
            ),
        ),
        TORCHRUN: ("your script", lambda s: s.lacks(LAUNCH, "(?i)checkpoint")),
        ACCELERATE: ("your script", lambda s: s.lacks("accelerate/checkpointing.py", r"os\.(replace|rename|fsync)")),
        TORCHRUNX: ("your script", lambda s: s.lacks("torchrunx/launcher.py", "(?i)checkpoint")),
    },
    "returns to the caller": {
        RAY: (
            "metrics, checkpoints, error, value",
            lambda s: (
                s.default(f"{TRAIN}/api/result.py", "Result.return_value") is None
                and s.says(f"{TRAIN}/_internal/execution/controller/controller.py", "worker_statuses[0].return_value")
            ),
        ),
        TORCHRUN: ("nothing", lambda s: s.says(RUN, "def run(args):") and s.lacks(RUN, r"^    return elastic_launch")),
        ACCELERATE: ("nothing", accelerate_is_torchrun),
        TORCHRUNX: ("values, error", lambda s: s.defines("torchrunx/launcher.py", "LaunchResult.rank")),
    },
    "resumes data in mid-epoch": {
        RAY: (
            "no [4]",
            lambda s: (
                s.lacks("ray/train", "DatasetCheckpointConfig")
                and not s.defines("ray/data/iterator.py", "DataIterator.state_dict")
            ),
        ),
        TORCHRUN: ("no", lambda s: s.lacks(LAUNCH, "(?i)dataset|loader")),
        ACCELERATE: (
            "StatefulDataLoader",
            lambda s: (
                s.default("accelerate/utils/dataclasses.py", "DataLoaderConfiguration.use_stateful_dataloader") is False
            ),
        ),
        TORCHRUNX: ("no", lambda s: s.lacks("torchrunx", "(?i)dataset|dataloader")),
    },
    "finds hangs": {
        RAY: (
            "NCCL, opt-in",
            lambda s: s.says(
                f"{TRAIN}/api/data_parallel_trainer.py", "env_bool(ENABLE_NCCL_HANG_DETECTOR_ENV_VAR, False)"
            ),
        ),
        TORCHRUN: ("opt-in [5]", nothing_starts_the_debug_server),
        ACCELERATE: ("opt-in [5]", lambda s: accelerate_is_torchrun(s) and s.lacks("accelerate", "start_debug_server")),
        TORCHRUNX: ("opt-in [5]", lambda s: s.lacks("torchrunx", "start_debug_server")),
    },
    "names the culprit": {
        RAY: (
            "rank, traceback",
            lambda s: s.says(f"{TRAIN}/api/exceptions.py", "worker_failures: Dict[int, Exception]"),
        ),
        TORCHRUN: (
            "rank, host [6]",
            lambda s: (
                s.says(
                    ERRORS,
                    "  host      : ${hostname}",
                    "  rank      : ${rank} (",
                )
                and s.says(ERRORS, "def record(")
            ),
        ),
        ACCELERATE: ("rank, host [6]", accelerate_is_torchrun),
        TORCHRUNX: ("an exception", lambda s: s.defines("torchrunx/utils/errors.py", "ExceptionFromWorker")),
    },
    "Slurm": {
        RAY: ("`ray symmetric-run`", lambda s: s.says("ray/scripts/scripts.py", 'name="symmetric-run"')),
        TORCHRUN: ("by srun", lambda s: s.lacks(RUN, r"SLURM_\w*(NODE|JOB)") and s.lacks(LAUNCH, "SLURM_")),
        ACCELERATE: ("by srun", lambda s: s.lacks("accelerate/commands", r"SLURM_\w*(NODE|JOB)")),
        TORCHRUNX: ("nodes", lambda s: s.says("torchrunx/launcher.py", 'Literal["auto", "slurm"]')),
    },
    "Kubernetes": {
        RAY: ("**KubeRay**", lambda s: s.says("ray/autoscaler/_private/kuberay/__init__.py")),
        TORCHRUN: ("**Kubeflow**", read_in("the PyTorch guide of Kubeflow Trainer, November 2026")),
        ACCELERATE: ("Kubeflow", read_in("the PyTorch guide of Kubeflow Trainer, November 2026")),
        TORCHRUNX: ("no", lambda s: s.lacks("torchrunx", "(?i)kubernetes|kubectl")),
    },
    "Windows, macOS, TPUs": {
        RAY: (
            "**TPUs**, others on one machine",
            lambda s: (
                s.default(f"{TRAIN}/api/config.py", "ScalingConfig.use_tpu") is False
                and s.says("ray/scripts/scripts.py", "Multi-node Ray clusters are not supported on Windows and OSX")
            ),
        ),
        TORCHRUN: ("partly", lambda s: "on Windows is a prototype feature" in s.description("torch")),
        ACCELERATE: ("**yes**", lambda s: s.says(ACCELERATE_LAUNCH, "tpu_launcher(args)")),
        TORCHRUNX: ("no", lambda s: s.says("torchrunx/launcher.py", 'get_context("fork")')),
    },
    "tuning, serving": {
        RAY: ("**yes**", lambda s: {"tune", "serve"} <= s.commands("ray")),
        TORCHRUN: ("no", lambda s: s.lacks(RUN, "(?i)hyperparameter")),
        ACCELERATE: ("no", lambda s: s.lacks("accelerate/commands", "(?i)hyperparameter")),
        TORCHRUNX: ("no", lambda s: s.lacks("torchrunx", "(?i)hyperparameter")),
    },
    "tested on GPUs": {
        RAY: ("**several**", lambda s: s.says("ray/train/torch/config.py", "nccl will be used if GPUs are requested")),
        TORCHRUN: (
            "**several**",
            lambda s: s.says("torch/testing/_internal/distributed/distributed_test.py", "@skip_if_lt_x_gpu(2)"),
        ),
        ACCELERATE: ("**several**", lambda s: s.defines("accelerate/test_utils/testing.py", "require_multi_gpu")),
        TORCHRUNX: ("several", lambda s: s.default("torchrunx/launcher.py", "Launcher.backend") == "nccl"),
    },
}
"""Of the first table: row -> column -> what the cell says, and the fact. Times are in ``documents.TIMES``."""

HOST_CELLS: dict[str, dict[str, tuple[str, Fact]]] = {
    "DeepSpeed's launcher": {
        "hosts are in": (
            "a hostfile of the same format",
            lambda s: s.says("deepspeed/launcher/runner.py", "--hostfile", "worker-0 slots=4"),
        ),
        "other hosts need": (
            "DeepSpeed at the same path",
            lambda s: s.says("deepspeed/launcher/multinode_runner.py", "cd {os.path.abspath('.')};\", sys.executable"),
        ),
        "runs": (
            "scripts; pdsh starts them",
            pdsh_is_the_default,
        ),
    },
    "SkyPilot": {
        "hosts are in": (
            "`~/.sky/ssh_node_pools.yaml`",
            lambda s: s.says("sky/ssh_node_pools/constants.py", "~/.sky/ssh_node_pools.yaml"),
        ),
        "other hosts need": (
            "sudo; `sky ssh up` installs Kubernetes (k3s)",
            lambda s: s.says("sky/ssh_node_pools/deploy/deploy.py", "https://get.k3s.io", "sudo "),
        ),
        "runs": (
            "commands, as jobs and services",
            lambda s: s.says("sky/jobs/__init__.py") and s.says("sky/serve/__init__.py"),
        ),
    },
    "dstack": {
        "hosts are in": (
            "the `ssh_config` of a fleet",
            lambda s: s.says("dstack/_internal/core/models/fleets.py", "ssh_config: ", "class SSHHostParams"),
        ),
        "other hosts need": (
            "sudo; a systemd service, dstack-shim",
            lambda s: s.says(
                "dstack/_internal/server/services/ssh_fleets/provisioning.py", "sudo systemctl restart dstack-shim"
            ),
        ),
        "runs": ("containers, as tasks and services", dstack_runs_containers),
    },
    "Monarch's SSHJob": {
        "hosts are in": ("a Python program", lambda s: s.defines("monarch/_src/job/job.py", "SSHJob")),
        "other hosts need": (
            "Monarch, an open port",
            lambda s: (
                s.default("monarch/_src/job/job.py", "SSHJob.__init__(monarch_port)") == 22222
                and s.says("monarch/_src/job/job.py", "from monarch.actor import run_worker_loop_forever")
            ),
        ),
        "runs": ("actors", lambda s: s.defines("monarch/actor/__init__.py", "Actor")),
    },
}
"""Of the table of hosts: row -> column -> what the cell says, and the fact."""


def torchrun_waits(seconds: int) -> Fact:
    return lambda s: (
        s.default(f"{ELASTIC}/multiprocessing/api.py", "PContext.close(timeout)") == seconds
        and s.says(LAUNCH, f'"TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "{seconds}"')
    )


PHRASES = [
    Claim("docs/failures.md", "torchrun waits 30 s", "torch", torchrun_waits(30)),
    Claim(
        "docs/failures.md",
        "the script gets them at once, and SIGKILL after 30 s",
        "torch",
        torchrun_waits(30),
    ),
    Claim("docs/migration/torchrun.md", "torchrun waits 30 s", "torch", torchrun_waits(30)),
    Claim(
        "docs/migration/torchrun.md",
        "`--no-python`, `--virtual-local-rank`, `--role`",
        "torch",
        lambda s: all(s.option(RUN, name) for name in ("--no-python", "--virtual-local-rank", "--role")),
    ),
    Claim("docs/migration/ray.md", "Ray 2.7 to 2.60", "ray", lambda s: s.versions["ray"].startswith("2.60.")),
    Claim(
        "docs/migration/deepspeed.md",
        "`--launcher pdsh`",
        "deepspeed",
        pdsh_is_the_default,
    ),
    Claim(
        "docs/migration/submitit.md",
        "`slurm_signal_delay_s=90`",
        "submitit",
        lambda s: s.default("submitit/slurm/slurm.py", "_make_sbatch_string(signal_delay_s)") == 90,
    ),
    Claim(
        "docs/comparison.md",
        "`torch.distributed.debug.start_debug_server()`",
        "torch",
        torch_serves_stacks,
    ),
]
"""Phrases of pages outside of the tables."""


def all_claims() -> list[Claim]:
    """Return the claims of both tables and of the other pages."""
    found = list(PHRASES)
    for row, cells in CELLS.items():
        found += [Claim(f"{row} / {column}", text, PACKAGES[column], fact) for column, (text, fact) in cells.items()]
    for row, cells in HOST_CELLS.items():
        found += [Claim(f"{row} / {column}", text, HOST_PACKAGES[row], fact) for column, (text, fact) in cells.items()]
    return found
