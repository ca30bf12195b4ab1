"""Files for hosts that do not share them, and files from there. Runs in: coordinator.

Every other machine is asked if it sees the user's files and the storage. What it lacks is copied to it, and its
checkpoints are fetched from it, by a mover (:mod:`distrain.transfer.mover`): one process for each such host, with a
connection of its own. So no message waits for data.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from distrain import wire
from distrain.decisions import events
from distrain.decisions.checkpoints.actions import Store
from distrain.decisions.hearing import does, hears
from distrain.errors import LaunchError
from distrain.system.log import say, warn, warn_once
from distrain.system.text import count, is_full_disk, name_hosts, size
from distrain.transfer.order_link import OrderLink
from distrain.wire.shipped_file import ShippedFile

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from distrain.coordinator.ranks.port import Ranks
    from distrain.coordinator.store.run_store import RunStore
    from distrain.system.background import Background
    from distrain.system.loop import Loop
    from distrain.transfer.project.project import Project

_MOST_TRIES = 3
"""Deliveries of the project that may fail before the host does."""
_SLOW_S = 20.0
_PATIENCE_S = 300.0
"""Seconds for which the start waits for the answer of a host, whose agent is alive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipping:
    """The question to the hosts of a run, and the user's project.

    question: has everything but the project's files.
    find_project: finds the project as it is now; raises LaunchError.
    takes_project: the hosts whose workers use the project; the others have files of their own.
    fetch_limit: the largest size, in bytes, of other files that come back from each host.
    """

    question: wire.SetUpHost
    project: Project | None = None
    find_project: Callable[[], Project | None] = lambda: None
    takes_project: Collection[str] = ()
    fetch_limit: int = 0

    def for_run(self, store: RunStore, run_id: str) -> Shipping:
        """Add the storage of a run, and the name of its directory in the caches of the hosts."""
        digest = hashlib.sha256(f"{platform.node()} {store.location}".encode(errors="backslashreplace")).hexdigest()[:8]
        place = f"{re.sub(r'[^A-Za-z0-9_-]', '_', store.location.name)[:60]}-{digest}"
        question = replace(self.question, place=place)
        if not store.is_remote:
            root, probe = str(store.paths.root), str(store.paths.manifest)
            question = replace(question, storage=root, probe_file=probe, nonce=run_id)
        return replace(self, question=question)


@dataclass(slots=True)
class _Host:
    """The state of one host.

    then: called once it is set up. question: the latest one. deliveries: the number of those under way.
    """

    then: list[Callable[[], None]] = field(default_factory=list)
    question: wire.SetUpHost | None = None
    open_questions: int = 0
    is_set_up: bool = False
    tries: int = 0
    mover: OrderLink | None = None
    deliveries: int = 0


@dataclass(eq=False)
class HostFiles:
    """The other machines of a run: what they see, and what goes there and comes back.

    receive: gets the answers to uploads, with the host. refuse: gets a host that cannot be set up, and why.
    """

    loop: Loop
    background: Background
    shipping: Shipping
    ranks: Ranks
    flags: Sequence[str]
    receive: Callable[[str, wire.Message], None]
    refuse: Callable[[str, str], None]

    def __post_init__(self) -> None:
        self._project = self.shipping.project
        self._hosts: dict[str, _Host] = {}
        self._waiting: set[str] = set()
        """Hosts that are asked when a thread has found the project as it is now."""
        self._announced: set[str] = set()
        self._answers: dict[str, wire.HostSetUp] = {}
        """The last answer of each host. The host may be lost by now, and about to be asked again."""
        self._lost: set[str] = set()
        """Hosts that are lost, and have not been set up again."""

    # -- setting up hosts -----------------------------------------------------------------------------------------

    def set_up(self, host: str, then: Callable[[], None]) -> None:
        """Ask a host what it lacks, and copy that to it. Call ``then`` when its workers can start."""
        self._hosts.setdefault(host, _Host()).then.append(then)
        if self._waiting and host in self.shipping.takes_project:
            self._waiting.add(host)
        else:
            self._ask(host)

    def refresh(self, hosts: Iterable[str]) -> None:
        """Copy what has changed in the project since the last attempt."""
        known = {host for host in hosts if host in self._hosts and host in self.shipping.takes_project}
        for host in known:
            self._hosts[host].is_set_up = False
        self._search(known)

    def _search(self, hosts: set[str]) -> None:
        """Have a thread find the project as it is now, then ask hosts."""
        is_searching, self._waiting = bool(self._waiting), self._waiting | hosts
        if hosts and not is_searching:
            self.background.do(partial(_found_by, self.shipping.find_project), self._on_found)

    def _on_found(self, found: Project | str | None) -> None:
        if isinstance(found, str):
            warn(f"the hosts keep the code of the last attempt: {found}")
        else:
            self._project = found
        waiting, self._waiting = self._waiting, set()
        for host in sorted(waiting & self._hosts.keys()):
            self._ask(host)

    def _ask(self, host: str) -> None:
        state = self._hosts[host]
        state.is_set_up, state.question = False, self.question_for(host)
        state.open_questions += 1
        self.ranks.send(host, state.question)
        if not self.shipping.question.requirements:  # else it says itself how far it is with the environment
            self.loop.call_in(f"set up {host}", _SLOW_S, partial(self._on_slow, host))

    def _on_slow(self, host: str) -> None:
        warn(f"{host} has not answered for {_SLOW_S:g} s: does a file system hang there?")
        why = f"it has not answered for {_PATIENCE_S:g} s, so a file system probably hangs there"
        self.loop.call_in(f"set up {host}", _PATIENCE_S - _SLOW_S, lambda: self.refuse(host, why))

    def question_for(self, host: str) -> wire.SetUpHost:
        """Return what a host is asked."""
        question = self.shipping.question
        name = hashlib.sha256(host.encode()).hexdigest()[:4]  # two hosts may be one machine, or share a home directory
        question = replace(question, place=f"{question.place}-{name}")
        if self._project is None or host not in self.shipping.takes_project:
            return question
        run = f"{question.storage}/"  # its files change
        files: list[tuple[str, int, int, int, int]] = [
            file for file in self._project.files if not (question.storage and file.path.startswith(run))
        ]
        return replace(question, files=files, folders=[*self._project.folders])

    def imports(self) -> list[str]:
        """Return the modules that the user's code imports from packages."""
        return self._project.third_party_imports() if self._project is not None else []

    def is_busy(self, hosts: Iterable[str]) -> bool:
        """Return whether workers of these hosts have to wait for files."""
        return bool(self._waiting) or any(host in self._hosts and not self._hosts[host].is_set_up for host in hosts)

    @hears(wire.HostSetUp)
    def on_set_up(self, host: str, answer: wire.HostSetUp) -> None:
        """Handle the answer of a host."""
        state = self._hosts[host]
        state.open_questions -= 1
        if not state.open_questions:
            self.loop.cancel(f"set up {host}")
        if answer.failed is not None:
            self.refuse(host, answer.failed + full_cache_hint(answer.failed))
        elif state.open_questions:  # only the last answer counts: the host was asked again meanwhile
            return
        elif answer.wanted:
            self._bring(host, state, answer)
        else:
            state.is_set_up, state.tries, self._answers[host] = True, 0, answer
            self._lost.discard(host)
            waiting, state.then = state.then, []
            for then in waiting:
                then()

    def _bring(self, host: str, state: _Host, answer: wire.HostSetUp) -> None:
        """Copy the project to the host."""
        assert state.question is not None
        files = state.question.files
        state.tries += 1
        if state.tries == 1:
            total = size(sum(ShippedFile(*fields).size for fields in files))
            say(f"copying {count(len(files), 'file')} ({total}) of your code to {host}")
            for note in self._project.notes if self._project else ():
                warn_once(note)
        folders = [folder.lstrip("/") for folder in state.question.folders]
        order = wire.Deliver(folder=answer.wanted, root="/", files=files, staging=answer.checkpoints, folders=folders)
        self.deliver(host, order, partial(self._on_brought, host, state))

    def _on_brought(self, host: str, state: _Host, failed: str | None) -> None:
        if failed is None:
            self._ask(host)
        elif is_full_disk(failed) or state.tries >= _MOST_TRIES:
            self.refuse(host, f"your code cannot be copied there: {failed}{full_cache_hint(failed)}")
        else:  # perhaps files have changed meanwhile
            self._search({host})

    # -- the storage ----------------------------------------------------------------------------------------------

    @does(events.WorkersStart)
    def announce(self, starts: events.WorkersStart) -> None:
        """Say once which hosts do not see the storage."""
        names = [host for host in starts.plan.hosts if self.lacks_storage(host) and host not in self._announced]
        self._announced.update(names)
        if names:
            see, their = ("does", "its") if len(names) == 1 else ("do", "their")
            problem = self._answers[names[0]].storage_problem
            say(
                f"{name_hosts(names)} {see} not see the run directory, which {problem}; {their} checkpoints come here "
                "over the connection"
            )

    def lacks_storage(self, host: str) -> bool:
        """Return whether a host does not see the storage, as far as is known."""
        return host in self._answers and self._answers[host].storage_problem is not None

    def checkpoints_on(self, host: str) -> str:
        """Return the directory of a host for checkpoints that are copied there."""
        return self._answers[host].checkpoints

    # -- the movers -----------------------------------------------------------------------------------------------

    @does(Store)
    def upload(self, asked: Store) -> None:
        """Have files of a rank stored: by the uploader of the host, or from here if that does not see the storage."""
        if self.lacks_storage(asked.host):
            self._mover(asked.host).order(asked.order, partial(self.receive, asked.host))
        else:
            self.ranks.send(asked.host, asked.order)

    def deliver(self, host: str, order: wire.Deliver | wire.BringBack, then: Callable[[str | None], None]) -> None:
        """Copy files to a host, or back. Call ``then`` with None, or with the reason why they could not be copied."""
        state = self._hosts[host]
        state.deliveries += 1

        def done(answer: wire.OrderDone) -> None:
            state.deliveries -= 1
            if answer.text:
                say(f"{host}: {answer.text}")
            then(answer.failed)

        self._mover(host).order(order, done)

    def bring_back(self, host: str) -> None:
        """Begin to copy what ranks have written into get_trial_dir() to the run directory, if the host lacks that."""
        if host in self._lost or not self.lacks_storage(host):
            return
        folder, run, limit = self._answers[host].trial_dir, self.shipping.question.storage, self.shipping.fetch_limit
        order = wire.BringBack(folder=folder, run=run, host=host.replace("/", "_"), limit_bytes=limit)
        self.deliver(host, order, partial(_warn_of_left_files, host, folder))

    def warn_of_lost(self) -> None:
        """Say which hosts that have had ranks are lost, so that their files cannot be fetched."""
        for host in self._lost & self._announced:
            _warn_of_left_files(host, self._answers[host].trial_dir, "the host is lost")

    @property
    def is_delivering(self) -> bool:
        """True while files are on their way to or from a host that is not lost."""
        return any(state.deliveries for state in self._hosts.values())

    def drop_checkpoint(self, host: str, folder: str) -> None:
        """Have a host delete a checkpoint that was copied there."""
        self.ranks.send(host, wire.DeleteCheckpoints(directories=[folder]))

    def _mover(self, host: str) -> OrderLink:
        state = self._hosts.setdefault(host, _Host())
        if state.mover is None:
            hear, argv = partial(self.receive, host), json.dumps(self.ranks.stream_argv(host))
            state.mover = OrderLink(self.loop, hear, "mover", argv, flags=self.flags)
        return state.mover

    @does(events.HostLost)
    def lost(self, lost: events.HostLost) -> None:
        """Forget a host that was lost, and end its transfers."""
        self._forget(lost.host)

    def _forget(self, host: str) -> None:
        self.loop.cancel(f"set up {host}")
        self._lost.add(host)
        state = self._hosts.pop(host, None)
        if state is not None and state.mover is not None:
            state.mover.close()

    def end_attempt(self) -> None:
        """End what is still fetched for an attempt that is over."""
        for state in self._hosts.values():
            if state.mover is not None and not state.mover.is_idle and not state.deliveries:
                state.mover.close()
                state.mover = None

    def close(self) -> None:
        """End all movers."""
        for host in list(self._hosts):
            self._forget(host)


def _found_by(find: Callable[[], Project | None]) -> Project | str | None:
    """Find the project. The result is a text if that is not possible."""
    try:
        return find()
    except LaunchError as error:
        return str(error)


def _warn_of_left_files(host: str, folder: str, why: str | None) -> None:
    if why is not None:
        warn(
            f"files written by ranks are still on {host}, in {folder}: {why}. Copy them yourself, or they are copied "
            f"when the run next uses {host}"
        )


def full_cache_hint(text: str) -> str:
    """Return advice to append to an error of a host's cache with this text, or an empty string."""
    cure = "; free some space there, or name another directory with env.DISTRAIN_CACHE= in the hostfile"
    return cure if is_full_disk(text) else ""
