"""The ends of a worker, one by one, and the error that the user gets for each."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import distrain
from distrain import Checkpoint, Result, WorkerGroupError
from tests.process.conftest import Fit, files_of, log_of, reported
from tests.tables import BUSY_FACTOR

if TYPE_CHECKING:
    from collections.abc import Callable

FIT_RAISES_WITHIN_S = 1.0


class Unpicklable(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class NeedsArguments(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Landmine:
    """Runs this code when it is unpickled."""

    def __init__(self, code: str) -> None:
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (self.code,)


def exit_with(code: object) -> Callable[[], None]:
    return lambda: sys.exit(code)  # type: ignore[arg-type]


def leave_with(code: int) -> Callable[[], None]:
    return lambda: os._exit(code)


def raise_(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def raise_what_needs_arguments() -> None:
    raise NeedsArguments(1, 2)


def raise_unpicklable() -> None:
    raise Unpicklable("holds a lock")


def kill_oneself(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def crash() -> None:
    faulthandler._sigsegv()  # type: ignore[attr-defined]


def close_output_and_raise() -> None:
    os.close(1)
    os.close(2)
    raise ValueError("boom")


def close_everything_and_raise() -> None:
    os.closerange(0, 1000)
    raise ValueError("boom")


def be_terminated() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


def one_fails(config: dict[str, Any]) -> None:
    """Rank 1 ends as it is told to; the others would stay for ever."""
    rank = distrain.get_context().get_world_rank()
    distrain.report({"rank": rank})
    if rank != 1:
        Path(config["place"], f"in-{rank}").touch()
        time.sleep(1000)
    while not Path(config["place"], "in-0").exists():
        time.sleep(0.001)
    Path(config["place"], "died").write_text(repr(time.time()))
    config["end"]()


def failure(fit: Fit, function: Callable[..., Any], *args: Any, **options: Any) -> WorkerGroupError:
    with pytest.raises(WorkerGroupError) as raised:
        fit(function, *args, **options)
    return raised.value


ENDS: list[Any] = [
    pytest.param(raise_(ValueError("bad lr")), ValueError, 1, "ValueError: bad lr", id="raise"),
    pytest.param(exit_with(3), SystemExit, 3, "sys.exit(3)", id="sys.exit(3)"),
    pytest.param(exit_with("no data"), SystemExit, 1, "sys.exit('no data')", id="sys.exit(text)"),
    pytest.param(close_output_and_raise, ValueError, 1, "ValueError: boom", id="closed stdout, raise"),
    pytest.param(close_everything_and_raise, RuntimeError, 1, "exited with code 1", id="all closed, raise"),
    pytest.param(be_terminated, SystemExit, 143, "was ended by SIGTERM (15), not sent by distrain at", id="SIGTERM"),
    pytest.param(leave_with(0), RuntimeError, 1, "exited with code 0", id="os._exit(0)"),
    pytest.param(leave_with(3), RuntimeError, 3, "exited with code 3", id="os._exit(3)"),
    pytest.param(kill_oneself(signal.SIGKILL), RuntimeError, 137, "killed by SIGKILL (9)", id="SIGKILL"),
    pytest.param(crash, RuntimeError, 139, "killed by SIGSEGV (11)", id="SIGSEGV"),
    pytest.param(raise_unpicklable, RuntimeError, 1, "holds a lock", id="unpicklable"),
    pytest.param(raise_what_needs_arguments, NeedsArguments, 1, "NeedsArguments: 1 and 2", id="needs arguments"),
    pytest.param(raise_(Mute()), Mute, 1, "Mute", id="its __str__ fails"),
    pytest.param(raise_(KeyboardInterrupt()), KeyboardInterrupt, 130, "KeyboardInterrupt", id="KeyboardInterrupt"),
]


@pytest.mark.sample(6)
@pytest.mark.parametrize(("end", "kind", "exit_code", "text"), ENDS)
def test_the_end_of_one_rank_ends_all_at_once_and_is_explained(
    fit: Fit, tmp_path: Path, end: Callable[[], None], kind: type[BaseException], exit_code: int, text: str
) -> None:
    error = failure(fit, one_fails, {"place": str(tmp_path), "end": end})
    took_s = time.time() - float((tmp_path / "died").read_text())
    assert error.culprit == 1
    assert error.exit_code == exit_code
    assert list(error.worker_failures) == [1]
    assert isinstance(error.worker_failures[1], kind)
    assert str(error).startswith("rank 1 on localhost: ")
    assert text in str(error)
    assert "\nrank 0 was stopped by distrain, in " in str(error)
    assert took_s < BUSY_FACTOR * FIT_RAISES_WITHIN_S
    assert error.result is not None
    again = Result.from_path(error.result.path).error
    assert isinstance(again, WorkerGroupError)
    assert str(again) == str(error)
    assert type(again.original) is type(error.original)


@pytest.mark.parametrize(
    ("code", "kind", "texts"),
    [
        ("raise LookupError('boom')", LookupError, ("LookupError: boom", "before train_func")),
        ("import os; os._exit(3)", RuntimeError, ("exited with code 3", "before it entered train_func")),
    ],
)
def test_an_end_while_unpickling_is_named_as_such(
    fit: Fit, code: str, kind: type[Exception], texts: tuple[str, str]
) -> None:
    error = failure(fit, lambda config: None, {"mine": Landmine(code)})
    for text in texts:
        assert text in str(error)
    assert isinstance(error.worker_failures[error.culprit], kind)


# -- what is left of the run -----------------------------------------------------------------------------------------


def fail_after_a_checkpoint(config: dict[str, Any]) -> None:
    rank = distrain.get_context().get_world_rank()
    checkpoint = None
    if rank == 0:
        Path(config["place"], "model").mkdir()
        Path(config["place"], "model", "weights.txt").write_text("1 2 3")
        checkpoint = Checkpoint.from_directory(Path(config["place"], "model"))
    distrain.report({"loss": 0.5}, checkpoint=checkpoint)
    if rank == 0:
        distrain.report({"loss": 0.25})
        while distrain.get_checkpoint() is None:  # committed
            time.sleep(0.001)
        print("before")
        raise FileNotFoundError(2, "No such file", "/data/train.bin")
    time.sleep(1000)


def test_the_error_and_the_run_directory_give_the_partial_result(any_fit: Fit, tmp_path: Path) -> None:
    only_rank_0 = distrain.CheckpointConfig(checkpoint_ranks=[0])
    error = failure(any_fit, fail_after_a_checkpoint, {"place": str(tmp_path)}, checkpoint_config=only_rank_0)
    assert error.result is not None
    again = Result.from_path(error.result.path)
    for copy, result in ((pickle.loads(pickle.dumps(error)), error.result), (again.error, again)):
        assert type(copy) is WorkerGroupError
        assert str(copy) == str(error)
        assert (copy.culprit, copy.exit_code) == (0, 1)
        original = copy.worker_failures[0]
        assert isinstance(original, FileNotFoundError)
        assert original.filename == "/data/train.bin"
        assert (result.metrics, result.return_value) == ({"loss": 0.25}, None)
        assert files_of(result.checkpoint) == {"weights.txt": "1 2 3"}
    assert error.original is error.worker_failures[0]
    log = log_of(error.result.path, 0)
    assert log.startswith("before\nTraceback")
    assert log.endswith("No such file: '/data/train.bin'\n")
    screen = str(error).partition("logs:")[0]
    assert "in fail_after_a_checkpoint" in screen
    assert str(Path(distrain.__file__).parent) not in screen, "the user's frames only"


def test_a_debugger_in_a_worker_says_where_it_works(fit: Fit) -> None:
    def train() -> None:
        import pdb

        pdb.set_trace()

    error = failure(fit, train)
    assert "BdbQuit" in str(error)
    assert "distrain: pdb needs a terminal, which workers do not have: " in str(error)
    assert "--debug-rank 0" in str(error)
    assert "ScalingConfig(num_workers=0)" in str(error)


def test_where_sys_exit_was_called_is_told(any_fit: Fit) -> None:
    def leave() -> None:
        sys.exit("no data")

    line = leave.__code__.co_firstlineno + 1
    error = failure(any_fit, leave)
    assert f"sys.exit('no data') at test_failures.py:{line}, in leave\n" in str(error)


def test_a_crash_in_native_code_shows_the_users_line(any_fit: Fit) -> None:
    def read_nothing() -> None:
        ctypes.string_at(0)

    line = read_nothing.__code__.co_firstlineno + 1
    text = str(failure(any_fit, read_nothing, workers=1))
    assert "Fatal Python error: Segmentation fault\n" in text
    assert f'test_failures.py", line {line} in read_nothing\n' in text
    assert "Extension modules" not in text
    assert "execution.py" not in text


class Slow(Exception):
    def __str__(self) -> str:
        began = time.monotonic()
        while time.monotonic() < began + 0.5:
            pass
        return "slow text"


def raise_with_an_alarm_to_come() -> None:
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    raise Slow


def ring(number: int, frame: object) -> None:
    raise RuntimeError("alarm")


def test_a_signal_handler_that_raises_too_late_does_not_hide_the_failure(any_fit: Fit) -> None:
    """As torch's for the workers of a DataLoader may do."""
    text = str(failure(any_fit, raise_with_an_alarm_to_come))
    assert "Slow: slow text" in text
    assert "alarm" not in text.replace("raise_with_an_alarm_to_come", "")


# -- ends that are no failures ---------------------------------------------------------------------------------------


def test_a_rank_that_has_returned_ends_as_a_script_does(any_fit: Fit, tmp_path: Path) -> None:
    """Its threads, child processes and exit handlers end, and an abort in one of them is no failure."""

    def work_on(name: str) -> None:
        time.sleep(0.3)
        (place / name).touch()

    def train() -> str:
        atexit.register(os.abort)
        atexit.register(lambda: (place / f"left-{distrain.get_context().get_world_rank()}").touch())
        threading.Thread(target=work_on, args=["thread"]).start()
        multiprocessing.get_context("fork").Process(target=work_on, args=["child"]).start()
        if distrain.get_context().get_world_rank() == 1:
            sys.exit(0)
        return "good"

    place = tmp_path
    assert any_fit(train).return_value == "good"
    assert {path.name for path in place.iterdir()} >= {"left-0", "left-1", "thread", "child"}


def test_when_a_rank_fails_its_hook_is_called_and_exit_handlers_have_time(any_fit: Fit, tmp_path: Path) -> None:
    """Those of the rank, and of one that had finished."""

    def leave(name: str) -> None:
        (place / f"leaves-{name}").touch()
        time.sleep(0.5)
        (place / f"left-{name}").touch()

    def train() -> None:
        rank = distrain.get_context().get_world_rank()
        sys.excepthook = lambda kind, error, trace: (place / f"hook-{rank}-{error}-{sys.last_value}").touch()
        atexit.register(leave, f"{rank}")
        while rank == 0 and not (place / "leaves-1").exists():
            time.sleep(0.001)
        if rank == 0:
            raise ValueError("boom")

    place = tmp_path
    assert failure(any_fit, train).culprit == 0
    assert {path.name for path in place.glob("[lh]*-*")} == {
        "leaves-0",
        "leaves-1",
        "left-0",
        "left-1",
        "hook-0-boom-boom",
    }


def test_nonsense_in_a_workers_pipe_ends_that_worker_with_an_explanation(any_fit: Fit) -> None:
    def train() -> None:
        if distrain.get_context().get_world_rank() == 1:
            for fd in range(3, 50):
                with contextlib.suppress(OSError):
                    os.write(fd, b"nonsense" * 10)
        time.sleep(1000)

    error = failure(any_fit, train)
    assert error.culprit == 1
    assert "its code wrote to distrain's pipe" in str(error)


class Holder:
    """A trainer as libraries have it: training needs it, and it cannot be pickled."""

    def __init__(self) -> None:
        self.state = {"lock": threading.Lock()}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_return_value_that_cannot_be_pickled_is_left_out(
    fit: Fit, capfd: pytest.CaptureFixture[str], workers: int
) -> None:
    def train() -> Holder:
        distrain.report({"loss": 1})
        return Holder()

    result = fit(train, workers=workers, failure_config=distrain.FailureConfig(max_failures=3))
    assert (result.metrics, result.return_value) == ({"loss": 1}, None)
    assert len(reported(result.path)) == max(workers, 1)  # of one attempt
    warnings = [line for line in capfd.readouterr().err.splitlines() if "Result.return_value is None" in line]
    assert len(warnings) == 1
    assert "return_value.state['lock'] (_thread.lock) cannot be pickled: TypeError: " in warnings[0]


def test_children_of_a_worker_end_by_sigterm_as_anywhere_else(fit: Fit) -> None:
    """They get neither our handler nor lose one that train_func has set for them."""

    def wait_for_the_end(ready: Any) -> None:
        ready.send(True)
        while True:
            time.sleep(0.01)  # pause() would miss a signal that comes just before it

    def exit_code_after_sigterm() -> int:
        here, there = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=wait_for_the_end, args=(there,))
        child.start()
        here.recv()  # CPython drops a signal that comes right after the fork
        child.terminate()
        child.join()
        assert child.exitcode is not None
        return child.exitcode

    def train() -> tuple[int, int]:
        plain = exit_code_after_sigterm()
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(9))
        return plain, exit_code_after_sigterm()

    assert fit(train, workers=1).return_value == (-signal.SIGTERM, 9)
