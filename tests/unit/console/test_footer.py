"""The footer of a terminal: what it says, and that it fits."""

from __future__ import annotations

import pytest

from distrain import wire
from distrain.console.footer import footer
from distrain.console.run_status import RunStatus
from distrain.hosts.troubles import Trouble


def running(*, ranks: int = 4, hosts: int = 1) -> RunStatus:
    """A run that has begun at 100 s, and has made 20 reports, one per second, of 100 steps, on every rank."""
    status = RunStatus("/runs/train-1", started=100.0, grace_s=10.0, phase="running")
    status.begin_attempt([f"host{rank * hosts // ranks}" for rank in range(ranks)], 101.0)
    for rank in range(ranks):
        status.rank_begins(rank, 102.0)
    for step in range(1, 21):
        for rank in range(ranks):
            status.reported(rank, step, {"loss": 1 / step, "lr": 0.1}, (step, 100), 102.0 + step)
    return status


def shown(status: RunStatus, now: float = 122.0, *, width: int = 100, rows: int = 40) -> list[str]:
    return [line.plain for line in footer(status, now, width=width, rows=rows, interrupt="Ctrl-C")]


def test_it_says_how_far_the_run_is() -> None:
    status = running()
    status.committed("checkpoint_000001", 120.0)
    assert shown(status) == [
        "running · 22 s · 4 workers · train-1",
        "━" * 30 + " 20/100 · 20% · 1.0/s · 1 min 20 s left",
        "loss 0.05 ↓   lr 0.1",
        "checkpoint_000001, 2.0 s ago",
        "ranks ●●●●  4 at work",
        "Ctrl-C: the workers have 10 s to save a checkpoint, then the run ends",
    ]


def test_without_progress_it_counts_reports() -> None:
    status = RunStatus("/runs/train-1", started=100.0)
    status.begin_attempt(["localhost"], 100.0)
    status.reported(0, 1, {}, None, 101.0)
    status.reported(0, 3, {}, None, 103.0)
    assert shown(status)[1] == "3 reports · 1.0/s"


def test_before_the_workers_start_it_has_little_to_say() -> None:
    status = RunStatus("/runs/train-1", started=100.0, grace_s=5)
    assert shown(status, 101.0)[0] == "connecting · 1.0 s · train-1"


def test_restarts_and_hosts_are_named() -> None:
    status = running(hosts=2)
    status.begin_attempt(["host0"] * 2 + ["host1"] * 2, 125.0)
    assert shown(status, 125.0)[0] == "running · 25 s · 4 workers · 2 hosts · 1 restart · train-1"
    assert "ranks ····  4 starting" in shown(status, 125.0)


def test_a_silent_rank_is_marked_and_named() -> None:
    status = running()
    for step in range(21, 60):
        for rank in (0, 1, 3):
            status.reported(rank, step, {}, (step, 100), 102.0 + step)
    assert "ranks ●●○●  rank 2 silent  3 at work" in shown(status, 162.0)
    assert any("rank 2 is at 20" in line for line in shown(status, 162.0))


def test_a_slow_rank_is_marked_and_named() -> None:
    status = running()
    for step in range(21, 80):
        for rank in range(4):
            done = step if rank != 1 else 20 + (step - 20) // 2
            status.reported(rank, done, {}, None, 102.0 + step)
            vitals = wire.Vitals(attempt=0, rank=rank, own_s=1.0, waiting_s=0.0, place="", place_s=0.0)
            status.heard_vitals(vitals, 102.0 + step)
    assert "ranks ●◐●●  rank 1 slow  3 at work" in shown(status, 182.0)


def test_ranks_with_too_little_memory_and_bad_gpus_are_marked_until_that_is_over() -> None:
    status = running(hosts=2)
    text = "97% of the host's memory is used, 41 GB by this rank"
    short, bad = (
        Trouble(rank=3, kind="memory", problem="full", text=text),
        Trouble(rank=0, kind="GPU", problem="silent", text="GPU 0 has failed"),
    )
    assert status.heard_troubles("host1", [short]) == ([short], [])
    assert status.heard_troubles("host0", [bad]) == ([bad], [])
    assert "ranks ◆●●▲  rank 3 memory  rank 0 GPU  2 at work" in shown(status)
    assert f"rank 3 on host1: {text}" in shown(status)
    assert "rank 0 on host0: GPU 0 has failed" in shown(status)
    assert status.heard_troubles("host1", []) == ([], [short])
    assert "ranks ◆●●●  rank 0 GPU  3 at work" in shown(status)


def test_ranks_that_wait_together_are_not_silent() -> None:
    assert "ranks ●●●●  4 at work" in shown(running(), 1000.0)


def test_a_progress_bar_of_the_user_is_shown_once() -> None:
    status = running()
    for rank in (1, 2):
        status.ranks[rank].bar = f"{rank}%|█   | 1/100"
    assert "rank 1: 1%|█   | 1/100" in shown(status)


def test_while_the_run_is_stopped_it_says_what_another_ctrl_c_does() -> None:
    status = running()
    status.is_stopping = True
    assert shown(status)[-1] == "the run is being stopped; Ctrl-C kills the workers now"


@pytest.mark.parametrize("width", [30, 60, 200])
@pytest.mark.parametrize("ranks", [1, 200])
def test_it_fits(width: int, ranks: int) -> None:
    status = running(ranks=ranks, hosts=min(ranks, 25))
    status.ranks[0].bar = "x" * 500
    lines = footer(status, 122.0, width=width, rows=40, interrupt="Ctrl-C")
    assert all(line.cell_len < width for line in lines)
    assert len(lines) <= 7


def test_a_low_terminal_gets_the_most_important_lines_only() -> None:
    assert len(shown(running(), rows=10)) == 3


def test_lost_time_is_from_the_last_checkpoint_until_all_ranks_are_at_work_again() -> None:
    status = running()
    status.committed("checkpoint_000001", 110.0)
    status.begin_attempt(["localhost"] * 4, 130.0)
    for rank in range(4):
        status.rank_begins(rank, 131.0 + rank)
    assert (status.restarts, status.lost_s) == (1, 24.0)
