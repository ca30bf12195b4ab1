"""The consoles of other processes, those of ``distrain attach``. Runs in: coordinator, and in these processes.

Each gets what a console hears, and the state of the run along with it, pickled. A console that does not read is
detached, so that the run never waits for it; only its end does, for a moment.
"""

from __future__ import annotations

import logging
import pickle
import sys
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from distrain import wire
from distrain.api.observer import AttemptBegan, AttemptEnded, Ended, Fact, Printed, Reported
from distrain.api.result import Result
from distrain.coordinator.requests import ATTACH
from distrain.storage.commit import CommittedCheckpoint
from distrain.storage.runs.listing import NoSuchRun

if TYPE_CHECKING:
    from collections.abc import Collection

    from distrain.api.config import RunContext
    from distrain.api.observer import RunBegan
    from distrain.decisions.run_status import RunStatus
    from distrain.wire.channel import Channel

News: TypeAlias = "Fact | dict[str, Any]"
"""A fact, or a line of distrain: what makes its ``logging.LogRecord``."""
VERSIONS = f"{wire.DISTRAIN_VERSION} on Python {sys.version_info[0]}.{sys.version_info[1]}"
"""Processes of the same versions can read what others have pickled."""
_SHORTEST_S, _LONGEST_S = 0.1, 1.0
"""Seconds between two messages to a console."""
_MOST_KEPT, _LONGEST_KEPT = 200, 16 << 10
"""Pieces of output, often lines, that a console gets when it is attached, and the bytes of each."""
_MOST_QUEUED_BYTES = 16 << 20
"""Bytes that may wait for a slow or stopped console."""


class Attached(logging.Handler):
    """The observer that tells the consoles of other processes what happens.

    ranks: those whose output is shown; None for all.
    """

    hears = (AttemptBegan, AttemptEnded, Ended, Printed, Reported)

    def __init__(self, status: RunStatus, ranks: Collection[int] | None = None) -> None:
        super().__init__()
        self.requests = {ATTACH: self.attach}
        self._status = status
        self._ranks = ranks
        self._attempt: list[News] = []
        """The beginning of the attempt, if there is one."""
        self._last: deque[News] = deque(maxlen=_MOST_KEPT)
        """The last output, and the last lines of distrain."""
        self._new: list[News] = []
        """The news since the last message to the consoles."""
        self._consoles: list[Channel] = []
        self._sent_at = 0.0
        logging.getLogger("distrain").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if not hasattr(record, "of_console"):
            line = {"levelno": record.levelno, "created": record.created, "msg": record.getMessage()}
            self._note(line, line)

    def hear(self, fact: Fact) -> None:
        match fact:
            case Printed(rank=rank, data=data):
                if self._ranks is None or rank in self._ranks:
                    self._note(fact, replace(fact, data=data[-_LONGEST_KEPT:]))
            case AttemptBegan():
                lines = [one for one in list(self._last) if isinstance(one, dict)]  # the ranks are others now
                self._attempt, self._last = [fact], deque(lines, _MOST_KEPT)
                self._note(fact)
            case AttemptEnded():
                self._note(replace(fact, failures=(), exceptions=dict))
                self._send()  # now, as the next attempt may have fewer ranks
            case Ended(result=result, checkpoints=saved):
                result = result and Result(metrics=None, checkpoint=None, path=result.path)
                names = [CommittedCheckpoint(Path(one.path.name), {}) for one in saved]
                self._note(replace(fact, result=result, error=None, checkpoints=names))
                self._end()
            case _:
                self._note(fact)

    def _note(self, news: News, kept: News | None = None) -> None:
        """Note what is new, and what consoles get that are attached later. Another thread may call this to log."""
        if kept is not None:
            self._last.append(kept)
        if self._consoles:
            self._new.append(news)

    def attach(self, asker: Channel, asked: wire.Ask) -> bool:
        """Attach the console of another process. Raises NoSuchRun if that could not read what it gets."""
        theirs = asked.body.decode()
        if theirs != VERSIONS:
            raise NoSuchRun(f"it runs with distrain {VERSIONS}, and this is distrain {theirs}: attach with that one")
        self._send()
        asker.queue(self._message([*self._attempt, *self._last]))
        self._consoles.append(asker)
        return True

    def deadline(self) -> float | None:
        """Return when to call :meth:`tick` (time.monotonic), or None."""
        return self._sent_at + (_SHORTEST_S if self._new else _LONGEST_S) if self._consoles else None

    def tick(self, now: float) -> None:
        """Send what is due by now."""
        if (due := self.deadline()) is not None and now >= due:
            self._send()

    def _send(self) -> None:
        """Tell all consoles what is new. Detach those that are gone, and those that do not read."""
        new, self._new, self._sent_at = self._new, [], time.monotonic()
        for console in self._consoles:
            if console.queued_bytes > _MOST_QUEUED_BYTES:
                console.close()
        self._consoles = [console for console in self._consoles if not console.at_end]
        message = self._message(new) if self._consoles else b""
        for console in self._consoles:
            console.queue(message)

    def _message(self, news: list[News]) -> bytes:
        return wire.encode(wire.OrderDone(body=pickle.dumps((self._status, [*news]))))

    def _end(self) -> None:
        logging.getLogger("distrain").removeHandler(self)
        for console in self._consoles:
            console.detach()  # its loop has ended
        self._send()
        deadline = time.monotonic() + _LONGEST_S
        for console in self._consoles:
            while console.queued_bytes and time.monotonic() < deadline:
                time.sleep(_SHORTEST_S / 10)
                console.flush()
            console.close()


def views_in(frames: list[wire.Frame]) -> list[tuple[RunStatus, list[News]]]:
    """Return what a console was told: the state of the run, and facts. Raise NoSuchRun if it was refused.

    It unpickles, so only the user's own process may have sent the frames.
    """
    answers = [frame.message() for frame in frames]
    if answers and (refusal := getattr(answers[0], "failed", None)) is not None:
        raise NoSuchRun(refusal)
    return [pickle.loads(answer.body) for answer in answers if isinstance(answer, wire.OrderDone)]  # noqa: S301 - see above


def observers(context: RunContext, run: RunBegan, status: RunStatus) -> list[Attached]:
    """Return the observer that tells the consoles of other processes what happens."""
    return [Attached(status, context.run_config.logging_config.ranks)]
