"""``distrain submit``: jobs that live on without a terminal. Runs in: coordinator, which is the waiter; submit itself.

A job has a directory with all that it needs to be started again: its arguments, its environment, and a copy of the
user's code as it was.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import shutil
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.api.config import ScalingConfig
from distrain.cli.run.command import asked_for, run_command
from distrain.cli.run.options import make_parser, parse
from distrain.cli.run.waiting import Job, enter_queue
from distrain.cli.text import echo
from distrain.coordinator.connection.choice import hosts_of, ssh_args_of
from distrain.coordinator.connection.transport import by_ssh
from distrain.hosts.hostfile import HostSpec, as_line, parse_hosts
from distrain.jobs.desk import LOGIN
from distrain.jobs.detach import install_hook, start_detached
from distrain.jobs.place import QUEUE, state_folder
from distrain.storage.files import write_atomically
from distrain.system import process
from distrain.system.locks import is_locked, lock
from distrain.transfer.project.project import find_project
from distrain.worker.job.origin import script_of, stem_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

_KEPT_S = 7 * 86400.0
"""Seconds for which the directory of a job is kept after its end."""
_SSH_FAILED = 255
_PLACES = ("--on-host", "--hosts", "--hostfile")
_LEFT_OUT = ("SSH_", "TMUX", "STY", "DISPLAY", "WINDOWID")
"""Beginnings of the names of variables that belong to a terminal."""


def run_submit(arguments: Sequence[str], user_path: Sequence[str]) -> int:
    """Put a job into the queue, and return. Raise SystemExit for a wrong command line."""
    parser = make_parser("distrain submit")
    options = parse(parser, arguments)
    if options.resume and options.target is None and options.module is None:
        return _resume_all()
    if options.on_host:
        return _send(options, arguments, user_path)
    hosts, work, scaling, run = asked_for(parser, options, user_path, Job())
    project = find_project(
        sys_path=user_path,
        directory=os.getcwd(),
        targets=work.files,
        named=[os.fspath(path) for path in run.shipping_config.include],
        limit_bytes=run.shipping_config.limit_bytes,
    )
    ticket = enter_queue(options, hosts, scaling, stem_of(script_of(work))).ticket
    name, token = ticket.name, ticket.token
    folder = _jobs() / f"{name}-{token[:8]}"  # another queue may have a job of the same name
    folder.mkdir(parents=True, mode=0o700)  # its files have the environment
    (folder / "code").mkdir()
    for file in project.files:
        copy = Path(f"{folder}/code{file.path}")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file.path, copy)
    facts = {
        "name": name,
        "token": token,
        "arguments": [word for word in arguments if word != "--resume"],
        "directory": os.getcwd(),
        "path": list(user_path),
        "environment": {key: value for key, value in os.environ.items() if not key.startswith(_LEFT_OUT)},
        "code": f"{folder}/code",
    }
    write_atomically(folder / "job.json", json.dumps(facts).encode())
    told = install_hook() if options.resume else ""
    told = start_detached(folder) or told
    echo(f"{name} is in the queue: `distrain queue`, `distrain attach {name}`, `distrain cancel {name}`")
    if told:
        echo(told, sys.stderr)
    return 0


def _jobs() -> Path:
    return state_folder() / "jobs"


# -- the process of a job --------------------------------------------------------------------------------------------


def run_job(given: str) -> int:
    """Wait in the queue and train, as the process of a job. given: its directory; ``-``: submit what stdin has."""
    if given == "-":
        return _receive()
    folder = Path(given)
    facts = json.loads((folder / "job.json").read_text())
    os.environ.clear()
    os.environ.update(facts["environment"])
    os.chdir(facts["directory"])
    job = Job(token=facts["token"], code=facts["code"])
    with open(folder / "lock", "w") as held:
        lock(held.fileno(), fcntl.LOCK_EX)
        sys.argv = ["distrain", "run", *facts["arguments"]]
        code = run_command(
            ["--wait", f"--name={facts['name']}", *facts["arguments"]], facts["path"], prog="distrain run", job=job
        )
        if job.how != "stopped":  # as by a machine that shuts down
            write_atomically(folder / "ended", f"{code}\n".encode())
    return code


def _resume_all() -> int:
    """Start the jobs of this machine again that have neither ended nor a process."""
    for folder in sorted(_jobs().glob("*")):
        ended = folder / "ended"
        if ended.exists():
            if time.time() - ended.stat().st_mtime > _KEPT_S:
                shutil.rmtree(folder, ignore_errors=True)
        elif (folder / "job.json").exists() and not is_locked(folder / "lock"):
            told = start_detached(folder)
            echo(f"{folder.name[:-9]} continues{f'; {told}' if told else ''}")
    return 0


# -- on another host -------------------------------------------------------------------------------------------------


def _send(options: argparse.Namespace, arguments: Sequence[str], user_path: Sequence[str]) -> int:
    """Have another host submit the job, from a copy of the project. Return the exit code of ``submit`` there."""
    hosts = hosts_of(ScalingConfig(hosts=options.hosts, hostfile=options.hostfile), os.environ)
    (spec,) = [one for one in hosts if one.name == options.on_host] or parse_hosts(options.on_host, "--on-host")
    queue = os.environ.get(QUEUE, "").removeprefix(f"ssh://{options.on_host}")
    passed = {name: value for name, value in os.environ.items() if name.startswith("DISTRAIN_")}
    facts = {
        "arguments": _without_places(options, arguments),
        "directory": os.getcwd(),
        "environment": {**passed, QUEUE: queue, LOGIN: options.on_host},
        "hostfile": "".join(f"{as_line(host)}\n" for host in hosts) if hosts != (HostSpec(),) else "",
    }
    files = [options.target] if options.target and os.path.isfile(options.target) else []
    project = find_project(
        sys_path=user_path, directory=os.getcwd(), targets=files, named=options.include, limit_bytes=options.limit_bytes
    )
    parcel = io.BytesIO()
    with tarfile.open(fileobj=parcel, mode="w:gz") as archive:
        data = json.dumps(facts).encode()
        archive.addfile(_entry("submit.json", len(data)), io.BytesIO(data))
        for file in project.files:
            archive.add(file.path, f"code{file.path}")
    python = spec.python or sys.executable
    remote = process.spawn(
        by_ssh(spec, ssh_args_of(ScalingConfig(), os.environ)).argv([python, "-m", "distrain", "job", "-"])
    )
    said, _ = remote.communicate(parcel.getvalue())
    sys.stdout.write(said.decode(errors="replace"))
    if remote.returncode == _SSH_FAILED:
        echo(f"distrain submit: error: {options.on_host} cannot be reached", sys.stderr)
    elif remote.returncode:
        echo(f"distrain submit: error: {options.on_host} has not taken the job; install distrain there", sys.stderr)
    return remote.returncode


def _entry(name: str, size: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size = size
    return entry


def _without_places(options: argparse.Namespace, arguments: Sequence[str]) -> list[str]:
    """Return the arguments without options that name the hosts, and the one that is to submit."""
    script = [options.target, *options.arguments] if options.target else ["-m", *options.module]
    own, kept = list(arguments[: len(arguments) - len(script)]), list[str]()
    while own:
        word = own.pop(0)
        if word in _PLACES:
            own.pop(0)
        elif not word.startswith(tuple(f"{name}=" for name in _PLACES)):
            kept.append(word)
    return [*kept, *script]


def _receive() -> int:
    """Submit a job that another host has sent."""
    folder = Path(tempfile.mkdtemp(prefix="project-", dir=_made(state_folder())))
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|gz") as archive:
        archive.extractall(folder, filter="data")
    facts = json.loads((folder / "submit.json").read_text())
    os.environ.update(facts["environment"])
    if facts["hostfile"]:
        (folder / "hostfile").write_text(facts["hostfile"])
        os.environ["DISTRAIN_HOSTFILE"] = str(folder / "hostfile")
    os.chdir(_made(Path(f"{folder}/code{facts['directory']}")))
    return run_submit(facts["arguments"], sys.path)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
