"""Exit facts -> who is to blame, and the screen that says so."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest

from distrain import wire
from distrain.api.backend import BackendConfig
from distrain.decisions.blame import culprit_first, finished_early, hang_failures
from distrain.decisions.failure_screen import failure_screen
from distrain.decisions.ranks import Rank
from distrain.errors import RankFailure
from distrain.hosts.world import RankPlan
from distrain.system.stacks import native_reason
from distrain.worker import user_code
from distrain.worker.job.job import Work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WORK = Work(backend=BackendConfig())


def outcome(**fields: Any) -> wire.Outcome:
    defaults = {
        "attempt": 0, "rank": 0, "ok": False, "stage": "run", "error": "ValueError: boom",
        "traceback": "Traceback...\nValueError: boom\n", "exit_code": 1, "body": b"pickled",
    }  # fmt: skip
    return wire.Outcome(**{**defaults, **fields})


def exited(**fields: Any) -> wire.Exited:
    return wire.Exited(**{"attempt": 0, "rank": 0, **fields})


def judged(
    outcome: wire.Outcome | None = None, exited: wire.Exited | None = None, reason: str = ""
) -> RankFailure | None:
    plan = RankPlan(rank=0, host="one", local_rank=0, local_world_size=1, node_rank=0)
    rank = Rank(plan, outcome=outcome, exited=exited, reason=reason, failed_order=1, when="during training")
    return rank.failure


def failed(outcome: wire.Outcome | None = None, exited: wire.Exited | None = None) -> RankFailure:
    failure = judged(outcome, exited)
    assert failure is not None
    return failure


def failure(rank: int, order: int = 0, **fields: Any) -> RankFailure:
    defaults = {
        "host": "one", "summary": "ValueError: boom", "traceback": "the traceback", "exit_code": 1,
        "consequence": False,
    }  # fmt: skip
    return RankFailure(rank=rank, order=order, **{**defaults, **fields})


def screen(*failures: RankFailure, stopped: list[int] | None = None, where: Sequence[str] = ()) -> str:
    last_lines = {0: ["its", "last words"], 1: []}
    return failure_screen(failures, stopped=stopped or [], last_lines=last_lines, where=where)


# -- what is a failure -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "exited"),
    [
        (outcome(ok=True, error=None), exited(exit_code=0)),
        (outcome(ok=True, error=None), exited(signal=signal.SIGABRT)),
        (None, exited(signal=signal.SIGKILL, by_us=True)),
        (None, None),
    ],
    ids=["good", "an abort after it", "we killed it", "still there"],
)
def test_what_is_no_failure(outcome: wire.Outcome | None, exited: wire.Exited | None) -> None:
    assert judged(outcome, exited) is None


@pytest.mark.parametrize(("stage", "words"), [("import", "unpickling"), ("setup", "process group")])
def test_a_failure_before_train_func_says_when(stage: str, words: str) -> None:
    summary = failed(outcome(stage=stage)).summary
    assert "before train_func" in summary
    assert words in summary


def test_openmp_without_threads_and_faulthandler_tell_what_to_do() -> None:
    reason = native_reason(["", "libgomp: Thread creation failed: Resource temporarily unavailable"])
    for text, words in (
        (reason, "failed: Resource temporarily unavailable; raise ulimit -u or pids.max"),
        ("NCCL error: earlier", "os._exit() or os.exec*()?"),
        (native_reason(["Timeout (0:00:01.5)!", "Thread 0x1 (most recent call first):"]), "dump_traceback_later("),
    ):
        found = judged(exited=exited(exit_code=1), reason=text)
        assert found is not None
        assert words in found.summary


def fork() -> None:
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


def read() -> None:
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


def start() -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(("act", "lacks"), [(fork, True), (start, True), (read, False)])
def test_a_process_that_may_start_nothing_more_tells_what_to_do(act: Callable[[], None], lacks: bool) -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011
        act()
    assert (
        "raise the limit (ulimit -u, or pids.max" in (user_code._explanation(WORK, raised.value, "") or "")
    ) == lacks


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (ModuleNotFoundError("No module named 'einops'"), f"install it in {sys.executable}; for a module of your own"),
        (OSError(errno.EADDRINUSE, "Address already in use"), "ranks of a host cannot share a port: add the"),
        (FileNotFoundError(errno.ENOENT, "No such file", "data/train.csv"), f"relative paths begin at {os.getcwd()}"),
        (FileNotFoundError(errno.ENOENT, "No such file", "/data/train.csv"), "None"),
        (
            ValueError("Default process group has not been initialized, please"),
            "`distrain run script.py:main` sets it up",
        ),
        (AttributeError("'RandomSampler' object has no attribute 'set_epoch'"), "gives a loader a sampler that has"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), "for lack of memory: lower the Data"),
    ],
)
def test_the_text_of_a_common_error_ends_with_its_cure(error: Exception, advice: str) -> None:
    assert advice in str(user_code._explanation(WORK, error, str(error)))


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, ["SIGKILL (9)", "out of memory"]),
        (signal.SIGSEGV, ["SIGSEGV (11)", "native code"]),
        (signal.SIGBUS, ["SIGBUS", "/dev/shm"]),
        (signal.SIGRTMIN + 5, ["signal 39"]),
    ],
)
def test_a_signal_is_told_in_words(number: int, words: list[str]) -> None:
    found = failed(exited=exited(signal=int(number)))
    assert all(word in found.summary for word in [*words, "not by distrain"])
    assert found.exit_code == 128 + number


TIMED_OUT = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE) ran for 600044 ms"


@pytest.mark.parametrize(
    ("number", "reason", "consequence"),
    [
        (signal.SIGABRT, TIMED_OUT, True),
        (signal.SIGABRT, "NCCL error: remote process exited or there was a network error, NCCL version 2.27.3", True),
        (signal.SIGABRT, "the JAX distributed service detected fatal errors", True),
        (signal.SIGABRT, "Observed flight recorder dump signal from another rank via TCPStore.", True),
        (signal.SIGABRT, "NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)", False),
        (signal.SIGABRT, "", False),
        (signal.SIGKILL, TIMED_OUT, False),
    ],
)
def test_an_abort_that_blames_a_peer_is_a_consequence(number: int, reason: str, consequence: bool) -> None:
    found = judged(exited=exited(signal=int(number)), reason=reason)
    assert found is not None
    assert found.consequence is consequence
    assert (reason in found.summary) is (number == signal.SIGABRT)


def test_a_silent_exit_is_told_and_never_counts_as_success() -> None:
    found = failed(exited=exited(exit_code=0))
    assert "exited with code 0" in found.summary
    assert found.exit_code == 1


# -- who is to blame -------------------------------------------------------------------------------------------------


GLOO = {"summary": "RuntimeError: [gloo/transport/tcp/pair.cc:561] Connection closed by peer", "consequence": True}
RESET = {"summary": "ConnectionResetError: [Errno 104] Connection reset by peer"}
KILLED = {"summary": "was killed by SIGKILL (9) during training, not by distrain", "kind": "signal"}
LATE = {"summary": "TimeoutError: timed out waiting for the data server"}


@pytest.mark.parametrize(
    ("first", "second", "culprits", "victims"),
    [
        (RESET, GLOO, [1], [2]),
        ({}, RESET, [1], [2]),
        (RESET, {}, [1, 2], []),
        (RESET, KILLED, [2], [1]),
        (RESET, LATE, [1, 2], []),
        (GLOO, GLOO, [], [1, 2]),
    ],
)
def test_an_error_about_a_connection_is_a_consequence_only_if_somebody_else_failed_first(
    first: dict[str, Any], second: dict[str, Any], culprits: list[int], victims: list[int]
) -> None:
    """Except that a death is noticed late."""
    found = culprit_first([failure(1, 1, **first), failure(2, 2, **second)])
    assert [f.rank for f in found] == culprits + victims
    assert [f.rank for f in found if f.role == "culprit"] == culprits


# -- the screen ------------------------------------------------------------------------------------------------------


def test_without_a_traceback_the_last_output_is_shown() -> None:
    text = screen(failure(0, traceback=""))
    assert "its last output:\n    its\n    last words" in text


def test_equal_failures_are_one_group() -> None:
    text = screen(*(failure(rank, rank) for rank in (0, 1, 2, 5)))
    assert text.splitlines()[0] == "ranks 0-2, 5 on one: ValueError: boom"
    assert text.count("the traceback") == 1


def test_numbers_and_addresses_do_not_split_a_group() -> None:
    one = failure(0, summary="boom at 0x7f12ab, step 17", traceback="line 3")
    other = failure(1, 1, summary="boom at 0x55aa00, step 18", traceback="line 3")
    title = screen(one, other).splitlines()[0]
    assert title == "ranks 0, 1 on one: boom at 0x7f12ab, step 17 (text of rank 0; others differ)"


def test_a_consequence_comes_last_without_its_traceback() -> None:
    victim = failure(0, 0, summary="RuntimeError: Connection closed", traceback="a long story", consequence=True)
    text = screen(victim, failure(1, 1))
    assert text.splitlines()[0].startswith("rank 1 ")
    assert "rank 0 on one: RuntimeError: Connection closed (a consequence" in text
    assert "a long story" not in text


@pytest.mark.parametrize(
    ("consequence", "finished", "is_named"), [(True, [0, 2], True), (True, [], False), (False, [0], False)]
)
def test_ranks_that_had_finished_are_blamed_if_nobody_failed_by_itself(
    consequence: bool, finished: list[int], is_named: bool
) -> None:
    failures = [failure(1, consequence=consequence)]
    early = finished_early(failures, finished)
    assert early == ("ranks 0, 2 had finished train_func while other ranks still waited for them" if is_named else None)
    screen = failure_screen(failures, stopped=(), finished=finished, last_lines={}, cure="look at the shapes")
    assert (f"{early}. Look at the shapes" in screen) == is_named


def test_a_finished_rank_is_the_culprit_of_a_hang() -> None:
    first, second = hang_failures({0: "a", 1: "b"}, [1], after_s=15, finished=[1])
    assert (first.rank, first.consequence, first.summary) == (
        1,
        False,
        "finished train_func while other ranks waited for it",
    )
    assert (second.rank, second.consequence, second.summary) == (0, True, "made no progress for 15 s")


@pytest.mark.parametrize(
    ("where", "lines"),
    [
        ([], ["ranks 1-3 were stopped by distrain"]),
        (["3 ranks (1-3) in f at a.py:1"], ["ranks 1-3 were stopped by distrain, in f at a.py:1"]),
        (
            ["2 ranks (1, 3) in f at a.py:1"],
            ["ranks 1-3 were stopped by distrain", "    2 ranks (1, 3) in f at a.py:1"],
        ),
    ],
)
def test_ranks_that_we_stopped_are_named_with_their_place(where: list[str], lines: list[str]) -> None:
    assert screen(failure(0), stopped=[1, 2, 3], where=where).splitlines()[-len(lines) :] == lines


def test_a_long_traceback_is_cut_in_the_middle() -> None:
    text = screen(failure(0, traceback="\n".join(f"frame {n}" for n in range(500))))
    assert "frame 0\n" in text
    assert "frame 499" in text
    assert "lines left out" in text
    assert len(text.splitlines()) < 70


def frame(file: str, line: int, code: str = "call()") -> str:
    return f'  File "{file}", line {line}, in function\n    {code}\n    {"^" * len(code)}\n'


TORCH, STDLIB = "/venv/lib/python3.11/site-packages/torch/data.py", "/usr/lib/python3.11/multiprocessing/queues.py"
CHAIN = (
    "Traceback (most recent call last):\n"
    + "".join([frame(TORCH, 1), frame(STDLIB, 2), frame(STDLIB, 3), frame(TORCH, 4, "raise_it()")])
    + "RuntimeError: worker is killed\n    by a signal\n\n"
    "The above exception was the direct cause of the following exception:\n\n"
    "Traceback (most recent call last):\n"
    + "".join([frame("/home/me/train.py", 9, "for batch in loader:"), frame(TORCH, 5), frame(TORCH, 6, "raise x")])
    + "RuntimeError: worker exited\n"
)


def test_of_a_long_traceback_the_inner_frames_of_libraries_are_folded() -> None:
    assert screen(failure(0, traceback=CHAIN)).splitlines()[1:] == [
        "  Traceback (most recent call last):",
        "    ... 3 frames in torch, multiprocessing ...",
        '    File ".../torch/data.py", line 4, in function',
        "      raise_it()",
        "  RuntimeError: worker is killed",
        "      by a signal",
        "  The above exception was the direct cause of the following exception:",
        "  Traceback (most recent call last):",
        '    File "/home/me/train.py", line 9, in function',
        "      for batch in loader:",
        f"      {'^' * 20}",
        "    ... 1 frame in torch ...",
        '    File ".../torch/data.py", line 6, in function',
        "      raise x",
        "  RuntimeError: worker exited",
    ]


# -- words -----------------------------------------------------------------------------------------------------------


def test_the_middle_of_a_long_traceback_is_left_out_where_it_enters() -> None:
    try:
        raise ValueError("begins" + "x y 12 " * 600_000 + "ends")
    except ValueError as error:
        text = user_code._traceback_text(error)
    assert len(text) < 40_000
    assert "begins" in text
    assert re.search(r"\n\.\.\. 4\d{6} characters left out \.\.\.\n", text)
    assert text.endswith("ends\n")
