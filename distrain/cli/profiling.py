"""``distrain profile``: where ranks of a running run spend their time. Runs in: coordinator."""

from __future__ import annotations

import argparse
import gzip
import json
import math
import time
from collections import Counter, defaultdict
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from distrain.cli import parsers
from distrain.cli.requesting import request
from distrain.cli.text import echo, paint, screen, table
from distrain.coordinator.requests import PROFILE, STACKS
from distrain.storage.runs.listing import NoSuchRun
from distrain.system.text import LIBRARY_FILE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from distrain.storage.runs.listing import Run

_MOST_S = 600.0
_POLL_S = 0.3
_NOTICE_S = 5.0
"""Seconds to wait for a rank to begin before a line says why it may not."""
_MOST_LINES, _MOST_OPERATIONS = 10, 5
_LONGEST_NAME = 80


def profile_parser() -> argparse.ArgumentParser:
    """Make the parser of ``distrain profile``."""
    parser = parsers.make_parser(
        "profile",
        "Show in which lines a rank of a running run spends its time. The stacks of its threads are sampled and, if it "
        "uses torch, the operations of its main thread are traced. The rank trains on, somewhat slower meanwhile; "
        "Ctrl-C only ends the command. Run it on the machine of fit().",
        "  distrain profile last\n  distrain profile last -r 3 --seconds 30\n  distrain profile last -r 0,3",
    )
    parsers.add_run(parser)
    add = parser.add_argument
    add("-r", "--ranks", metavar="0,2-5", default="0", help="the ranks (default: 0)")
    add("--seconds", type=_seconds, default=10.0, metavar="S", help="how long (default: 10)")
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.01 <= seconds <= _MOST_S:
        raise argparse.ArgumentTypeError(f"must be from 0.01 to {_MOST_S:g}, got {text!r}")
    return seconds


def run_profile(options: argparse.Namespace) -> int:
    """Profile ranks. Return 1 if there is no profile of one of them."""
    from distrain.cli.run.options import shown_ranks

    run = parsers.run_of(options)
    try:
        ranks = shown_ranks(options.ranks, "-r")
    except ValueError as error:
        raise NoSuchRun(str(error)) from None
    for rank in ranks:
        if problem := _ask(run, f"{rank} {options.seconds:.3f}")["problem"]:
            raise NoSuchRun(problem)
    echo(f"profiling for {options.seconds:g} s; the run continues, also after Ctrl-C")
    return max([_show(rank, _await_files(run, rank)) for rank in ranks])


def _ask(run: Run, argument: str) -> Any:
    return json.loads(request(run, PROFILE, argument))


def _await_files(run: Run, rank: int) -> Mapping[str, str]:
    """Wait for the end of a profile, and return the paths of its files by suffix. Show notes as they come."""
    shown, notice_at = 0, time.monotonic() + _NOTICE_S
    while True:
        try:
            state = _ask(run, str(rank))
        except NoSuchRun:
            raise NoSuchRun(f"the run has ended, and the profile of rank {rank} with it") from None
        if not state["begun"] and not state["over"] and time.monotonic() > notice_at:
            notice_at = math.inf
            echo(f"rank {rank} does not begin: native code in it keeps Python from running\n{request(run, STACKS)}")
        for note in state["notes"][shown:]:
            echo(f"rank {rank}: {note}")
        shown = len(state["notes"])
        if state["over"]:
            return cast("Mapping[str, str]", state["files"])
        time.sleep(_POLL_S)


# -- what is shown ---------------------------------------------------------------------------------------------------


def _show(rank: int, files: Mapping[str, str]) -> int:
    columns = (screen() or (None, 0))[0]
    for suffix, file in files.items():
        what, rows_of, page = _FILES[suffix]
        echo("\n".join(["", paint(f"rank {rank}: {what}", "1"), *table([*rows_of(Path(file))], columns, right=(0,))]))
        echo(paint(f"{file}: open it at {page}", "2"))
    return 0 if files else 1


def _lines_of(file: Path) -> Iterable[list[str]]:
    yield ["TIME", "LINE", "IN"]
    profile = json.loads(file.read_bytes())
    main = profile["profiles"][0]
    for line in hottest_lines(profile["shared"]["frames"], main)[:_MOST_LINES]:
        yield [f"{line.seconds / main['endValue']:.0%}", line.place, line.calls]


class HotLine(NamedTuple):
    """A line of the user's code. ``calls``: the library functions in which it spends most of that time."""

    seconds: float
    place: str
    calls: str


def hottest_lines(frames: list[dict[str, Any]], thread: Mapping[str, Any]) -> list[HotLine]:
    """Return the lines of the user's code with most of a thread's time. Time in a library counts for the line outside.

    frames, thread: of a file in speedscope's format.
    """
    places: Counter[str] = Counter()
    calls: dict[str, Counter[str]] = defaultdict(Counter)
    for stack, seconds in zip(thread["samples"], thread["weights"], strict=True):
        users = [depth for depth, frame in enumerate(stack) if _is_users(frames[frame]["file"])]
        depth = users[-1] if users else len(stack) - 1
        frame, called = frames[stack[depth]], [frames[one] for one in stack[depth + 1 :]]
        place = f"{frame['name']} ({Path(frame['file']).name}:{frame['line']})"
        places[place] += seconds
        ends = {id(one): one for one in (called[:1] + called[-1:])}.values()
        calls[place][" > ".join(f"{one['name']} ({Path(one['file']).name})" for one in ends)] += seconds
    return [HotLine(seconds, place, calls[place].most_common(1)[0][0]) for place, seconds in places.most_common()]


def _is_users(file: str) -> bool:
    return not (file.startswith("distrain/") or LIBRARY_FILE.search(file))


def _operations_of(file: Path) -> Iterable[list[str]]:
    yield ["TIME", "WHERE", "OPERATION"]
    with gzip.open(file) as opened:
        events = [event for event in json.load(opened)["traceEvents"] if event.get("ph") == "X"]
    for kind, where in (("cpu_op", "CPU"), ("kernel", "GPU")):
        for name, microseconds in self_times(event for event in events if event.get("cat") == kind)[:_MOST_OPERATIONS]:
            yield [f"{microseconds / 1e6:.3f} s", where, name[:_LONGEST_NAME]]


_FILES = {
    ".speedscope.json": ("the lines of your code with the most time", _lines_of, "https://www.speedscope.app"),
    ".json.gz": ("torch's operations with the most time of their own", _operations_of, "https://ui.perfetto.dev"),
}
"""By suffix: what is shown of a file, the rows of its table, and what opens it."""


def self_times(events: Iterable[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """Return the microseconds by the name of events of a Chrome trace, the most first, without those of inner events.

    >>> outer = {"name": "linear", "ts": 0.0, "dur": 10.0, "tid": 1}
    >>> self_times([outer, {"name": "addmm", "ts": 1.0, "dur": 7.0, "tid": 1}])
    [('addmm', 7.0), ('linear', 3.0)]
    """
    spent: dict[str, float] = defaultdict(float)
    under_way: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        outer = under_way[event["tid"]]
        while outer and outer[-1]["ts"] + outer[-1]["dur"] <= event["ts"]:
            outer.pop()
        if outer:
            spent[outer[-1]["name"]] -= event["dur"]
        spent[event["name"]] += event["dur"]
        outer.append(event)
    return sorted(spent.items(), key=itemgetter(1), reverse=True)
