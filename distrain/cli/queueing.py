"""``distrain queue``, ``gpus`` and ``cancel``: the jobs of all users, and what their hosts have. Runs in: commands."""

from __future__ import annotations

import os
import shlex
import sys
import time
from dataclasses import asdict
from platform import node
from typing import TYPE_CHECKING, Any

from distrain.api.config import RunConfig, ScalingConfig
from distrain.cli.run.waiting import key_of
from distrain.cli.text import age, coloured, echo, screen, table, write_json
from distrain.coordinator.connection.choice import hosts_of, ssh_args_of, transports_for
from distrain.errors import DistrainError
from distrain.jobs.far import Far
from distrain.jobs.waiter import in_words, open_desk, tickets_in
from distrain.storage.runs.listing import NoSuchRun, Run, run_at
from distrain.system.background import in_threads
from distrain.system.log import warn_once
from distrain.system.remote_path import locate
from distrain.system.text import count, duration

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Collection
    from pathlib import Path

    from distrain.coordinator.connection.transport import Transport
    from distrain.jobs.desk import Ticket
    from distrain.system.remote_path import RemotePath

_POLL_S = 0.5
_RECENT_S = 3600.0
"""Seconds for which jobs that have failed are shown, too."""
_PATIENCE_S = 120.0


def add_queue_options(add: Callable[..., object]) -> None:
    """Add the options of ``distrain queue``."""
    add("--all", action="store_true", help="also the jobs of the last day that have ended")


def run_queue(options: argparse.Namespace) -> int:
    """List the jobs, the waiting ones in the order in which they were submitted."""
    desk = open_desk()
    now = desk.now()
    found = sorted(tickets_in(desk).values(), key=lambda one: (one.state == "waiting", one.submitted))
    recent = {one.name for one in found if state_of(one) in ("failed", "lost") and one.silent_s < _RECENT_S}
    shown = [one for one in found if one.is_active or one.name in recent or options.all]
    if options.json:
        write_json("queue", jobs=[{**_plain(one), "state": state_of(one)} for one in shown])
    elif not shown:
        echo("no job waits or runs")
    else:
        rows = [
            ["NAME", "USER", "STATE", "SINCE", "NEEDS", "WHERE", "EXPECTED", "WHAT"],
            *(_row(one, now) for one in shown),
        ]
        size = screen()
        echo("\n".join(table(rows, size and size[0])))
    return 0


def state_of(job: Ticket) -> str:
    """Return the state of a job: how it has ended, or ``lost`` if its process is gone."""
    return job.how if job.state == "ended" else job.state if job.is_active else "lost"


def _plain(job: Ticket) -> dict[str, Any]:
    return {name: value for name, value in asdict(job).items() if name not in ("looks", "token")}


def _row(job: Ticket, now: float) -> list[str]:
    is_waiting = job.state == "waiting"
    needs = count(job.size, "GPU" if job.kind == "gpu" else "slot")
    where = job.why or in_words(job.units, job.kind)
    if job.units and job.host not in job.units:
        where = f"{where}; coordinator on {job.host}"
    expected = ""
    if is_waiting and job.begins:
        expected = f"begins in {duration(max(0.0, job.begins - now))}"
    elif job.state == "running" and job.expected_s:
        expected = f"{duration(max(0.0, job.began + job.expected_s - now))} left"
    since = job.ended or job.began or job.submitted
    return [job.name, job.user, coloured(state_of(job)), age(now - since), needs, where, expected, job.command]


# -- cancel ----------------------------------------------------------------------------------------------------------


def add_cancel_options(add: Callable[..., object]) -> None:
    """Add the options of ``distrain cancel``."""
    add("job", metavar="JOB", help="its name, or the beginning of it")


def run_cancel(options: argparse.Namespace) -> int:
    """Cancel a job, and wait until it has ended."""
    desk = open_desk()
    job = job_named(options.job, tickets_in(desk))
    if not job.is_active:
        raise NoSuchRun(f"{job.name} has ended already: {state_of(job)}")
    desk.cancel(job.name)
    deadline = time.monotonic() + _PATIENCE_S
    while job.is_active and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        job = tickets_in(desk).get(job.name, job)
    echo(f"{job.name} is {'still stopping' if job.is_active else state_of(job)}")
    return 0


def job_named(given: str, tickets: dict[str, Ticket]) -> Ticket:
    """Return the job of a name, or of the unique beginning of one. Raise NoSuchRun."""
    matching = [given] if given in tickets else [name for name in tickets if name.startswith(given)]
    if len(matching) != 1:
        what = f"{len(matching)} jobs have names that begin" if matching else "no job has a name that begins"
        raise NoSuchRun(f"{what} with {given!r}; `distrain queue` lists them")
    return tickets[matching[0]]


# -- gpus ------------------------------------------------------------------------------------------------------------


def add_gpus_options(add: Callable[..., object]) -> None:
    """Add the options of ``distrain gpus``."""
    add("--hosts", metavar="alpha:4,beta:4", help="the hosts (default: DISTRAIN_HOSTS, else DISTRAIN_HOSTFILE)")
    add("--hostfile", metavar="PATH", help="a file with the hosts")


def run_gpus(options: argparse.Namespace) -> int:
    """Show who uses the GPUs of all hosts."""
    scaling = ScalingConfig(hosts=options.hosts, hostfile=options.hostfile)
    hosts = hosts_of(scaling, os.environ)
    transports = transports_for(hosts, scaling, os.environ, RunConfig())
    looks = dict(zip(map(key_of, hosts), in_threads(_look, transports, threads=len(hosts)), strict=True))
    gpus = [
        {"host": host, "gpu": name, "product": look["products"].get(name, ""), "user": user}
        for host, look in looks.items()
        for name, user in look["users"].items()
    ]
    if options.json:
        write_json(
            "gpus", gpus=gpus, problems={host: look["problem"] for host, look in looks.items() if "problem" in look}
        )
        return 0
    rows = [[one["host"], one["gpu"], one["product"], one["user"] or coloured("free")] for one in gpus]
    rows += [[host, "", "", look.get("problem") or "no GPU"] for host, look in looks.items() if not look["users"]]
    echo("\n".join(table([["HOST", "GPU", "PRODUCT", "USED BY"], *rows])))
    if gpus:
        free = sum(not one["user"] for one in gpus)
        echo(f"{free} of {count(len(gpus), 'GPU')} {'is' if free == 1 else 'are'} free")
    return 0


def _look(transport: Transport) -> dict[str, Any]:
    try:
        link = Far(transport, "distrain gpus")
        try:
            found: dict[str, Any] = link.ask("look", kind="gpu", slots=None)
        finally:
            link.close()
    except DistrainError as error:
        return {"users": {}, "products": {}, "problem": str(error)}
    return found


# -- the runs of jobs ------------------------------------------------------------------------------------------------


def jobs_elsewhere(storage: Path | RemotePath) -> Callable[[Collection[str]], list[Run]]:
    """Return a function that returns jobs as runs of a storage path, but for those whose run directory is known.

    If the queue cannot be read, it says so once, and returns none.
    """
    desk = None

    def find(known: Collection[str]) -> list[Run]:
        nonlocal desk
        try:
            desk = desk or open_desk()
            jobs = tickets_in(desk).values()
        except DistrainError as error:
            warn_once(f"jobs are not shown: {error}")
            return []
        return [_as_run(one, storage) for one in jobs if one.is_active and one.run not in known]

    return find


def _as_run(job: Ticket, storage: Path | RemotePath) -> Run:
    ranks = {host: list(range(len(names) // job.each)) for host, names in job.units.items()}
    attempts = [{"attempt": 0, "started": job.began, "hosts": ranks}] if ranks else []
    manifest = {"started": job.submitted, "attempts": attempts}
    return Run(job.name, str(storage / job.name), job.state, job.why, manifest)


def run_of_job(given: str, *, waits: bool) -> Run | None:
    """Return the run of a job that is stored elsewhere on this machine; None if there is no such job.

    If it is on another machine, the command runs there instead of this process. waits: until the job has begun.
    """
    if given not in (tickets := tickets_in(desk := open_desk())):
        return None
    job, said = tickets[given], ""
    while job.is_active and not job.run and waits:
        if job.why not in ("", said):
            echo(f"{job.name} waits: {job.why}")
        said = job.why
        time.sleep(_POLL_S)  # once more after its beginning: a moment later, it takes requests
        job = tickets_in(desk).get(given, job)
    if not job.run:
        raise NoSuchRun(f"{job.name} ({state_of(job)}) has not begun{f': {job.why}' if job.why else ''}")
    if job.host == node() or "://" in job.run or os.path.isdir(job.run):
        return run_at(locate(job.run))
    words = [job.python, "-m", "distrain", *(job.run if word == given else word for word in sys.argv[1:])]
    arguments = [*(["-t"] if sys.stdout.isatty() else []), *ssh_args_of(ScalingConfig(), os.environ)]
    return os.execvp("ssh", ["ssh", *arguments, "--", job.login or job.host, shlex.join(words)])  # noqa: S606, S607
