"""Questions to hosts before they train together, and findings from their answers. Runs in: coordinator.

No I/O and no clock: the checks of a launch, or of ``--check``, send the questions and pass the answers on.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.decisions.events import SendMessage
from distrain.system.text import name_hosts, size

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from distrain.decisions.events import RunRequest
    from distrain.hosts.gpu_health import GpuHealth

ANSWER_TIMEOUT_S = 15.0
"""Seconds to wait for the answers of a host before it counts as silent."""
MAX_CLOCK_SKEW_S = 1.0
MIN_FREE_DISK_BYTES = 1 << 30
MOST_PEERS = 31
"""Number of hosts to which each host connects, besides the first one."""
_MEMORY_OF_DRIVER = 0.05
"""Share of a GPU's memory that its driver may take without any process."""
_NETWORK_VARIABLES = {"MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem of a host, with its cure.

    is_fatal: False if training is possible in spite of it.
    """

    host: str
    text: str
    is_fatal: bool = True


# -- all hosts -------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class HostChecks:
    """One round of questions to hosts.

    inspections: by host, what it is asked first. Once all have answered, each connects to ports of others; see
        :func:`peers_of`.
    addresses: by host that opens a port for this, the address under which the others reach it; empty if unknown.
    own_versions: versions of packages on this machine.
    imported: those of them that the user's code may do without.
    nonce: identifies this round. Answers that carry another one are ignored.
    must_connect: False makes a failed connection a warning.
    """

    inspections: Mapping[str, wire.ProbeHost]
    addresses: Mapping[str, str]
    nonce: str
    own_versions: Mapping[str, str | None] = field(default_factory=dict)
    imported: Collection[str] = ()
    must_connect: bool = True

    def __post_init__(self) -> None:
        self._waiting = dict.fromkeys(self.inspections)
        """Hosts that have not answered, or, once all have, that have not connected to the others."""
        self._ports: dict[str, wire.HostProbed] = {}
        self._failed_peers: dict[str, dict[str, str]] = {}
        self._is_connecting = False

    @property
    def is_done(self) -> bool:
        """True when no answer is missing."""
        return not self._waiting

    def begin(self) -> list[SendMessage]:
        """Return the first questions."""
        return [SendMessage(host, self._first_question(host)) for host in self._waiting]

    def _first_question(self, host: str) -> wire.ProbeHost:
        question = replace(self.inspections[host], nonce=self.nonce)
        if host not in self.addresses:
            return question
        address = self.addresses[host]
        known = next(filter(None, self.addresses.values()), "")  # a host finds its own address on the route there
        return replace(question, is_reached=True, address=address, peer="" if address else known)

    def handle(self, host: str, answer: wire.HostProbed) -> list[SendMessage | Finding]:
        """Take the answer of a host. Return the next questions, and what the answer shows."""
        if answer.nonce != self.nonce or host not in self._waiting:
            return []
        if self._is_connecting:
            self._failed_peers[host] = answer.failed_peers
            return self._stop_waiting_for(host)
        if host in self.addresses:
            self._ports[host] = answer
        found = version_findings(host, answer.versions, self.own_versions, self.imported, python=answer.executable)
        return [*found, *self._stop_waiting_for(host)]

    def remove(self, host: str) -> list[SendMessage | Finding]:
        """Forget a lost host: the others neither wait for it nor blame it."""
        self._ports.pop(host, None)
        self._failed_peers.pop(host, None)
        return self._stop_waiting_for(host) if host in self._waiting else []

    def _stop_waiting_for(self, host: str) -> list[SendMessage | Finding]:
        del self._waiting[host]
        if self._waiting:
            return []
        if self._is_connecting:
            return [*self.connection_findings()]
        self._is_connecting = True
        self._waiting = dict.fromkeys(self._ports)
        return [*self._connections()]

    def _connections(self) -> list[SendMessage]:
        """Return the order to connect for each host, also for those that have no port themselves."""
        ports = {host: (opened.address, opened.port) for host, opened in self._ports.items() if opened.port}
        chosen = peers_of([host for host in self.addresses if host in self._ports])
        peers = {host: {name: ports[name] for name in names if name in ports} for host, names in chosen.items()}
        return [SendMessage(host, wire.ProbeHost(nonce=self.nonce, peers=peers[host])) for host in peers]

    def overdue(self, after_s: float) -> list[Finding]:
        """Return one finding for each host that still owes an answer, ``after_s`` seconds after the questions."""
        text = f"it has not answered within {after_s:g} s: does a file system or a driver hang there, or is it frozen?"
        return [Finding(host, text) for host in self._waiting]

    def connection_findings(self) -> list[Finding]:
        """Return one finding for each host that others cannot connect to, as far as the hosts have answered."""
        found = [
            Finding(host, f"other hosts can't reach it: {opened.failed}; put a reachable address in the hostfile")
            for host, opened in self._ports.items()
            if opened.failed is not None
        ]
        callers: dict[tuple[str, str], list[str]] = {}
        for caller, failed in self._failed_peers.items():
            for host, why in failed.items():
                if host in self._ports:
                    callers.setdefault((host, why), []).append(caller)
        found += [self._blocked(host, why, sorted(names)) for (host, why), names in sorted(callers.items())]
        return [replace(finding, is_fatal=self.must_connect) for finding in found]

    def _blocked(self, host: str, why: str, callers: Sequence[str]) -> Finding:
        opened = self._ports[host]
        text = (
            f"{name_hosts(callers)} cannot connect to it at {opened.address} ({opened.interface}): {why}; allow "
            "TCP between the hosts on all ports, or use a network that does: name the hosts by their addresses in it, "
            "or choose an --interface"
        )
        return Finding(host, text)


def peers_of(hosts: Sequence[str]) -> dict[str, list[str]]:
    """Return the hosts to which each host connects: the first one, as all ranks do, and those that follow it.

    So a host that the others cannot reach, or that reaches no other, is found, and the cost grows with the number of
    hosts, not with its square.
    """
    ring = [*hosts, *hosts]
    nearest = {host: ring[at + 1 : at + 1 + MOST_PEERS] for at, host in enumerate(hosts)}
    return {host: [name for name in dict.fromkeys((hosts[0], *near)) if name != host] for host, near in nearest.items()}


def must_connect(request: RunRequest) -> bool:
    """Tell if the ranks are known to connect to each other over the addresses that the checks try.

    They do not without a framework, nor if the user has named another network.
    """
    other_network = any(_NETWORK_VARIABLES & settings.environment.keys() for settings in request.hosts.values())
    return bool(request.backend.framework) and not other_network


# -- versions --------------------------------------------------------------------------------------------------------


def refusal(hello: Mapping[str, Any], python: str | None) -> str | None:
    """Return why this coordinator cannot work with an agent, or None if it can.

    hello: the fields of its HELLO, which another version of distrain may send with other names.
    python: the version of Python on this machine; None if the agent may have any.
    """
    theirs, their_python = hello.get("distrain"), str(hello.get("python"))
    if (hello.get("wire"), theirs) != (wire.WIRE_VERSION, wire.DISTRAIN_VERSION):
        return (
            f"it has distrain {theirs}, this machine {wire.DISTRAIN_VERSION}; "
            f"run there: pip install distrain=={wire.DISTRAIN_VERSION}"
        )
    if python is not None and _release(their_python, 2) != _release(python, 2):
        return (
            f"it has Python {their_python}, this machine {python}: pickles are not compatible between them; "
            f"name a Python {'.'.join(_release(python, 2))} with python= in the hostfile, or let uv install one with "
            "--env-from requirements.txt"
        )
    return None


def version_findings(
    host: str,
    versions: Mapping[str, str | None],
    own_versions: Mapping[str, str | None],
    imported: Collection[str] = (),
    *,
    python: str = "",
) -> list[Finding]:
    """Return packages that the host lacks or has in another version than this machine.

    Another version is a warning, except another major version of cloudpickle: only that is known to break pickles. A
    package is also only a warning if it is only ``imported`` by the user's code, which may do without. python: the
    interpreter of the host.
    """
    found = []
    missing = {name: own for name, own in own_versions.items() if own is not None and versions.get(name) is None}
    needed = [name for name in missing if name not in imported]
    if missing:
        found.append(_missing_finding(host, missing, python, is_fatal=bool(needed)))
    for package, own in own_versions.items():
        version = versions.get(package)
        if own and version and _public(version) != _public(own) and package not in imported:
            breaks = package == "cloudpickle" and _release(own, 1) != _release(version, 1)
            what = ": pickles may not be compatible between them" if breaks else ""
            text = f"it has {package} {version}, this machine {own}{what}; install {package}=={_public(own)} there"
            found.append(Finding(host, text, is_fatal=breaks))
    return found


def _missing_finding(host: str, missing: Mapping[str, str], python: str, *, is_fatal: bool) -> Finding:
    names = ", ".join(missing)
    wanted = " ".join(f"{name}=={_public(own)}" if own else name for name, own in missing.items())
    text = (
        f"its {python or 'interpreter'} has no {names}; install there: {wanted}; or name another interpreter with "
        "python= in the hostfile, or make an environment on each host with --env-from requirements.txt"
    )
    return Finding(host, text, is_fatal=is_fatal)


def _public(version: str) -> str:
    """Return a version as indexes of packages name it: ``2.13.0`` of ``2.13.0+cpu``, which is one of its builds."""
    return version.partition("+")[0]


def _release(version: str, parts: int) -> list[str]:
    return version.split(".")[:parts]


# -- one host --------------------------------------------------------------------------------------------------------


def disk_findings(host: str, free_bytes: int) -> list[Finding]:
    """Return a warning if the disk is nearly full. ``free_bytes``: -1 if unknown."""
    if not 0 <= free_bytes < MIN_FREE_DISK_BYTES:
        return []
    text = f"only {size(free_bytes)} are free where checkpoints are stored; make room"
    return [Finding(host, text, is_fatal=False)]


def clock_findings(host: str, ahead_s: float, uncertain_s: float) -> list[Finding]:
    """Return a warning if the host's clock is wrong.

    ahead_s: how far it is ahead of this machine's clock, give or take ``uncertain_s``.
    """
    if abs(ahead_s) - uncertain_s <= MAX_CLOCK_SKEW_S:
        return []
    where = "ahead of" if ahead_s > 0 else "behind"
    text = f"its clock is {abs(ahead_s):.1f} s {where} this machine's, so times in logs do not compare; run NTP there"
    return [Finding(host, text, is_fatal=False)]


def gpu_findings(host: str, gpus: Sequence[GpuHealth]) -> list[Finding]:
    """Return a warning for each problem of GPUs that slows a run down or may end it."""
    numbers: dict[str, list[str]] = {}
    for gpu in gpus:
        for text in _problems_of(gpu):
            numbers.setdefault(text, []).append(str(gpu.index))
    return [Finding(host, f"GPU {', '.join(those)}: {text}", is_fatal=False) for text, those in numbers.items()]


def _problems_of(gpu: GpuHealth) -> Iterator[str]:
    taken = gpu.memory_bytes - gpu.free_bytes
    shown = f"{taken / 2**30:.1f} of {gpu.memory_bytes / 2**30:.1f} GiB are taken"
    if gpu.processes:
        yield f"used by {', '.join(gpu.processes)}" + f"; {shown}" * bool(gpu.memory_bytes)
    elif taken > _MEMORY_OF_DRIVER * gpu.memory_bytes:
        yield f"{shown}, by graphics or by a process that cannot be seen there"
    if gpu.repair == "failed":
        yield "faulty memory, and no spare memory left to replace it; have the GPU replaced"
    elif gpu.repair:
        yield "faulty memory, which is replaced when the GPU is reset: nvidia-smi --gpu-reset, or restart the host"
    if gpu.memory_errors:
        count = f"{gpu.memory_errors} uncorrectable memory error{'s' if gpu.memory_errors > 1 else ''}"
        yield f"{count} since the driver was loaded; each ends a run; have the GPU replaced if more follow"
    if gpu.slowed_by:
        yield f"slowed down by {' and '.join(gpu.slowed_by)} ({gpu.celsius} °C); look at its cooling and power"
