"""Log files: all lines, the last ones, and what a terminal must not see."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from distrain.storage.runs.listing import WrongArgument, find_run
from distrain.storage.runs.logs import Follower, attempts_with_logs, log_files, read_lines
from distrain.system.remote_path import RemotePath
from tests.unit.storage.made import make_run

if TYPE_CHECKING:
    from distrain.storage.runs.listing import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A finished run with two attempts of two ranks."""
    made = make_run(tmp_path, "run")
    for attempt in (0, 1):
        folder = made / "logs" / f"attempt_{attempt}"
        folder.mkdir(parents=True)
        for rank in (0, 1):
            (folder / f"rank_{rank}.log").write_text("".join(f"{attempt}{rank} line {n}\n" for n in range(3)) + "end")
    (made / "logs" / "validation").mkdir()
    return find_run("run", tmp_path)


@pytest.mark.parametrize(
    ("last", "lines"),
    [
        (None, ["00 line 0", "00 line 1", "00 line 2", "end"]),
        (2, ["00 line 2", "end"]),
        (1, ["end"]),
        (0, []),
        (99, ["00 line 0", "00 line 1", "00 line 2", "end"]),
    ],
)
def test_lines_are_read_from_either_end(run: Run, last: int | None, lines: list[str]) -> None:
    file = log_files(run, 0)[0]
    assert list(read_lines(run, file, last)) == lines
    remote = RemotePath("memory://logs/rank_0.log")
    remote.write_bytes(file.read_bytes())  # type: ignore[union-attr]
    assert list(read_lines(run, remote, last)) == lines
    remote.remove()


@pytest.mark.parametrize("last", [None, 5])
def test_a_line_is_shown_in_its_last_state_without_what_moves_the_cursor(run: Run, last: int | None) -> None:
    file = log_files(run, 0)[0]
    file.write_bytes(b"10%\r50%\r100%\r\n\x1b[31mred\x1b[0m\x1b[2J\xff\nlast\n")  # type: ignore[union-attr]
    assert list(read_lines(run, file, last)) == ["100%", "\x1b[31mred\x1b[0m\ufffd", "last"]


def test_attempts_and_ranks_are_found_by_their_files(run: Run) -> None:
    assert attempts_with_logs(run) == [0, 1]
    assert list(log_files(run, 1)) == [0, 1]
    assert list(log_files(run, 1, [1])) == [1]
    with pytest.raises(WrongArgument, match="no log of rank 7; it has those of ranks 0, 1"):
        log_files(run, 1, [0, 7])


@pytest.mark.parametrize(("attempt", "last", "begins"), [(None, 1, "11 "), (0, None, "00 "), (1, None, "10 ")])
def test_a_run_that_has_ended_is_followed_to_its_end(
    run: Run, attempt: int | None, last: int | None, begins: str
) -> None:
    found = list(Follower(run, [0] if last is None else [1], attempt, last).lines())
    lines = [line for _, _, line in found]
    assert lines[-1] == "end"
    assert lines[0].startswith(begins) or last == 1
    assert {number for number, _, _ in found} == ({0, 1} if attempt == 0 else {1})


def test_a_torn_line_is_followed_when_it_or_the_run_has_ended(run: Run) -> None:
    file = Path(str(log_files(run, 1)[0]))
    follower = Follower(run, [0], 1, 1)
    assert list(follower.new_lines()) == [(1, 0, "10 line 2")]
    assert list(follower.new_lines()) == []
    with file.open("ab") as log:
        log.write(b"\r50%")
    assert list(follower.new_lines()) == []
    assert list(follower.new_lines(is_over=True)) == [(1, 0, "50%")]
