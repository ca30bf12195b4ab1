"""A run on several hosts, seen from outside while it trains: find its processes, and strike its hosts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil

from tests.conftest import run_members, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.hosts.lab import Lab

LEASE_S = 2.0


class Running:
    """A user's process in ``head`` that runs ``script`` with one rank on each host. The arguments of the script are a
    folder, a scaling config and a failure config. When a rank trains, it makes a file ``ready-0-RANK`` there."""

    def __init__(
        self,
        lab: Lab,
        place: Path,
        run_id: str,
        script: str,
        *,
        hosts: list[str],
        spare: list[str],
        **failures: float,
    ) -> None:
        self.lab, self.place, self.run_id, self.hosts = lab, place, run_id, hosts
        (place / "script.py").write_text(script)
        (place / "hosts").write_text("\n".join(lab.line(host) for host in [*hosts, *spare]))
        scaling = {"num_workers": len(hosts), "hostfile": str(place / "hosts")}
        config = {"host_lease_s": LEASE_S, "host_wait_s": 0.0, **failures}
        argv = [sys.executable, str(place / "script.py"), str(place), json.dumps(scaling), json.dumps(config)]
        self.user = subprocess.Popen(
            lab.argv("head", *argv),
            cwd=place,
            env=lab.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait_until_it_trains(self, within_s: float = 60.0) -> None:
        ready = [self.place / f"ready-0-{rank}" for rank in range(len(self.hosts))]
        wait_until(lambda: self.user.poll() is not None or all(path.exists() for path in ready), within_s, "training")
        assert self.user.poll() is None, self.user.communicate()[0]

    def end(self) -> tuple[str, float]:
        """Wait for the end; return the output, and when it ended."""
        output, _ = self.user.communicate(timeout=100.0)
        return output, time.monotonic()

    def close(self) -> None:
        self.user.kill()
        self.user.wait()
        assert self.user.stdout is not None
        self.user.stdout.close()

    def let_it_finish(self) -> None:
        (self.place / "end").touch()

    # -- its processes --

    def on(self, host: str) -> list[psutil.Process]:
        """Return the run's processes on a host."""
        return [member for member in run_members(self.run_id) if self.lab.has(host, member)]

    def program(self, host: str, name: str) -> psutil.Process:
        """Return the agent or the forkserver of a host."""
        members = [member for member in self.on(host) if member.name() != "distrain-guard"]
        found = [member for member in members if name in member.cmdline()]
        return next(member for member in found if member.ppid() not in {other.pid for other in found})

    def worker(self, host: str) -> psutil.Process:
        [worker] = self.program(host, "forkserver").children()
        return worker

    def sshd(self, host: str) -> psutil.Process:
        """Return the sshd of this connection, not the one that listens."""
        return next(parent for parent in self.program(host, "agent").parents() if "sshd" in parent.name())

    def ssh(self, host: str) -> psutil.Process:
        children = psutil.Process(self.user.pid).children()
        return next(child for child in children if child.name() == "ssh" and host in child.cmdline())


def set_link(lab: Lab, host: str, state: str) -> None:
    """Plug the network cable of a host in (``up``) or out (``down``)."""
    done = lab.run("switch", "ip", "link", "set", host, state)
    assert done.returncode == 0, done.stderr


def cut_power(lab: Lab, host: str) -> None:
    """End a host without a word: all its processes and its address are gone at once."""
    set_link(lab, host, "down")
    os.kill(json.loads((lab.folder / "pids.json").read_text())[host][0], signal.SIGKILL)
