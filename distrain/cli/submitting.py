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
from contextlib import ExitStack, suppress
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
_REFUSED = 2
"""The exit code of a command line that distrain refuses, and says why."""
_PROJECT = "project-"
"""The beginning of the names of directories with projects that other hosts have sent."""
_PLACES = ("--on-host", "--hosts", "--hostfile")
_LEFT_OUT = ("SSH_", "TMUX", "STY", "DISPLAY", "WINDOWID")
"""Beginnings of the names of variables that belong to a terminal."""


def run_submit(arguments: Sequence[str], user_path: Sequence[str]) -> int:
    """Put a job into the queue, and return. Raise SystemExit for a wrong command line."""
    parser = make_parser("distrain submit")
    options = parse(parser, arguments)
    _delete_old()
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
        "arguments": _without(options, arguments, flag="--resume"),
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


def run_job(folder: Path) -> int:
    """Wait in the queue and train, as the process of a job. folder: its directory."""
    facts = json.loads((folder / "job.json").read_text())
    os.environ.clear()
    os.environ.update(facts["environment"])
    os.chdir(facts["directory"])
    job = Job(token=facts["token"], code=facts["code"])
    with open(folder / "lock", "w") as held:
        lock(held.fileno(), fcntl.LOCK_EX)
        sys.argv = ["distrain", "run", *facts["arguments"]]
        try:
            return run_command(
                ["--wait", f"--name={facts['name']}", *facts["arguments"]], facts["path"], prog="distrain run", job=job
            )
        finally:
            if job.how != "stopped":  # as by a machine that shuts down
                (folder / "ended").touch()


def _resume_all() -> int:
    """Start the jobs of this machine again that have neither ended nor a process."""
    for facts in sorted(_jobs().glob("*/job.json")):
        folder = facts.parent
        if not (folder / "ended").exists() and not is_locked(folder / "lock"):
            told = start_detached(folder)
            echo(f"{folder.name[:-9]} continues{f'; {told}' if told else ''}")
    return 0


def _delete_old() -> None:
    """Delete the directories of jobs that ended long ago, and the projects in which other hosts have sent them."""
    for facts in _jobs().glob("*/job.json"):
        with suppress(OSError, ValueError, KeyError):  # it has not ended, or was not written completely
            if time.time() - facts.with_name("ended").stat().st_mtime > _KEPT_S:
                sent = Path(os.path.relpath(json.loads(facts.read_text())["directory"], state_folder())).parts[0]
                for path in (facts.parent, *([state_folder() / sent] if sent.startswith(_PROJECT) else [])):
                    shutil.rmtree(path, ignore_errors=True)


# -- on another host -------------------------------------------------------------------------------------------------


def _send(options: argparse.Namespace, arguments: Sequence[str], user_path: Sequence[str]) -> int:
    """Have another host submit the job, from a copy of the project. Return the exit code of ``submit`` there."""
    hosts = hosts_of(ScalingConfig(hosts=options.hosts, hostfile=options.hostfile), os.environ)
    (spec,) = [one for one in hosts if one.name == options.on_host] or parse_hosts(options.on_host, "--on-host")
    queue, here = os.environ.get(QUEUE, ""), f"ssh://{options.on_host}/"
    passed = {name: value for name, value in os.environ.items() if name.startswith("DISTRAIN_")}
    queue = f"/{queue.removeprefix(here)}" if queue.startswith(here) else queue
    facts = {
        "arguments": _without(options, arguments, *_PLACES),
        "directory": os.getcwd(),
        "environment": {**passed, QUEUE: queue, LOGIN: options.on_host, "DISTRAIN_HOSTS": "", "DISTRAIN_HOSTFILE": ""},
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
    transport = by_ssh(spec, ssh_args_of(ScalingConfig(), os.environ))
    remote = process.spawn(transport.argv([spec.python or sys.executable, "-m", "distrain", "job", "-"]))
    said, _ = remote.communicate(parcel.getvalue())
    sys.stdout.write(said.decode(errors="replace"))
    if remote.returncode == transport.failed_code:
        echo(f"distrain submit: error: {options.on_host} cannot be reached", sys.stderr)
    elif remote.returncode not in (0, _REFUSED):
        echo(f"distrain submit: error: {options.on_host} cannot run distrain: install it there", sys.stderr)
    return remote.returncode


def _entry(name: str, size: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size = size
    return entry


def _without(options: argparse.Namespace, arguments: Sequence[str], *names: str, flag: str = "") -> list[str]:
    """Return the arguments without some options and their values, and without a flag. Those of the script stay."""
    script = [options.target, *options.arguments] if options.target else ["-m", *options.module]
    own, kept = list(arguments[: len(arguments) - len(script)]), list[str]()
    while own:
        word = own.pop(0)
        if word in names:
            own.pop(0)
        elif word != flag and not word.startswith(tuple(f"{name}=" for name in names)):
            kept.append(word)
    return [*kept, *script]


def receive_job() -> int:
    """Submit a job that another host sends to stdin."""
    folder = Path(tempfile.mkdtemp(prefix=_PROJECT, dir=_made(state_folder())))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)  # unless the job is taken
        with tarfile.open(fileobj=sys.stdin.buffer, mode="r|gz") as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.2, for one, has none
            archive.extractall(folder)  # noqa: S202 - the user themselves has sent it
        facts = json.loads((folder / "submit.json").read_text())
        os.environ.update(facts["environment"])
        if facts["hostfile"]:
            (folder / "hostfile").write_text(facts["hostfile"])
            os.environ["DISTRAIN_HOSTFILE"] = str(folder / "hostfile")
        os.chdir(_made(Path(f"{folder}/code{facts['directory']}")))
        code = run_submit(facts["arguments"], sys.path)
        stack.pop_all()
    return code


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
