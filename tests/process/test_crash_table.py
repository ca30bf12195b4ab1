"""The crash table of ranks: a failure x where in the worker it happens x on which ranks.

Every cell runs real processes, and is followed by the census of tests/conftest.py. Each run has three ranks; those that
do not fail wait for the others in a barrier. A normal run of the tests takes a sample of the cells, whose seed is in
their names (DISTRAIN_TABLE_SEED=N repeats it); ``--all`` takes every cell.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import importlib
import itertools
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest

import distrain
from distrain import Checkpoint, FailureConfig, HangError, PreemptionError, Result, RunConfig, ScalingConfig
from distrain.api.backend import BackendConfig
from distrain.coordinator.connection.transport import LocalTransport, Transport
from distrain.coordinator.fit import run_work
from distrain.worker.job.job import FunctionWork
from tests.process.conftest import GROUP_BYTES, SSH_THAT_EXECUTES, make_fake_ssh
from tests.tables import BUSY_FACTOR, deal_cells

if TYPE_CHECKING:
    from collections.abc import Callable

WORKERS = 3
SAMPLE = 16
RAISES_WITHIN_S = 1.0
HANG_TIMEOUT_S = 1.5
STOP_GRACE_S = 0.2


# -- what a rank does to itself ---------------------------------------------------------------------------------------


def raise_(strike: Strike) -> None:
    raise ValueError("boom")


def sys_exit(strike: Strike) -> None:
    sys.exit(3)


def os_exit_0(strike: Strike) -> None:
    os._exit(0)


def os_exit_3(strike: Strike) -> None:
    os._exit(3)


def sigkill(strike: Strike) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sigsegv(strike: Strike) -> None:
    faulthandler._sigsegv()  # type: ignore[attr-defined]


def be_stopped_for_a_while(strike: Strike) -> None:
    waker = 'until grep -q "^State:.T" /proc/$1/status; do sleep 0.01; done; sleep 0.2; kill -CONT $1'
    subprocess.Popen(["sh", "-c", waker, "waker", str(os.getpid())], start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def ignore_sigterm(strike: Strike) -> None:
    """The user's process is asked to end when everybody who ignores it does so."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(strike.place, f"ignores-{os.environ['RANK']}").touch()
    if int(os.environ["RANK"]) == strike.ranks[0]:
        while len(list(Path(strike.place).glob("ignores-*"))) < len(strike.ranks):
            time.sleep(0.001)
        os.kill(strike.user, signal.SIGTERM)
    time.sleep(1000)


def deadlock_with_the_gil(strike: Strike) -> None:
    lock, library = ctypes.create_string_buffer(64), ctypes.PyDLL(None)  # which does not release the GIL
    library.pthread_mutex_lock(lock)
    library.pthread_mutex_lock(lock)  # waits for itself


def run_out_of_memory(strike: Strike) -> None:
    taken = []
    while True:
        taken.append(bytearray(b"x") * (4 << 20))


def leave_a_grandchild(strike: Strike) -> None:
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    sigkill(strike)


def close_output(strike: Strike) -> None:
    os.close(1)
    os.close(2)


def close_output_and_raise(strike: Strike) -> None:
    close_output(strike)
    raise ValueError("boom")


def close_everything_and_raise(strike: Strike) -> None:
    os.closerange(0, 1000)
    raise ValueError("boom")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What a rank does, and what is to be said about it; ``kind`` None: nothing has failed."""

    do: Callable[[Strike], None]
    kind: str | None
    phrase: str = ""
    exit_code: int = 1
    after_s: float = 0.0


FAILURES: dict[str, Failure] = {
    "raise": Failure(do=raise_, kind="exception", phrase="boom"),
    "sys.exit(3)": Failure(do=sys_exit, kind="exception", phrase="sys.exit(3)", exit_code=3),
    "os._exit(0)": Failure(do=os_exit_0, kind="exit", phrase="exited with code 0"),
    "os._exit(3)": Failure(do=os_exit_3, kind="exit", phrase="exited with code 3", exit_code=3),
    "SIGKILL": Failure(do=sigkill, kind="signal", phrase="was killed by SIGKILL (9)", exit_code=137),
    "SIGSEGV": Failure(do=sigsegv, kind="signal", phrase="was killed by SIGSEGV (11)", exit_code=139),
    "SIGSTOP for a while": Failure(do=be_stopped_for_a_while, kind=None),
    "SIGTERM ignored": Failure(do=ignore_sigterm, kind="preemption", phrase="by SIGTERM", after_s=STOP_GRACE_S),
    "deadlock with the GIL": Failure(
        do=deadlock_with_the_gil, kind="hang", phrase="in deadlock_with_the_gil at", after_s=HANG_TIMEOUT_S
    ),
    "out of memory": Failure(
        do=run_out_of_memory,
        kind="memory",
        phrase=f"of the {GROUP_BYTES >> 20} MiB that the cgroup ",
        exit_code=137,
        after_s=1.0,
    ),
    "grandchild, SIGKILL": Failure(do=leave_a_grandchild, kind="signal", phrase="SIGKILL (9)", exit_code=137),
    "closed stdout": Failure(do=close_output, kind=None),
    "closed stdout, raise": Failure(do=close_output_and_raise, kind="exception", phrase="boom"),
    "all closed, raise": Failure(do=close_everything_and_raise, kind="exit", phrase="exited with code 1"),
}


# -- where it does so -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Strike:
    """To be called in every rank; strikes the ranks that are meant."""

    failure: str
    ranks: tuple[int, ...]
    place: str
    user: int = field(default_factory=os.getpid)

    def __call__(self) -> None:
        rank = int(os.environ["RANK"])
        if rank in self.ranks:
            Path(self.place, f"struck-{rank}").touch()
            FAILURES[self.failure].do(self)

    def in_a_moment(self) -> None:
        """While the rank does something else."""
        signal.signal(signal.SIGALRM, lambda number, frame: self())
        signal.setitimer(signal.ITIMER_REAL, 0.1)

    @property
    def is_over(self) -> bool:
        return len(list(Path(self.place).glob("struck-*"))) == len(self.ranks)


def meet() -> str:
    distrain.collective.barrier()
    return "trained"


def train_only(config: dict[str, Any]) -> str:
    return meet()


def strike_in_training(config: dict[str, Any]) -> str:
    config["strike"]()
    return meet()


class Metric:
    """Strikes when report() asks for its value."""

    shape = ()

    def __init__(self, strike: Strike) -> None:
        self.strike = strike

    def item(self) -> float:
        self.strike()
        return 1.0


class Striking(Checkpoint):
    """Strikes when report() reads its files."""

    strike: Strike

    def as_reported(self, *arguments: Any) -> Checkpoint:
        return self

    def as_directory(self) -> Any:
        self.strike()
        return super().as_directory()


def strike_in_metrics(config: dict[str, Any]) -> str:
    distrain.report({"loss": Metric(config["strike"])})
    return meet()


def strike_in_checkpoint(config: dict[str, Any]) -> str:
    folder = Path(config["strike"].place, f"model-{os.environ['RANK']}")
    folder.mkdir()
    (folder / f"weights-{os.environ['RANK']}.txt").write_text("1 2 3")
    checkpoint = Striking(folder)
    checkpoint.strike = config["strike"]
    distrain.report({"loss": 1.0}, checkpoint=checkpoint)
    return meet()


def strike_in_collective(config: dict[str, Any]) -> str:
    strike: Strike = config["strike"]
    if int(os.environ["RANK"]) in strike.ranks:
        strike.in_a_moment()
    else:
        while not strike.is_over:
            time.sleep(0.001)
    return meet()


class ReturnValue:
    def __init__(self, strike: Strike) -> None:
        self.strike = strike

    def __reduce__(self) -> Any:
        self.strike()
        return str, ("trained",)


def strike_in_return_value(config: dict[str, Any]) -> Any:
    meet()
    return ReturnValue(config["strike"])


def strike_at_exit(config: dict[str, Any]) -> str:
    atexit.register(config["strike"])
    return meet()


class Landmine:
    """Strikes when it is unpickled."""

    def __init__(self, strike: Strike) -> None:
        self.strike = strike

    def __reduce__(self) -> Any:
        return self.strike, ()


@dataclass(frozen=True, kw_only=True)
class StrikingBackend(BackendConfig):
    strike: Strike

    def setup(self, context: Any) -> None:
        self.strike()


USERS_MODULE = """
import os, pickle
from pathlib import Path
if "RANK" in os.environ:
    pickle.loads(Path(__file__).with_suffix(".pkl").read_bytes())()
def train(config):
    import distrain
    distrain.collective.barrier()
    return "trained"
"""


def strike_in_import(strike: Strike) -> FunctionWork:
    name = f"users_module_{uuid.uuid4().hex}"
    Path(strike.place, f"{name}.py").write_text(USERS_MODULE)
    Path(strike.place, f"{name}.pkl").write_bytes(cloudpickle.dumps(strike))
    return FunctionWork(function=importlib.import_module(name).train, config={}, backend=BackendConfig())


def with_function(function: Callable[[dict[str, Any]], Any]) -> Callable[[Strike], FunctionWork]:
    return lambda strike: FunctionWork(function=function, config={"strike": strike}, backend=BackendConfig())


PLACES: dict[str, Callable[[Strike], FunctionWork]] = {
    "import": strike_in_import,
    "unpickling": lambda strike: FunctionWork(
        function=train_only, config={"mine": Landmine(strike)}, backend=BackendConfig()
    ),
    "setup": lambda strike: FunctionWork(function=train_only, config={}, backend=StrikingBackend(strike=strike)),
    "training": with_function(strike_in_training),
    "report, metrics": with_function(strike_in_metrics),
    "report, checkpoint": with_function(strike_in_checkpoint),
    "collective": with_function(strike_in_collective),
    "return value": with_function(strike_in_return_value),
    "exit handlers": with_function(strike_at_exit),
}

BEFORE_TRAINING = ("import", "unpickling", "setup")
RANKS: dict[str, tuple[int, ...]] = {"rank 0": (0,), "rank 1": (1,), "all ranks": tuple(range(WORKERS))}


# -- the cells --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Cell:
    failure: str
    place: str
    ranks: str

    def __str__(self) -> str:
        return f"{self.failure} - {self.place} - {self.ranks}"

    @property
    def expected(self) -> str | None:
        """The kind of what fit() is to raise. What happens after the outcome was reported fails nothing."""
        is_harmless = self.place == "exit handlers" or self.loses_return_value
        return None if is_harmless else FAILURES[self.failure].kind

    @property
    def loses_return_value(self) -> bool:
        """True if the return value cannot be pickled: the training has finished all the same."""
        return self.place == "return value" and self.failure in ("raise", "closed stdout, raise")

    @property
    def phrases(self) -> list[str]:
        if self.expected in ("preemption", "hang"):
            return [FAILURES[self.failure].phrase]
        if self.place in BEFORE_TRAINING:
            when = "before train_func" if self.expected == "exception" else "before it entered train_func"
        else:
            when = "" if self.expected == "exception" else "during training"
        return [FAILURES[self.failure].phrase, when]

    @property
    def within_s(self) -> float:
        """From the strike to the end of fit()."""
        failure = FAILURES[self.failure]
        return BUSY_FACTOR * RAISES_WITHIN_S + failure.after_s


LEFT_OUT: list[tuple[Callable[[Cell], bool], str]] = [
    (
        lambda cell: cell.place == "return value" and cell.ranks != "rank 0",
        "only rank 0's return value is pickled",
    ),
    (
        lambda cell: cell.place == "return value" and cell.failure == "all closed, raise",
        "there, the exception is not a failure, and the rank cannot say that it has finished",
    ),
    (
        lambda cell: cell.place == "collective" and cell.ranks == "all ranks",
        "a collective that all ranks are in is over",
    ),
    (
        lambda cell: cell.place == "exit handlers" and cell.failure in ("SIGTERM ignored", "deadlock with the GIL"),
        "the run waits for exit handlers for ten minutes",
    ),
]


def cells() -> list[Cell]:
    every = (Cell(failure=f, place=p, ranks=r) for f, p, r in itertools.product(FAILURES, PLACES, RANKS))
    return [cell for cell in every if not any(is_out(cell) for is_out, _ in LEFT_OUT)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    deal_cells(metafunc, cells(), sample=SAMPLE)


def fit(cell: Cell, strike: Strike, transport: Transport) -> Result:
    hang_timeout_s = HANG_TIMEOUT_S if cell.expected == "hang" else None
    return run_work(
        PLACES[cell.place](strike),
        ScalingConfig(num_workers=WORKERS),
        RunConfig(
            name="run",
            storage_path=Path(strike.place, "runs"),
            stop_grace_s=STOP_GRACE_S,
            failure_config=FailureConfig(hang_timeout_s=hang_timeout_s),
        ),
        transports=(transport,),
    )


def test_a_crash(cell: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    strike = Strike(failure=cell.failure, ranks=RANKS[cell.ranks], place=str(tmp_path))
    transport: Transport = LocalTransport()
    if cell.failure == "out of memory":
        group = request.getfixturevalue("memory_group")
        transport = make_fake_ssh(tmp_path, f"echo $$ > {group}/cgroup.procs\n{SSH_THAT_EXECUTES}")
    error: BaseException | None = None
    try:
        result = fit(cell, strike, transport)
    except distrain.TrainingFailedError as raised:
        error = raised
    ended = time.time()
    struck = [path.stat().st_mtime for path in tmp_path.glob("struck-*")]
    assert struck, "nobody was struck"
    assert ended - min(struck) < cell.within_s
    match cell.expected:
        case None:
            assert error is None, str(error)
            assert result.return_value == (None if cell.loses_return_value else "trained")
        case "preemption":
            assert isinstance(error, PreemptionError)
            assert_is_explained(cell, str(error))
        case kind:
            assert isinstance(error, distrain.WorkerGroupError)
            assert isinstance(error, HangError) == (kind == "hang")
            assert_is_explained(cell, str(error))
            assert_is_blamed(cell, error)


def assert_is_explained(cell: Cell, text: str) -> None:
    for phrase in cell.phrases:
        assert phrase in text


def assert_is_blamed(cell: Cell, error: distrain.WorkerGroupError) -> None:
    ranks = RANKS[cell.ranks]
    assert error.culprit in ranks
    first = error.failures[0]
    assert (first.kind, first.rank, first.role) == (cell.expected, error.culprit, "culprit")
    culprits = {failure.rank for failure in error.failures if failure.role == "culprit"}
    assert culprits == set(ranks) if len(ranks) < WORKERS else culprits
    if cell.expected == "hang":
        return  # whose victims are known, too
    assert set(error.worker_failures) == culprits
    assert first.exit_code == error.exit_code == FAILURES[cell.failure].exit_code
    assert str(error).startswith(("rank ", "ranks "))


def test_the_table_is_complete() -> None:
    """Every failure, every place and every choice of ranks is in some cell, and every reason leaves something out."""
    table = cells()
    assert {cell.failure for cell in table} == set(FAILURES)
    assert {cell.place for cell in table} == set(PLACES)
    assert {cell.ranks for cell in table} == set(RANKS)
    every = [Cell(failure=f, place=p, ranks=r) for f, p, r in itertools.product(FAILURES, PLACES, RANKS)]
    assert all(any(is_out(cell) for cell in every) for is_out, _ in LEFT_OUT)


def test_a_child_that_the_kernel_has_killed_is_told_with_its_ranks_exception(
    memory_group: Path, tmp_path: Path
) -> None:
    """As with the workers of a DataLoader, also if the rank then has to be killed while it leaves."""

    def train(config: dict[str, Any]) -> None:
        if distrain.get_context().get_world_rank() == 1:
            atexit.register(time.sleep, 1000)
            eat = "taken = []\nwhile True: taken.append(bytearray(b'x') * (4 << 20))"
            raise RuntimeError(f"the child ended with {subprocess.run([sys.executable, '-c', eat]).returncode}")
        meet()

    transport = make_fake_ssh(tmp_path, f"echo $$ > {memory_group}/cgroup.procs\n{SSH_THAT_EXECUTES}")
    work = FunctionWork(function=train, config={}, backend=BackendConfig())
    with pytest.raises(distrain.WorkerGroupError) as raised:
        run_work(work, ScalingConfig(num_workers=2), RunConfig(storage_path=tmp_path), transports=[transport])
    text = str(raised.value)
    assert text.startswith("rank 1 on ")
    assert "RuntimeError: the child ended with -9 (meanwhile, the kernel killed a process for lack of memory" in text
    assert f"of the {GROUP_BYTES >> 20} MiB that the cgroup " in text
