"""The failures of ranks, on one screen of text. Runs in: coordinator.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import TYPE_CHECKING

from distrain.decisions.blame import BATCHES, culprit_first, finished_early, is_refusal
from distrain.system.text import LIBRARY_FILE, count, count_ranks, name_hosts, name_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distrain.errors import RankFailure

_MOST_WHOLE = 15
"""Lines of a traceback that fit a terminal of 24 rows, with what is above and below them."""
_FRAME = re.compile(r'^ *File "(?P<file>.*)", line \d+')
_IN_FRAME = ("    ", "  [Previous line")
_LIBRARY = re.compile(r"/.*/(?:site-packages|dist-packages|python\d[^/]*)/([\w-]+)(.*)")


def failure_screen(
    failures: Sequence[RankFailure],
    *,
    stopped: Sequence[int],
    last_lines: Mapping[int, Sequence[str]],
    finished: Sequence[int] = (),
    where: Sequence[str] = (),
    cure: str = BATCHES,
) -> str:
    """Return one screen of plain text, the culprit first.

    The culprit is shown with its traceback, or with its last output if it has none. Equal failures are grouped.

    stopped: ranks that distrain stopped.
    finished: ranks that had finished their work.
    where: lines that describe what the stopped ranks were doing.
    cure: what to do if no failure has a cause of its own.
    """
    lines: list[str] = []
    if early := finished_early(failures, finished):
        lines.append(f"{early}. {cure[:1].upper()}{cure[1:]}")
    elif stopped and all(failure.consequence for failure in failures):
        lines.append(
            f"no rank is known to have failed by itself; the cause may lie with {name_ranks(stopped)}, stopped before "
            f"{'it' if len(stopped) == 1 else 'they'} could report an error"
        )
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


def _group_lines(group: Sequence[RankFailure], last_lines: Mapping[int, Sequence[str]], *, is_first: bool) -> list[str]:
    first = group[0]
    ranks, hosts = name_ranks([f.rank for f in group]), name_hosts(dict.fromkeys(f.host for f in group))
    differ = any(failure.summary != first.summary for failure in group)
    title = f"{ranks} on {hosts}: {first.summary}" + (f" (text of rank {first.rank}; others differ)" if differ else "")
    if first.consequence and not is_first:
        return [f"{_cut_line(title, 160)} (a consequence: a peer was gone)"]
    if is_refusal(first):
        return [title]
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
