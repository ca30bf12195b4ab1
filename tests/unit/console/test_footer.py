"""The footer of a terminal: what it says, and that it fits."""

from __future__ import annotations

import math

import pytest

from distrain import wire
from distrain.api.observer import AttemptBegan, HangBegan, RankEnded, RankTrains, Reported
from distrain.console.footer import footer
from distrain.decisions.run_status import RunStatus
from distrain.hosts.troubles import Trouble


def running(*, ranks: int = 4, hosts: int = 1) -> RunStatus:
    """A run that has begun at 100 s, and has made 20 reports, one per second, of 100 steps, on every rank."""
    status = RunStatus("/runs/train-1", started=100.0, grace_s=10.0, phase="running")
    status.hear(AttemptBegan(0, [f"host{rank * hosts // ranks}" for rank in range(ranks)], 101.0))
    for rank in range(ranks):
        status.hear(RankTrains(rank, 102.0))
    for step in range(1, 21):
        for rank in range(ranks):
            status.hear(Reported(rank, step, step, {"loss": 1 / step, "lr": 0.1}, (step, 100), 102.0 + step))
    return status


def shown(status: RunStatus, now: float = 122.0, *, width: int = 100, bar: tuple[int, str] | None = None) -> list[str]:
    return [line.plain for line in footer(status, now, width=width, interrupt="Ctrl-C", bar=bar)]


def commit(status: RunStatus, name: str, now: float) -> None:
    status.checkpoint, status.checkpoint_at = name, now


def test_it_says_how_far_the_run_is() -> None:
    status = running()
    commit(status, "checkpoint_000001", 120.0)
    assert shown(status) == [
        "running · 22 s · 4 workers · train-1",
        "━" * 6 + "╌" * 24 + " 20/100 · 20% · 1.0/s · 1 min 20 s left",
        "loss 0.05   lr 0.1",
        "checkpoint_000001, 2.0 s ago",
        "ranks ●●●●  4 at work",
        "Ctrl-C: stops the run; no checkpoint is saved because train_func has not called should_stop()",
    ]


def test_what_a_rank_reports_and_prints_does_nothing_to_the_terminal() -> None:
    status = running()
    status.hear(Reported(0, 21, 21, {"a\x1b[2Jb\nc": 1}, (21, 100), 122.0))
    lines = shown(status, bar=(0, "50%\x1b[\x002J\x9b2J"))
    assert lines[2] == "a [2Jb c 1"
    assert all(line.isprintable() for line in lines)


def test_before_the_workers_start_it_has_little_to_say() -> None:
    status = RunStatus("/runs/train-1", started=100.0, grace_s=5)
    assert shown(status, 101.0) == ["connecting · 1.0 s · train-1", "Ctrl-C: stops the run"]


def test_restarts_and_hosts_are_named() -> None:
    status = running(hosts=2)
    status.hear(AttemptBegan(1, ["host0"] * 2 + ["host1"] * 2, 125.0))
    status.phase = "starting"
    assert shown(status, 125.0)[0] == "restarting · 25 s · 4 workers · 2 hosts · 1 restart · train-1"
    assert "ranks ····  4 starting" in shown(status, 125.0)
    assert not any("left" in line for line in shown(status, 125.0))


def test_a_late_report_takes_the_place_of_the_rate_and_the_time_left() -> None:
    status = running()
    assert "no report" not in shown(status, 132.0)[1]
    assert shown(status, 133.0)[1] == "━" * 6 + "╌" * 24 + " 20/100 · 20% · no report for 11 s"
    assert "no report for 1 min 58 s" in shown(status, 240.0)[1]


def test_a_silent_rank_is_marked_and_named() -> None:
    status = running()
    for step in range(21, 60):
        for rank in (0, 1, 3):
            status.hear(Reported(rank, step, step, {}, (step, 100), 102.0 + step))
    assert "ranks ●●○●  rank 2 silent for 40 s  3 at work" in shown(status, 162.0)


def test_a_slow_rank_is_marked_and_named() -> None:
    status = running()
    for step in range(21, 80):
        for rank in range(4):
            done = step if rank != 1 else 20 + (step - 20) // 2
            status.hear(Reported(rank, done, done, {}, None, 102.0 + step))
            vitals = wire.Vitals(attempt=0, rank=rank, own_s=1.0, waiting_s=0.0, place="load (a.py:3)", place_s=1.0)
            status.heard_vitals(vitals, 102.0 + step)
    assert "ranks ●◐●●  rank 1 slow, in load (a.py:3)  3 at work" in shown(status, 182.0)


def test_a_hang_is_shown_until_a_person_holds_a_rank() -> None:
    status = running()
    status.hear(HangBegan("rank 1 is stuck", 0.0, [1], lambda now: f"rank 1 is stuck at {now:g}"))
    assert "ranks ◌◍◌◌  rank 1 stuck  3 others wait" in shown(status)
    assert "rank 1 is stuck at 122" in shown(status)
    status.is_debugged = True
    assert "ranks ●●●●  4 at work" in shown(status)
    assert "stuck" not in "".join(shown(status))


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
    status.heard_troubles("ranks", [Trouble(rank=2, kind="diverged", problem="parameters", text="parameters differ")])
    assert "ranks ◆●≠●  rank 0 GPU  rank 2 diverged  2 at work" in shown(status)


def test_it_says_what_ctrl_c_does_to_ranks_that_call_should_stop() -> None:
    status = running()
    status.saves_on_stop = True
    assert shown(status)[-1] == "Ctrl-C: the workers have 10 s to save a checkpoint, then the run ends"


def test_ranks_that_were_stopped_or_have_failed_are_not_marked_as_finished() -> None:
    status = running()
    status.hear(RankEnded(0, "ended"))
    status.hear(RankEnded(0, "stopped"))  # its exit, after its work was done
    status.hear(RankEnded(1, "stopped"))
    status.hear(RankEnded(2, "failed"))
    assert "ranks ✓■✗●  rank 2 failed  1 at work, 1 stopped, 1 ended" in shown(status)


def test_numbers_are_short_and_those_that_are_none_are_red() -> None:
    status = running()
    metrics = {"loss": math.nan, "tokens": 123456789, "grad": 0.0187153, "huge": 10**400}
    status.hear(Reported(0, 21, 21, metrics, (1e7, 2e7), 123.0))
    assert "━" * 15 + "╌" * 15 + " 10M/20M · 50%" in shown(status)[1]
    line = footer(status, 123.0, width=600, interrupt=None)[2]
    assert line.plain.startswith("loss nan   tokens 123.5M   grad 0.01872   huge 1000")
    assert [(line.plain[span.start : span.end], span.style) for span in line.spans] == [("nan", "bold red")]


@pytest.mark.parametrize("width", [30, 60, 200])
@pytest.mark.parametrize("ranks", [1, 200])
def test_it_fits(width: int, ranks: int) -> None:
    status = running(ranks=ranks, hosts=min(ranks, 25))
    lines = footer(status, 122.0, width=width, interrupt="Ctrl-C", bar=(0, "x" * 500))
    assert all(line.cell_len < width for line in lines)
    assert len(lines) <= 7


def test_lost_time_is_from_the_last_checkpoint_until_the_next_report_takes_its_usual_time() -> None:
    status = running()
    commit(status, "checkpoint_000001", 110.0)
    status.hear(AttemptBegan(1, ["localhost"] * 4, 130.0))
    for rank in range(4):
        status.hear(RankTrains(rank, 131.0 + rank))
    for step, now in ((11, 145.0), (12, 146.0)):
        status.hear(Reported(0, step - 10, step, {}, None, now))
    assert (status.restarts, status.lost_s, status.reports) == (1, 34.0, 12)
