"""The failures of ranks: who is to blame, and the text that shows them to the user. Runs in: coordinator.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import math
import re
import signal
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from distrain.errors import RankFailure
from distrain.system.naming import count_ranks, name_hosts, name_ranks, signal_in_words
from distrain.system.peer_errors import CONNECTION_GONE, blames_peer
from distrain.system.text import LIBRARY_FILE, count

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from distrain import wire

_SIGNAL_HINTS: dict[int, str] = {
    signal.SIGKILL: "often the kernel does it, when the host is out of memory",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGBUS: "a crash in native code, or /dev/shm is full",
    signal.SIGABRT: "native code gave up; its message, if it had one, is in the log",
}
_STAGES = {"import": "unpickling it and importing what it needs", "setup": "setting up the process group"}
_MOST_WHOLE = 15
"""Lines of a traceback that fit a terminal of 24 rows, with what is above and below them."""
_FRAME = re.compile(r'^ *File "(?P<file>.*)", line \d+')
_IN_FRAME = ("    ", "  [Previous line")
_LIBRARY = re.compile(r"/.*/(?:site-packages|dist-packages|python\d[^/]*)/([\w-]+)(.*)")

# -- who has failed --------------------------------------------------------------------------------------------------


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
    """Return the failure of a rank, or None if it finished its work or distrain ended it.

    order: its position among the failures of the attempt.
    entered: the rank had entered train_func.
    reason: why its native code aborted, if its output contains a reason.
    """
    if outcome is not None and outcome.ok:
        return None  # whatever happens afterwards: gloo may abort when the interpreter exits
    if outcome is not None:
        return RankFailure(
            rank=rank,
            host=host,
            order=order,
            summary=_summary(outcome, exited),
            traceback=outcome.traceback,
            exit_code=outcome.exit_code,
            consequence=outcome.blames_peer,
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
        consequence=exited.signal == signal.SIGABRT and blames_peer(reason),
    )


def hang_failures(hosts: Mapping[int, str], suspects: Sequence[int], *, after_s: float) -> list[RankFailure]:
    """Return a failure for each rank that had not finished, the suspects first.

    hosts: the host of each of these ranks.
    suspects: ranks that the others may have waited for; all ranks if it is empty.
    """
    blamed = set(suspects or hosts)
    order = sorted(hosts, key=lambda rank: (rank not in blamed, rank))
    return [
        RankFailure(
            rank=rank,
            host=hosts[rank],
            order=number,
            summary=f"made no progress for {after_s:g} s",
            traceback="",
            exit_code=1,
            consequence=rank not in blamed,
            kind="hang",
        )
        for number, rank in enumerate(order)
    ]


def culprit_first(failures: Iterable[RankFailure]) -> list[RankFailure]:
    """Sort failures: those with a cause of their own before consequences, each in order of arrival.

    An error about any connection becomes a consequence if another rank had failed by itself before, or has died: a
    death is noticed later than the connections that it breaks.
    """
    found = list(failures)
    own = [one for one in found if not one.consequence and not _is_about_connection(one)]
    first = min((one.order for one in own), default=math.inf)
    has_death = any(one.kind != "exception" for one in own)
    judged = [
        replace(one, consequence=True) if _is_about_connection(one) and (has_death or first < one.order) else one
        for one in found
    ]
    return sorted(judged, key=lambda failure: (failure.consequence, failure.order))


def _is_about_connection(failure: RankFailure) -> bool:
    return failure.kind == "exception" and bool(CONNECTION_GONE.search(failure.summary))


def _summary(outcome: wire.Outcome, exited: wire.Exited | None) -> str:
    summary = outcome.error or "unknown error"
    if exited is not None and exited.oom_limit_bytes:  # the victim is often a DataLoader worker
        summary = f"{summary} (meanwhile, the kernel killed a process for lack of memory: {_limit(exited)})"
    if outcome.stage != "run":
        summary = f"{summary} (before train_func, while {_STAGES.get(outcome.stage, outcome.stage)})"
    return summary


def _kind(exited: wire.Exited) -> str:
    if exited.lost is not None:
        return "lost"
    if exited.oom_limit_bytes and exited.signal == signal.SIGKILL:
        return "memory"
    return "signal" if exited.signal is not None else "exit"


def _death(exited: wire.Exited, *, entered: bool, reason: str) -> str:
    """Describe how a process ended without an outcome."""
    memory = f"; peak memory {exited.max_rss_bytes / 2**20:.0f} MiB" if exited.max_rss_bytes else ""
    when = "during training" if entered else "before it entered train_func"
    if exited.lost is not None:
        return f"lost: {exited.lost}"
    if _kind(exited) == "memory":
        return f"was killed by the kernel for lack of memory {when}: {_limit(exited)}{memory}"
    if exited.signal is not None:
        hint = (exited.signal == signal.SIGABRT and reason) or _SIGNAL_HINTS.get(exited.signal)
        if exited.signal == signal.SIGKILL and exited.oom_limit_bytes is not None:
            hint = "perhaps the kernel did it, which killed processes for lack of memory on this host"
        killed = f"was killed by {signal_in_words(exited.signal)} {when}, not by distrain"
        return f"{killed}{f': {hint}' if hint else ''}{memory}"
    if reason.startswith("libgomp: "):
        return f"exited with code {exited.exit_code} {when}: {reason}; raise ulimit -u or pids.max{memory}"
    return f"exited with code {exited.exit_code} {when}, without an exception: os._exit() or os.exec*()?{memory}"


def _limit(exited: wire.Exited) -> str:
    return f"the cgroup allows {(exited.oom_limit_bytes or 0) / 2**20:.0f} MiB for all processes in it"


# -- the failure screen ----------------------------------------------------------------------------------------------


def failure_screen(
    failures: Sequence[RankFailure],
    *,
    stopped: Sequence[int],
    last_lines: Mapping[int, Sequence[str]],
    finished: Sequence[int] = (),
    where: Sequence[str] = (),
) -> str:
    """Return one screen of plain text, the culprit first.

    The culprit is shown with its traceback, or with its last output if it has none. Equal failures are grouped.

    stopped: ranks that distrain stopped.
    finished: ranks that had finished their work.
    where: lines that describe what the stopped ranks were doing.
    """
    lines: list[str] = []
    if all(failure.consequence for failure in failures):
        lines += _unknown_culprit(stopped=stopped, finished=finished)
    for number, group in enumerate(_grouped(culprit_first(failures))):
        lines += _group_lines(group, last_lines, is_first=number == 0)
    if stopped:
        lines += _stopped_lines(stopped, where)
    return "\n".join(lines)


def _stopped_lines(stopped: Sequence[int], where: Sequence[str]) -> list[str]:
    """Name the ranks that distrain stopped, and what they were doing: in the same line if it was the same."""
    text = f"{name_ranks(stopped)} {'was' if len(stopped) == 1 else 'were'} stopped by distrain"
    together = f"{count_ranks(stopped)} in "
    if len(where) == 1 and where[0].startswith(together):
        return [f"{text}, in {where[0].removeprefix(together)}"]
    return [text, *(f"    {line}" for line in where)]


def _unknown_culprit(*, stopped: Sequence[int], finished: Sequence[int]) -> list[str]:
    """Describe who may be the culprit if all failures are consequences."""
    text = ""
    if finished:
        text = (
            f"{name_ranks(finished)} had finished train_func while other ranks still waited for "
            f"{'it' if len(finished) == 1 else 'them'}. Every rank must take part in every collective: do all have the "
            "same number of batches?"
        )
    elif stopped:
        text = (
            f"no rank is known to have failed by itself; the cause may lie with {name_ranks(stopped)}, stopped before "
            f"{'it' if len(stopped) == 1 else 'they'} could report an error"
        )
    return [text] if text else []


def _group_lines(group: Sequence[RankFailure], last_lines: Mapping[int, Sequence[str]], *, is_first: bool) -> list[str]:
    first = group[0]
    ranks, hosts = name_ranks([f.rank for f in group]), name_hosts(dict.fromkeys(f.host for f in group))
    differ = any(failure.summary != first.summary for failure in group)
    title = f"{ranks} on {hosts}: {first.summary}" + (f" (text of rank {first.rank}; others differ)" if differ else "")
    if first.consequence and not is_first:
        return [f"{_cut_line(title, 160)} (a consequence: a peer was gone)"]
    if first.traceback:
        traceback = [line for line in first.traceback.rstrip().splitlines() if line and not _is_long_underline(line)]
        return [title, *(f"  {_cut_line(line)}" for line in _cut_middle(_folded(traceback)))]
    if last_lines.get(first.rank):
        return [title, "  its last output:", *(f"    {_cut_line(line)}" for line in last_lines[first.rank])]
    return [title]


def _grouped(failures: Sequence[RankFailure]) -> list[list[RankFailure]]:
    """Group failures with the same text up to numbers and addresses. A group stands where its first failure does."""
    groups: dict[tuple[str, str], list[RankFailure]] = {}
    for failure in failures:
        key = (_masked(failure.summary), _masked(failure.traceback))
        groups.setdefault(key, []).append(failure)
    return list(groups.values())


def _masked(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+|\d+", "#", text)


def _is_long_underline(line: str, most: int = 100) -> bool:
    """Tell if a line is one of ``^^^`` that fills more than a row of most terminals, and so marks nothing there."""
    return len(line) > most and not line.strip(" ^~")


def _folded(traceback: list[str], most: int = _MOST_WHOLE) -> list[str]:
    """Return the lines of a traceback; of a long one, only the innermost of successive frames of each package.

    Those are without the marks (``^^^``) and the directories in front of the library, so that few lines wrap. A
    traceback without a frame of the user's stays whole. The log and error.json have all lines.
    """
    blocks: list[tuple[str, list[str]]] = []  # the file of a frame, and its lines; other lines have no file
    for line in traceback:
        if (frame := _FRAME.match(line)) or not (blocks and blocks[-1][0] and line.startswith(_IN_FRAME)):
            blocks.append((frame["file"] if frame else "", [line]))
        else:
            blocks[-1][1].append(line)
    if len(traceback) <= most or all(LIBRARY_FILE.search(file) for file, _ in blocks if file):
        return traceback
    lines: list[str] = []
    for is_library, run in groupby(blocks, key=lambda block: bool(LIBRARY_FILE.search(block[0]))):
        files, texts = zip(*run, strict=True)
        if not is_library:
            lines += [line for text in texts for line in text]
            continue
        libraries = [_LIBRARY.sub(r"\1", file) for file in files]
        innermost = {name: n for n, name in enumerate(libraries) if "-packages/" in files[n]}
        begin = 0
        for n in sorted({*innermost.values(), len(files) - 1}):
            if folded := libraries[begin:n]:
                lines.append(f"  ... {count(len(folded), 'frame')} in {', '.join(dict.fromkeys(folded))} ...")
            lines += [_LIBRARY.sub(r".../\1\2", line) for line in texts[n] if line.strip(" ^~")]
            begin = n + 1
    return lines


def _cut_middle(lines: list[str], most: int = 60) -> list[str]:
    """Return the lines, or the first and last ones if there are many. The log has all of them."""
    left_out = len(lines) - most
    if left_out <= 1:  # the line that counts them would take the place of the only one
        return lines
    return [*lines[: most // 3], f"... {left_out} lines left out ...", *lines[most // 3 + left_out :]]


def _cut_line(line: str, most: int = 500) -> str:
    note = f" ... {len(line) - most} characters left out ..."
    return line if len(line) <= most + len(note) else f"{line[:most]}{note}"
