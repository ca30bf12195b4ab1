"""The output of workers: whole lines on the console, raw bytes in the files."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import sys
import termios
import threading
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrain.api.observer import AttemptBegan, AttemptEnded, Printed, Reported
from distrain.console.run_console import INTERVAL_S, RunConsole
from distrain.coordinator.observers import Observers
from distrain.coordinator.store.rank_logs import RankLogs
from distrain.decisions.run_status import RunStatus
from distrain.storage.runs.listing import run_at
from distrain.storage.runs.logs import read_lines
from distrain.system import consoles
from distrain.system.background import Background
from distrain.system.consoles import console_threads
from distrain.system.log import log_level, say, warn
from distrain.system.output_lines import with_one_bar
from distrain.system.text import without_controls

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


Console = pytest.CaptureFixture[str]


def observers_of(
    *, ranks: int = 4, hosts: tuple[str, ...] = ("localhost",), shown: list[int] | None = None
) -> Observers:
    """The console of an attempt whose ranks are on these hosts, the last one on the last host."""
    status = RunStatus("/runs/run", started=0.0)
    observers = Observers([status, RunConsole(status, ranks=shown)])
    observers.tell(AttemptBegan(0, [*hosts[:-1], *[hosts[-1]] * (ranks - len(hosts) + 1)], 0.0))
    return observers


def report(
    observers: Observers, index: int, metrics: object = None, progress: object = None, *, now: float = 0.0
) -> None:
    observers.tell(Reported(0, index, index, metrics or {}, progress, now))  # type: ignore[arg-type]


class RankOutput:
    """Output of rank 3, told and logged as the coordinator does it."""

    def __init__(self, file: Path, observers: Observers) -> None:
        self._observers = observers
        self._logs = RankLogs(lambda attempt, rank: file, Background(None, "log"), print)
        self.flush = self._logs.flush

    def feed(self, stream: int, data: bytes) -> None:
        data = with_one_bar(data)
        self._logs.of(3).feed(stream, data)
        self._observers.tell(Printed(3, stream, data, time.monotonic()))

    def note(self, text: str) -> None:
        self._logs.of(3).note(text)

    def close(self) -> None:
        self._observers.tell(AttemptEnded(0, [], None, dict))
        self._logs.flush()

    @property
    def last_lines(self) -> list[str]:
        return self._logs.of(3).last_lines


@pytest.fixture
def log(tmp_path: Path) -> Path:
    folder = tmp_path / "logs" / "attempt_0"
    folder.mkdir(parents=True)
    return folder / "rank_3.log"


@pytest.fixture
def output(log: Path) -> Iterator[RankOutput]:
    opened = RankOutput(log, observers_of())
    yield opened
    opened.close()


def shown(capsys: Console, log: Path, *pieces: bytes) -> list[str]:
    """Lines on stdout while the pieces come in, and after the end."""
    output = RankOutput(log, observers_of())
    for piece in pieces:
        output.feed(1, piece)
    output.close()
    return capsys.readouterr().out.splitlines()


# -- lines -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "hosts", "line"),
    [(200, ("localhost",), "[rank   3] one\n"), (16, ("beta", "alpha"), "[rank  3 alpha] one\n")],
)
def test_ranks_are_aligned_and_name_their_hosts(
    capsys: Console, log: Path, ranks: int, hosts: tuple[str, ...], line: str
) -> None:
    output = RankOutput(log, observers_of(ranks=ranks, hosts=hosts))
    output.feed(1, b"one\n")
    output.close()
    assert capsys.readouterr().out == line


def test_the_prefix_of_torch_is_not_shown_beside_ours(capsys: Console, log: Path) -> None:
    data = b"[rank3]: Traceback\n[rank3]:   File 'a.py'\n[rank3]:[W1122 12:00:00] slow\n[rank2]: somebody else\n"
    lines = ["Traceback", "  File 'a.py'", "[W1122 12:00:00] slow", "[rank2]: somebody else"]
    assert shown(capsys, log, data) == [f"[rank 3] {line}" for line in lines]
    assert log.read_bytes() == data


def test_a_bar_below_another_one_ends_no_line(capsys: Console, log: Path) -> None:
    """As the Trainer of transformers saves: tqdm moves the cursor down and up again."""
    inner = [b"\n\rshards:   0%\x1b[A", b"\n\r\x1b[32mshards:  50%\x1b[0m\x1b[A", b"\n\r          \x1b[A"]
    assert shown(capsys, log, b"\r 25%", *inner, b"\rshards: 100%\n", b"\r 26%", b"\r100%\n") == [
        "[rank 3] shards: 100%",
        "[rank 3] 100%",
    ]
    assert list(read_lines(run_at(log.parents[2]), log)) == ["shards: 100%", "100%"]


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"\x1b[31mred\x1b[0m\n", "\x1b[31mred\x1b[0m"),
        (b"\x1b[A\x1b[2Jup and clear\x1b[K\n", "up and clear"),
        (b"\x1b]0;title\x07text\n", "text"),
        (b"\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\\n", "link"),
        (b"a\x00\x0e\x07b\x7f\tc\n", "ab\tc"),
        (b"\x1bcreset, cut \x1b\n", "reset, cut "),
        (b"caf\xe9 10%\r 50%\r\n", " 50%"),
    ],
)
def test_a_rank_cannot_move_about_on_the_console(capsys: Console, log: Path, data: bytes, line: str) -> None:
    assert shown(capsys, log, data) == [f"[rank 3] {line}"]
    assert log.read_bytes() == data


def test_an_unfinished_control_sequence_ends_with_its_line() -> None:
    assert without_controls("\x1b]0;title\ntext\n\x1b\nlast\x1b") == "\ntext\n\nlast"


def test_a_line_that_never_ends_does_not_fill_the_memory(capsys: Console, output: RankOutput) -> None:
    for _ in range(100):
        output.feed(1, b"x" * 10_000)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 5
    output.close()
    lines += capsys.readouterr().out.splitlines()
    assert sum(line.count("x") for line in lines) == 1_000_000


@given(
    lines=st.lists(
        st.text(st.characters(exclude_categories=["Cc"], exclude_characters="\u2028\u2029", codec="utf-8"), max_size=20)
    ),
    data=st.data(),
)
def test_any_split_gives_the_same_lines(
    lines: list[str], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    stream = "".join(f"{line}\n" for line in lines).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    output = RankOutput(tmp_path_factory.getbasetemp() / "split.log", observers_of())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", console := io.StringIO())
        for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            output.feed(1, stream[start:end])
        output.close()
    assert console.getvalue() == "".join(f"[rank 3] {line}\n" for line in lines)
    assert output.last_lines == lines


def test_a_console_that_is_gone_does_not_end_the_run(
    output: RankOutput, monkeypatch: pytest.MonkeyPatch, log: Path
) -> None:
    console = io.StringIO()
    console.close()
    monkeypatch.setattr(sys, "stdout", console)
    output.feed(1, b"one\n")
    output.flush()
    assert log.read_bytes() == b"one\n"


# -- consoles that take no more --------------------------------------------------------------------------------------


class Blocked:
    """A console that takes nothing until :meth:`read_until`."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.read_fd, self.write_fd = read_fd, write_fd
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        if os.isatty(write_fd):
            termios.tcflow(write_fd, termios.TCOOFF)  # Ctrl-S

    @contextlib.contextmanager
    def as_stderr(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        with io.TextIOWrapper(open(self.write_fd, "wb", closefd=False)) as stream, monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stream)
            with console_threads():
                yield

    def read_until(self, last: str) -> None:
        self._last = last
        if os.isatty(self.write_fd):
            termios.tcflow(self.write_fd, termios.TCOON)
        self._reader.start()

    def _read(self) -> None:
        with open(self.read_fd, closefd=False) as stream:
            while self._last not in (line := stream.readline()):
                self._lines.append(line.rstrip("\n"))
            self._lines.append(line.rstrip("\n"))

    def lines(self) -> list[str]:
        self._reader.join(timeout=20.0)
        return self._lines


@pytest.fixture(params=["pipe", "terminal"])
def blocked(request: pytest.FixtureRequest) -> Iterator[Blocked]:
    read_fd, write_fd = os.pipe() if request.param == "pipe" else os.openpty()
    yield Blocked(read_fd, write_fd)
    for fd in (read_fd, write_fd):
        os.close(fd)


def test_a_blocked_console_is_not_waited_for_and_shows_everything_later(
    blocked: Blocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    with blocked.as_stderr(monkeypatch):
        for number in range(2000):
            say(f"line {number} {'x' * 100}")
        blocked.read_until("line 1999")
    assert [line.split()[:3] for line in blocked.lines()] == [["distrain:", "line", str(n)] for n in range(2000)]


def test_a_blocked_console_that_misses_lines_says_how_many(blocked: Blocked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consoles, "_MOST_QUEUED_BYTES", 1 << 20)
    with blocked.as_stderr(monkeypatch):
        for number in range(5000):
            say(f"line {number} {'x' * 1000}")
        blocked.read_until("the logs have them")
    *shown, last = blocked.lines()
    assert len(shown) > 1000
    missed = 5000 - len(shown)
    assert last == f"distrain: {missed} lines are not shown, as this console was too slow; the logs have them"


# -- files and last lines --------------------------------------------------------------------------------------------


def test_a_line_of_one_stream_replaces_the_bar_of_the_other_in_the_log(output: RankOutput, log: Path) -> None:
    """As on a terminal. So it is found at the beginning of a line."""
    for stream, data in ((2, b"\r10%"), (2, b"|##|"), (1, b"{'loss': 1}\n"), (2, b"\r20%"), (2, b"\r30%\n")):
        output.feed(stream, data)
    output.feed(1, b"Epoch 1 ...")
    output.feed(2, b"a warning\n")
    output.close()
    assert log.read_bytes() == b"\r10%|##|\r{'loss': 1}\n\r20%\r30%\nEpoch 1 ...a warning\n"
    assert list(read_lines(run_at(log.parents[2]), log)) == ["{'loss': 1}", "30%", "Epoch 1 ...a warning"]


def test_a_log_that_cannot_be_written_does_not_keep_others_from_it(capsys: Console, tmp_path: Path) -> None:
    output = RankLogs(lambda attempt, rank: tmp_path / str(rank) / "log", Background(None, "log"), print)
    (tmp_path / "1").mkdir()
    output.begin(0)
    for turn in range(2):
        for rank in range(2):
            output.of(rank).feed(1, b"%d\n" % turn)
        output.flush()
    assert (tmp_path / "1" / "log").read_bytes() == b"0\n1\n"
    assert capsys.readouterr().err.count(f"the log {tmp_path / '0' / 'log'} can no longer be written") == 1


# -- reports ---------------------------------------------------------------------------------------------------------


def test_a_report_is_one_line_on_stderr(capsys: Console) -> None:
    report(observers_of(), 1, {"loss": 0.123456789, "epoch": 3, "eval": {"acc": 0.5}, "note": "x\ny"})
    assert capsys.readouterr() == ("", "distrain: report 1: loss=0.123457, epoch=3, eval/acc=0.5, note=x y\n")


def test_a_metric_that_becomes_nan_is_named_once(capsys: Console) -> None:
    observers = observers_of()
    for index, loss in enumerate((1.0, math.inf, math.nan, math.nan), 1):
        report(observers, index, {"train": {"loss": loss}})
    [line] = [line for line in capsys.readouterr().err.splitlines() if "nan" in line and "report 3" in line]
    assert line.startswith("distrain: rank 0 reported train/loss=nan in report 3. Common causes: the learning rate is")
    assert "FailureConfig(on_nan='rollback', nan_metric='train/loss')" in line


def test_progress_is_shown_with_its_rate_and_the_time_left(capsys: Console) -> None:
    observers = observers_of()
    for step in range(1, 41):
        report(observers, step, {"loss": 1.0}, (10 * step, 1000), now=100.0 + step)
    assert capsys.readouterr().err.splitlines() == [
        "distrain: 10/1000 (1%): loss=1",
        "distrain: 310/1000 (31%), 10.0/s, 1 min 09 s left: loss=1",
    ]


def test_fast_reports_are_throttled_and_the_last_one_is_shown(capsys: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    observers = observers_of()
    observers.tell(Reported(1, 1, 1, {}, None, 0.0))  # of another rank
    for index in range(1, 101):
        report(observers, index, now=10.0 + index * INTERVAL_S / 1000)
    assert capsys.readouterr().err == "distrain: report 1: no metrics\n"
    monkeypatch.setattr(time, "monotonic", lambda: 10.0 + 2 * INTERVAL_S)
    observers.tick()
    assert capsys.readouterr().err == "distrain: report 100, 33.3/s: no metrics\n"


# -- levels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("INFO", ["progress", "notice"]),
        ("WARNING", ["notice"]),
        ("ERROR", []),
    ],
)
def test_a_level_hides_what_is_below_it(capsys: Console, level: str, shown: list[str]) -> None:
    with log_level(level):
        say("progress")
        warn("notice")
    assert capsys.readouterr() == ("", "".join(f"distrain: {text}\n" for text in shown))


def test_lines_are_records_of_logging(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler of the user's own on the logger ``distrain`` gets them."""
    logger = logging.getLogger("distrain")
    monkeypatch.setattr(logger, "handlers", [*logger.handlers, caplog.handler])
    warn("50 % done, {really}")
    assert ("distrain", logging.WARNING, "50 % done, {really}") in caplog.record_tuples
