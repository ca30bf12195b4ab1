"""A summary of what all ranks are doing, from the stacks that faulthandler wrote. Runs in: coordinator, worker.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distrain.system.text import LIBRARY_FILE, count_ranks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_RAISED = re.compile(r'^ *File "(.*)", line (\d+), in ', re.MULTILINE)
_BOOTSTRAP = re.compile(r"^<|/runpy\.py$")
WRAPPERS = re.compile(r"^(wrapper|inner|_fn|__call__|_?wrapped\w*|_call_impl|decorate_context|<\w+>)$")
PRIVATE = re.compile(r"^_[^_]")
"""Functions of libraries that no line of the user's code calls: handlers of signals, which interrupt it."""
_BOTTOM = {"run_worker": "/worker", "_be_rank": "/coordinator/ranks"}
"""The outermost function of distrain in a worker, and in a process of the user that is a rank, with its package."""
PHASES = {
    "_load": "loading train_func",
    "setup": "setting up the process group",
    "_failure": "handling an exception of its own",
    "_disconnect_peers": "at the end of train_func",
    "exit_process": "running exit handlers",
}
"""By function of distrain: the phase of a worker that runs no line of the user's code."""
WHY_SILENT = "stopped (SIGSTOP), waiting in the kernel, very busy, or another program (os.exec*())"
_CRASH = ("Fatal Python error: ", "Timeout (")
"""The first words of faulthandler: the second one is of dump_traceback_later()."""
_LINES_QUOTED = 10
_NATIVE_REASONS = [
    re.compile(pattern)
    for pattern in (
        r"Watchdog caught (?!exception).*",
        r"(?<=attempting to dump debug info, due to ).*",
        r"NCCL error: .*",
        r"(?<=what\(\):).*",
        r"the JAX distributed service detected fatal errors",
        r"libgomp: Thread creation failed.*",
        r"^Timeout \([\d:.]+\)!$",
    )
]
"""Reasons that native code prints when it aborts, the most precise first: NCCL's watchdog, NCCL, C++ exceptions,
JAX's message when the process of rank 0 is gone, OpenMP, faulthandler."""
_NATIVE_ABORT = re.compile(
    r"Watchdog caught|dump debug info, due to|terminate called|^\s*what\(\):|NCCL error: |\bnccl[A-Z]\w+Error: "
)
_NATIVE_FRAME = re.compile(r"^frame #\d+: ")
_NOISE = re.compile(
    r"/(site|dist)-packages/.*:\d+: \w*Warning: |^\[Gloo\] Rank \d+ is connected to |^I0000 |: I (tensorflow|external)/"
)
"""Output of libraries in runs that are fine: warnings of Python code, gloo, TensorFlow."""


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


def summarize_stacks(
    stacks: Mapping[int, str],
    *,
    silent: Collection[int] = (),
    finished: Collection[int] = (),
) -> list[str]:
    """Return a line for each of the :func:`places_of` ranks."""
    return [f"{count_ranks(ranks)} {where}" for ranks, where in places_of(stacks, silent=silent, finished=finished)]


def places_of(
    stacks: Mapping[int, str], *, silent: Collection[int] = (), finished: Collection[int] = ()
) -> list[tuple[list[int], str]]:
    """Return each location with its ranks, most ranks first; then silent ranks, and finished ones.

    stacks: for each rank the text of faulthandler, with all threads or only the main one.
    silent: ranks that did not answer when asked for their stacks.
    """
    working = {rank: text for rank, text in stacks.items() if rank not in finished}
    locations = sorted(_ranks_by_location(working).items(), key=lambda item: -len(item[1]))
    others = {f"did not answer: {WHY_SILENT}": silent, "finished train_func": finished}
    return [(sorted(ranks), where) for where, ranks in (*locations, *others.items()) if ranks]


def suspects(stacks: Mapping[int, str], *, silent: Iterable[int] = ()) -> list[int]:
    """Return the ranks that the other ranks may be waiting for.

    These are the silent ranks, and those that are not at the most common location. Return all ranks if there are none.
    """
    locations = _ranks_by_location(stacks)
    most = max(map(len, locations.values()), default=0)
    apart = [rank for ranks in locations.values() if len(ranks) < most for rank in ranks]
    return sorted({*silent, *apart}) or sorted(stacks)


def _ranks_by_location(stacks: Mapping[int, str]) -> dict[str, list[int]]:
    locations: dict[str, list[int]] = {}
    for rank, text in sorted(stacks.items()):
        locations.setdefault(location(text), []).append(rank)
    return locations


def location(text: str) -> str:
    """Return the location of a worker's main thread, such as ``in all_reduce at train.py:88``.

    It names the user's innermost line and the function that this line has called, without wrappers.
    """
    frames = _main_thread(text)
    if not frames:
        return "is at an unknown location: it has no Python frame"
    ours = _ours(frames)
    called = ""
    for frame in frames:
        if frame not in ours and not LIBRARY_FILE.search(frame.file):
            return f"in {called} at {frame}" if called else f"in {frame.function} at {frame}"
        if not WRAPPERS.match(frame.function):
            called = "" if PRIVATE.match(frame.function) else frame.function
    phases = [PHASES[frame.function] for frame in frames if frame in ours and frame.function in PHASES]
    return phases[-1] if phases else f"in {frames[0].function} at {frames[0]}"


def raised_at(traceback: str) -> str:
    """Return the innermost line of the user's code in a traceback, such as ``train.py:17``; else of any, or ""."""
    frames = [_Frame(file, int(line), "") for file, line in _RAISED.findall(traceback)]
    users = [frame for frame in frames if not LIBRARY_FILE.search(frame.file)] or frames
    return str(users[-1]) if users else ""


def native_reason(lines: Sequence[str]) -> str:
    """Return why native code aborted, according to the last lines of the rank's output, or an empty string."""
    for pattern in _NATIVE_REASONS:
        for line in reversed(lines):
            if found := pattern.search(line):
                return found[0].strip()
    return ""


def last_words(lines: Sequence[str]) -> list[str]:
    """Return the lines of a rank's output that a failure screen quotes: its last lines, but no native frames or noise.

    If the interpreter has crashed, these are what native code printed when it aborted, and then the stack that
    faulthandler wrote, without frames of distrain.
    """
    start = max((n for n, line in enumerate(lines) if line.startswith(_CRASH)), default=None)
    if start is None:
        return [line for line in without_noise(lines) if not _NATIVE_FRAME.match(line)][-_LINES_QUOTED:]
    native = [line for line in lines[:start] if _NATIVE_ABORT.search(line)][-_LINES_QUOTED // 2 :]
    frames = _main_thread("\n".join(lines[start:]))
    ours = _ours(frames)
    theirs = [frame for frame in frames if frame not in ours and not _BOOTSTRAP.search(frame.file)]
    shown = [f'  File "{frame.file}", line {frame.line} in {frame.function}' for frame in theirs[:_LINES_QUOTED]]
    return [*native, lines[start], *shown]


def without_noise(lines: Sequence[str]) -> list[str]:
    """Return the lines without what libraries print in any run, and without the line of code below a warning."""
    noisy = [bool(_NOISE.search(line)) for line in lines]
    quoted = [before and line.startswith("  ") for before, line in zip([False, *noisy], lines, strict=False)]
    return [line for line, *is_left_out in zip(lines, noisy, quoted, strict=True) if not any(is_left_out)]


def _ours(frames: Sequence[_Frame]) -> list[_Frame]:
    """Return the frames of distrain: those of files below the package of the worker's outermost function."""
    bottom = next((frame for frame in frames if frame.function in _BOTTOM), None)
    root = bottom and bottom.folder.removesuffix(_BOTTOM[bottom.function])
    return [f for f in frames if root is not None and (f.folder == root or f.folder.startswith(f"{root}/"))]


def _main_thread(text: str) -> list[_Frame]:
    """Return the thread that runs the worker, or else the one that handled the signal."""
    parts = re.split(r"^(?=Thread |Current thread )", text, flags=re.MULTILINE)
    threads = [_frames(part) for part in parts if part]
    for frames in threads:
        if any(frame.function in _BOTTOM for frame in frames):
            return frames
    return threads[-1] if threads else []


def _frames(text: str) -> list[_Frame]:
    """Return the frames of one thread, innermost first."""
    found = (_FRAME.match(line) for line in text.splitlines())
    return [_Frame(match["file"], int(match["line"]), match["function"]) for match in found if match]
