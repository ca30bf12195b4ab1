"""``distrain run --wait``: wait in the queue, then train on what the job gets. Runs in: coordinator."""

from __future__ import annotations

import os
import shlex
import time
import uuid
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from platform import node
from typing import TYPE_CHECKING

from distrain.api.config import RunConfig, ScalingConfig
from distrain.api.observer import Fact, Observer, RunBegan, Stopping
from distrain.coordinator.connection.choice import transports_for
from distrain.coordinator.run.errors import exit_code_of
from distrain.coordinator.run.facts import without_secrets
from distrain.errors import LaunchError, ResourcesError, StorageError
from distrain.hosts.hostfile import as_line
from distrain.jobs.desk import Ticket
from distrain.jobs.waiter import Waiter, open_desk, tickets_in
from distrain.storage.runs.listing import folders_in, storage_at
from distrain.system.log import say
from distrain.system.scratch import temporary_directory
from distrain.system.text import BY_COMMAND

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from distrain.hosts.hostfile import HostSpec

_RETRY_S = 5.0
_HOW: dict[object, str] = {0: "finished", 130: "cancelled", 143: "stopped", 129: "stopped"}
"""How a job has ended, by exit code; others have failed. A machine that shuts down stops it."""


@dataclass(kw_only=True)
class Job:
    """A job that ``distrain submit`` has made.

    token: of its ticket. code: the directory with the copy of its code. how: it has ended.
    """

    token: str = ""
    code: str = ""
    how: str = ""

    def in_copy(self, path: str) -> str:
        """Return where a file or directory is in the copy of the code; the path itself if it is not there."""
        copy = f"{self.code}{os.path.abspath(path)}"
        return copy if self.code and os.path.exists(copy) else path


class _Watcher(Observer):
    """It notes the run directory in the ticket, and what has stopped the run."""

    hears = (RunBegan, Stopping)
    stopped_by = ""

    def __init__(self, waiter: Waiter) -> None:
        self._waiter = waiter

    def hear(self, fact: Fact) -> None:
        match fact:
            case RunBegan(location=location):
                self._waiter.began(location)
            case Stopping(reason):
                self.stopped_by = reason


def take_gpus(options: argparse.Namespace) -> None:
    """Read ``--gpus N`` as a number of workers with a GPU each. Raise ValueError if another number is given, too."""
    if options.gpus:
        if options.num_workers or options.nproc_per_node:
            raise ValueError("--gpus N stands for --num-workers N --use-gpu; drop one of the two")
        options.num_workers, options.use_gpu = str(options.gpus), True


def ticket_for(options: argparse.Namespace, hosts: Sequence[HostSpec], scaling: ScalingConfig) -> Ticket:
    """Return the ticket of a job. Raise ResourcesError for what no queue can share out."""
    if not scaling.max_workers:
        raise ResourcesError("num_workers=0 trains in this process, which needs nothing that others could have")
    if scaling.gpus_per_worker != int(scaling.gpus_per_worker):
        raise ResourcesError("the queue gives whole GPUs: ask for a whole number for each worker, or do not wait")
    return Ticket(
        name=options.name or "",
        kind="gpu" if scaling.use_gpu else "slot",
        workers=scaling.max_workers,
        each=max(1, int(scaling.gpus_per_worker)),
        hosts={key_of(host): host.slots for host in hosts},
        expected_s=options.time,
        after=options.after,
        command=shlex.join(without_secrets(options.module or [str(options.target), *options.arguments])),
    )


def key_of(host: HostSpec) -> str:
    """Return the name by which all users of a queue know a host."""
    return node() if host.is_local else host.name


def enter_queue(
    options: argparse.Namespace, hosts: Sequence[HostSpec], scaling: ScalingConfig, stem: str, token: str = ""
) -> Waiter:
    """Put a job into the queue. Raise StorageError or LaunchError if that is not possible, ResourcesError.

    token: of a job that is in the queue already.
    """
    desk = open_desk()
    if not token and (unknown := set(options.after) - tickets_in(desk).keys()):
        raise StorageError(
            f"--after {', '.join(sorted(unknown))}: the queue has no such job; `distrain queue` lists them"
        )
    taken = folders_in(storage_at(options.storage_path), may_be_missing=True)
    ticket = replace(ticket_for(options, hosts, scaling), token=token or uuid.uuid4().hex)
    transports = transports_for(hosts, scaling, os.environ, RunConfig())
    waiter = Waiter(desk, ticket, dict(zip(ticket.hosts, transports, strict=True)))
    while True:
        try:
            waiter.enter(stem, taken)
            return waiter
        except LaunchError as error:
            if not token:
                raise
            say(f"{ticket.name} waits: {error}")  # the machine of the queue may still be booting
            time.sleep(_RETRY_S)


@contextmanager
def in_queue(
    options: argparse.Namespace, hosts: Sequence[HostSpec], scaling: ScalingConfig, stem: str, job: Job
) -> Iterator[tuple[str, str, Observer]]:
    """Wait in the queue. Give the name of the job, a hostfile of what it gets, and an observer of its run.

    Raises StorageError, LaunchError or ResourcesError if it cannot wait, KeyboardInterrupt if it is cancelled.
    """
    waiter = enter_queue(options, hosts, scaling, stem, job.token)
    error, watcher = None, _Watcher(waiter)
    try:
        lines = [as_line(host) for host in waiter.wait()]
        with temporary_directory("job-") as folder:
            file = Path(folder, "hostfile")
            file.write_text("\n".join(lines))
            yield waiter.ticket.name, str(file), watcher
    except BaseException as raised:
        error = raised
        raise
    finally:
        is_cancelled = waiter.is_cancelled or watcher.stopped_by == BY_COMMAND
        code = (error.code or 0) if isinstance(error, SystemExit) else exit_code_of(error)
        job.how = "cancelled" if is_cancelled else _HOW.get(code, "failed")
        waiter.end(job.how, str(error).partition("\n")[0] if job.how == "failed" else "")
