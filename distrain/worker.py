"""One rank: open the job, set up the framework, run train_func in the main thread, say what came of it.

Runs in: worker. The outcome goes out on the channel before anything can go wrong at exit, then the exit handlers run,
and the process leaves by os._exit: processes that did DDP over gloo often abort while the interpreter is taken down.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import io
import json
import os
import pickle
import random
import runpy
import signal
import sys
import threading
import traceback
from dataclasses import asdict, dataclass
from typing import NoReturn

import cloudpickle

from distrain import job, main_module, wire
from distrain.channel import Channel, widen_pipe
from distrain.checkpoint import Checkpoint
from distrain.errors import DistrainError
from distrain.process import STACKS_SIGNAL
from distrain.session import Session, TrainContext

__all__ = ["WORKER_PIPES", "WorkerFds", "main", "run_worker"]

WORKER_PIPES = ("down", "up", "out", "err", "stacks")
"""The order in which the agent hands over a worker's descriptors."""


@dataclass(frozen=True, slots=True)
class WorkerFds:
    """The descriptors a worker is born with: commands, reports, stdout, stderr, stacks, and the pickled job."""

    down: int
    up: int
    out: int
    err: int
    stacks: int
    job: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def all(self) -> tuple[int, ...]:
        return (self.down, self.up, self.out, self.err, self.stacks, self.job)


def main(arguments: list[str]) -> NoReturn:
    """A fresh interpreter that becomes a worker (start method ``spawn``)."""
    run_worker(WorkerFds(**json.loads(arguments[0])), forked=False)


def run_worker(fds: WorkerFds, *, forked: bool) -> NoReturn:
    """Be a worker from beginning to end; never returns."""
    _take_over_standard_streams(fds)
    channel = Channel(fds.down, fds.up)
    widen_pipe(fds.up)
    _keep_fds_out_of_children(fds)
    spec = _first_frame(channel)
    _adopt(spec)
    _answer_signals(fds.stacks)
    if forked:
        _reseed()
    session = Session(channel, _context(spec), Checkpoint(spec.checkpoint) if spec.checkpoint else None)
    Session.current = session
    outcome, work = _execute(fds.job, session, channel)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # there is nothing left to unwind, and the outcome must get out
    _flush()
    with contextlib.suppress(OSError):
        channel.send(outcome)
    if outcome.ok and work is not None:
        _let_go(work, session)
    _exit(outcome.exit_code)


# -- becoming a worker -----------------------------------------------------------------------------------------------


class _NoStdin(io.TextIOBase):
    """Says why there is nothing to read."""

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        raise EOFError("a distrain worker has no terminal: input() and pdb do not work in train_func; print() does")

    def read(self, size: int | None = -1) -> str:
        return self.readline()

    def fileno(self) -> int:
        return 0


def _take_over_standard_streams(fds: WorkerFds) -> None:
    devnull = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((devnull, 0), (fds.out, 1), (fds.err, 2)):
        os.dup2(source, target)
        os.close(source)
    sys.stdin = _NoStdin()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def _keep_fds_out_of_children(fds: WorkerFds) -> None:
    """Children of os.fork must neither hold our pipes open nor write into them."""
    private = (fds.down, fds.up, fds.stacks, fds.job)
    for fd in private:
        os.set_inheritable(fd, False)

    def become_stranger() -> None:
        for fd in private:
            with contextlib.suppress(OSError):
                os.close(fd)
        if signal.getsignal(signal.SIGTERM) is _terminate:  # ours, not one that the user wants there, too
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    os.register_at_fork(after_in_child=become_stranger)


def _first_frame(channel: Channel) -> wire.WorkerSpec:
    frames = channel.wait()
    if not frames:
        os._exit(1)  # the agent is gone
    spec = frames[0].message()
    assert isinstance(spec, wire.WorkerSpec)
    return spec


def _adopt(spec: wire.WorkerSpec) -> None:
    """The user's directory, path and arguments, and the rank's environment."""
    os.environ.update(spec.environment)
    for name, value in spec.defaults.items():
        os.environ.setdefault(name, value)
    os.chdir(spec.directory)
    sys.path[:] = spec.sys_path
    sys.argv[:] = spec.argv
    main_module.begin()


def _answer_signals(stacks_fd: int) -> None:
    """SIGTERM unwinds train_func, so that its ``finally`` blocks run; the stacks signal works even while C code holds
    the GIL."""
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, file=stacks_fd, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _terminate)


class _Terminated(SystemExit):
    """SIGTERM, as an exception."""


def _terminate(number: int, frame: object) -> NoReturn:
    raise _Terminated(128 + number)


def _reseed() -> None:
    """A fork copies the random state: without this all ranks and attempts would draw the same numbers."""
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if torch := sys.modules.get("torch"):
        torch.seed()


def _context(spec: wire.WorkerSpec) -> TrainContext:
    return TrainContext(
        world_rank=spec.rank,
        world_size=spec.world_size,
        local_rank=spec.local_rank,
        local_world_size=spec.local_world_size,
        node_rank=spec.node_rank,
        run_name=spec.run_name,
        storage_path=spec.storage_path,
        attempt=spec.attempt,
        devices=tuple(spec.devices),
    )


# -- the work --------------------------------------------------------------------------------------------------------


def _execute(job_fd: int, session: Session, channel: Channel) -> tuple[wire.Outcome, job.Work | None]:
    stage, work, value = "import", None, None
    context = session.context
    try:
        work = job.loads(_read_all(job_fd))
        if isinstance(work, job.FunctionWork):
            main_module.share(work.function)
        if work.initialises_backend:
            stage = "setup"
            work.backend.setup(context)
        stage = "run"
        channel.send(wire.Running(attempt=context.attempt, rank=context.world_rank))
        value = work.run()
        body = _pickled_value(value) if context.world_rank == 0 else b""
    except BaseException as error:
        if isinstance(error, SystemExit) and _exit_code(error) == 0 and stage == "run":
            return _outcome(context, stage=stage), work
        if isinstance(error, SystemExit) and isinstance(error.code, str):
            print(error.code, file=sys.stderr)  # as the interpreter does
        return _failure(context, stage, error), work
    return _outcome(context, stage=stage, body=body), work


def _read_all(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    parts, offset = [], 0
    while offset < size:
        parts.append(os.pread(fd, size - offset, offset))
        offset += len(parts[-1])
    return b"".join(parts)


def _pickled_value(value: object) -> bytes:
    try:
        body: bytes = cloudpickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"train_func returned a {type(value).__qualname__} that cannot be pickled: {error}. Return plain data, or "
            "save it in a checkpoint."
        ) from error
    return body


def _outcome(context: TrainContext, *, stage: str, body: bytes = b"") -> wire.Outcome:
    return wire.Outcome(
        attempt=context.attempt,
        rank=context.world_rank,
        ok=True,
        stage=stage,
        error=None,
        traceback="",
        exit_code=0,
        body=body or cloudpickle.dumps(None),
    )


def _failure(context: TrainContext, stage: str, error: BaseException) -> wire.Outcome:
    return wire.Outcome(
        attempt=context.attempt,
        rank=context.world_rank,
        ok=False,
        stage=stage,
        error=_one_line(error),
        traceback=_traceback_text(error),
        exit_code=_exit_code(error),
        body=_pickled_exception(error),
    )


def _exit_code(error: BaseException) -> int:
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def _traceback_text(error: BaseException) -> str:
    """The traceback without our own frames on top; none for sys.exit(), which is no crash."""
    if isinstance(error, SystemExit):
        return ""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OWN_FILES):
        trace = trace.tb_next
    if trace is None and not isinstance(error, (DistrainError, SyntaxError)):
        trace = error.__traceback__  # only our frames: then they are what there is to see
    try:
        return "".join(traceback.format_exception(type(error), error, trace))
    except Exception as broken:  # an exception that cannot even be formatted
        return f"{type(error).__qualname__} (its text cannot be had: {broken!r})\n"


_OWN_FILES = (os.path.dirname(__file__), "<frozen runpy>", "<frozen importlib", runpy.__file__)


def _one_line(error: BaseException) -> str:
    if isinstance(error, _Terminated):
        return "was ended by SIGTERM (15)"
    if isinstance(error, SystemExit):
        return f"sys.exit({error.code!r})"
    try:
        text = str(error).strip()
    except Exception:
        text = "(its __str__ fails)"
    first = text.splitlines()[0] if text else ""
    return f"{type(error).__qualname__}: {first}" if first else type(error).__qualname__


def _pickled_exception(error: BaseException) -> bytes:
    """Best effort; it must also come back, which exceptions with required arguments often do not."""
    try:
        body: bytes = cloudpickle.dumps(error)
        pickle.loads(body)  # noqa: S301 - our own
    except Exception:
        return b""
    return body


# -- leaving ---------------------------------------------------------------------------------------------------------


def _let_go(work: job.Work, session: Session) -> None:
    """Free the peers. What they may still need of rank 0, the store of the process group, stays until all are done."""
    try:
        kept = work.backend.teardown(session.context)
    except Exception:
        traceback.print_exc()
        return
    if kept is not None and session.context.world_rank == 0:
        session.wait_for_release()


def _exit(code: int) -> NoReturn:
    """What the interpreter does at exit, without taking itself down."""
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    _flush()
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
