"""Exit facts and outcomes of ranks -> who is to blame, and the screen that says so. Runs in: coordinator.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING

from distrain.errors import RankFailure

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from distrain import wire

# What survivors of a dead peer raise, from gloo, NCCL and the TCPStore (torch 2.4 to 2.15), and from TensorFlow (2.21).
_CONSEQUENCE = re.compile(
    r"connection (closed|reset|was closed)|closed by (remote )?peer|broken pipe|timed out waiting|wait timeout after|"
    r"collective operation timeout|operation timed out!|socket timeout|store.{0,40}timed out|"
    r"failed to pass monitoredbarrier|"
    r"recvvalue failed|sendbytes failed|remote process exited|ncclremoteerror|remote error detected|socket closed|"
    r"dump signal from another rank|"
    r"which goes first on this host, failed|"
    r"collective ops is aborted by|tasks are unhealthy \(stopped sending heartbeats\)",
    re.IGNORECASE,
)

_SIGNAL_HINTS: dict[int, str] = {
    signal.SIGKILL: "often the kernel running out of memory, or somebody's kill -9",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGBUS: "a crash in native code, or /dev/shm is full",
    signal.SIGABRT: "native code gave up; its message, if it had one, is in the log",
}


def failure_of(
    rank: int,
    host: str,
    order: int,
    *,
    outcome: wire.Outcome | None,
    exited: wire.Exited | None,
    entered: bool = True,
    reason: str = "",
) -> RankFailure | None:
    """The failure of a rank; None if it did its work, or if we ended it. ``entered``: it had got into train_func.
    ``reason``: why its native code aborted, if its output tells.
    """
    if outcome is not None:
        if outcome.ok:
            return None  # whatever the process did afterwards: gloo aborts at interpreter exit, for one
        summary = outcome.error or "unknown error"
        if exited is not None and exited.oom_limit_bytes:  # a DataLoader worker, as a rule
            summary = f"{summary} (meanwhile, the kernel killed a process for lack of memory: {_limit(exited)})"
        if outcome.stage != "run":
            summary = f"{summary} (before train_func, while {_STAGES.get(outcome.stage, outcome.stage)})"
        return RankFailure(
            rank=rank,
            host=host,
            order=order,
            summary=summary,
            traceback=outcome.traceback,
            exit_code=outcome.exit_code,
            consequence=bool(_CONSEQUENCE.search(_message(outcome))),
            max_rss_bytes=exited.max_rss_bytes if exited is not None else 0,
            payload=outcome.body,
        )
    if exited is None or exited.by_us:
        return None
    return RankFailure(
        rank=rank,
        host=host,
        order=order,
        summary=_death(exited, entered=entered, reason=reason),
        traceback="",
        kind=_kind(exited),
        signal=exited.signal,
        max_rss_bytes=exited.max_rss_bytes,
        exit_code=exited.exit_code or (128 + exited.signal if exited.signal else 1),
        consequence=exited.signal == signal.SIGABRT and bool(_CONSEQUENCE.search(reason)),
    )


def hang_failures(hosts: Mapping[int, str], suspects: Sequence[int], *, after_s: float) -> list[RankFailure]:
    """One for each rank that had not finished (``hosts``: its host), the suspects first."""
    suspects = suspects or list(hosts)
    order = sorted(hosts, key=lambda rank: (rank not in suspects, rank))
    return [
        RankFailure(
            rank=rank,
            host=hosts[rank],
            order=number,
            summary=f"made no progress for {after_s:g} s",
            traceback="",
            exit_code=1,
            consequence=rank not in suspects,
            kind="hang",
        )
        for number, rank in enumerate(order)
    ]


def _message(outcome: wire.Outcome) -> str:
    """The whole text of the exception, without the lines of code that lead to it."""
    first = (outcome.error or "").removesuffix(" ...")
    return outcome.traceback[max(outcome.traceback.rfind(first), 0) :] if first in outcome.traceback else first


_STAGES = {"import": "unpickling it and importing what it needs", "setup": "setting up the process group"}


def _kind(exited: wire.Exited) -> str:
    if exited.lost is not None:
        return "lost"
    if exited.oom_limit_bytes and exited.signal == signal.SIGKILL:
        return "memory"
    return "signal" if exited.signal is not None else "exit"


def _death(exited: wire.Exited, *, entered: bool, reason: str) -> str:
    memory = f" (peak memory {exited.max_rss_bytes / 2**20:.0f} MiB)" if exited.max_rss_bytes else ""
    when = "in the middle of the training" if entered else "before it got into train_func"
    if exited.lost is not None:
        return f"lost: {exited.lost}"
    if _kind(exited) == "memory":
        return f"was killed by the kernel for lack of memory {when}{memory}: {_limit(exited)}"
    if exited.signal is not None:
        hint = (exited.signal == signal.SIGABRT and reason) or _SIGNAL_HINTS.get(exited.signal)
        if exited.signal == signal.SIGKILL and exited.oom_limit_bytes is not None:
            hint = "perhaps by the kernel, which was killing for lack of memory on this host, or by somebody's kill -9"
        killed = f"was killed by {signal_in_words(exited.signal)} {when}, not sent by distrain{memory}"
        return f"{killed}: {hint}" if hint else killed
    return f"exited with code {exited.exit_code} {when}{memory}, without an exception: os._exit()?"


def _limit(exited: wire.Exited) -> str:
    return f"the cgroup allows {(exited.oom_limit_bytes or 0) / 2**20:.0f} MiB for all processes in it"


_KNOWN_SIGNALS = {int(number) for number in signal.Signals}


def signal_in_words(number: int) -> str:
    """``SIGKILL (9)``; real-time signals have no name."""
    return f"{signal.Signals(number).name} ({number})" if number in _KNOWN_SIGNALS else f"signal {number}"


def culprit_first(failures: Iterable[RankFailure]) -> list[RankFailure]:
    """Sorted: what happened by itself before what a dead peer explains, each in order of arrival."""
    return sorted(failures, key=lambda failure: (failure.consequence, failure.order))


def failure_screen(
    failures: Sequence[RankFailure],
    *,
    stopped: Sequence[int],
    last_lines: Mapping[int, Sequence[str]],
    finished: Sequence[int] = (),
    where: Sequence[str] = (),
) -> str:
    """One screen of plain text: the culprit with its traceback (or its last output, if it has none), equal failures
    grouped, then the others.

    finished: ranks that had done their work. where: the places at which the stopped ranks were.
    """
    groups = _grouped(culprit_first(failures))
    lines: list[str] = []
    if finished and all(failure.consequence for failure in failures):
        lines.append(
            f"{_title(finished)} had finished train_func when others still waited for "
            f"{'it' if len(finished) == 1 else 'them'}. Every rank must take part in every collective: do all have the "
            "same number of batches?"
        )
    elif stopped and all(failure.consequence for failure in failures):
        lines.append(
            f"no rank is known to have failed by itself; the cause may lie with {_title(stopped)}, stopped before "
            f"{'it' if len(stopped) == 1 else 'they'} could say so"
        )
    for number, group in enumerate(groups):
        first = group[0]
        title = (
            f"{_title([f.rank for f in group])} on {', '.join(dict.fromkeys(f.host for f in group))}: {first.summary}"
        )
        if first.consequence and number:
            lines.append(f"{_narrow(title, 160)} (a consequence: a peer had gone)")
            continue
        lines.append(title)
        if first.traceback:
            lines += [f"  {_narrow(line)}" for line in _cut(first.traceback.rstrip()).splitlines()]
        elif last_lines.get(first.rank):
            lines += ["  its last output:", *(f"    {_narrow(line)}" for line in last_lines[first.rank])]
    if stopped:
        lines.append(f"{_title(stopped)}: stopped by distrain")
        lines += [f"    {line}" for line in where]
    return "\n".join(lines)


def _grouped(failures: Sequence[RankFailure]) -> list[list[RankFailure]]:
    """Same text up to numbers and addresses: same group; the first failure of a group decides its place."""
    groups: dict[tuple[str, str], list[RankFailure]] = {}
    for failure in failures:
        key = (_masked(failure.summary), _masked(failure.traceback))
        groups.setdefault(key, []).append(failure)
    return list(groups.values())


def _masked(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+|\d+", "#", text)


def _cut(text: str, most: int = 60) -> str:
    """The whole text, or its first and last lines: the log has it all."""
    lines = text.splitlines()
    if len(lines) <= most:
        return text
    head, tail = most // 3, most - most // 3
    return "\n".join([*lines[:head], f"... {len(lines) - most} lines left out ...", *lines[-tail:]])


def _narrow(line: str, most: int = 500) -> str:
    return line if len(line) <= most else f"{line[:most]} ... {len(line) - most} characters left out ..."


def _title(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + rank_list(ranks)


def rank_list(ranks: Iterable[int]) -> str:
    """``0, 2-5``."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
