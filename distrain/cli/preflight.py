"""Whether hosts are fit to train together: all of them looked at, at once. Runs in: coordinator.

``python -m distrain.launch --check``. Every host gets an agent, as for a run, that starts nothing.
"""

from __future__ import annotations

import contextlib
import platform
import signal
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from distrain import wire
from distrain.coordinator.agent_link import PING_INTERVAL_S, AgentLink, agent_argv, close_all
from distrain.decisions import host_checks
from distrain.decisions.host_checks import INSPECT_TIMEOUT_S, PACKAGES, Finding, Pairs
from distrain.decisions.placement import shares_of, workers_on
from distrain.errors import ResourcesError
from distrain.hosts.host import Gpu, gpu_problem, hidden_gpus_problem
from distrain.hosts.inspection import package_versions
from distrain.hosts.reachability import REACH_S
from distrain.storage.paths import choose_run
from distrain.system import process
from distrain.system.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distrain.config import ScalingConfig
    from distrain.coordinator.transport import Transport
    from distrain.hosts.host import HostSettings

HERE = "this machine"
CONNECT_TIMEOUT_S = 60.0
PAIRS_TIMEOUT_S = 3 * REACH_S
_LOOPBACK = "127.0.0.1"
_SSH_FAILED = 255
_WORDS_SHOWN = 3


@dataclass(slots=True)
class _Host:
    """One host, and what it has said so far."""

    transport: Transport
    order: HostSettings
    link: AgentLink | None = None
    hello: wire.Hello | None = None
    asked: float = 0.0
    inspected: wire.InspectionResult | None = None
    ahead_s: float = 0.0
    listening: wire.ProbePortOpened | None = None
    failed: bool = False

    @property
    def name(self) -> str:
        return self.transport.host.name

    @property
    def greeted_in_s(self) -> float | None:
        return self.link.greeted_in_s if self.link is not None else None

    @property
    def versions(self) -> dict[str, str | None]:
        """As far as it has said."""
        hello = self.link.hello if self.link is not None else {}
        said = {name: str(hello.get(name)) for name in ("python", "distrain") if hello}
        return {**said, **(self.inspected.versions if self.inspected is not None else {})}

    @property
    def is_settled(self) -> bool:
        return self.failed or self.inspected is not None


class Preflight:
    """One look at all hosts. After :meth:`run`, ``findings`` is what is wrong, and ``rows`` what there is."""

    def __init__(
        self,
        transports: Sequence[Transport],
        orders: Mapping[str, HostSettings],
        *,
        storage_path: str | None,
        sys_path: Sequence[str],
        scaling: ScalingConfig,
    ) -> None:
        self.findings: list[Finding] = []
        self._hosts = {t.host.name: _Host(t, orders[t.host.name]) for t in transports}
        self._storage = choose_run(storage_path, None).parent
        self._own = package_versions(PACKAGES, sys_path)
        self._scaling = scaling
        self._shares = self._placed()
        self._id = uuid.uuid4().hex
        self._probe_file = self._storage / f".distrain-check-{self._id}"
        self._has_storage = False
        self._on_hosts = isinstance(self._storage, Path)  # else each uploader tries it when a run begins
        self._pairs: Pairs | None = None
        self._loop = Loop()

    def _placed(self) -> dict[str, int]:
        """How many workers each host gets."""
        slots = {name: host.order.slots for name, host in self._hosts.items()}
        try:
            return shares_of(slots, workers_on(slots, self._scaling))
        except ResourcesError as error:
            self.findings.append(Finding(HERE, "slots", str(error)))
            return {}

    @property
    def is_fit(self) -> bool:
        return not any(finding.is_fatal for finding in self.findings)

    def run(self) -> None:
        """Takes as long as the slowest host; whatever is raised, nothing is left."""
        try:
            self._put_witness()
            # Ctrl-C waits for the loop: inside of Popen() it would leave a process behind that nobody knows of.
            with self._loop.signals((signal.SIGINT,), _interrupt):
                self._loop.call_in("connect", CONNECT_TIMEOUT_S, lambda: self._give_up(CONNECT_TIMEOUT_S))
                for host in self._hosts.values():
                    self._connect(host)
                self._beat()
                while not all(host.is_settled for host in self._hosts.values()):
                    self._loop.step()
                self._check_pairs()
        finally:
            self._close()
        order = {name: number for number, name in enumerate((HERE, *self._hosts))}
        self.findings.sort(key=lambda finding: (not finding.is_fatal, order[finding.host]))

    def _beat(self) -> None:
        """Those who have answered wait for the slowest, and are to know that we live."""
        for host in self._hosts.values():
            if host.link is not None:
                host.link.send(wire.Ping())
        self._loop.call_in("beat", PING_INTERVAL_S, self._beat)

    def _put_witness(self) -> None:
        try:
            if isinstance(self._probe_file, Path):
                self._probe_file.parent.mkdir(parents=True, exist_ok=True)
                self._probe_file.write_text(self._id)
            else:
                self._probe_file.write_bytes(self._id.encode())
            self._has_storage = True
        except OSError as error:
            why = error.strerror or error
            text = f"the storage {self._storage} cannot be used: {why}; name another with --storage-path"
            self.findings.append(Finding(HERE, "storage", text))

    def _close(self) -> None:
        with contextlib.suppress(OSError):
            self._probe_file.unlink() if isinstance(self._probe_file, Path) else self._probe_file.remove()
        links = [host.link for host in self._hosts.values() if host.link is not None]
        for link in links:
            if not link.greeted:
                link.drop()
        close_all(links)
        self._loop.close()

    # -- one host -------------------------------------------------------------------------------------------------

    def _connect(self, host: _Host) -> None:
        ids = process.extended_run_ids(self._id)
        try:
            host.link = AgentLink(self._loop, host.transport, agent_argv(host.transport, ids, self._id, "gpus"))
        except OSError as error:
            self._fail(host, "ssh", f"its agent cannot be started: {error}")
            return
        host.link.listen(
            lambda link, message: self._on_message(host, message),
            on_refused=lambda link, about, why: self._fail(host, about, why),
            on_end=lambda link: self._on_end(host, link),
        )

    def _on_end(self, host: _Host, link: AgentLink) -> None:
        why, code, words = link.why_it_ended(), link.exit_code, _last_words(link.chatter())
        if link.greeted or not code or code < 0:
            self._fail(host, "ssh", why)
        elif code == _SSH_FAILED:
            command = process.describe(host.transport.argv(["true"]))
            self._fail(host, "ssh", f"ssh does not get there{words}; this must work without a question: {command}")
        else:
            python = host.transport.host.python or sys.executable
            text = f"{python} does not start distrain there, exit code {code}{words}; install "
            text += f"distrain=={wire.DISTRAIN_VERSION} for it, or name another interpreter: python= in the hostfile"
            self._fail(host, "python", text)

    def _on_message(self, host: _Host, message: wire.Message) -> None:
        match message:
            case wire.Hello():
                host.hello = message
                self._inspect(host)
            case wire.InspectionResult():
                self._on_inspected(host, message)
            case wire.ProbePortOpened() | wire.ProbeResult() if self._pairs is not None:
                if isinstance(message, wire.ProbePortOpened):
                    host.listening = message
                self._tell(self._pairs.heard(host.name, message))

    def _inspect(self, host: _Host) -> None:
        shared = self._has_storage and self._on_hosts
        storage, probe_file = (str(self._storage), str(self._probe_file)) if shared else ("", "")
        host.asked = time.time()
        asked = wire.InspectHost(
            directory=host.order.directory,
            sys_path=list(host.order.sys_path),
            packages=list(PACKAGES),
            storage=storage,
            probe_file=probe_file,
            nonce=self._id,
        )
        self._tell({host.name: asked})
        late = f"it has not answered within {INSPECT_TIMEOUT_S:g} s: does {storage or asked.directory} hang there?"
        name = f"inspect {host.name}"
        self._loop.call_in(
            name, INSPECT_TIMEOUT_S, lambda: None if host.is_settled else self._fail(host, "storage", late)
        )

    def _on_inspected(self, host: _Host, message: wire.InspectionResult) -> None:
        assert host.hello is not None
        now = time.time()
        host.inspected = message
        host.ahead_s = ((message.received - host.asked) + (message.sent - now)) / 2
        uncertain_s = max(0.0, (now - host.asked) - (message.sent - message.received)) / 2
        name, storage = host.name, str(self._storage)
        self.findings += [
            *host_checks.version_findings(name, message.versions, self._own),
            *host_checks.directory_findings(name, message, host.order.directory),
            *host_checks.storage_findings(name, message, storage),
            *host_checks.disk_findings(name, message, storage),
            *host_checks.clock_findings(name, host.ahead_s, uncertain_s),
        ]
        self._check_gpus(host, host.hello)

    def _check_gpus(self, host: _Host, hello: wire.Hello) -> None:
        """A host that gets none of the workers is a spare one, which may get as many as it has slots."""
        workers = self._shares.get(host.name) or host.order.slots or 1
        gpus = [Gpu(**gpu) for gpu in hello.gpus or ()]
        problem = gpu_problem(host.transport.host.gpus, gpus)
        if self._scaling.use_gpu and not problem:
            problem = hidden_gpus_problem(host.order)
        if self._scaling.use_gpu and len(gpus) < workers and not problem:
            few = "ask for fewer (--num-workers, or slots= in the hostfile), or look at its driver"
            problem = f"it has {len(gpus)} usable GPUs for {workers} workers; {few}"
        if problem or hello.driver_problem:
            is_fatal = bool(problem) and (bool(gpus) or self._scaling.use_gpu)
            text = ". ".join(filter(None, (problem, hello.driver_problem)))
            self.findings.append(Finding(host.name, "GPUs", text, is_fatal=is_fatal))

    def _fail(self, host: _Host, about: str, text: str) -> None:
        host.failed = True
        self.findings.append(Finding(host.name, about, text))
        if host.link is not None:
            host.link.drop()
        if self._pairs is not None:
            self._tell(self._pairs.lost(host.name))

    def _give_up(self, after_s: float) -> None:
        for host in self._hosts.values():
            if host.greeted_in_s is None and not host.failed:
                self._fail(host, "ssh", f"no answer within {after_s:g} s")

    def _tell(self, said: Mapping[str, wire.Message]) -> None:
        for name, message in said.items():
            link = self._hosts[name].link
            assert link is not None
            link.send(message)

    # -- all of them ----------------------------------------------------------------------------------------------

    def _check_pairs(self) -> None:
        greeted = {host.name: host.hello for host in self._hosts.values() if not host.failed and host.hello}
        if len(greeted) < 2:
            return
        networks = {hello.network for hello in greeted.values()}
        is_one = len(networks) == 1 and networks != {""}
        local = [host.name for host in self._hosts.values() if host.order.is_local]
        addresses = {
            name: _LOOPBACK if is_one else "" if name in local else hello.address for name, hello in greeted.items()
        }
        self._pairs = Pairs(addresses, self._id)
        self._tell(self._pairs.begin())
        late: list[str] = []
        self._loop.call_in("pairs", PAIRS_TIMEOUT_S, lambda: late.append("late"))
        while not self._pairs.is_done and not late:
            self._loop.step()
        silent = f"silent for {PAIRS_TIMEOUT_S:g} s: is it frozen?"
        self.findings += self._pairs.findings()
        self.findings += [Finding(name, "peers", silent) for name in self._pairs.silent]

    # -- what there is --------------------------------------------------------------------------------------------

    def rows(self) -> list[dict[str, str]]:
        """By column, for each host in turn, with this machine as the first."""
        here = {"host": HERE, "python": platform.python_version(), "distrain": wire.DISTRAIN_VERSION}
        here |= {name: _version(version) for name, version in self._own.items()}
        here["storage"] = "ok" if self._has_storage else ""
        return [here, *(self._row(host) for host in self._hosts.values())]

    def _row(self, host: _Host) -> dict[str, str]:
        row = {
            "host": host.name,
            "slots": str(host.order.slots or ""),
            **{name: _version(version) for name, version in host.versions.items()},
        }
        if host.greeted_in_s is not None:
            row["ssh"] = "not needed" if host.order.is_local else f"{host.greeted_in_s:.2f} s"
        if (hello := host.hello) is not None and (seen := host.inspected) is not None:
            memory = hello.memory_bytes
            row |= {
                "cwd": "ok",
                "storage": ("ok" if self._on_hosts else "not tried") if self._has_storage else "",
                "peers": "ok" if self._pairs else "",
                "clock": f"{round(host.ahead_s, 1) or 0.0:+.1f} s",  # not -0.0
                "CPUs": str(hello.cpus),
                "RAM free": f"{_gib(min(seen.memory_free_bytes, memory))} of {_gib(memory)} GiB",
                "disk free": f"{_gib(seen.disk_free_bytes)} GiB",
                "GPUs": _gpus([gpu["name"] for gpu in hello.gpus or ()]),
            }
        if (said := host.listening) is not None:
            row["address"] = f"{said.address} {said.interface}"
        return row


def _interrupt(number: int) -> None:
    raise KeyboardInterrupt


def _version(version: str | None) -> str:
    return "none" if version is None else version or "?"


def _gib(amount: int) -> str:
    return f"{amount / 2**30:.{0 if amount >= 10 << 30 else 1}f}"


def _gpus(names: Sequence[str]) -> str:
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names)) or "none"


def _last_words(said: str) -> str:
    """What explains an end: of a traceback the last line, else the last few."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    shown = lines[-1:] if any(line.startswith("Traceback") for line in lines) else lines[-_WORDS_SHOWN:]
    return ": " + " / ".join(shown) if shown else ""
