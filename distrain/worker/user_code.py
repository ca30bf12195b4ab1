"""Run the user's code in this process, and make the outcome of it. Runs in: worker, coordinator (without workers)."""

from __future__ import annotations

import atexit
import contextlib
import inspect
import itertools
import os
import pickle
import runpy
import signal
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from distrain import wire
from distrain.errors import DistrainError, Portable, Rollback
from distrain.hosts.host import MIRROR
from distrain.hosts.shared_memory import shared_memory_problem
from distrain.storage.names import evidence_file
from distrain.system.background import start_hidden_thread
from distrain.system.log import warn
from distrain.system.notebook import cell_of, with_cells
from distrain.system.peer_errors import blames_peer
from distrain.system.pickling import pickled
from distrain.system.text import OWN_FILES, is_users_file, signal_in_words
from distrain.worker.job.job import FunctionWork, TargetWork
from distrain.worker.job.unpicklable import describe_unpicklable
from distrain.worker.places import at, no_collection, place_of
from distrain.worker.reporting.written_files import WrittenFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from types import FrameType, TracebackType

    from distrain.worker.job.job import Work
    from distrain.worker.session import Session

NOTICE_S = 10.0
"""Seconds that a rank may take to exit before a line says what it waits for. The time doubles with every line."""
_LONGEST_SUMMARY = 300
"""Longest first line of an exception, in characters."""
_LONGEST_TRACEBACK = 32 << 10
"""Longest traceback, in characters."""
_LARGEST_EXCEPTION = 64 << 20
"""Largest pickled exception, in bytes. A larger one holds data, which would cost more than it helps."""
_LARGEST_SNAPSHOT = 32 << 20
"""Largest pickled snapshot of a GPU's memory, in bytes."""
_COMMUNICATION = ("torch.distributed.", "torch.nn.parallel.")
"""Modules whose exceptions come from the communication between ranks, or of which one called its native code."""
_FILES = ("torch.distributed.checkpoint.",)
"""Modules among them that read and write files."""
RUNNER_FILES = (OWN_FILES, "<frozen runpy>", "<frozen importlib", runpy.__file__)
"""Files of distrain, and of what it runs scripts with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """The end of a rank: the message about it, and the exception."""

    outcome: wire.Outcome
    error: BaseException | None = None


def run_rank(
    load: Callable[[], Work],
    session: Session,
    *,
    observed: AbstractContextManager[None],
    ended: Callable[[BaseException | None], None],
) -> RankResult:
    """Load the work, set up its framework, run it, and make the outcome. Raises nothing.

    observed: a context in which it is run.
    ended: called with what it has raised, before the outcome is made.
    """
    value, error = None, None
    try:
        try:
            value = _run(load, session, observed)
        except BaseException as raised:
            error = raised
        ended(error)
    except BaseException as interrupt:  # a signal handler raised it after the user's code had returned
        ended(None)
        session.stage, error = "run", interrupt
    body = pickled(None)
    if error is None and session.context.world_rank == 0:
        try:
            body = _pickled_value(value)
        except BaseException as interrupt:  # Ctrl-C without workers
            error = interrupt
    if error is None or (isinstance(error, SystemExit) and _exit_code(error) == 0 and session.stage == "run"):
        if error is not None and not session.runs_script:
            print(f"distrain: {_one_line(error)} has ended train_func on this rank", file=sys.stderr)
        attempt, rank = session.context.attempt, session.context.world_rank
        outcome = wire.Outcome(
            attempt=attempt, rank=rank, ok=True, stage=session.stage, body=body, stopped=session.stopped
        )
        return RankResult(outcome=outcome)
    if isinstance(error, SystemExit) and isinstance(error.code, str):
        print(error.code, file=sys.stderr)  # as the interpreter does
    return RankResult(outcome=_failure(session, error), error=error)


def _run(load: Callable[[], Work], session: Session, observed: AbstractContextManager[None]) -> Any:
    """Take all steps up to the end of the user's code, and return what it returns."""
    pid, context = os.getpid(), session.context
    try:
        work = session.work = load()
        if work.initialises_backend:
            session.stage = "setup"
            work.backend.setup(context)
        session.stage = "run"
        work.backend.at_begin(context)
        session.send(wire.Running)
        with observed, contextlib.closing(WrittenFiles(tempfile.gettempdir())) as session.temporary:
            if work.before is not None:
                work.before()
            value = work.run()
            if os.getpid() != pid:
                _end_forked_child(None)
            work.backend.at_end(context)
            session.finish_uploads()
    except BaseException as error:
        if os.getpid() != pid:
            _end_forked_child(error)
        session.finish_copy_from_gpu()
        if isinstance(error, Rollback) and error.skip_batch:
            error.skip_to = session.positions_to_skip_to()
        raise
    return value


# -- the end of the process ------------------------------------------------------------------------------------------


def _end_forked_child(error: BaseException | None) -> NoReturn:
    """End a child of the user's ``os.fork()`` that returned from train_func, as the interpreter ends a script."""
    if isinstance(error, SystemExit) and error.code is not None and not isinstance(error.code, int):
        print(error.code, file=sys.stderr)
    exit_process(0 if error is None else _exit_code(error), error)


def exit_process(code: int, error: BaseException | None = None, *, is_shown: bool = False) -> NoReturn:
    """Call sys.excepthook, wait for threads and run exit handlers as the interpreter does; exit without finalizing it.

    Ctrl-C ends what it interrupts, and changes the exit code.

    error: the exception that has ended the user's code. is_shown: somebody else prints it, as the usual hook would.
    """
    steps = [threading._shutdown, atexit._run_exitfuncs]  # type: ignore[attr-defined]
    if error is not None and not isinstance(error, SystemExit):
        raised = type(error), error.with_traceback(users_part(error)), error.__traceback__
        sys.last_type, sys.last_value, sys.last_traceback = raised
        setattr(sys, "last_exc", error)  # noqa: B010 - of Python 3.12
        hook = sys.excepthook
        # That of torch only puts the rank in front of what another one prints.
        while getattr(hook, "__module__", "") == "torch.distributed.distributed_c10d":
            hook = inspect.getclosurevars(hook).nonlocals.get("old_hook", sys.__excepthook__)
        if not (is_shown and hook is sys.__excepthook__):
            steps.insert(0, partial(hook, *raised))

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal code
        code = code or 128 + number
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, interrupt)
    with contextlib.suppress(RuntimeError):  # there may be no more threads
        start_hidden_thread(_say_what_is_awaited, threading.get_ident())
    for step in steps:
        try:
            step()
        except BaseException:
            traceback.print_exc()
    flush_output()
    os._exit(code)


def _say_what_is_awaited(main: int) -> None:
    """Print on stderr what keeps the process from exiting, more and more rarely."""
    for times in itertools.count():
        time.sleep(NOTICE_S * 2**times)
        with no_collection():
            frames = sys._current_frames()
            others = [one for one in threading.enumerate() if not one.daemon and one.ident != main]
            awaited = {f"the thread {one.name!r}": frames.get(one.ident or 0) for one in others}
            awaited = awaited or {"an exit handler": frames[main]}
            places = [f"{what}, at {place_of(one) or at(one, one)}" if one else what for what, one in awaited.items()]
        print(f"distrain: the code has ended; waiting for {' and '.join(places)}; Ctrl-C ends it", file=sys.stderr)


def flush_output() -> None:
    """Flush stdout and stderr. Raises nothing."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


class Terminated(SystemExit):
    """A signal that ends the process, usually SIGTERM, as an exception."""

    @property
    def number(self) -> int:
        """The number of the signal."""
        return _exit_code(self) - 128


def terminate(number: int, frame: object) -> NoReturn:
    """Handle a signal: raise :class:`Terminated`."""
    raise Terminated(128 + number)


# -- the outcome -----------------------------------------------------------------------------------------------------


def _pickled_value(value: object) -> bytes:
    """Pickle what train_func has returned. If that fails, warn and pickle None: the training has finished."""
    try:
        return pickled(value)
    except Exception as error:
        culprit = describe_unpicklable(("return_value", value))
        warn(
            f"train_func has finished, but Result.return_value is None: {culprit} cannot be pickled: "
            f"{_one_line(error)}. Return plain data, or save it in a checkpoint."
        )
        return pickled(None)


def _failure(session: Session, error: BaseException) -> wire.Outcome:
    text = _traceback_text(error)
    advice = _gpu_memory(session, error) or _explanation(session.work, error, text)
    rollback = None
    if isinstance(error, Rollback):
        rollback = {"why": _one_line(error).partition(": ")[2], "skip_to": error.skip_to}
    return wire.Outcome(
        attempt=session.context.attempt,
        rank=session.context.world_rank,
        ok=False,
        stage=session.stage,
        error=_with_users_paths(_one_line(error)),
        traceback=_with_users_paths(text) + (f"distrain: {advice}\n" if advice else ""),
        exit_code=_exit_code(error),
        body=_pickled_exception(error),
        blames_peer=any(map(_blames_peer, _chain(error))),
        exits=isinstance(error, (SystemExit, KeyboardInterrupt)),
        rollback=rollback,
    )


def keep_evidence(session: Session, what: str, body: bytes) -> str:
    """Send a piece of evidence for the run directory, and return the path that it gets."""
    session.send(wire.Dump, what=what, body=body)
    context = session.context
    return f"{context.get_storage().experiment_fs_path}/{evidence_file(context.attempt, what, context.world_rank)}"


def _gpu_memory(session: Session, error: BaseException) -> str | None:
    """Keep torch's snapshot of a GPU's memory that was too small, and return where it is.

    It lists segments and blocks. The stacks that allocated them, and what happened before, are in it if the script has
    called ``torch.cuda.memory._record_memory_history(max_entries=...)``. distrain does not: that takes 2 us for each
    allocation, and several kB for each entry (torch's docstring). A long history is left out; a snapshot that is large
    without it, too.
    """
    with contextlib.suppress(Exception):  # the failure itself matters more
        torch = sys.modules.get("torch")
        if torch is None or type(error) is not torch.cuda.OutOfMemoryError:
            return None
        snapshot = torch.cuda.memory._snapshot()
        body = pickle.dumps(snapshot)
        if len(body) > _LARGEST_SNAPSHOT:
            body = pickle.dumps({**snapshot, "device_traces": [[] for _ in snapshot["device_traces"]]})
        if len(body) <= _LARGEST_SNAPSHOT:
            file = keep_evidence(session, "memory", body)
            return f"what fills the GPU is in {file}: drop it onto https://pytorch.org/memory_viz"
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception, and those from which it follows."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        yield following
        seen.add(id(following))
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)


def _blames_peer(error: BaseException) -> bool:
    """Tell if an exception means that another rank is gone.

    A text about a broken connection is not enough: the rank may have lost one of its own, such as to a storage.
    """
    try:
        return blames_peer(str(error), between_ranks=is_of_communication(error))
    except Exception:  # its __str__ fails
        return False


def is_of_communication(error: BaseException) -> bool:
    """Return whether an exception comes from the communication between ranks."""
    places = (f"{type(error).__module__}.", f"{_raised_in(error)}.")
    return any(place.startswith(_COMMUNICATION) and not place.startswith(_FILES) for place in places)


def _raised_in(error: BaseException) -> str:
    """Return the name of the module that raised the exception, or called the native code that did."""
    names = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    return names[-1] if names else ""


def _pickled_exception(error: BaseException) -> bytes:
    """Return the pickled exception, or empty bytes if it cannot be pickled, cannot be unpickled or is too large."""
    try:
        body = pickled(Portable(error))
        pickle.loads(body)  # noqa: S301 - pickled in the line before
    except Exception:
        return b""
    return body if len(body) <= _LARGEST_EXCEPTION else b""


def _exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT  # as of the interpreter
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


# -- the text of an exception ----------------------------------------------------------------------------------------


def _one_line(error: BaseException) -> str:
    if isinstance(error, Terminated):
        return f"was ended by {signal_in_words(error.number)}, not sent by distrain{_origin(error)}"
    if isinstance(error, SystemExit):
        return f"sys.exit({error.code!r:.300}){_origin(error)}"
    try:
        text = str(error).strip()
    except Exception:
        text = "(its __str__ fails)"
    first = text.splitlines()[0] if text else ""
    if len(first) > _LONGEST_SUMMARY:
        first = f"{first[:_LONGEST_SUMMARY]} ..."
    return f"{type(error).__qualname__}: {first}" if first else type(error).__qualname__


def _origin(error: BaseException) -> str:
    """Return the innermost line outside of libraries, for an exception that is shown without a traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if is_users_file(frame.filename)]
    if not theirs:
        return ""
    file = cell_of(theirs[-1].filename) or os.path.basename(theirs[-1].filename)
    return f" at {file}:{theirs[-1].lineno}, in {theirs[-1].name}"


def _traceback_text(error: BaseException) -> str:
    """Return the traceback without distrain's outer frames; an empty string for sys.exit(), which isn't a crash."""
    if isinstance(error, SystemExit):
        return ""
    try:
        return _shortened("".join(traceback.format_exception(type(error), error, users_part(error))))
    except Exception as broken:  # an exception that cannot be formatted
        return f"{type(error).__qualname__} (its text is not available: {broken!r})\n"


def users_part(error: BaseException) -> TracebackType | None:
    """Return the traceback of an exception without distrain's outer frames."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(RUNNER_FILES):
        trace = trace.tb_next
    if trace is None and not isinstance(error, (DistrainError, SyntaxError)):
        trace = error.__traceback__  # there are only frames of distrain, so show them
    return trace


def _shortened(text: str) -> str:
    """Return the text without its middle if it is long: every process that gets it searches it."""
    left_out = len(text) - _LONGEST_TRACEBACK
    if left_out <= 0:
        return text
    half = _LONGEST_TRACEBACK // 2
    return f"{text[:half]}\n... {left_out} characters left out ...\n{text[-half:]}"


def _with_users_paths(text: str) -> str:
    """Replace the paths of copies that this host has of the user's files by those of the user's machine.

    In a kernel, replace those of cells by the names of the cells. Other workers get code that has these names.
    """
    brought, text = os.environ.get(MIRROR, ""), with_cells(text)
    return text.replace(f"{brought}/", "/") if brought else text


def _explanation(work: Work, error: BaseException, traceback_text: str) -> str | None:
    """Return what distrain or the framework's backend adds to the text of an exception."""
    text = work.backend.explain(error)
    if _raised_in(error) in ("bdb", "pdb") and not os.isatty(0):
        text = (
            "pdb needs a terminal, which workers do not have: name a rank with RunConfig(debug_rank=0) or "
            "--debug-rank 0, or train in your own process with ScalingConfig(num_workers=0)"
        )
    elif _lacks_threads(error):
        text = (
            "this process may start no more threads or processes: raise the limit (ulimit -u, or pids.max of the "
            "container), or use fewer (num_workers of the DataLoader, OMP_NUM_THREADS)"
        )
    elif "process group has not been initialized" in traceback_text:
        text = "`distrain run script.py:main` sets it up, as TorchTrainer does; a whole script has to do so itself"
    elif isinstance(work, TargetWork) and "Error: 'dict' object has no attribute" in traceback_text:
        text = (
            f"{work.target} is called with the values of --config and --set, a dict; it has to parse arguments itself"
        )
    elif isinstance(error, KeyError) and isinstance(work, (FunctionWork, TargetWork)) and not work.config:
        text = "the config is empty: train_loop_config=..., or --config and --set, fill it"
    elif "has no attribute 'set_epoch'" in traceback_text:
        text = "prepare_data_loader() gives a loader a sampler that has set_epoch()"
    elif problem := shared_memory_problem(traceback_text):
        text = problem
    elif isinstance(error, FileNotFoundError) and MIRROR in os.environ:
        text = (
            "this host shares no files with your machine, and has copies of your code only; --ship PATH, or "
            "ShippingConfig(include=[...]), copies other files"
        )
        if os.path.isabs(str(error.filename)):
            text += ". Keep them in your project, and open them by a path relative to it"
    elif isinstance(error, ModuleNotFoundError) and MIRROR in os.environ:
        text = (
            "this host shares no files with your machine, and has a copy of your project only; install the module "
            "there, or with --env-from, or keep it in the project"
        )
    elif isinstance(error, ModuleNotFoundError) and text is None:
        text = f"install it in {sys.executable}; for a module of your own, add its directory to PYTHONPATH"
    elif "is killed by signal: Killed" in traceback_text:  # says torch of a DataLoader worker
        text = "often the kernel kills it, for lack of memory: lower the DataLoader's num_workers, or the batch size"
    elif isinstance(error, OSError) and "Address already in use" in str(error):
        text = "ranks of a host cannot share a port: add the local rank to it, or bind port 0, which takes a free one"
    elif isinstance(error, FileNotFoundError) and not os.path.isabs(str(error.filename)):
        text = f"relative paths begin at {os.readlink('/proc/self/cwd')}"
    return text


def _lacks_threads(error: BaseException) -> bool:
    """Return True if no thread could be started, or no process forked."""
    if isinstance(error, RuntimeError):
        return str(error).startswith("can't start new thread")
    innermost = traceback.extract_tb(error.__traceback__)[-1:]
    return isinstance(error, BlockingIOError) and any("fork" in f"{frame.name} {frame.line}" for frame in innermost)
