"""The news for consoles of other processes: as much as if they had been there, and never more than they read."""

from __future__ import annotations

import logging
import os
import socket
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrain import wire
from distrain.api.observer import (
    AttemptBegan,
    AttemptEnded,
    Committed,
    Ended,
    HangBegan,
    HangEnded,
    Printed,
    RankEnded,
    RankTrains,
    Reported,
)
from distrain.api.result import Result
from distrain.console.footer import footer
from distrain.coordinator.attached import VERSIONS, Attached, views_in
from distrain.coordinator.observers import Observers
from distrain.coordinator.requests import ATTACH
from distrain.decisions.health.standstills import Hang, Stand
from distrain.decisions.run_status import RunStatus
from distrain.hosts.troubles import Trouble
from distrain.storage.checkpoint import Checkpoint
from distrain.storage.commit import CommittedCheckpoint
from distrain.storage.runs.listing import NoSuchRun
from distrain.system.log import say, warn
from distrain.system.process import user_of_peer
from distrain.wire.channel import Channel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from distrain.api.observer import Fact

ASK = wire.Ask(attempt=0, rank=0, what=ATTACH, body=VERSIONS.encode())
RANKS = 3
HANG = Hang({1: Stand("stuck", "load (train.py:3)")}, {0: Stand("waits", "all_reduce"), 2: Stand("waits", "x")}, 1.0)


def channels() -> tuple[Channel, Channel]:
    """Both ends of a connection."""
    ours, theirs = (end.detach() for end in socket.socketpair())
    return Channel(ours, ours), Channel(theirs, theirs)


@pytest.fixture
def status() -> RunStatus:
    return RunStatus("/runs/train-1", started=0.0, phase="running")


@pytest.fixture
def attached(status: RunStatus) -> Iterator[Attached]:
    observer = Attached(status)
    yield observer
    logging.getLogger("distrain").removeHandler(observer)


def output(channel: Channel) -> bytes:
    """The output of the ranks, as a console was told."""
    views = views_in(channel.drain())
    return b"".join(one.data for _, news in views for one in news if isinstance(one, Printed))


def lines(channel: Channel) -> list[str]:
    """The lines of distrain that a console was told."""
    return [one["msg"] for _, news in views_in(channel.drain()) for one in news if isinstance(one, dict)]


def facts(rank: int, number: int) -> st.SearchStrategy[Fact]:
    """A fact of any kind at the time ``number``."""
    now = float(number)
    checkpoint = Checkpoint("/runs/train-1/checkpoint")
    committed = Committed(0, f"checkpoint_{number}", number, number, 1, 0.1, [0], {}, checkpoint, now)
    return st.sampled_from(
        [
            Reported(rank, number, number, {"loss": 1 / (number + 1)}, (number, 100), now),
            Printed(rank, 1, b"%d\n" % number, now),
            RankTrains(rank, now),
            RankEnded(rank, "ended"),
            HangBegan(HANG.headline(), 0.0, HANG.culprits, HANG.headline),
            HangEnded(0.0),
            committed,
            AttemptEnded(0, (), None, dict),
            AttemptBegan(1, ["alpha", "beta", "beta"], now),
        ]
    )


@given(st.data(), st.integers(0, 25), st.integers(1, 30))
def test_whoever_comes_late_sees_what_one_sees_who_was_there(data: st.DataObject, before: int, after: int) -> None:
    status = RunStatus("/runs/train-1", started=0.0, phase="running")
    attached = Attached(status)
    observers = Observers([status, attached])
    printed = b""
    ours, theirs = channels()
    mirrored = None
    try:
        observers.tell(AttemptBegan(0, ["alpha", "beta", "beta"], 0.0))
        for number in range(before + after):
            if number == before:
                attached.attach(ours, ASK)
            fact = data.draw(facts(data.draw(st.integers(0, RANKS - 1)), number))
            if isinstance(fact, AttemptBegan) and number < before:
                printed = b""  # of other ranks
            if number % 7 == 3:
                status.heard_troubles(
                    "alpha", [Trouble(rank=0, kind="memory", problem="full", text=f"{number}% is used")]
                )
                status.phase = f"phase {number}"
            observers.tell(fact)
            printed += fact.data if isinstance(fact, Printed) else b""
        attached.tick(time.monotonic() + 1.0)
        views = views_in(theirs.drain())
        mirrored, now = views[-1][0], before + after + 30.0
        both = [footer(one, now, width=120, interrupt=None) for one in (mirrored, status)]
        assert both[0] == both[1]
        assert b"".join(one.data for _, news in views for one in news if isinstance(one, Printed)) == printed
        assert isinstance(views[0][1][0], AttemptBegan)
    finally:
        logging.getLogger("distrain").removeHandler(attached)
        ours.close()
        theirs.close()


def test_they_get_the_last_output_only_and_then_all(attached: Attached, status: RunStatus) -> None:
    Observers([status]).tell(AttemptBegan(0, ["alpha"], 0.0))
    for number in range(1000):
        attached.hear(Printed(0, 1, b"%d\n" % number, 1.0))
    ours, theirs = channels()
    attached.attach(ours, ASK)
    assert output(theirs) == b"".join(b"%d\n" % number for number in range(800, 1000))
    for number in range(1000, 2000):
        attached.hear(Printed(0, 1, b"%d\n" % number, 1.0))
    attached.tick(time.monotonic() + 1.0)
    assert output(theirs) == b"".join(b"%d\n" % number for number in range(1000, 2000))


def test_they_get_the_lines_of_distrain_but_not_those_of_its_console(attached: Attached) -> None:
    say("one")
    say("loss=0.1", of_console=True)
    ours, theirs = channels()
    attached.attach(ours, ASK)
    warn("two")
    attached.tick(time.monotonic() + 1.0)
    assert lines(theirs) == ["one", "two"]


def test_output_of_ranks_that_are_not_shown_is_left_out(status: RunStatus) -> None:
    attached = Attached(status, ranks=[1])
    ours, theirs = channels()
    try:
        attached.attach(ours, ASK)
        for rank in range(3):
            attached.hear(Printed(rank, 1, b"%d\n" % rank, 1.0))
        attached.tick(time.monotonic() + 1.0)
        assert output(theirs) == b"1\n"
    finally:
        logging.getLogger("distrain").removeHandler(attached)


def test_one_that_does_not_read_is_detached_and_another_one_gets_everything(attached: Attached) -> None:
    (stuck, its_end), (ours, theirs) = channels(), channels()
    for asker in (stuck, ours):
        attached.attach(asker, ASK)
    received, most, began = b"", 0, time.monotonic()
    for _ in range(40):
        attached.hear(Printed(0, 1, b"x" * (1 << 20), 1.0))
        attached.tick(time.monotonic() + 1.0)
        most = max(most, stuck.queued_bytes)
        while ours.queued_bytes:
            received += output(theirs)
            ours.flush()
        received += output(theirs)
    assert time.monotonic() - began < 10.0
    assert most <= 18 << 20
    assert stuck.at_end
    assert not ours.at_end
    assert received == b"x" * (40 << 20)
    its_end.close()


def test_without_consoles_nothing_waits_and_nothing_is_due(attached: Attached) -> None:
    ours, theirs = channels()
    attached.attach(ours, ASK)
    assert attached.deadline() is not None
    ours.close()
    theirs.close()
    attached.tick(time.monotonic() + 1.0)
    assert attached.deadline() is None


def test_the_end_reaches_them_without_what_cannot_be_pickled(
    attached: Attached, status: RunStatus, tmp_path: Path
) -> None:
    ours, theirs = channels()
    attached.attach(ours, ASK)
    result = Result(metrics=None, checkpoint=None, path="/runs/train-1", return_value=lambda: None)
    saved = [CommittedCheckpoint(tmp_path / "checkpoint_000001", {"model": lambda: None})]
    attached.hear(Ended("finished", "finished", 1.0, result, RuntimeError(lambda: None), saved, None, True))
    end = views_in(theirs.drain())[-1][1][-1]
    assert isinstance(end, Ended)
    assert end.result is not None
    assert [one.path.name for one in end.checkpoints] == ["checkpoint_000001"]
    assert not theirs.wait(5.0)
    assert theirs.at_end


def test_another_version_is_refused(attached: Attached) -> None:
    ours, _ = channels()
    with pytest.raises(NoSuchRun, match=r"it runs with distrain .*, and this is distrain 0\.0\.1 on Python 2\.7"):
        attached.attach(ours, wire.Ask(attempt=0, rank=0, what=ATTACH, body=b"0.0.1 on Python 2.7"))
    refusal = wire.Frame(*next(iter(wire.Decoder().feed(wire.encode(wire.OrderDone(failed="no"))))))
    with pytest.raises(NoSuchRun, match="no"):
        views_in([refusal])


def test_the_owner_of_the_other_end_is_known(tmp_path: Path) -> None:
    ours, _ = channels()
    assert user_of_peer(ours.read_fd) == os.geteuid()
    if os.geteuid() != 0:
        return
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        os.seteuid(65534)  # a socket belongs to the user who has called listen()
        try:
            listener.bind("\0distrain-test-" + tmp_path.name)
            listener.listen()
        finally:
            os.seteuid(0)
        client.connect("\0distrain-test-" + tmp_path.name)
        assert user_of_peer(client.fileno()) == 65534
