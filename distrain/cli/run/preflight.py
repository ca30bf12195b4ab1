"""``python -m distrain.launch --check``: look at all hosts at once. Runs in: coordinator.

Each host gets an agent as for a run, which starts no workers.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import sys
import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from distrain import wire
from distrain.api.config import ScalingConfig
from distrain.coordinator.connection.agent_link import (
    FILES_PER_HOST,
    PING_INTERVAL_S,
    AgentLink,
    LinkCallbacks,
    agent_argv,
    close_all,
)
from distrain.coordinator.connection.worker_settings import for_another_interpreter
from distrain.decisions import host_checks
from distrain.decisions.host_checks import (
    ANSWER_TIMEOUT_S,
    Finding,
    HostChecks,
    Question,
    directory_findings,
    inspection,
)
from distrain.decisions.host_pool import HostPool, Readiness, info_of
from distrain.decisions.placement import shares_of, workers_on
from distrain.errors import ResourcesError
from distrain.hosts.gpu_health import GpuHealth
from distrain.hosts.host import interface_problem
from distrain.hosts.inspection import package_versions
from distrain.storage.paths import choose_run
from distrain.system import process
from distrain.system.arguments import in_users_words
from distrain.system.log import say
from distrain.system.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from distrain.coordinator.connection.transport import Transport
    from distrain.hosts.host import HostInfo, HostSettings

PACKAGES = ("torch", "cloudpickle")
"""Packages whose versions are compared, in addition to Python and distrain."""
HERE = "this machine"
_PROGRESS_AFTER_S = 5.0
"""Seconds to wait for hosts before a line says which."""
_LOOPBACK = "127.0.0.1"
_LINES_SHOWN = 3


@dataclass(slots=True)
class _Host:
    """One host, and its answers so far."""

    transport: Transport
    settings: HostSettings
    link: AgentLink | None = None
    hello: wire.Hello | None = None
    info: HostInfo | None = None
    asked_at: float = 0.0
    inspected: wire.InspectionResult | None = None
    ahead_s: float = 0.0
    probe_port: wire.ProbeAddress | None = None
    emptied: wire.CacheEmptied | None = None
    failed: bool = False

    @property
    def name(self) -> str:
        return self.transport.host.name

    @property
    def brings_project(self) -> bool:
        """True if a run brings the user's code there if necessary."""
        return self.transport.ships and self.transport.host.cwd is None

    @property
    def gpus(self) -> list[GpuHealth]:
        return [GpuHealth(**gpu) for gpu in self.inspected.gpus] if self.inspected is not None else []

    @property
    def is_connected(self) -> bool:
        return self.hello is not None and not self.failed

    @property
    def greeted_in_s(self) -> float | None:
        return self.link.greeted_in_s if self.link is not None else None

    @property
    def versions(self) -> dict[str, str | None]:
        """All versions that the host has sent."""
        hello = self.link.hello if self.link is not None else {}
        sent = {name: str(hello.get(name)) for name in ("python", "distrain") if hello}
        return {**sent, **(self.inspected.versions if self.inspected is not None else {})}


class Preflight:
    """One look at all hosts. After :meth:`run`, ``findings`` holds the problems, and ``rows`` what the hosts have."""

    def __init__(
        self,
        transports: Sequence[Transport],
        settings: Mapping[str, HostSettings],
        *,
        storage_path: str | None,
        sys_path: Sequence[str],
        scaling: ScalingConfig,
    ) -> None:
        self.findings: list[Finding] = []
        self._hosts = {t.host.name: _Host(t, settings[t.host.name]) for t in transports}
        self._storage = choose_run(storage_path, None).parent
        self._own_versions = package_versions(PACKAGES, sys_path)
        self._compared = {} if any(one.makes_environment for one in transports) else self._own_versions
        """The versions to compare. An environment that a run makes on the hosts has the packages."""
        self._scaling = scaling
        self._sys_path = [os.fspath(entry) for entry in sys_path]
        self._pool = HostPool(dict.fromkeys(self._hosts, 1), ScalingConfig(num_workers=(1, len(self._hosts))))
        self._shares = self._workers_by_host()
        self._id = uuid.uuid4().hex
        self._probe_file = self._storage / f".distrain-check-{self._id}"
        self._has_storage = False
        self._hosts_use_storage = isinstance(self._storage, Path)  # only uploaders use a remote one, during a run
        self._checks: HostChecks | None = None
        self._tries_connections = False
        self._loop = Loop()

    def _workers_by_host(self) -> dict[str, int]:
        slots = {name: host.settings.slots for name, host in self._hosts.items()}
        try:
            return shares_of(slots, workers_on(slots, self._scaling))
        except ResourcesError as error:
            self.findings.append(Finding(HERE, "slots", in_users_words(str(error))))
            return {}

    def _workers_on(self, host: _Host) -> int:
        """Return how many workers a host gets. A spare one gets none, but may get as many as it has slots."""
        return self._shares.get(host.name) or host.settings.slots or 1

    @property
    def is_fit(self) -> bool:
        """True if the hosts can train together."""
        return not any(finding.is_fatal for finding in self.findings)

    def run(self) -> None:
        """Look at the hosts, as long as the slowest takes. Whatever is raised, no process and no file remains."""
        try:
            self._write_probe_file()
            # Ctrl-C waits for the loop: inside of Popen() it would leave an unknown process behind.
            with (
                process.many_open_files(*[len(self._hosts) * FILES_PER_HOST] * 2),
                self._loop.signals((signal.SIGINT,), _interrupt),
            ):
                self._connect_all()
                self._ask()
        finally:
            self._close()
        order = {name: number for number, name in enumerate((HERE, *self._hosts))}
        self.findings.sort(key=lambda finding: (not finding.is_fatal, order[finding.host]))

    def clear_caches(self) -> None:
        """Delete what distrain stores on the hosts. Whatever is raised, no process remains."""
        try:
            with (
                process.many_open_files(*[len(self._hosts) * FILES_PER_HOST] * 2),
                self._loop.signals((signal.SIGINT,), _interrupt),
            ):
                self._connect_all()
                asked = [host for host in self._hosts.values() if host.is_connected]
                for host in asked:
                    assert host.link is not None
                    host.link.send(wire.EmptyCache())
                while any(host.emptied is None and host.is_connected for host in asked):
                    self._loop.step()
        finally:
            self._close()

    def emptied(self) -> dict[str, wire.CacheEmptied | None]:
        """Return the answer of each host to :meth:`clear_caches`; None if it has not answered."""
        return {name: host.emptied for name, host in self._hosts.items()}

    def _write_probe_file(self) -> None:
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

    def _ping(self) -> None:
        """Show hosts that wait for slower ones that this process lives."""
        for host in self._hosts.values():
            if host.link is not None and host.link.greeted:
                host.link.send(wire.Ping())
        self._loop.call_in("ping", PING_INTERVAL_S, self._ping)

    def _wait_until(self, done: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        self._loop.call_at("timeout", deadline, lambda: None)
        while not done() and time.monotonic() < deadline:
            self._loop.step()
        self._loop.cancel("timeout")

    def _close(self) -> None:
        with contextlib.suppress(OSError):
            self._probe_file.unlink() if isinstance(self._probe_file, Path) else self._probe_file.remove()
        links = [host.link for host in self._hosts.values() if host.link is not None]
        for link in links:
            if not link.greeted:
                link.drop()
        close_all(links)
        self._loop.close()

    # -- connecting to the hosts ----------------------------------------------------------------------------------

    def _connect_all(self) -> None:
        """Connect the hosts, with as many new connections at once as in a run."""
        self._ping()
        self._loop.call_in("progress", _PROGRESS_AFTER_S, self._show_progress)
        while True:
            now = time.monotonic()
            for name in self._pool.hosts_to_connect(now):
                self._connect(self._hosts[name])
            if self._pool.readiness(now) is not Readiness.WAITING:
                break
            self._loop.call_at("connect", self._pool.deadline(), lambda: None)
            self._loop.step()
        self._loop.cancel("connect")
        self._loop.cancel("progress")
        for name, why in self._pool.losses.items():
            if not self._hosts[name].failed:  # it has not answered
                self._fail(Finding(name, "reached", why))

    def _show_progress(self) -> None:
        if text := self._pool.describe_progress():
            say(text)

    def _connect(self, host: _Host) -> None:
        if host.link is not None:  # sshd has turned it away
            host.link.drop()
            host.link.dispose()
        ids = process.extended_run_ids(self._id)
        callbacks = LinkCallbacks(
            on_message=lambda link, message: self._on_message(host, message),
            on_refused=lambda link, about, why: self._fail(Finding(host.name, about, why)),
            on_end=lambda link: self._on_end(host, link),
        )
        try:
            argv = agent_argv(host.transport, ids, self._id, "gpus")
            host.link = AgentLink(self._loop, host.transport, argv, callbacks)
        except OSError as error:
            self._fail(Finding(host.name, "reached", f"its agent cannot be started: {error}"))

    def _on_end(self, host: _Host, link: AgentLink) -> None:
        if not (link.was_turned_away and self._pool.may_try_later(host.name, time.monotonic())):
            self._fail(_end_finding(host, link))

    def _fail(self, finding: Finding) -> None:
        """Drop a host that cannot be checked further."""
        host = self._hosts[finding.host]
        host.failed = True
        self._pool.mark_lost(host.name, finding.text, time.monotonic())
        self.findings.append(finding)
        if host.link is not None:
            host.link.drop()
        if self._checks is not None:
            self._carry_out(self._checks.remove(host.name))

    # -- questions and answers ------------------------------------------------------------------------------------

    def _ask(self) -> None:
        hosts = [host for host in self._hosts.values() if host.is_connected]
        checks = self._checks = HostChecks(
            {host.name: self._question(host) for host in hosts},
            _addresses(hosts),
            nonce=self._id,
            own_versions=self._compared,
        )
        self._tries_connections = len(hosts) > 1
        self._carry_out(checks.begin())
        while not checks.is_done:
            if not checks.is_connecting:
                self._wait_until(lambda: checks.is_done or checks.is_connecting, ANSWER_TIMEOUT_S)
            if checks.is_connecting:  # these questions have a time limit of their own
                self._wait_until(lambda: checks.is_done, ANSWER_TIMEOUT_S)
            for finding in checks.overdue(ANSWER_TIMEOUT_S):
                self._fail(finding)  # the other hosts continue without it

    def _question(self, host: _Host) -> wire.InspectHost:
        shared = self._has_storage and self._hosts_use_storage
        question = inspection(
            host.settings,
            self._own_versions,
            storage=str(self._storage) if shared else "",
            probe_file=str(self._probe_file) if shared else "",
            content=self._id,
        )
        return replace(
            question,
            is_thorough=True,
            workers=self._workers_on(host),
            numa_binding=self._scaling.numa_binding or "",
            gpus_per_worker=self._scaling.gpus_per_worker,
        )

    def _carry_out(self, steps: Iterable[Question | Finding]) -> None:
        for step in steps:
            if isinstance(step, Finding):
                self.findings.append(step)
                continue
            host = self._hosts[step.host]
            host.asked_at = time.time() if isinstance(step.message, wire.InspectHost) else host.asked_at
            assert host.link is not None
            host.link.send(step.message)

    def _on_message(self, host: _Host, message: wire.Message) -> None:
        if self._checks is not None:
            self._carry_out(self._checks.handle(host.name, message))
        match message:
            case wire.Hello():
                host.hello = message
                if host.brings_project and message.executable != sys.executable:
                    path = for_another_interpreter(self._sys_path)
                    host.settings = replace(host.settings, sys_path=path)
                host.info = info_of(host.name, message, host.settings)
                self._pool.mark_connected(host.name, host.info)
                if problem := interface_problem(host.settings.interface, message.interfaces):
                    self._fail(Finding(host.name, "address", problem))
            case wire.InspectionResult():
                self._on_inspected(host, message)
            case wire.CacheEmptied():
                host.emptied = message
            case wire.ProbeAddress():
                host.probe_port = message

    def _on_inspected(self, host: _Host, result: wire.InspectionResult) -> None:
        assert host.hello is not None
        now = time.time()
        host.inspected = result
        host.ahead_s = ((result.received - host.asked_at) + (result.sent - now)) / 2
        uncertain_s = max(0.0, (now - host.asked_at) - (result.sent - result.received)) / 2
        named, use_gpu = host.transport.host.gpus, self._scaling.use_gpu
        self.findings += [
            *([] if host.brings_project else directory_findings(host.name, result, host.settings.directory)),
            *host_checks.disk_findings(host.name, result, str(self._storage)),
            *host_checks.cpu_findings(host.name, result),
            *host_checks.clock_findings(host.name, host.ahead_s, uncertain_s),
            *host_checks.gpu_health_findings(host.name, host.gpus),
            *host_checks.gpu_findings(
                host.name,
                host.hello,
                host.settings,
                named=named,
                workers=self._workers_on(host),
                use_gpu=use_gpu,
                is_bound=self._scaling.numa_binding is not None,
            ),
        ]

    # -- the table ------------------------------------------------------------------------------------------------

    def rows(self) -> list[dict[str, str]]:
        """Return the cells of each row by column, first those of this machine."""
        here = {"host": HERE, "python": platform.python_version(), "distrain": wire.DISTRAIN_VERSION}
        here |= {name: _version(version) for name, version in self._own_versions.items()}
        here["storage"] = "ok" if self._has_storage else ""
        return [here, *(self._row(host) for host in self._hosts.values())]

    def _row(self, host: _Host) -> dict[str, str]:
        row = {
            "host": host.name,
            "slots": str(host.settings.slots or ""),
            **{name: _version(version) for name, version in host.versions.items()},
        }
        if host.greeted_in_s is not None:
            by = os.path.basename(host.transport.program)
            row["reached"] = f"{by} {host.greeted_in_s:.2f} s" if by else "directly"
        if (hello := host.hello) is not None and (result := host.inspected) is not None:
            memory = hello.memory_bytes
            row |= {
                "cwd": "ok" if result.directory_problem is None else "brought",
                "storage": ("ok" if self._hosts_use_storage else "not tried") if self._has_storage else "",
                "peers": "ok" if self._tries_connections else "",
                "clock": f"{round(host.ahead_s, 1) or 0.0:+.1f} s",  # not -0.0
                "CPUs": str(hello.cpus),
                "RAM free": f"{_gib(min(result.memory_free_bytes, memory))} of {_gib(memory)} GiB",
                "disk free": f"{_gib(result.disk_free_bytes)} GiB",
                "cache": f"{result.cache_bytes / 1e6:,.0f} MB",
                "GPU free": _least_free(host.gpus),
                "GPUs": _gpus([gpu["name"] for gpu in hello.gpus or ()]),
            }
        if (port := host.probe_port) is not None:
            row["address"] = f"{port.address} {port.interface}"
        return row


def _interrupt(number: int) -> None:
    raise KeyboardInterrupt


def _addresses(hosts: Sequence[_Host]) -> dict[str, str]:
    """Return where each host is reached by the others: on loopback if all are one machine; empty if unknown."""
    infos = {host.name: host.info for host in hosts if host.info is not None}
    networks = {info.network for info in infos.values()}
    if len(networks) == 1 and networks != {""}:
        return dict.fromkeys(infos, _LOOPBACK)
    return {name: info.address for name, info in infos.items()}


def _end_finding(host: _Host, link: AgentLink) -> Finding:
    """Explain the end of an agent that was not asked to end."""
    why, code, words = link.why_it_ended(), link.exit_code, _last_lines(link.stray_output())
    if link.greeted or not code or code < 0:
        return Finding(host.name, "reached", why)
    program = os.path.basename(host.transport.program)
    if code == host.transport.failed_code:
        command = process.describe(host.transport.argv(["true"]))
        text = f"{program} does not get there{words}; this must work without a question: {command}"
        return Finding(host.name, "reached", text)
    python = host.transport.host.python or sys.executable
    if program and host.transport.failed_code is None:  # the exit code may be of either program
        command = process.describe(host.transport.argv([python, "--version"]))
        text = f"{program} or Python has failed there, exit code {code}{words}; this must work: {command}"
        return Finding(host.name, "reached", text)
    text = (
        f"{python} does not start distrain there, exit code {code}{words}; install "
        f"distrain=={wire.DISTRAIN_VERSION} for it, or name another interpreter: python= in the hostfile"
    )
    return Finding(host.name, "python", text)


def _last_lines(text: str) -> str:
    """Return the lines that explain an end: the last one of a traceback, else the last few."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    shown = lines[-1:] if any(line.startswith("Traceback") for line in lines) else lines[-_LINES_SHOWN:]
    return ": " + " / ".join(shown) if shown else ""


def _version(version: str | None) -> str:
    return "none" if version is None else version or "?"


def _gib(amount: int) -> str:
    return f"{amount / 2**30:.{0 if amount >= 10 << 30 else 1}f}"


def _gpus(names: Sequence[str]) -> str:
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names)) or "none"


def _least_free(gpus: Sequence[GpuHealth]) -> str:
    """Return the free memory of the GPU that has the least; empty if it is not known."""
    known = [gpu for gpu in gpus if gpu.memory_bytes]
    gpu = min(known, key=lambda gpu: gpu.free_bytes, default=None)
    return "" if gpu is None else f"{_gib(gpu.free_bytes)} of {_gib(gpu.memory_bytes)} GiB"
