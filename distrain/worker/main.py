"""One rank: open the job, set up the framework, run train_func in the main thread, send the outcome. Runs in: worker.

The outcome is sent before anything can fail at exit. Then sys.excepthook and exit handlers run, and the process ends by
os._exit: processes that did DDP over gloo often abort while the interpreter is finalized.
"""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import io
import json
import mmap
import os
import random
import signal
import sys
import traceback
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from distrain import wire
from distrain.api import current
from distrain.storage.checkpoint import fetch_with
from distrain.system.background import start_hidden_thread
from distrain.system.process import STACKS_SIGNAL, UNWIND_SIGNAL, WAKE_SIGNAL, show_command
from distrain.wire.channel import Channel
from distrain.worker import flight_recorder
from distrain.worker.debugger import Debugger
from distrain.worker.job import job, main_module
from distrain.worker.profiler import begin_profile
from distrain.worker.session import Session
from distrain.worker.user_code import exit_process, flush_output, run_rank, terminate
from distrain.worker.vitals import VitalsSampler

if TYPE_CHECKING:
    from collections.abc import Callable

_MOST_REQUESTS = 64
"""Requests for stacks that may come while native code holds the GIL. One answer is enough."""


class WorkerFds(NamedTuple):
    """The descriptors that a worker starts with. The agent passes them on in this order.

    down, up: messages from and to the agent.
    out, err: stdout and stderr.
    stacks: faulthandler writes stacks to it.
    job: a file with the pickled job.
    """

    down: int
    up: int
    out: int
    err: int
    stacks: int
    job: int


def main(arguments: list[str]) -> NoReturn:
    """Turn a new interpreter into a worker (start method ``spawn``). ``arguments``: the descriptors as JSON."""
    run_worker(WorkerFds(*json.loads(arguments[0])), forked=False)


def run_worker(fds: WorkerFds, *, forked: bool) -> NoReturn:
    """Run a worker from start to exit; never return."""
    _take_over_standard_streams(fds)
    channel = Channel(fds.down, fds.up)
    _keep_fds_out_of_children(fds)
    if not (frames := channel.wait()):
        os._exit(1)  # the agent is gone
    spec = frames[0].message()
    assert isinstance(spec, wire.WorkerSpec)
    _apply(spec)
    flight_recorder.turn_on()
    _handle_signals(fds.stacks)
    if forked:
        _reseed()
    session = Session.of(channel, spec)
    context = session.context
    show_command("distrain:", "rank", str(context.world_rank), "of", context.run_name)
    session.handle(frames[1:])
    current.session = session
    debugger = Debugger(session, spec.debug_rank)
    debugger.install()
    session.hooks["profile"] = partial(begin_profile, session)
    run = context.get_storage().experiment_fs_path
    fetch_with(session.fetch_checkpoint, run, lacks_storage=not context.sees_storage)
    sampler = VitalsSampler(session, spec.vitals_s, session.poll)

    def ended(error: BaseException | None) -> None:
        try:
            debugger.after_failure(error)
        finally:
            _ignore_signals()

    result = run_rank(lambda: _load(fds.job), session, observed=sampler, ended=ended)
    flush_output()
    with contextlib.suppress(OSError):
        channel.send(result.outcome)
    if result.outcome.ok:
        _disconnect_peers(session)
    exit_process(result.outcome.exit_code, result.error, is_shown=True)


# -- the start -------------------------------------------------------------------------------------------------------


def _input(prompt: object = "", /, _input: Callable[[object], str] = builtins.input) -> str:
    """Do what ``input()`` does, but say why there is no input. Other ways to read stdin find it empty."""
    try:
        return _input(prompt)
    except EOFError:
        how = "as arguments of the command line" if current.session.runs_script else "in train_loop_config"
        raise EOFError(
            f"a distrain worker has no terminal for input(): pass values {how}; pdb is opened by "
            "RunConfig(debug_rank=0), --debug-rank 0 or `distrain debug RUN -r 0`"
        ) from None


def _take_over_standard_streams(fds: WorkerFds) -> None:
    devnull = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((devnull, 0), (fds.out, 1), (fds.err, 2)):
        os.dup2(source, target)
        os.close(source)
    builtins.input = _input
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def _keep_fds_out_of_children(fds: WorkerFds) -> None:
    """Let children of the user's os.fork() neither hold the worker's pipes open nor write into them."""
    private = (fds.down, fds.up, fds.stacks, fds.job)
    for fd in private:
        os.set_inheritable(fd, False)

    def forget_worker() -> None:
        sys.settrace(None)  # a debugger of the worker cannot be reached from here
        for fd in private:
            with contextlib.suppress(OSError):
                os.close(fd)
        if signal.getsignal(signal.SIGTERM) is terminate:  # not a handler that the user has set for children, too
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    os.register_at_fork(after_in_child=forget_worker)


def _apply(spec: wire.WorkerSpec) -> None:
    """Set the rank's environment, and the directory, module path and arguments of the user's process."""
    os.environ.update(spec.environment)
    for name, value in spec.defaults.items():
        os.environ.setdefault(name, value)
    os.chdir(spec.directory)
    sys.path[:] = [path for entry in spec.sys_path for path in (sys.path[:] if entry is None else [entry])]
    sys.argv[:] = spec.argv
    main_module.replace_main()


def _handle_signals(stacks_fd: int) -> None:
    """Install the signal handlers.

    SIGTERM unwinds train_func, so that its ``finally`` blocks run. A script has no handler for SIGTERM but its own, as
    under torchrun; a signal of distrain's unwinds it.

    A thread writes the stacks on request. It holds the GIL, as faulthandler may crash if threads begin or end
    meanwhile. While C code holds the GIL, or the machine is busy, the thread does not run in time. A signal then makes
    faulthandler write only the stack of the thread that handles it, the main one, which needs no list of threads.
    """
    faulthandler.enable()
    start_hidden_thread(_write_stacks, stacks_fd)
    faulthandler.register(STACKS_SIGNAL, file=stacks_fd, all_threads=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(WAKE_SIGNAL, lambda number, frame: None)
    signal.siginterrupt(WAKE_SIGNAL, False)  # sleeps end all the same, and are continued
    signal.signal(UNWIND_SIGNAL, lambda number, frame: terminate(signal.SIGTERM, frame))
    signal.signal(signal.SIGTERM, terminate)


def _write_stacks(stacks_fd: int) -> None:
    while os.read(stacks_fd, _MOST_REQUESTS):
        faulthandler.dump_traceback(stacks_fd, all_threads=True)


def _ignore_signals() -> None:
    """Disable all handlers in Python: train_func has ended, and no handler may interrupt the sending of the outcome."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL if number == signal.SIGCHLD else signal.SIG_IGN)


def _reseed() -> None:
    """Seed the random generators anew. A fork copies their state, so all ranks would draw the same numbers.

    Numpy's seeds itself when ``numpy.random`` is imported, and torch's for devices when the device is first used.
    """
    random.seed()
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()


# -- the work --------------------------------------------------------------------------------------------------------


def _load(job_fd: int) -> job.Work:
    with mmap.mmap(job_fd, 0, access=mmap.ACCESS_READ) as blob:  # other workers read it, too
        work = job.loads(bytes(blob))
    if isinstance(work, job.FunctionWork):
        main_module.publish(work.function)
    elif isinstance(work, job.ScriptWork):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return work


# -- the end ---------------------------------------------------------------------------------------------------------


def _disconnect_peers(session: Session) -> None:
    """Tear down the framework, so that no peer waits for this rank.

    Rank 0 waits for the end of all ranks if the framework keeps something for them, such as the store of the process
    group. A rank with local files that it must delete waits, too.
    """
    try:
        kept = session.work.backend.teardown(session.context)
    except Exception:
        traceback.print_exc()
        return
    if kept is not None and session.context.world_rank == 0:
        session.wait_for_release()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a stop ends the wait: the outcome is sent
    session.wait_for_commits()
