"""``--slurm``: write a batch script that runs this command line in a job of Slurm, and submit it. Runs in: coordinator.

The options are those of sbatch, see its manual page.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distrain.cli.run.options import is_function
from distrain.errors import LaunchError
from distrain.storage.paths import choose_run, new_name
from distrain.system.process import run_with_input
from distrain.worker.job.origin import stem_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

_DEFAULTS = {
    "requeue": "",
    "open-mode": "append",
    "no-kill": "",
    "signal": "USR1@120",
}
_TASKS = ("ntasks", "ntasks-per-node", "gpus", "gpus-per-node", "gpus-per-task")
_SETTING = re.compile(r"[a-z][a-z-]*")
_SCRIPT = """\
#!/bin/bash
{options}
# Slurm sends a signal before the time limit (see --signal, in seconds) and SIGTERM before a preemption. Workers that
# call should_stop() then store a checkpoint. The command ends with 128 + the number of the signal, and the job is
# requeued: it starts again later, and continues at that checkpoint.
cd {directory}
{command}
code=$?
case $code in
    138 | 140 | 143) scontrol requeue "$SLURM_JOB_ID" && sleep 60 ;;
esac
exit $code
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    """A batch script, and the run directory of its run."""

    script: str
    run: str

    def submit(self) -> str:
        """Submit the script with sbatch, and return the id of the job. Raises LaunchError."""
        try:
            done = run_with_input(["sbatch", "--parsable"], self.script)
        except OSError as error:
            raise LaunchError(
                f"--slurm: sbatch cannot be started: {error}; run this where jobs are submitted"
            ) from None
        if done.returncode:
            raise LaunchError(f"sbatch has refused the batch script: {done.stderr.strip()}")
        return done.stdout.strip().partition(";")[0]


def batch_job(options: argparse.Namespace, arguments: Sequence[str]) -> BatchJob:
    """Return the job that runs the command line. Raises ValueError for options that do not go together.

    arguments: those after ``python -m distrain.launch``.
    """
    for name in ("hosts", "hostfile"):
        if getattr(options, name) is not None:
            raise ValueError(f"--{name} and --slurm: the nodes of the job are the hosts; drop one of the two")
    if "SLURM_JOB_ID" in os.environ:
        raise ValueError("--slurm: this is a job of Slurm already; leave --slurm out to use its nodes")
    settings = _settings(options)
    what = stem_of(options.target or options.module[0])
    name = options.name or new_name(what)
    command = [sys.executable, "-m", "distrain.launch", *([] if options.name else ["--name", name])]
    shown = {"job-name": what, **_DEFAULTS, **settings}
    lines = (f"#SBATCH --{key}={value}" if value else f"#SBATCH --{key}" for key, value in shown.items())
    script = _SCRIPT.format(
        options="\n".join(lines),
        directory=shlex.quote(os.getcwd()),
        command=shlex.join([*command, *_without_slurm(options, arguments)]),
    )
    return BatchJob(script=script, run=str(choose_run(options.storage_path, name)))


def _settings(options: argparse.Namespace) -> dict[str, str]:
    """Return the options for sbatch by their names."""
    settings: dict[str, str] = {}
    for given in options.slurm:
        for part in re.split(r",(?=[a-z][a-z-]*=)", given):  # a value may have commas: nodelist=n1,n2
            key, _, value = part.partition("=")
            if not _SETTING.fullmatch(key) or re.search(r"\s", value):
                raise ValueError(f"--slurm {part!r}: must be an option of sbatch, such as partition=gpu or exclusive")
            settings[key] = value
    workers = options.num_workers or options.nproc_per_node or ""
    if workers and not any(key in settings for key in _TASKS):
        settings["ntasks"] = workers.rpartition(":")[2]
        if not settings["ntasks"].isdigit():
            raise ValueError(f"--num-workers {workers} with --slurm: give a number, or ask Slurm for tasks or GPUs")
    return settings


def _without_slurm(options: argparse.Namespace, arguments: Sequence[str]) -> list[str]:
    """Return the command line without the options that make a job of it. Those of a script stay as they are."""
    of_script = len(options.arguments) if options.target else len(options.module or ())
    if options.target and is_function(options.target):
        of_script = 0
    own, rest = list(arguments[: len(arguments) - of_script]), list(arguments[len(arguments) - of_script :])
    kept = []
    words = iter(own)
    for word in words:
        if word == "--slurm":
            next(words)
        elif word not in ("--dry-run", "--dry_run") and not word.startswith("--slurm="):
            kept.append(word)
    return kept + rest
