"""Places in the user's code, from the frames of a thread. Runs in: worker."""

from __future__ import annotations

import contextlib
import gc
import linecache
import os
import re
import sys
import threading
import time
from types import ModuleType
from typing import TYPE_CHECKING

from distrain.system.stacks import PRIVATE, WRAPPERS
from distrain.system.text import OWN_FILES, is_users_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType, FrameType

_COLLECTIVE_FILES = re.compile(r"/torch/distributed/(distributed_c10d|_functional_collectives)\.py$")
_CHANNEL_FILES = [f"{OWN_FILES}{name}" for name in ("wire/channel.py", "coordinator/ranks/rank_channel.py")]
"""Files whose functions wait in native code for other ranks."""
_DEBUGGER_FILES = re.compile(r"/distrain/worker/(debugger|remote_pdb)\.py$|/debugpy/")
"""Those of distrain's debugger, and of one that the user's code has started."""
_WAITING_FUNCTIONS = {"_engine_run_backward", "synchronize"}
"""Functions of torch: DDP waits for other ranks in backward(), and a GPU waits for them in its queue."""
_WAITING_CALL = re.compile(r"\.(wait|item|cpu|tolist|synchronize)\(\)")
"""Native methods of tensors and of asynchronous collectives that wait for the same. They have no frame of their own."""


_SWITCH_S = 5e-5
_napping = threading.RLock()
_usual_s: float | None = None
"""During a nap, the switch interval after it."""
_threshold: tuple[int, int, int] | None = None
"""Without garbage collection, the threshold after that."""


def _reset_in_child() -> None:
    """Undo what :func:`nap` and :func:`no_collection` do at the moment in a child that train_func forks."""
    global _napping
    _napping = threading.RLock()  # the thread that holds the other one is not in the child
    if _usual_s is not None:
        sys.setswitchinterval(_usual_s)
    if _threshold is not None:
        gc.set_threshold(*_threshold)


os.register_at_fork(after_in_child=_reset_in_child)


def nap(seconds: float) -> None:
    """Sleep, and continue at any point of the main thread, to see where it is.

    Usually, a thread that runs Python keeps the GIL for 5 ms, unless it gives it up by itself, in native code. So after
    a usual sleep, of 1 ms of Python between calls of 1 ms, nothing is seen; after a nap, 42 % of the samples see it.
    """
    global _usual_s
    with _napping:
        _usual_s = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        during_nap = sys.getswitchinterval()
        time.sleep(seconds)
        if sys.getswitchinterval() == during_nap:  # else the user's code has set it
            sys.setswitchinterval(_usual_s)
        _usual_s = None


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Return a context without garbage collection, for walks along the frames of another thread.

    In Python 3.11, the collector may run finalizers while a frame object is made. If the thread of the frame ends it
    meanwhile, the object points to memory of something else. The user's code may call gc.enable() and gc.isenabled().
    """
    global _threshold
    before = _threshold = gc.get_threshold()
    paused = (0, *before[1:])
    gc.set_threshold(*paused)
    try:
        yield
    finally:
        if gc.get_threshold() == paused:  # else the user's code has set it
            gc.set_threshold(*before)
        _threshold = None


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those of its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_users(code: CodeType) -> bool:
    """Return whether code is the user's own: neither of distrain nor of a library."""
    return is_users_file(code.co_filename)


def may_contain(pattern: re.Pattern[str], frame: FrameType) -> bool:
    """Return whether a pattern is found in the text of the user's code, or that of code which is running is missing.

    The text is that of this frame, its callers, and the modules that were imported.
    """
    running = {one.f_code.co_filename for one in outwards(frame) if is_users(one.f_code)}
    modules = [vars(module).get("__file__") for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    imported = {path for path in modules if isinstance(path, str) and path.endswith(".py") and is_users_file(path)}
    texts = {path: "".join(linecache.getlines(path)) for path in running | imported}
    return not all(map(texts.get, running)) or any(map(pattern.search, texts.values()))


def is_waiting(frame: FrameType) -> bool:
    """Return whether the innermost frame of a thread waits for other ranks, as far as can be seen."""
    file, function = frame.f_code.co_filename, frame.f_code.co_name
    if is_in_collective(frame) or file in _CHANNEL_FILES or (function in _WAITING_FUNCTIONS and "/torch/" in file):
        return True
    return _WAITING_CALL.search(linecache.getline(file, frame.f_lineno or 0)) is not None


def is_asking(frame: FrameType) -> bool:
    """Return whether a thread waits for an answer from distrain, and not for other ranks."""
    in_channel = frame.f_code.co_filename in _CHANNEL_FILES
    return in_channel and not any(one.f_code.co_name == "collective" for one in outwards(frame))


def is_in_debugger(frame: FrameType) -> bool:
    """Return whether the debugger of the rank has stopped a thread, or is about to."""
    return any(_DEBUGGER_FILES.search(one.f_code.co_filename) for one in outwards(frame))


def is_in_collective(frame: FrameType) -> bool:
    """Return whether the innermost frame of a thread is in a blocking call of torch.distributed."""
    return _COLLECTIVE_FILES.search(frame.f_code.co_filename) is not None


def is_in_backward_on_cpu(frame: FrameType) -> bool:
    """Return whether the innermost frame is in backward() without a GPU, which computes or waits for other ranks."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    is_in_backward = frame.f_code.co_name == "_engine_run_backward" and "/torch/" in frame.f_code.co_filename
    return is_in_backward and cuda is not None and not cuda.is_initialized()


def place_of(frame: FrameType) -> str:
    """Return the innermost line of the user's code, such as ``load_batch (train.py:31)``, or an empty string."""
    users, _ = _call(frame)
    return "" if users is None else at(users, users)


def stuck_at(frame: FrameType) -> str:
    """Return the same, and the function of a library that this line has called."""
    _, called = _call(frame)
    module = "" if called is None else str(called.f_globals.get("__name__", "")).rpartition(".")[2]
    return place_of(frame) + ("" if called is None else f", in {module}.{called.f_code.co_name}")


def call_in(frame: FrameType) -> str:
    """Return what the user's innermost line has called, such as ``all_reduce (train.py:88)``.

    It is the line itself, as :func:`place_of` says it, if that has called no function written in Python.
    """
    users, called = _call(frame)
    return place_of(frame) if users is None or called is None else at(users, called)


def _call(frame: FrameType) -> tuple[FrameType | None, FrameType | None]:
    """Return the user's innermost frame, and that of the function that it has called, without wrappers."""
    called = None
    for outer in outwards(frame):
        if is_users(outer.f_code):
            return outer, called
        if not WRAPPERS.match(outer.f_code.co_name):
            called = None if PRIVATE.match(outer.f_code.co_name) else outer
    return None, called


def at(frame: FrameType, function: FrameType) -> str:
    """Return the name of a function with the line of a frame."""
    name, line = function.f_code.co_name, f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    return line if name == "<module>" else f"{name} ({line})"
