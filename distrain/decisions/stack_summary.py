"""Stacks of all ranks, as faulthandler wrote them -> who is where, in a few lines. Runs in: coordinator, worker.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distrain.decisions.failures import rank_list

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
LIBRARY_FILE = re.compile(r"/(site|dist)-packages/|/lib(64)?/python\d|^<")
_BOOTSTRAP = re.compile(r"^<|/runpy\.py$")
_WRAPPERS = re.compile(r"^(wrapper|inner|_fn|__call__|_?wrapped\w*|_call_impl|decorate_context|<\w+>)$")
_COLLECTIVES = re.compile(r"/torch/distributed/distributed_c10d\.py$")
_BOTTOM = "run_worker"
_PHASES = {
    "_load": "loading train_func",
    "setup": "setting up the process group",
    "_failure": "handling an exception of its own",
    "_let_go": "at the end of train_func",
    "_exit": "at the end of train_func",
}
"""What our functions are doing when no line of the user is running."""
_CRASH = "Fatal Python error: "
_LINES_QUOTED = 10
_NATIVE_REASONS = [
    re.compile(pattern)
    for pattern in (
        r"Watchdog caught (?!exception).*",
        r"(?<=attempting to dump debug info, due to ).*",
        r"NCCL error: .*",
        r"(?<=what\(\):).*",
    )
]
"""How native code says why it aborts, the most telling first: NCCL's watchdog, NCCL, any C++ exception."""
_NATIVE_ABORT = re.compile(
    r"Watchdog caught|dump debug info, due to|terminate called|^\s*what\(\):|NCCL error: |\bnccl[A-Z]\w+Error: "
)
_NATIVE_FRAME = re.compile(r"^frame #\d+: ")


@dataclass(frozen=True, slots=True)
class _Frame:
    file: str
    line: int
    function: str

    @property
    def folder(self) -> str:
        return self.file.rpartition("/")[0]

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line}"


def grouped(stacks: Mapping[int, str], *, silent: Iterable[int] = (), finished: Iterable[int] = ()) -> list[str]:
    """One line for each place where ranks are, most ranks first; then who did not answer, and who has finished.

    stacks: rank -> the text of faulthandler, of all threads. silent: ranks that did not answer.
    """
    places = sorted(_by_place(stacks).items(), key=lambda item: -len(item[1]))
    lines = [f"{_ranks(ranks)} {where}" for where, ranks in places]
    if silent := sorted(silent):
        lines.append(f"{_ranks(silent)} did not answer: stopped (SIGSTOP), waiting in the kernel, or very busy")
    if finished := sorted(finished):
        lines.append(f"{_ranks(finished)} finished train_func")
    return lines


def suspects(stacks: Mapping[int, str], *, silent: Iterable[int] = ()) -> list[int]:
    """Whom the others may be waiting for: who did not answer, and who is not where most are; all, if that is nobody."""
    places = _by_place(stacks)
    most = max(map(len, places.values()), default=0)
    apart = [rank for ranks in places.values() if len(ranks) < most for rank in ranks]
    return sorted({*silent, *apart}) or sorted(stacks)


def mismatched(stacks: Mapping[int, str]) -> list[str]:
    """Return one line for each group of ranks if all wait in collectives of ``torch.distributed`` that do not match,
    and nothing otherwise.

    Collectives do not match if ranks are at different ones, or if a rank has two at a time, from two threads.
    """
    waiting = {rank: _collectives(text) for rank, text in sorted(stacks.items())}
    if not all(waiting.values()) or (len({*waiting.values()}) == 1 and all(len(w) == 2 for w in waiting.values())):
        return []
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, found in waiting.items():
        groups.setdefault(found, []).append(rank)
    return [
        f"{_ranks(ranks)} {where}: {' and, in another thread, '.join(names)}"
        for (where, *names), ranks in groups.items()
    ]


def _collectives(text: str) -> tuple[str, ...]:
    """Return the place of the main thread, its collective, and those of other threads; nothing if it is in none."""
    main = _main_thread(text)
    others = [frames for frames in _threads(text) if frames != main]
    names = [frames[0].function for frames in (main, *others) if frames and _COLLECTIVES.search(frames[0].file)]
    return (place(text), *names) if main and _COLLECTIVES.search(main[0].file) else ()


def _by_place(stacks: Mapping[int, str]) -> dict[str, list[int]]:
    places: dict[str, list[int]] = {}
    for rank, text in sorted(stacks.items()):
        places.setdefault(place(text), []).append(rank)
    return places


def place(text: str) -> str:
    """Where the main thread of a worker is: ``in all_reduce at train.py:88``: the user's innermost line, and what it
    has called, wrappers aside.
    """
    frames = _main_thread(text)
    if not frames:
        return "is somewhere without a Python frame"
    ours = _ours(frames)
    called = ""
    for frame in frames:
        if frame not in ours and not LIBRARY_FILE.search(frame.file):
            return f"in {called} at {frame}" if called else f"in {frame.function} at {frame}"
        if not _WRAPPERS.match(frame.function):
            called = frame.function
    phases = [_PHASES[frame.function] for frame in frames if frame in ours and frame.function in _PHASES]
    return phases[-1] if phases else f"in {frames[0].function} at {frames[0]}"


def native_reason(lines: Sequence[str]) -> str:
    """Return why native code aborted, as the rank's last lines of output tell it, or an empty string."""
    for pattern in _NATIVE_REASONS:
        for line in reversed(lines):
            if found := pattern.search(line):
                return found[0].strip()
    return ""


def last_words(lines: Sequence[str]) -> list[str]:
    """Return the lines of a rank's output that a failure screen quotes, without native frames.

    These are the last lines. If faulthandler has written where the interpreter crashed, they are that, without our own
    frames, and before it what native code said when it aborted.
    """
    start = max((n for n, line in enumerate(lines) if line.startswith(_CRASH)), default=None)
    if start is None:
        return [line for line in lines if not _NATIVE_FRAME.match(line)][-_LINES_QUOTED:]
    said = [line for line in lines[:start] if _NATIVE_ABORT.search(line)][-_LINES_QUOTED // 2 :]
    frames = _main_thread("\n".join(lines[start:]))
    ours = _ours(frames)
    theirs = [frame for frame in frames if frame not in ours and not _BOOTSTRAP.search(frame.file)]
    return [*said, lines[start], *(f'  File "{f.file}", line {f.line} in {f.function}' for f in theirs[:_LINES_QUOTED])]


def _ours(frames: Sequence[_Frame]) -> list[_Frame]:
    """The frames of distrain, which is where the bottom of a worker is."""
    worker = next((frame.folder for frame in frames if frame.function == _BOTTOM), None)
    root = worker and worker.rpartition("/")[0]
    return [f for f in frames if root is not None and (f.folder == root or f.folder.startswith(f"{root}/"))]


def _main_thread(text: str) -> list[_Frame]:
    """The thread that ran us; the one that took the signal, if none did."""
    threads = _threads(text)
    for frames in threads:
        if any(frame.function == _BOTTOM for frame in frames):
            return frames
    return threads[-1] if threads else []


def _threads(text: str) -> list[list[_Frame]]:
    return [_frames(part) for part in re.split(r"^(?=Thread |Current thread )", text, flags=re.MULTILINE) if part]


def _frames(text: str) -> list[_Frame]:
    """Innermost first."""
    found = (_FRAME.match(line) for line in text.splitlines())
    return [_Frame(match["file"], int(match["line"]), match["function"]) for match in found if match]


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks ({rank_list(ranks)})"
