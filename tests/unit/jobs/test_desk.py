"""The directory of a queue, in which other users may put anything."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING

import pytest

from distrain.errors import StorageError
from distrain.jobs.desk import SILENCE_S, Desk, Ticket

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path / "queue")


def test_everybody_can_add_tickets_and_nobody_can_delete_those_of_others(desk: Desk) -> None:
    assert desk.folder.stat().st_mode & 0o7777 == 0o1777
    desk.write(asdict(Ticket(name="job")))
    assert (desk.folder / "job").stat().st_mode & 0o777 == 0o644


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_ticket_of_another_user_counts(desk: Desk) -> None:
    desk.write(asdict(Ticket(name="theirs", user="nobody")))
    os.chown(desk.folder / "theirs", 65534, 65534)
    assert list(desk.read()) == ["theirs"]
    (desk.folder / "theirs.cancel").touch()
    os.chown(desk.folder / "theirs.cancel", 4711, 4711)
    assert not desk.touch("theirs"), "only its owner, or root, can cancel it"
    os.chown(desk.folder / "theirs.cancel", 65534, 65534)
    assert desk.touch("theirs")


def test_what_is_no_ticket_is_left_out(desk: Desk, tmp_path: Path) -> None:
    desk.write(asdict(Ticket(name="job")))
    (tmp_path / "secret").write_text('{"name": "secret"}')
    (desk.folder / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(desk.folder / "pipe")
    (desk.folder / "folder").mkdir()
    (desk.folder / "text").write_text("{")
    (desk.folder / "list").write_text("[]")
    (desk.folder / "large").write_text(" " * 2_000_000 + "{}")
    (desk.folder / "job.new").write_text("{}")
    assert list(desk.read()) == ["job"]


def test_a_silent_ticket_counts_for_nothing_by_the_clock_of_the_file_system(desk: Desk) -> None:
    desk.write(asdict(Ticket(name="job")))
    assert Ticket.of(desk.read()["job"]).is_active
    then = desk.now() - SILENCE_S - 1
    os.utime(desk.folder / "job", (then, then))
    assert not Ticket.of(desk.read()["job"]).is_active
    desk.touch("job")
    assert Ticket.of(desk.read()["job"]).is_active


def test_fields_of_another_version_are_ignored(desk: Desk) -> None:
    desk.write({**asdict(Ticket(name="job")), "colour": "blue"})
    assert Ticket.of(desk.read()["job"]).name == "job"


def test_one_process_decides_at_a_time(desk: Desk) -> None:
    other = Desk(desk.folder)
    assert desk.lock()
    assert not other.lock()
    desk.unlock()
    assert other.lock()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"the queue .*/file/queue cannot be used"):
        Desk(tmp_path / "file" / "queue")
