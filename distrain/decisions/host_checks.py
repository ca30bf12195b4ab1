"""What hosts are asked before they train together, and what is wrong with their answers. Runs in: coordinator.

Pure: no I/O, no clock. Two ask: a launch, beside the start of its workers, and ``--check``, which looks at everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distrain import wire

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from distrain.decisions.events import RunRequest
    from distrain.hosts.world import WorldPlan

PACKAGES = ("torch", "cloudpickle")
"""Whose versions ``--check`` compares, beside Python's and ours."""
INSPECT_TIMEOUT_S = 15.0
MOST_SKEW_S = 1.0
LEAST_DISK_BYTES = 1 << 30
_NETWORK_VARIABLES = {"MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with a host: what was seen, and what to do. ``about`` is the column of the table that it concerns.
    Without ``is_fatal``, training is possible.
    """

    host: str
    about: str
    text: str
    is_fatal: bool = True


# -- versions --------------------------------------------------------------------------------------------------------


def refusal(hello: Mapping[str, Any], python: str) -> tuple[str, str] | None:
    """Why we cannot talk to an agent, whose HELLO may have other fields than ours, and which column that concerns.
    ``python``: this machine's version.
    """
    theirs, their_python = hello.get("distrain"), str(hello.get("python"))
    if (hello.get("wire"), theirs) != (wire.WIRE_VERSION, wire.DISTRAIN_VERSION):
        return "distrain", (
            f"it has distrain {theirs}, this machine {wire.DISTRAIN_VERSION}; "
            f"run there: pip install distrain=={wire.DISTRAIN_VERSION}"
        )
    if _release(their_python, 2) != _release(python, 2):
        return "python", (
            f"it has Python {their_python}, this machine {python}: pickles do not travel between them; "
            f"name a Python {'.'.join(_release(python, 2))} with python= in the hostfile"
        )
    return None


def version_findings(host: str, theirs: Mapping[str, str | None], ours: Mapping[str, str | None]) -> list[Finding]:
    """Packages that the host lacks, or has in another version than this machine. Only another cloudpickle generation
    is known to break pickles.
    """
    found = []
    for package, own in ours.items():
        there = theirs[package]
        if own is None or there == own:
            continue
        wanted = f"{package}=={own}" if own else package
        if there is None:
            text = (
                f"it has no {package}; install {wanted} there, or name another interpreter with python= in the hostfile"
            )
            found.append(Finding(host, package, text))
        elif own and there:
            breaks = package == "cloudpickle" and _release(own, 1) != _release(there, 1)
            what = ": pickles may not travel between them" if breaks else ""
            text = f"it has {package} {there}, this machine {own}{what}; install {wanted} there"
            found.append(Finding(host, package, text, is_fatal=breaks))
    return found


def _release(version: str, parts: int) -> list[str]:
    return version.split(".")[:parts]


# -- what was inspected ----------------------------------------------------------------------------------------------


def directory_findings(host: str, inspected: wire.InspectionResult, directory: str) -> list[Finding]:
    if inspected.directory_problem is None:
        return []
    text = f"no worker can run in {directory}: {inspected.directory_problem}; create it, or set cwd= in the hostfile"
    return [Finding(host, "cwd", text)]


def storage_findings(host: str, inspected: wire.InspectionResult, storage: str) -> list[Finding]:
    if inspected.storage_problem is None:
        return []
    text = (
        f"the storage {storage} {inspected.storage_problem}; mount one that all hosts share there, "
        "or name another place with RunConfig(storage_path=...) or --storage-path"
    )
    return [Finding(host, "storage", text)]


def disk_findings(host: str, inspected: wire.InspectionResult, storage: str) -> list[Finding]:
    free = inspected.disk_free_bytes
    if not 0 < free < LEAST_DISK_BYTES:
        return []
    text = f"only {free / 2**20:.0f} MiB are free in {storage}, where checkpoints go; make room"
    return [Finding(host, "disk", text, is_fatal=False)]


def clock_findings(host: str, ahead_s: float, uncertain_s: float) -> list[Finding]:
    """``ahead_s``: by how much its clock is ahead of this machine's, give or take ``uncertain_s``."""
    if abs(ahead_s) - uncertain_s <= MOST_SKEW_S:
        return []
    where = "ahead of" if ahead_s > 0 else "behind"
    text = f"its clock is {abs(ahead_s):.1f} s {where} this machine's, so times in logs do not compare; run NTP there"
    return [Finding(host, "clock", text, is_fatal=False)]


# -- pairs -----------------------------------------------------------------------------------------------------------


class Pairs:
    """Whether every host can connect to every other. ``addresses``: where each is reached, empty if unknown. What is
    said with another ``nonce``, or by a host that is not of them (any more), is of another round, and passed over.
    """

    def __init__(self, addresses: Mapping[str, str], nonce: str) -> None:
        self._addresses = dict(addresses)
        self._nonce = nonce
        self._listening: dict[str, wire.ProbePortOpened | None] = dict.fromkeys(addresses)
        self._reached: dict[str, dict[str, str]] = {}

    @property
    def is_done(self) -> bool:
        return not self.silent

    @property
    def silent(self) -> list[str]:
        """Who has something left to say: where it listens, or, once all do, whom it reached."""
        said = self._reached if all(self._listening.values()) else [h for h, here in self._listening.items() if here]
        return [host for host in self._listening if host not in said]

    def begin(self) -> dict[str, wire.Message]:
        """What to say to whom."""
        return {
            host: wire.OpenProbePort(address=address, nonce=self._nonce, peer="" if address else self._other(host))
            for host, address in self._addresses.items()
        }

    def _other(self, host: str) -> str:
        return next((address for name, address in self._addresses.items() if address and name != host), "")

    def heard(self, host: str, message: wire.ProbePortOpened | wire.ProbeResult) -> dict[str, wire.Message]:
        """What to say to whom now."""
        if message.nonce != self._nonce or host not in self._listening:
            return {}
        if isinstance(message, wire.ProbeResult):
            self._reached[host] = message.failed
            return {}
        self._listening[host] = message
        return self._calls() if all(self._listening.values()) else {}

    def lost(self, host: str) -> dict[str, wire.Message]:
        """Do not wait for this one. What to say to whom now."""
        was_waited_for = self._listening.pop(host, self) is None
        self._addresses.pop(host, None)
        return self._calls() if was_waited_for and all(self._listening.values()) else {}

    def _calls(self) -> dict[str, wire.Message]:
        where = {host: (said.address, said.port) for host, said in self._listening.items() if said and said.port}
        return {
            host: wire.ProbePeers(peers={name: to for name, to in where.items() if name != host}, nonce=self._nonce)
            for host in self._listening
        }

    def findings(self) -> list[Finding]:
        """One for each host that others cannot connect to."""
        found = [
            Finding(host, "peers", f"it has no address for the other hosts: {said.failed}; name it by such a one")
            for host, said in self._listening.items()
            if said is not None and said.failed is not None
        ]
        callers: dict[tuple[str, str], list[str]] = {}
        for caller, failed in self._reached.items():
            for host, why in failed.items():
                if host in self._listening:
                    callers.setdefault((host, why), []).append(caller)
        found += [self._blocked(host, why, sorted(names)) for (host, why), names in sorted(callers.items())]
        return found

    def _blocked(self, host: str, why: str, callers: Sequence[str]) -> Finding:
        said = self._listening[host]
        where = f"{said.address} ({said.interface})" if said else ""
        text = (
            f"{_listed(callers)} cannot connect to it at {where}: {why}; let TCP through between the hosts, on all "
            "ports, or name them by addresses of a network where it is"
        )
        return Finding(host, "peers", text)


def _listed(names: Sequence[str], most: int = 8) -> str:
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} others" if len(names) > most else shown


# -- a launch --------------------------------------------------------------------------------------------------------


class LaunchChecks:
    """What can be found out while the workers of a launch import, so that it costs nothing: versions, storage, pairs.

    own: versions on this machine. storage: the run directory; ``probe_file`` is a file in it with the run's id. nonce:
    of the pairs, see :class:`Pairs`.
    """

    def __init__(
        self,
        request: RunRequest,
        plan: WorldPlan,
        *,
        own: Mapping[str, str | None],
        storage: str,
        probe_file: str,
        nonce: str,
    ) -> None:
        self._request = request
        self._own = own
        self._storage = storage
        self._probe_file = probe_file
        self._hosts = list(plan.hosts)
        pairs = {} if plan.shares_network else dict(zip(plan.hosts, plan.addresses, strict=True))
        self._pairs = Pairs(pairs, nonce)
        self._pairs_matter = _meets(request)
        self._inspected: set[str] = set()

    def begin(self) -> list[tuple[str, wire.Message]]:
        """What to say to whom."""
        said: list[tuple[str, wire.Message]] = list(self._pairs.begin().items())
        return [*said, *((host, self._inspect(host)) for host in self._hosts)]

    def _inspect(self, host: str) -> wire.InspectHost:
        order = self._request.hosts[host]
        return wire.InspectHost(
            directory=order.directory,
            sys_path=list(order.sys_path),
            packages=list(self._own),
            storage=self._storage,
            probe_file=self._probe_file,
            nonce=self._request.run_id,
        )

    @property
    def is_done(self) -> bool:
        """Whether all hosts have said all."""
        return self._pairs.is_done and self._inspected.issuperset(self._hosts)

    def heard(self, host: str, message: wire.Message) -> tuple[Iterable[tuple[str, wire.Message]], list[Finding]]:
        """What to say to whom now, and what is wrong."""
        match message:
            case wire.InspectionResult():
                self._inspected.add(host)
                versions = version_findings(host, message.versions, self._own)
                return (), [*versions, *storage_findings(host, message, self._storage)]
            case wire.ProbePortOpened() | wire.ProbeResult():
                said = self._pairs.heard(host, message)
                return said.items(), self._blocked() if self._pairs.is_done else []
            case _:
                return (), []

    def lost(self, host: str) -> Iterable[tuple[str, wire.Message]]:
        """Do not wait for this one. What to say to whom now."""
        if host in self._hosts:
            self._hosts.remove(host)
        return self._pairs.lost(host).items()

    def late(self, after_s: float) -> list[Finding]:
        """Hosts that have not said within this time what they find."""
        text = f"it could not look at the storage {self._storage} within {after_s:g} s: does it hang there?"
        return [Finding(host, "storage", text, is_fatal=False) for host in self._hosts if host not in self._inspected]

    def _blocked(self) -> list[Finding]:
        found = self._pairs.findings()
        return [Finding(f.host, f.about, f.text, is_fatal=f.is_fatal and self._pairs_matter) for f in found]


def _meets(request: RunRequest) -> bool:
    """Whether the ranks are known to talk over the addresses that we try: not without a framework, nor where the user
    has named another network.
    """
    is_named = any(_NETWORK_VARIABLES & order.environment.keys() for order in request.hosts.values())
    return bool(request.backend.framework) and not is_named
