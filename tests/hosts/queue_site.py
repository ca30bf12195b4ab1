"""A few users, who share two hosts with two GPUs each by a queue, and a ledger that the jobs keep of who has which GPU.

The users are real ones of Unix: they can neither read nor signal what belongs to another. The GPUs are those of a fake
driver, and have the same names on both hosts.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain.jobs.desk import Ticket
from distrain.jobs.place import QUEUE
from distrain.system.process import RUN_IDS
from tests.conftest import wait_until
from tests.hosts.lab import ROOT, end_lab, start_lab
from tests.nvml import make_driver

if TYPE_CHECKING:
    from collections.abc import Iterator

USERS = {"ada": 5101, "bob": 5102, "eve": 5103}
HOSTS = {"alpha": 2, "beta": 2}
GPUS = [(host, f"GPU-{number}") for host, amount in HOSTS.items() for number in range(1, amount + 1)]
EVERYWHERE = ",".join(f"{host}:{amount}" for host, amount in HOSTS.items())
NOTHING_LEFT_WITHIN_S = 25.0

JOB = """
import fcntl, json, os, signal, socket, sys, tempfile, time
from pathlib import Path
import distrain
from distrain import Checkpoint

place, steps, step_s, ignores_sigterm = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), "stubborn" in sys.argv
if ignores_sigterm:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
context, before, first = distrain.get_context(), distrain.get_checkpoint(), 0
rank, job, host = context.get_world_rank(), context.get_experiment_name(), socket.gethostname()
shown = os.environ["CUDA_VISIBLE_DEVICES"]
gpu = shown.split(",")[int(os.environ["LOCAL_RANK"])]

def note(what, **more):
    line = {"what": what, "job": job, "rank": rank, "at": time.time(), "pid": os.getpid(), "shown": shown, **more}
    file = os.open(place / f"{host}-{gpu}", os.O_WRONLY | os.O_APPEND)
    os.write(file, f"{json.dumps(line)}\\n".encode())

held = os.open(place / f"{host}-{gpu}.lock", os.O_RDWR)
try:
    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    note("TWICE")
    raise
if before:
    with before.as_directory() as folder:
        first = 1 + int(Path(folder, "step").read_text())
note("begins", first=first)
for step in range(first, steps):
    time.sleep(step_s)
    with tempfile.TemporaryDirectory() as folder:
        if rank == 0:
            Path(folder, "step").write_text(str(step))
        distrain.report({"step": step}, checkpoint=Checkpoint(folder) if rank == 0 else None)
note("ends")
print(f"{job} rank {rank} is done", flush=True)
"""


@dataclass
class Site:
    """The hosts, their users, and where they keep what. ``head`` is the machine at which the users sit."""

    folder: Path
    queue: str = ""

    # -- up and down --

    def start(self) -> None:
        """Start the hosts, and let the users in."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for one in (self.folder, *self.folder.parents):
            if not one.stat().st_mode & 0o001:
                one.chmod(one.stat().st_mode | 0o011)
        self._holder = start_lab(self.lab, *(f"{host}:{amount}" for host, amount in HOSTS.items()))
        try:
            self.inits = {name: pid for name, (pid, _) in json.loads((self.lab / "pids.json").read_text()).items()}
            self.spaces = {os.readlink(f"/proc/{pid}/ns/net"): name for name, pid in self.inits.items()}
            self.queue = self.queue or str(self.folder / "queue")
            self.ledger.mkdir(exist_ok=True)
            if not self.queue.startswith("ssh://"):
                Path(self.queue).mkdir()
                Path(self.queue).chmod(0o1777)
            (self.folder / "job.py").write_text(JOB)
            driver = make_driver(self.folder / "driver")
            for host, gpu in GPUS:
                for name in (f"{host}-{gpu}", f"{host}-{gpu}.lock"):
                    (self.ledger / name).touch()
                    (self.ledger / name).chmod(0o666)
            for host in ("head", *HOSTS):
                self._let_in(
                    host,
                    f"export LD_LIBRARY_PATH='{driver}' FAKE_GPUS=gg PYTHONPATH='{ROOT}'\n" if host != "head" else "",
                )
        except BaseException:
            self.end()
            raise

    def _let_in(self, host: str, profile: str) -> None:
        for hidden in [one for one in Path(sys.base_prefix).resolve().parents if not one.stat().st_mode & 0o001][-1:]:
            inner = Path(sys.base_prefix).resolve()
            script = f"mkdir /run/base; mount --bind {inner} /run/base; mount -t tmpfs -o mode=755 tmpfs {hidden}"
            self.on(host, "sh", "-ec", f"{script}; mkdir -p {inner}; mount --bind /run/base {inner}", check=True)
        with open(self.lab / f"passwd-{host}", "a") as passwd:
            for user, uid in USERS.items():
                home = self.home(user, host)
                (home / ".ssh").mkdir(parents=True)
                passwd.write(f"{user}:x:{uid}:{uid}::{home}:/bin/bash\n")
                (home / ".bashrc").write_text(profile)
                (home / ".ssh" / "config").write_text(
                    f"Host *\n IdentityFile {home}/.ssh/id\n UserKnownHostsFile {self.lab}/known_hosts\n"
                )
                shutil.copy(self.lab / "id", home / ".ssh" / "id")
                for path in (home, *home.rglob("*")):
                    os.chown(path, uid, uid)

    def end(self) -> None:
        end_lab(self._holder, self.lab)
        for pid, user in self.processes():  # only of users that exist here alone
            os.kill(pid, signal.SIGKILL)

    @property
    def lab(self) -> Path:
        return self.folder / "lab"

    @property
    def ledger(self) -> Path:
        return self.folder / "ledger"

    def home(self, user: str, host: str = "head") -> Path:
        return self.lab / "homes" / f"{host}-{user}"

    # -- commands --

    def argv(self, host: str, *argv: str, user: str = "") -> list[str]:
        """Return the command line that runs ``argv`` on a host."""
        spaces = ["--net", "--mount", "--uts", "--ipc", *(["--pid"] if host != "head" else [])]
        uid = USERS.get(user)
        as_user = [] if uid is None else ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
        return ["nsenter", f"--target={self.inits[host]}", *spaces, *as_user, *argv]

    def on(self, host: str, *argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command as root."""
        return subprocess.run(self.argv(host, *argv), capture_output=True, text=True, timeout=60, cwd="/", **options)

    def environment(self, user: str, **more: str) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "LANG", RUN_IDS) if name in os.environ}
        own = {"HOME": str(self.home(user)), "USER": user, "LOGNAME": user, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
        return {**kept, **own, QUEUE: self.queue, "DISTRAIN_HOSTS": EVERYWHERE, **more}

    def command(self, user: str, *words: str) -> list[str]:
        there = ["env", f"--chdir={self.home(user)}"]
        return self.argv("head", *there, sys.executable, "-m", "distrain", *words, user=user)

    def distrain(
        self, user: str, *words: str, timeout_s: float = 120.0, **more: str
    ) -> subprocess.CompletedProcess[str]:
        """Run ``distrain`` on the head, as a user."""
        return subprocess.run(
            self.command(user, *words),
            env=self.environment(user, **more),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def says(self, user: str, *words: str, code: int = 0, **more: str) -> str:
        """Return what ``distrain`` says, if it ends with a code."""
        done = self.distrain(user, *words, **more)
        assert done.returncode == code, (words, done.stdout, done.stderr)
        return done.stdout + done.stderr

    def job_words(self, *, steps: int = 6, step_s: float = 0.2, stubborn: bool = False) -> list[str]:
        """Return the end of a command line: the script, and its arguments."""
        more = ["stubborn"] if stubborn else []
        return [str(self.folder / "job.py"), str(self.ledger), str(steps), str(step_s), *more]

    def submit(self, user: str, name: str, gpus: int, *options: str, **script: Any) -> None:
        words = [f"--name={name}", f"--gpus={gpus}", "--max-failures=-1", *options, *self.job_words(**script)]
        self.says(user, "submit", *words)

    # -- what can be seen --

    def tickets(self, queue: str = "") -> dict[str, Ticket]:
        found, folder = {}, Path(queue or self.queue)
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.suffix not in (".cancel", ".new", ".lock") and not path.name.startswith("."):
                try:
                    fields = {**json.loads(path.read_text()), "silent_s": time.time() - path.stat().st_mtime}
                    found[path.name] = Ticket.of(fields)
                except (OSError, ValueError):
                    continue
        return found

    def wait_for(self, name: str, *states: str, within_s: float = 60.0) -> Ticket:
        """Wait until a job waits, runs, or has ended in one of these ways."""

        def state() -> str:
            ticket = self.tickets().get(name)
            return "" if ticket is None else ticket.how or ticket.state

        try:
            wait_until(lambda: state() in states, within_s, f"{name}: {' or '.join(states)}")
        except AssertionError:
            raise AssertionError(f"{name} is {state()}, not {states}:\n{self.story(name)}") from None
        return self.tickets()[name]

    def story(self, name: str) -> str:
        """Return what the console of a job says, and its ticket."""
        consoles = self.lab.glob(f"homes/*/.local/state/distrain/jobs/{name}-????????/console.log")
        return "\n".join([*(path.read_text()[-6000:] for path in consoles), str(self.tickets().get(name))])

    def claims(self) -> set[tuple[str, str]]:
        """Return the GPUs of all hosts that a job has claimed, as the kernel knows them."""
        found = set()
        for host in HOSTS:
            lines = Path(f"/proc/{self.inits[host]}/net/unix").read_text().splitlines()
            names = {line.rpartition("@distrain/")[2] for line in lines if "@distrain/" in line}
            found |= {(host, name) for name in names}
        return found

    def processes(self, *users: str) -> Iterator[tuple[int, str]]:
        """Give the pid and the command line of each process of these users, or of all users, on all hosts."""
        uids = {USERS[user] for user in users or USERS}
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                if os.stat(f"/proc/{name}").st_uid in uids:
                    if not self.host_of(int(name)):  # of another site
                        continue
                    stat = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                    if stat[0] != "Z":
                        yield int(name), Path(f"/proc/{name}/cmdline").read_text().replace("\0", " ").strip()
            except OSError:
                continue

    def process_of(self, name: str) -> int | None:
        """Return the pid of the process of a job: its waiter, which is the coordinator later."""
        pattern = re.compile(rf"-m distrain job \S+/{re.escape(name)}-\w{{8}}$")
        return next((pid for pid, line in self.processes() if pattern.search(line)), None)

    def host_of(self, pid: int) -> str:
        try:
            space = os.readlink(f"/proc/{pid}/ns/net")
        except OSError:
            return ""
        return self.spaces.get(space, "")

    # -- blows --

    def kill_host(self, host: str, away_s: float = 0.0) -> None:
        """Kill all processes of a host, and start its sshd again."""
        self.on(host, "sh", "-c", "kill -9 -1")
        time.sleep(away_s)
        self.on(host, "/usr/sbin/sshd", "-f", str(self.lab / "sshd_config"), check=True)

    def kill_all_of(self, user: str) -> None:
        """Kill all processes of a user on all hosts, as if all machines had lost power."""
        for _ in range(3):
            for pid, _ in self.processes(user):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue

    # -- what must hold --

    def records(self) -> dict[tuple[str, str], list[dict[str, Any]]]:
        """Return the ledger: what the ranks have noted, by GPU."""
        return {
            (host, gpu): [json.loads(line) for line in (self.ledger / f"{host}-{gpu}").read_text().splitlines()]
            for host, gpu in GPUS
        }

    def check_ledger(self) -> None:
        """No GPU was given twice at any moment."""
        for unit, lines in self.records().items():
            twice = [line for line in lines if line["what"] == "TWICE"]
            assert not twice, f"{unit} was given twice: {twice}, {lines}"

    def check_output(self, name: str, gpus: int, steps: int) -> None:
        """A job that has finished has done all of its steps, and nothing is missing from its output."""
        [run] = self.lab.glob(f"homes/*/distrain_results/{name}")
        found = defaultdict(set)
        for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
            found[line["rank"]].add(line["metrics"]["step"])
        assert found == {rank: set(range(steps)) for rank in range(gpus)}, (name, dict(found))
        [console] = self.lab.glob(f"homes/*/.local/state/distrain/jobs/{name}-????????/console.log")
        ends = {
            (line["job"], line["rank"]) for lines in self.records().values() for line in lines if line["what"] == "ends"
        }
        missing = [rank for rank in range(gpus) if (name, rank) not in ends]
        assert not missing, f"{name}: ranks {missing} have not ended"
        text = console.read_text()
        assert all(f"{name} rank {rank} is done" in text for rank in range(gpus)), text

    def check_nothing_left(self) -> None:
        """No process, no claim, no active ticket and no lock is left."""
        wait_until(lambda: not list(self.processes()), NOTHING_LEFT_WITHIN_S, "the end of all processes")
        assert not self.claims()
        assert not [one.name for one in self.tickets().values() if one.is_active]
        for path in (*self.ledger.glob("*.lock"), *Path(self.queue).glob(".lock")):
            with open(path) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
