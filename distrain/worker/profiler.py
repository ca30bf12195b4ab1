"""A profile of this rank on request: samples of the stacks, and a trace of torch's operations. Runs in: worker.

A thread makes it, so a rank that hangs can be profiled, unless native code keeps the GIL.
"""

from __future__ import annotations

import _thread
import contextlib
import gc
import gzip
import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.errors import DistrainError
from distrain.system import __version__
from distrain.worker.places import no_collection
from distrain.worker.user_code import run_rank

if TYPE_CHECKING:
    from types import FrameType

    from distrain.worker.session import Session, WorkerChannel

_SAMPLE_S = 0.01
_SWITCH_S = 5e-5
"""Seconds until a thread that runs Python gives the GIL to the one that takes samples. With 5 ms, the default, it
sees the main thread only where that gives up the GIL by itself, in native code: of 1 ms of Python between such calls,
45 % of the time, it saw nothing. With this value it saw 42 %."""
_MOST_SAMPLES = 10_000
"""Samples of a long profile: it takes fewer per second, so that its file stays small."""
_FIRST_WINDOW_S = 0.2
_MOST_GROWTH = 8
"""How many times as long as the last one the next window of the trace is, at most."""
_TRACE_BYTES = 32 << 20
"""The wanted size of a trace. All threads wait about 1 s while torch makes one of this size."""
_PACKAGE = os.path.dirname(os.path.dirname(__file__))


class Profiler:
    """Profile this rank when the coordinator asks for it."""

    def __init__(self, session: Session, channel: WorkerChannel) -> None:
        self._context = session.context
        self._channel = channel
        session.on_profile = lambda seconds: _thread.start_new_thread(self._run, (seconds,))

    def _run(self, seconds: float) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they have to interrupt the main thread
        self._send(body=b"")  # it has begun
        until, trace, note = time.monotonic() + seconds, b"", ""
        samples = StackSamples(max(_SAMPLE_S, seconds / _MOST_SAMPLES))
        try:
            if torch := sys.modules.get("torch"):
                trace, note = trace_windows(torch, until, samples)
        except Exception as error:  # such as a full disk
            note = f"torch's operations could not be traced: {error!r}"
        samples.take_until(until)
        title = f"rank {self._context.world_rank} of {self._context.run_name}"
        stacks = json.dumps(samples.as_speedscope(title)).encode()
        self._send(body=stacks + trace, stacks_bytes=len(stacks), note=note)

    def _send(self, **fields: Any) -> None:
        attempt, rank = self._context.attempt, self._context.world_rank
        with contextlib.suppress(OSError, DistrainError):  # the agent is gone
            self._channel.send(wire.RankProfile(attempt=attempt, rank=rank, **fields))


def trace_windows(torch: Any, until: float, samples: StackSamples) -> tuple[bytes, str]:
    """Return a compressed trace of torch's operations, and what the user has to know. Take samples meanwhile.

    torch keeps all operations in memory and cannot count them before the end. Small ones may come at 400,000 per
    second, and the process would need gigabytes for some seconds of them. So there are traces of longer and longer
    times, until the next one would be too large.
    """
    profiler = torch.autograd.profiler  # torch.profiler would import torch._inductor, which takes seconds
    if any(type(one) is profiler.profile for one in gc.get_objects()):  # ours would end it, and crash it at its end
        return b"", "torch's operations are not traced, as train_func has a profiler of its own"
    try:
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        return b"", f"torch's operations are not traced: that needs torch 2.7 or newer, and this is {torch.__version__}"
    device = "cuda" if torch.cuda.is_initialized() else None
    window_s = _FIRST_WINDOW_S
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        while True:
            began = time.monotonic()
            with profiler.profile(use_kineto=True, use_device=device, experimental_config=config) as profile:
                samples.take_until(min(began + window_s, until))
                window_s = time.monotonic() - began
            if not profile.kineto_results.trace_start_ns():  # it is empty; to write it would crash
                return b"", "torch's operations are not traced, as train_func has begun a profiler of its own"
            profile.export_chrome_trace(str(file))
            size = file.stat().st_size
            if until - time.monotonic() < window_s or size > _TRACE_BYTES // 2:
                trace = gzip.compress(file.read_bytes(), compresslevel=3)
                return trace, f"torch's operations were traced for {window_s:.1f} s"
            window_s *= min(_MOST_GROWTH, _TRACE_BYTES / size)


class StackSamples:
    """Samples of the stacks of all threads but distrain's own. Those of the main thread begin at train_func."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._frames: dict[tuple[str, str, int], int] = {}
        """Function, file and line: their place in the file that is written."""
        self._threads: dict[int, dict[str, Any]] = {}

    def take_until(self, until: float) -> None:
        """Take samples until a moment of time.monotonic().

        No object that the garbage collector tracks is made outside of no_collection(): finalizers run in the threads of
        train_func, as without us.
        """
        switch_s, seen = sys.getswitchinterval(), time.monotonic()
        sys.setswitchinterval(_SWITCH_S)
        try:
            while seen < until:
                time.sleep(self._every_s)
                now = time.monotonic()
                with no_collection():
                    self._take(now - seen)
                seen = now
        finally:
            sys.setswitchinterval(switch_s)

    def _take(self, seconds: float) -> None:
        frames = sys._current_frames()
        for thread in threading.enumerate():  # it does not know distrain's own
            if thread.ident is not None and (frame := frames.get(thread.ident)) is not None:
                empty = {"type": "sampled", "unit": "seconds", "startValue": 0, "endValue": 0.0}
                new = {**empty, "name": thread.name, "samples": [], "weights": []}
                profile = self._threads.setdefault(thread.ident, new)
                profile["samples"].append(self._stack_of(frame))
                profile["weights"].append(seconds)
                profile["endValue"] += seconds

    def _stack_of(self, innermost: FrameType) -> list[int]:
        stack: list[int] = []
        frame: FrameType | None = innermost
        while frame is not None and frame.f_code.co_name != run_rank.__name__:
            file = frame.f_code.co_filename.replace(_PACKAGE, "distrain")
            key = (frame.f_code.co_name, file, frame.f_lineno or 0)
            stack.append(self._frames.setdefault(key, len(self._frames)))
            frame = frame.f_back
        return stack[::-1]

    def as_speedscope(self, title: str) -> dict[str, Any]:
        """Return the samples in the format of https://www.speedscope.app, the main thread first."""
        return {
            "$schema": "https://www.speedscope.app/file-format-schema.json",
            "exporter": f"distrain {__version__}",
            "name": title,
            "shared": {"frames": [{"name": name, "file": file, "line": line} for name, file, line in self._frames]},
            "profiles": list(self._threads.values()),
        }
