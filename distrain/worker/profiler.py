"""A profile of this rank on request: samples of the stacks, and a trace of torch's operations. Runs in: worker.

A thread makes it, so a rank that hangs can be profiled, unless native code keeps the GIL.
"""

from __future__ import annotations

import gc
import gzip
import os
import sys
import tempfile
import threading
import time
from collections import defaultdict
from functools import partial
from heapq import nlargest
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain.errors import DistrainError
from distrain.system.background import start_hidden_thread
from distrain.worker.places import nap, no_collection, outwards, place_of
from distrain.worker.user_code import keep_evidence

if TYPE_CHECKING:
    from types import FrameType

    from distrain import wire
    from distrain.worker.session import Session

_SAMPLE_S = 0.01
_FIRST_WINDOW_S = 0.2
_MOST_GROWTH = 8
"""The most by which a window of the trace is longer than the one before, as a factor."""
_TRACE_BYTES = 32 << 20
"""The wanted size of a trace. All threads wait about 1 s while torch makes one of this size."""
_lock = threading.Lock()
"""Held during a profile. Another one begins after it."""


def begin_profile(session: Session, request: wire.Ask) -> None:
    """Profile this rank, and send what is found, in a thread."""
    start_hidden_thread(_profile, session, request.seconds)


def _profile(session: Session, seconds: float) -> None:
    keep = partial(keep_evidence, session)
    with _lock:
        until, samples, trace = time.monotonic() + seconds, StackSamples(), ""
        if torch := sys.modules.get("torch"):
            try:
                file = keep("trace", trace_torch(torch, until, samples))
                trace = f"torch's operations, for https://ui.perfetto.dev: {file}"
            except Exception as error:  # such as a full disk
                trace = f"torch's operations are not traced: {error}"
        samples.take_until(until)
        title = f"rank {session.context.world_rank}: the lines of your code with the most time"
        stacks = f"all stacks, for https://www.speedscope.app: {keep('samples', samples.collapsed().encode())}"
        text = "\n".join([title, *samples.hottest_lines(), stacks, trace])
        keep("profile", text.encode())  # the last one: the command waits for it


def trace_torch(torch: Any, until: float, samples: StackSamples) -> bytes:
    """Return a compressed trace of torch's operations, and take samples meanwhile. Raise an error that says why not.

    torch keeps all operations in memory and cannot count them before the end. Small ones may come at 400,000 per
    second, and the process would need gigabytes for some seconds of them. So there are traces of longer and longer
    times, until the next one would be too large.
    """
    profiler = torch.autograd.profiler  # torch.profiler would import torch._inductor, which takes seconds
    if any(type(one) is profiler.profile for one in gc.get_objects()):  # ours would end it, and crash it at its end
        raise DistrainError("train_func has a profiler of its own")
    try:
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        raise DistrainError(f"that needs torch 2.7 or newer, and this is {torch.__version__}") from None
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its errors would be in the output of the rank: that of no GPU
    device = "cuda" if torch.cuda.is_initialized() else None
    window_s = _FIRST_WINDOW_S
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        while True:
            began = time.monotonic()
            with profiler.profile(use_kineto=True, use_device=device, experimental_config=config) as profile:
                samples.take_until(min(began + window_s, until))
            if not profile.kineto_results.trace_start_ns():  # it is empty; to write it would crash
                raise DistrainError("train_func has begun a profiler of its own")
            profile.export_chrome_trace(str(file))
            size = file.stat().st_size
            if until - time.monotonic() < window_s or size > _TRACE_BYTES // 2:
                return gzip.compress(file.read_bytes(), compresslevel=3)
            window_s *= min(_MOST_GROWTH, _TRACE_BYTES / size)


class StackSamples:
    """Samples of the stacks of all threads but distrain's own."""

    def __init__(self) -> None:
        self._stacks: dict[str, float] = defaultdict(float)
        """The seconds in each stack."""
        self._lines: dict[str, float] = defaultdict(float)
        """The seconds of the main thread in each line of the user's code."""

    def take_until(self, until: float) -> None:
        """Take samples until a moment of time.monotonic().

        No object that the garbage collector tracks is made outside of no_collection(): finalizers run in the threads of
        train_func, as without us.
        """
        seen = time.monotonic()
        while seen < until:
            nap(_SAMPLE_S)
            now = time.monotonic()
            with no_collection():
                self._take(now - seen)
            seen = now

    def _take(self, seconds: float) -> None:
        frames = sys._current_frames()
        for thread in threading.enumerate():  # it does not know distrain's own
            if thread.ident is not None and (frame := frames.get(thread.ident)) is not None:
                self.add(thread, frame, seconds)

    def add(self, thread: threading.Thread, frame: FrameType, seconds: float) -> None:
        """Add a sample of a thread. Time in a library counts for the user's line that called it."""
        stack = [f"{one.f_code.co_name} ({one.f_code.co_filename}:{one.f_lineno})" for one in outwards(frame)]
        self._stacks[";".join([*stack, thread.name][::-1])] += seconds
        if thread is threading.main_thread():
            self._lines[place_of(frame) or "outside of your code"] += seconds

    def hottest_lines(self) -> list[str]:
        """Return the ten lines of the user's code with most of the main thread's time, with their shares of it."""
        hottest = nlargest(10, self._lines.items(), key=itemgetter(1))
        return [f"{seconds / sum(self._lines.values()):4.0%}  {line}" for line, seconds in hottest]

    def collapsed(self) -> str:
        """Return the milliseconds in each stack, in the collapsed format of speedscope and flamegraph.pl."""
        return "".join(f"{stack} {1000 * seconds:.0f}\n" for stack, seconds in self._stacks.items())
