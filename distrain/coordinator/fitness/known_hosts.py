"""The memory of bad hosts: an observer that writes it. Runs in: coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distrain.api.observer import AttemptBegan, AttemptEnded, Observer, TroubleBegan
from distrain.storage.host_records import change_records

if TYPE_CHECKING:
    from distrain.api.config import RunContext
    from distrain.api.observer import Fact, RunBegan
    from distrain.decisions.run_status import RunStatus


def observers(context: RunContext, run: RunBegan, status: RunStatus) -> list[KnownHosts]:
    """Return the observer that remembers the hosts of a run, unless it trains in this process."""
    return [] if run.in_process else [KnownHosts(run.name)]


class KnownHosts(Observer):
    """Remembers hosts that were lost, whose GPUs have failed, or that were slow.

    Runs on a single host are left out: without it, the user has none.
    """

    name = "the memory of hosts"
    hears = (AttemptBegan, AttemptEnded, TroubleBegan)

    def __init__(self, run: str) -> None:
        self._run = run
        self._is_alone = True

    def hear(self, fact: Fact) -> None:
        match fact:
            case AttemptBegan(hosts=hosts):
                self._is_alone = len(set(hosts)) == 1
            case TroubleBegan(host, trouble) if trouble.kind == "host":
                self._note(host, "slow", trouble.text)
            case TroubleBegan(host, trouble) if trouble.kind == "GPU" and not trouble.problem.startswith("full "):
                self._note(host, "GPU", trouble.text)
            case AttemptEnded(failures=failures) if failures:
                for lost in {one.host: one for one in failures if one.lost}.values():
                    self._note(lost.host, "lost", lost.summary)

    def _note(self, host: str, what: str, text: str) -> None:
        if not self._is_alone:
            change_records(lambda known: known.add_trouble(host, what, text, self._run))
