"""The logs of the ranks of a run, as they are and as they grow. Runs in: anywhere."""

from __future__ import annotations

import io
import os
import re
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from distrain.storage import names
from distrain.storage.lines import Tail, last_lines, read_with
from distrain.storage.ownership import list_names, open_to_read
from distrain.storage.runs.listing import Run, WrongArgument, run_at
from distrain.system.text import name_ranks, without_controls

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from distrain.system.remote_path import RemotePath

_ATTEMPT = re.compile(r"attempt_(\d+)")
_RANK = re.compile(r"rank_(\d+)\.log")
_POLL_S = 0.2
"""Seconds between two looks at the logs that are followed, and at the state of their run."""
_PIECE = 256 << 10
"""Bytes that are read at once. A longer line is shown as several."""


def log_folder(run: Run) -> Path | RemotePath:
    """Return the directory of a run's logs; they may be outside of the run directory (``RunConfig.log_dir``)."""
    config = run.manifest.get("run_config")
    log_dir = config.get("log_dir") if isinstance(config, dict) else None
    return Path(log_dir, run.name) if isinstance(log_dir, str) else run.location / names.LOGS


def attempts_with_logs(run: Run) -> list[int]:
    """Return the numbers of the attempts that have logs."""
    return _numbers(run, log_folder(run), _ATTEMPT)


def log_files(run: Run, attempt: int, ranks: Collection[int] | None = None) -> dict[int, Path | RemotePath]:
    """Return the logs of an attempt by rank: some ranks' or (None) all. Raise WrongArgument if one is missing."""
    folder = log_folder(run) / f"attempt_{attempt}"
    found = _numbers(run, folder, _RANK)
    if missing := sorted(set(ranks or ()) - set(found)):
        raise WrongArgument(
            f"{folder} has no log of rank {missing[0]}; it has those of {name_ranks(found) if found else 'none'}"
        )
    return {rank: folder / f"rank_{rank}.log" for rank in found if ranks is None or rank in ranks}


def _numbers(run: Run, folder: Path | RemotePath, pattern: re.Pattern[str]) -> list[int]:
    listed = list_names(folder, run.path, str(log_folder(run))) if isinstance(folder, Path) else folder.names()
    return sorted(int(match[1]) for name in listed if (match := pattern.fullmatch(name)))


def read_lines(run: Run, file: Path | RemotePath, last: int | None = None) -> Iterator[str]:
    """Yield the lines of a log of a run, or the last ones. The log may be larger than the memory. Raise OSError."""
    if last is not None:
        lines = read_with(file, partial(last_lines, most=last), run.path, str(log_folder(run)))
        yield from map(_shown, deque(lines, maxlen=last))
        return
    with _open(run, file) if isinstance(file, Path) else io.BytesIO(file.read_bytes()) as log:
        yield from map(_shown, iter(partial(log.readline, _PIECE), b""))


def _open(run: Run, file: Path) -> IO[bytes]:
    return open(open_to_read(file, run.path, below=str(log_folder(run))), "rb")


def _shown(line: bytes) -> str:
    """Return a line as it may appear on a console: its last state, if it was overwritten, and colours."""
    return without_controls(line.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2])


class Follower:
    """A reader of what is new in the logs of a local run, attempt after attempt.

    attempt: where to begin. last: lines of each rank's log so far that are wanted, None for all.
    """

    def __init__(self, run: Run, ranks: Collection[int] | None, attempt: int | None, last: int | None) -> None:
        self._run = run
        self._ranks = ranks
        self._attempt = attempt
        self._last = last
        self._tails: dict[int, Tail] = {}
        """By rank, of the attempt that is read."""

    def lines(self) -> Iterator[tuple[int, int, str]]:
        """Yield attempt, rank and line until the run ends. It may be asked for forever: break, or Ctrl-C."""
        while True:
            is_over = not run_at(self._run.location).is_active
            yield from self.new_lines(is_over=is_over)
            if is_over:
                return
            time.sleep(_POLL_S)

    def new_lines(self, *, is_over: bool = False) -> Iterator[tuple[int, int, str]]:
        """Yield attempt, rank and line of what is new now."""
        later = [number for number in attempts_with_logs(self._run) if self._attempt is None or number > self._attempt]
        if self._attempt is not None:
            yield from self._of_attempt(self._attempt, to_end=bool(later) or is_over)
        for number in later if self._attempt is not None else later[-1:]:
            self._attempt, self._tails = number, {}
            yield from self._of_attempt(number, to_end=number != later[-1] or is_over)

    def _of_attempt(self, attempt: int, *, to_end: bool) -> Iterator[tuple[int, int, str]]:
        """Yield what is new in an attempt; ``to_end``: also last lines without a line end, as nothing follows them."""
        folder = log_folder(self._run) / f"attempt_{attempt}"
        for rank in _numbers(self._run, folder, _RANK):
            if self._ranks is None or rank in self._ranks:
                for part in self._of_rank(folder / f"rank_{rank}.log", rank, to_end=to_end):
                    yield attempt, rank, _shown(part)
        self._last = None  # later lines are all wanted

    def _of_rank(self, file: Any, rank: int, *, to_end: bool) -> Iterator[bytes]:
        """Yield what is new in a log, all of it if that is shorter now."""
        size, tail = os.lstat(file).st_size, self._tails.get(rank)
        if tail is not None and size == tail.position:  # few of many logs grow between two looks
            return
        with _open(self._run, file) as log:
            if tail is None or size < tail.position:
                wanted = [] if self._last is None else last_lines(log, self._last)
                begin = 0 if self._last is None else log.tell() - sum(map(len, wanted))
                tail = self._tails[rank] = Tail(begin, _PIECE)
            yield from (part for part, _ in tail.read(log, to_end=to_end))
