"""Requests to a running run, over its socket."""

from __future__ import annotations

import contextlib
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from distrain.coordinator.requests import STOP, Requests, answer, ask, connect
from distrain.storage.paths import RunPaths
from distrain.storage.runs.listing import NoSuchRun
from distrain.system.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from distrain import wire
    from distrain.wire.channel import Channel


class Served:
    """A run that answers requests to stop."""

    def __init__(self, root: Path) -> None:
        self.paths, self.loop = RunPaths(root), Loop()
        self.gone: list[Channel] = []
        store: Any = SimpleNamespace(paths=self.paths, delete_file=os.unlink)
        self.requests = Requests(self.loop, store, {STOP: self.on_stop}, self.gone.append)

    def on_stop(self, asker: Channel, asked: wire.Ask) -> None:
        if asked.rank > 0:
            raise NoSuchRun(f"there is no rank {asked.rank}")
        answer(asker, "stopping")

    def ask(self, what: str, **fields: Any) -> str:
        """Send a request from another thread, and serve it."""
        gone = len(self.gone)

        def send() -> str:
            with contextlib.closing(connect(self.paths)) as run:
                return ask(run, what, **fields)

        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(send)
            while len(self.gone) == gone:
                self.loop.step()
            return asked.result()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    root = tmp_path / ("long" * 50)  # longer than the address of a socket may be
    root.mkdir()
    made = Served(root)
    before = os.umask(0)
    try:
        made.requests.open()
    finally:
        os.umask(before)
    yield made
    made.loop.close()


def test_a_request_is_answered_or_refused(served: Served) -> None:
    assert served.ask(STOP) == "stopping"
    with pytest.raises(NoSuchRun, match="there is no rank 9"):
        served.ask(STOP, rank=9)
    with pytest.raises(NoSuchRun, match="another version of distrain runs it"):
        served.ask("pause")
    with pytest.raises(NoSuchRun, match="not supported between instances of 'str' and 'int'"):
        served.ask(STOP, rank="all")
    served.requests.close()


def test_only_the_user_of_the_run_can_ask(served: Served) -> None:
    assert stat.S_IMODE(served.paths.requests.stat().st_mode) == 0o600
    served.requests.close()


def test_whoever_asks_at_the_end_hears_of_it(served: Served) -> None:
    with contextlib.closing(connect(served.paths)) as early, contextlib.closing(connect(served.paths)) as late:
        served.loop.step()
        served.requests.close()
        for asker in (early, late):
            with pytest.raises(NoSuchRun, match="the run has ended"):
                ask(asker, STOP)
    with pytest.raises(FileNotFoundError):
        connect(served.paths)
