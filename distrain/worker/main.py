"""One rank: open the job, set up the framework, run train_func in the main thread, say what came of it.

Runs in: worker. The outcome goes out on the channel before anything can go wrong at exit, then the exit handlers run,
and the process leaves by os._exit: processes that did DDP over gloo often abort while the interpreter is taken down.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import random
import signal
import sys
import traceback
from dataclasses import asdict, dataclass
from typing import NoReturn

from distrain import wire
from distrain.context import TrainContext
from distrain.system.process import STACKS_SIGNAL
from distrain.wire.channel import Channel, widen_pipe
from distrain.work import job, main_module
from distrain.worker.session import Session
from distrain.worker.user_code import UserCodeResult, attempt, conclude, flush, leave, terminate

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
    context = _context(spec)
    checkpoint = context.get_storage().checkpoint(spec.checkpoint) if spec.checkpoint else None
    session = Session(channel, context, checkpoint)
    Session.current = session
    try:
        done = attempt(lambda: _load(fds.job), session, channel)
        _hush_signals()
    except BaseException as error:  # raised by a signal handler, in the last moment
        _hush_signals()
        done = UserCodeResult(stage="run", error=error)
    executed = conclude(done, session)
    outcome, work = executed.outcome, executed.work
    flush()
    with contextlib.suppress(OSError):
        channel.send(outcome)
    if outcome.ok and work is not None:
        _let_go(work, session)
    leave(outcome.exit_code)


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
        if signal.getsignal(signal.SIGTERM) is terminate:  # ours, not one that the user wants there, too
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
    sys.path[:] = [path for entry in spec.sys_path for path in (sys.path[:] if entry is None else [entry])]
    sys.argv[:] = spec.argv
    main_module.begin()


def _answer_signals(stacks_fd: int) -> None:
    """SIGTERM unwinds train_func, so that its ``finally`` blocks run; the stacks signal works even while C code holds
    the GIL.
    """
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, file=stacks_fd, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, terminate)


def _hush_signals() -> None:
    """There is nothing left to unwind, and the outcome must get out: no handler in Python is called from now on."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL if number == signal.SIGCHLD else signal.SIG_IGN)


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
        filesystem=spec.filesystem,
        validates=spec.validates,
        attempt=spec.attempt,
        devices=tuple(spec.devices),
        shares_gpu=spec.shares_gpu,
        run_id=spec.run_id,
        metadata=spec.metadata,
        resources=spec.resources,
    )


# -- the work --------------------------------------------------------------------------------------------------------


def _load(job_fd: int) -> job.Work:
    work = job.loads(_read_all(job_fd))
    if isinstance(work, job.FunctionWork):
        main_module.share(work.function)
    return work


def _read_all(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    parts, offset = [], 0
    while offset < size:
        parts.append(os.pread(fd, size - offset, offset))
        offset += len(parts[-1])
    return b"".join(parts)


# -- leaving ---------------------------------------------------------------------------------------------------------


def _let_go(work: job.Work, session: Session) -> None:
    """Free the peers. What they may still need of rank 0, the store of the process group, stays until all are done; so
    do local files that we are to delete.
    """
    try:
        kept = work.backend.teardown(session.context)
    except Exception:
        traceback.print_exc()
        return
    if kept is not None and session.context.world_rank == 0:
        session.wait_for_release()
    session.wait_for_commits()
