"""A profile of this rank on request: a trace of torch's operations, and samples of the stacks. Runs in: worker.

Threads do both, so a rank that hangs can be profiled, unless it keeps the GIL.
"""

from __future__ import annotations

import _thread
import contextlib
import gc
import gzip
import json
import math
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
from distrain.system.text import size
from distrain.worker.user_code import run_rank

if TYPE_CHECKING:
    from collections.abc import Iterator
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
_MOST_BYTES = 64 << 20
"""The size up to which a file is sent."""
_PART_BYTES = 256 << 10
_PACKAGE = os.path.dirname(os.path.dirname(__file__))


class Profiler:
    """Profile this rank when the coordinator asks for it. Make and install it in the main thread."""

    def __init__(self, session: Session, channel: WorkerChannel) -> None:
        self._context = session.context
        self._channel = channel
        self._main = threading.get_ident()
        session.on_profile = lambda seconds: _thread.start_new_thread(self._run, (seconds,))

    def _run(self, seconds: float) -> None:
        _block_signals()
        try:
            self._profile(seconds)
        except Exception as error:
            self._send(note=f"the profile failed: {error!r}")
        self._send(last=True)

    def _profile(self, seconds: float) -> None:
        self._send()  # it has begun
        until = time.monotonic() + seconds
        samples, traced = StackSamples(self._main), threading.Event()
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder, "trace.json")
            _thread.start_new_thread(self._trace, (until, trace, samples, traced))
            samples.take_until(until, max(_SAMPLE_S, seconds / _MOST_SAMPLES))
            name = f"rank {self._context.world_rank} of {self._context.run_name}"
            self._send_file(".speedscope.json", json.dumps(samples.as_speedscope(name)).encode())
            traced.wait()
            if trace.exists():
                self._send_file(".json.gz", gzip.compress(trace.read_bytes(), compresslevel=3))

    def _trace(self, until: float, file: Path, samples: StackSamples, traced: threading.Event) -> None:
        """Write a trace to a file, if torch is loaded. Set ``traced`` at the end."""
        _block_signals()
        try:
            if torch := sys.modules.get("torch"):
                self._send(note=trace_windows(torch, until, file, samples))
        except Exception as error:
            self._send(note=f"torch's operations could not be traced: {error!r}")
        finally:
            traced.set()

    def _send_file(self, suffix: str, data: bytes) -> None:
        if len(data) > _MOST_BYTES:
            self._send(note=f"{suffix} has {size(len(data))}, more than {size(_MOST_BYTES)}: use fewer --seconds")
            return
        for start in range(0, len(data), _PART_BYTES):
            self._send(suffix=suffix, body=data[start : start + _PART_BYTES])

    def _send(self, **fields: Any) -> None:
        attempt, rank = self._context.attempt, self._context.world_rank
        with contextlib.suppress(OSError, DistrainError):  # the agent is gone
            self._channel.send(wire.ProfilePart(attempt=attempt, rank=rank, **fields))


def _block_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they have to interrupt the main thread


def trace_windows(torch: Any, until: float, file: Path, samples: StackSamples) -> str:
    """Write traces of longer and longer times, each over the last one, until the next would be too large.

    torch keeps all operations in memory and cannot count them before the end. Small ones may come at 400,000 per
    second, and the process would need gigabytes for some seconds of them. Return what the user has to know.
    """
    profiler = torch.autograd.profiler  # torch.profiler would import torch._inductor, which takes seconds
    if any(type(one) is profiler.profile for one in gc.get_objects()):  # ours would end it, and crash it at its end
        return "torch's operations are not traced, as train_func has a profiler of its own"
    try:
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        return f"torch's operations are not traced: that needs torch 2.7 or newer, and this is {torch.__version__}"
    device = "cuda" if torch.cuda.is_initialized() else None
    window_s = _FIRST_WINDOW_S
    while True:
        profile = profiler.profile(use_kineto=True, use_device=device, experimental_config=config)
        began = time.monotonic()
        profile.__enter__()
        time.sleep(max(0.0, min(window_s, until - time.monotonic())))
        with samples.paused():
            profile.__exit__(None, None, None)
            window_s = time.monotonic() - began
            if not profile.kineto_results.trace_start_ns():  # it is empty; to write it would crash
                return "torch's operations are not traced, as train_func has begun a profiler of its own"
            profile.export_chrome_trace(str(file))
        written = file.stat().st_size
        if until - time.monotonic() < window_s or written > _TRACE_BYTES // 2:
            return f"torch's operations were traced for {window_s:.1f} s"
        window_s *= min(_MOST_GROWTH, _TRACE_BYTES / written)


class StackSamples:
    """Samples of the stacks of all threads but distrain's own.

    main: the ident of the main thread, whose stacks begin at train_func.
    """

    def __init__(self, main: int) -> None:
        self._main = main
        self._frames: dict[tuple[str, str, int], int] = {}
        """Function, file and line: their place in the file that is written."""
        self._threads: dict[int, list[tuple[tuple[int, ...], float]]] = {main: []}
        """By thread: its stacks, the outermost frame first, each with the seconds that it was seen."""
        self._paused_until = 0.0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time of this context, in which torch keeps the GIL."""
        self._paused_until = math.inf
        try:
            yield
        finally:
            self._paused_until = time.monotonic()

    def take_until(self, until: float, every_s: float) -> None:
        """Take samples until a moment of time.monotonic()."""
        switch_s, seen = sys.getswitchinterval(), time.monotonic()
        sys.setswitchinterval(_SWITCH_S)
        try:
            while seen < until:
                time.sleep(every_s)
                now, since = time.monotonic(), max(seen, self._paused_until)
                if now > since:
                    self._take(now - since)
                seen = now
        finally:
            sys.setswitchinterval(switch_s)

    def _take(self, seconds: float) -> None:
        for thread, frame in sys._current_frames().items():
            if stack := self._stack_of(frame, is_main=thread == self._main):
                stacks = self._threads.setdefault(thread, [])
                if stacks and stacks[-1][0] == stack:
                    seconds_so_far = stacks.pop()[1]
                    stacks.append((stack, seconds_so_far + seconds))
                else:
                    stacks.append((stack, seconds))

    def _stack_of(self, innermost: FrameType, *, is_main: bool) -> tuple[int, ...]:
        """Return nothing for a thread of distrain."""
        stack, file = [], ""
        frame: FrameType | None = innermost
        while frame is not None and frame.f_code.co_name != run_rank.__name__:
            file = frame.f_code.co_filename
            shown = f"distrain{file[len(_PACKAGE) :]}" if file.startswith(_PACKAGE) else file
            key = (frame.f_code.co_name, shown, frame.f_lineno or 0)
            stack.append(self._frames.setdefault(key, len(self._frames)))
            frame = frame.f_back
        return () if file.startswith(_PACKAGE) and not is_main else tuple(reversed(stack))

    def as_speedscope(self, name: str) -> dict[str, Any]:
        """Return the samples in the format of https://www.speedscope.app, the main thread first."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return {
            "$schema": "https://www.speedscope.app/file-format-schema.json",
            "exporter": f"distrain {__version__}",
            "name": name,
            "activeProfileIndex": 0,
            "shared": {
                "frames": [{"name": name, "file": file, "line": line} for name, file, line in self._frames],
            },
            "profiles": [
                {
                    "type": "sampled",
                    "name": names.get(thread, "a thread that Python did not start"),
                    "unit": "seconds",
                    "startValue": 0,
                    "endValue": sum(seconds for _, seconds in stacks),
                    "samples": [stack for stack, _ in stacks],
                    "weights": [seconds for _, seconds in stacks],
                }
                for thread, stacks in self._threads.items()
            ],
        }
