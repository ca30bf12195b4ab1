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
from typing import TYPE_CHECKING, Any

from distrain.cli import parsers
from distrain.cli.requesting import request
from distrain.cli.text import echo, paint, screen, table
from distrain.coordinator.requests import PROFILE, STACKS
from distrain.storage.runs.listing import RUNNING, STARTING, NoSuchRun
from distrain.system.text import LIBRARY_FILE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from distrain.storage.runs.listing import Run

_MOST_S = 600.0
_POLL_S = 0.3
_NOTICE_S = 5.0
"""Seconds to wait for a rank to begin before a line says why it may not."""
_MOST_LINES, _MOST_OPERATIONS = 10, 5


def profile_parser() -> argparse.ArgumentParser:
    """Make the parser of ``distrain profile``."""
    parser = parsers.make_parser(
        "profile",
        "Show in which lines a rank of a running run spends its time. The stacks of its threads are sampled and, if it "
        "uses torch, its operations are traced. The rank trains on, somewhat slower meanwhile; Ctrl-C only ends the "
        "command. Run it on the machine of fit().",
        "  distrain profile last\n  distrain profile last -r 3 --seconds 30\n  distrain profile last -r 0,3",
    )
    parsers.add_run(parser)
    parser.add_argument("-r", "--ranks", metavar="0,2-5", default="0", help="the ranks (default: 0)")
    parser.add_argument("--seconds", type=_seconds, default=10.0, metavar="S", help="how long (default: 10)")
    return parser


def _seconds(text: str) -> float:
    seconds = float(text) if text.replace(".", "", 1).isdecimal() else 0.0
    if not 0.01 <= seconds <= _MOST_S:
        raise argparse.ArgumentTypeError(f"must be from 0.01 to {_MOST_S:g}, got {text!r}")
    return seconds


def run_profile(options: argparse.Namespace) -> int:
    """Profile ranks."""
    from distrain.cli.run.options import shown_ranks

    run = parsers.run_of(options)
    if run.state not in (RUNNING, STARTING):
        hint = "start it again and profile it while it trains"
        raise NoSuchRun(f"{run.name} is not running: its state is {run.state}; {hint}")
    try:
        ranks = shown_ranks(options.ranks, "-r")
    except ValueError as error:
        raise NoSuchRun(str(error)) from None
    for rank in ranks:
        _check(_ask(run, f"{rank} {options.seconds:.3f}"))
    echo(f"profiling for {options.seconds:g} s; the run continues, also after Ctrl-C")
    for rank in ranks:
        _show(rank, _await_end(run, rank))
    return 0


def _ask(run: Run, argument: str) -> Any:
    return json.loads(request(run, PROFILE, argument))


def _check(state: Any) -> None:
    if state["problem"]:
        raise NoSuchRun(state["problem"])


def _await_end(run: Run, rank: int) -> Any:
    """Wait for the end of a profile, and return its state."""
    notice_at = time.monotonic() + _NOTICE_S
    while True:
        try:
            state = _ask(run, str(rank))
        except NoSuchRun:
            raise NoSuchRun(f"the run has ended, and the profile of rank {rank} with it") from None
        _check(state)
        if state["files"]:
            return state
        if not state["begun"] and time.monotonic() > notice_at:
            notice_at = math.inf
            echo(f"rank {rank} does not begin: native code in it keeps Python from running\n{request(run, STACKS)}")
        time.sleep(_POLL_S)


# -- what is shown ---------------------------------------------------------------------------------------------------


def _show(rank: int, state: Any) -> None:
    for suffix, title, rows_of, page in (
        (".speedscope.json", "the lines of your code with the most time", hottest_lines, "www.speedscope.app"),
        (".json.gz", "torch's operations with the most time of their own", _operations, "ui.perfetto.dev"),
    ):
        if file := state["files"].get(suffix):
            data = Path(file).read_bytes()
            content = json.loads(gzip.decompress(data) if suffix.endswith(".gz") else data)
            rows = table([*rows_of(content)], (screen() or (None, 0))[0], right=(0,))
            echo("\n".join(["", paint(f"rank {rank}: {title}", "1"), *rows, f"{file}: open it at https://{page}"]))
    echo(f"{state['note']}\n" if state["note"] else "")


def hottest_lines(profile: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    """Yield a table of the lines of the user's code with most of the main thread's time.

    Time in a library counts for the line that called it. The last column has the functions that it called: the first,
    and the innermost one. profile: a file in speedscope's format.
    """
    frames, main = profile["shared"]["frames"], profile["profiles"][0]
    lines: dict[str, Counter[str]] = defaultdict(Counter)
    for numbers, seconds in zip(main["samples"], main["weights"], strict=True):
        stack = [frames[number] for number in numbers]
        users = [depth for depth, frame in enumerate(stack) if _is_users(frame["file"])]
        depth = users[-1] if users else len(stack) - 1
        called = [f"{frame['name']} ({Path(frame['file']).name})" for frame in stack[depth + 1 :]]
        place = f"{stack[depth]['name']} ({Path(stack[depth]['file']).name}:{stack[depth]['line']})"
        lines[place][" > ".join([*called[:1], *called[1:][-1:]])] += seconds
    yield "TIME", "LINE", "IN"
    for place, calls in sorted(lines.items(), key=lambda line: -line[1].total())[:_MOST_LINES]:
        yield f"{calls.total() / main['endValue']:.0%}", place, calls.most_common(1)[0][0]


def _is_users(file: str) -> bool:
    return not (file.startswith("distrain/") or LIBRARY_FILE.search(file))


def _operations(trace: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    yield "TIME", "WHERE", "OPERATION"
    for kind, where in (("cpu_op", "CPU"), ("kernel", "GPU")):
        events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("cat") == kind]
        for name, microseconds in self_times(events)[:_MOST_OPERATIONS]:
            yield f"{microseconds / 1e6:.3f} s", where, name


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
