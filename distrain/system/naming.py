"""How ranks, hosts and signals are named in texts. Runs in: every process."""

from __future__ import annotations

import signal
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

_MOST_HOSTS_NAMED = 8
_KNOWN_SIGNALS = {int(number) for number in signal.Signals}


def signal_in_words(number: int) -> str:
    """Return ``SIGKILL (9)``; real-time signals have no name."""
    return f"{signal.Signals(number).name} ({number})" if number in _KNOWN_SIGNALS else f"signal {number}"


def stopped_by(reason: str) -> str:
    """Return the reason of a stop as users know it: most send SIGINT by Ctrl-C."""
    return "Ctrl-C" if reason == "SIGINT" else reason


def name_ranks(ranks: Collection[int]) -> str:
    """Return ``rank 3`` or ``ranks 0, 2-5``."""
    return ("rank " if len(ranks) == 1 else "ranks ") + rank_list(ranks)


def count_ranks(ranks: Collection[int]) -> str:
    """Return ``rank 3`` or ``5 ranks (0, 2-5)``."""
    return f"rank {rank_list(ranks)}" if len(ranks) == 1 else f"{len(ranks)} ranks ({rank_list(ranks)})"


def ranks_have(ranks: Collection[int]) -> str:
    """Return ``rank 3 has`` or ``ranks 0, 2-5 have``."""
    return f"{name_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'}"


def name_hosts(hosts: Collection[str]) -> str:
    """Return the names of the hosts, or of the first ones and the number of the others."""
    shown = ", ".join(islice(hosts, _MOST_HOSTS_NAMED))
    others = len(hosts) - _MOST_HOSTS_NAMED
    return f"{shown} and {others:,} others" if others > 0 else shown


def on_host(host: str) -> str:
    """Return `` on beta``, or nothing for this machine."""
    return "" if host == "localhost" else f" on {host}"


def rank_list(ranks: Iterable[int]) -> str:
    """Return ``0, 2-5``."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
