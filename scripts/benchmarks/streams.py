"""The throughput of the mover beside that of ``ssh host tar c | tar x``, over a real sshd on this machine.

In one round, each program runs once for each set of files, in turn. The figures are medians with ranges. A ratio is the
median, over the rounds, of the rate beside that of tar in the same round. "first": the mover has no stream yet, so that
it has to connect, as tar has. "later": its streams are open. "tar, flushed" ends with ``sync -f``, as the files that
the mover fetches are flushed to disk.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from distrain import wire
from distrain.hosts.ports import reserve_port
from distrain.system import process
from distrain.wire.child_link import ChildLink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SETS = {"1 GB file": (1, 10**9), "2,000 x 50 KB": (2000, 50_000)}
"""Number of files, and bytes in each."""
SSHD_CONFIG = """\
ListenAddress 127.0.0.1
Port {port}
HostKey "{folder}/hostkey"
PidFile none
AuthorizedKeysFile "{folder}/id.pub"
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
MaxStartups 100
"""
SSH_CONFIG = """\
Host *
  HostName 127.0.0.1
  Port {port}
  IdentityFile "{folder}/id"
  IdentitiesOnly yes
  UserKnownHostsFile "{folder}/known_hosts"
  GlobalKnownHostsFile /dev/null
  Ciphers ^aes128-gcm@openssh.com
"""


@contextlib.contextmanager
def ssh_to_this_machine() -> Iterator[list[str]]:
    """Run an sshd. Yield the command line of ssh up to the remote command."""
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if program is None:
        sys.exit("there is no sshd here (package openssh-server)")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as made, reserve_port() as reserved:
        folder, port = Path(made), reserved.getsockname()[1]
        for name in ("id", "hostkey"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
        (folder / "known_hosts").write_text(f"* {(folder / 'hostkey.pub').read_text()}")
        (folder / "sshd_config").write_text(SSHD_CONFIG.format(port=port, folder=folder))
        (folder / "ssh_config").write_text(SSH_CONFIG.format(port=port, folder=folder))
        with (folder / "log").open("wb") as log:
            running = subprocess.Popen([program, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=log)
        ssh = ["ssh", "-F", str(folder / "ssh_config"), "-T", "-o", "BatchMode=yes", "host"]
        try:
            while subprocess.run([*ssh, "true"], capture_output=True).returncode:
                time.sleep(0.1)
            yield ssh
        finally:
            running.kill()
            running.wait()


class MoverProcess:
    """A mover, and its answers."""

    def __init__(self, ssh: list[str]) -> None:
        stream = [*ssh, shlex.join(process.bootstrap_argv("stream-server"))]
        self._link = ChildLink(process.bootstrap_argv("mover", str(os.getpid()), json.dumps(stream)))

    def do(self, order: wire.Message) -> wire.Message:
        """Return the answer to an order."""
        self._link.channel.send(order)
        frames = self._link.channel.wait()
        if not frames:
            sys.exit("the mover has died")
        answer = frames[0].message()
        if getattr(answer, "failed", None):
            sys.exit(f"the mover has failed: {answer}")
        return answer

    def close(self) -> None:
        """End it."""
        self._link.kill()


class Compared:
    """The programs for one set of files in one folder. Each is a function that moves all from ``source``."""

    def __init__(self, ssh: list[str], folder: Path, files: int, size: int) -> None:
        self.source, self.target = folder / "source", folder / "target 0"
        self.source.mkdir()
        self._targets = 0
        self.size = files * size
        self.names = [f"file {number}" for number in range(files)]
        for name in self.names:
            (self.source / name).write_bytes(os.urandom(size))
        crcs = {str(self.source / name): zlib.crc32((self.source / name).read_bytes()) for name in self.names}
        self.files = [(path, size, 0, 0o600, f"crc32:{crc}") for path, crc in crcs.items()]
        self._ssh = ssh
        self._mover: MoverProcess | None = None

    def programs(self) -> dict[str, Callable[[], object]]:
        """Return the programs by what they do; tar comes first."""
        return {
            "from the host, tar": self.tar_from,
            "from the host, tar, flushed": lambda: self.tar_from(flushes=True),
            "from the host, first": self.fetch,
            "from the host, later": self.fetch,
            "to the host, tar": self.tar_to,
            "to the host, tar, flushed": lambda: self.tar_to(flushes=True),
            "to the host, first": self.deliver,
            "to the host, later": self.deliver,
        }

    def tar_from(self, *, flushes: bool = False) -> None:
        pipe([*self._ssh, f"tar c -C {shlex.quote(str(self.source))} ."], ["tar", "x", "-C", str(self.target)])
        if flushes:
            subprocess.run(["sync", "-f", self.target], check=True)

    def tar_to(self, *, flushes: bool = False) -> None:
        target = shlex.quote(str(self.target))
        command = f"tar x -C {target}" + (f"; sync -f {target}" if flushes else "")
        pipe(["tar", "c", "-C", str(self.source), "."], [*self._ssh, command])

    def prepare(self, program: str) -> None:
        """Make another target, and start a mover for the first of its orders.

        Many files are not deleted: ext4 makes new ones slowly where others were deleted in the last seconds.
        """
        if len(self.names) == 1:
            shutil.rmtree(self.target, ignore_errors=True)
        self._targets += 1
        self.target = self.target.with_name(f"target {self._targets}")
        self.target.mkdir()
        if program.endswith("first"):
            self.close()
            self._mover = MoverProcess(self._ssh)
        subprocess.run(["sync", "-f", self.target], check=True)

    def fetch(self) -> None:
        assert self._mover is not None
        paths = {"source": str(self.source), "directory": str(self.target)}
        self._mover.do(wire.Upload(attempt=0, rank=0, ordinal=1, files=self.names, others=[], **paths))

    def deliver(self) -> None:
        assert self._mover is not None
        folder, staging = str(self.target / "all"), str(self.target.parent)
        self._mover.do(wire.Deliver(folder=folder, root=str(self.source), files=self.files, staging=staging))

    def check(self) -> None:
        top = self.target / "all" if (self.target / "all").exists() else self.target
        for name in self.names:
            if (top / name).read_bytes() != (self.source / name).read_bytes():
                sys.exit(f"{name} differs")

    def close(self) -> None:
        if self._mover is not None:
            self._mover.close()
            self._mover = None


def pipe(first: list[str], second: list[str]) -> None:
    subprocess.run(["bash", "-c", f"{shlex.join(first)} | {shlex.join(second)}"], check=True)


def measure(ssh: list[str], folder: Path, title: str, rounds: int, chosen: str) -> None:
    """Print the rates for one set of files in one folder."""
    with tempfile.TemporaryDirectory(dir=folder) as made:
        compared = Compared(ssh, Path(made), *SETS[title])
        rates: dict[str, list[float]] = {}
        for _ in range(rounds):
            for name, program in compared.programs().items():
                if chosen in name:
                    compared.prepare(name)
                    began = time.monotonic()
                    program()
                    rates.setdefault(name, []).append(compared.size / 1e6 / (time.monotonic() - began))
                    compared.check()
        compared.close()
    print(f"\n{title} in {folder}", flush=True)
    for name, found in rates.items():
        tars = rates[f"{name.partition(',')[0]}, tar"]
        ratio = median(rate / tar for rate, tar in zip(found, tars, strict=True))
        print(f"  {name:30} {median(found):6.0f} MB/s ({min(found):.0f} to {max(found):.0f})  {ratio:5.2f} x tar")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folders", type=Path, nargs="+", default=[Path("/dev/shm"), Path("/var/tmp")])
    parser.add_argument("--only", default="", help="what the name of a program contains, such as 'from'")
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=list(SETS), metavar="SET")
    options = parser.parse_args()
    with ssh_to_this_machine() as ssh:
        for folder in options.folders:
            for title in options.sets:
                measure(ssh, folder, title, options.rounds, options.only)
