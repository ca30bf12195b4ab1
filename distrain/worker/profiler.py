"""A profile of this rank on request: a trace of torch's operations, and samples of the stacks. Runs in: worker.

torch records the operations of the thread that starts its profiler. So a signal handler starts and stops it in the main
thread, between two lines of train_func. While native code runs, the handler waits until that returns. The samples come
from a thread, which needs no handler.
"""

from __future__ import annotations

import _thread
import gzip
import json
import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.system import __version__
from distrain.system.process import WAKE_SIGNAL
from distrain.system.text import size
from distrain.worker.user_code import run_rank

if TYPE_CHECKING:
    from collections.abc import Callable
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
"""The wanted size of a trace. The main thread waits about 1 s while torch makes one of this size."""
_MOST_BYTES = 64 << 20
"""The size up to which a file is sent."""
_PART_BYTES = 256 << 10
_NOTICE_S = 5.0
"""Seconds in native code after which the user hears of it."""
_STOP_S = 60.0
"""Seconds to wait for the main thread at the end of a trace."""
_WAKE_S = 1.0
_PACKAGE = os.path.dirname(os.path.dirname(__file__))


class Profiler:
    """Profile this rank when the coordinator asks for it. Make and install it in the main thread."""

    def __init__(self, session: Session, channel: WorkerChannel) -> None:
        self._session = session
        self._channel = channel
        self._main = threading.get_ident()
        self._tasks: deque[Callable[[], None]] = deque()
        """What the main thread has to do."""

    def install(self) -> None:
        """Set the hooks."""
        signal.signal(WAKE_SIGNAL, self.do_tasks)
        signal.siginterrupt(WAKE_SIGNAL, False)  # sleeps end all the same, and are continued
        self._session.on_profile = lambda seconds: _thread.start_new_thread(self._run, (seconds,))

    def do_tasks(self, number: int, frame: FrameType | None) -> None:
        """Do what waits for the main thread: a signal handler."""
        while self._tasks:
            self._tasks.popleft()()

    def _run(self, seconds: float) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they have to interrupt the main thread
        try:
            self._profile(seconds)
        except Exception as error:
            self._note(f"the profile failed: {error!r}")
        self._send(last=True)

    def _profile(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        samples, traced = StackSamples(self._main), threading.Event()
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder, "trace.json")
            _thread.start_new_thread(self._trace, (until, trace, traced))
            samples.take_until(until, max(_SAMPLE_S, seconds / _MOST_SAMPLES))
            context = self._session.context
            name = f"rank {context.world_rank} of {context.run_name}"
            self._send_file(".speedscope.json", json.dumps(samples.as_speedscope(name)).encode())
            traced.wait()
            if trace.exists():
                self._send_file(".json.gz", gzip.compress(trace.read_bytes(), compresslevel=3))

    # -- torch ----------------------------------------------------------------------------------------------------

    def _trace(self, until: float, file: Path, traced: threading.Event) -> None:
        """Write a trace to a file, if torch is loaded."""
        try:
            if torch := sys.modules.get("torch"):
                self._trace_windows(torch, until, file)
        except Exception as error:  # such as: the user's code uses the profiler itself
            self._note(f"torch's profiler failed: {error}")
        finally:
            traced.set()

    def _trace_windows(self, torch: Any, until: float, file: Path) -> None:
        """Write traces of longer and longer times, each over the last one, until the next would be too large.

        torch keeps all operations in memory and cannot count them before the end. Small ones may come at 400,000 per
        second, and the process would need gigabytes for some seconds of them.
        """
        device = "cuda" if torch.cuda.is_initialized() else None
        window_s = _FIRST_WINDOW_S
        while True:
            # torch.profiler would import torch._inductor in the main thread, which takes seconds
            profile = torch.autograd.profiler.profile(use_kineto=True, use_device=device)
            stop = partial(profile.__exit__, None, None, None)
            began = time.monotonic()
            if not self._in_main(profile.__enter__, until):
                self._in_main(stop, until)  # once it has begun after all
                break
            time.sleep(max(0.0, min(window_s, until - time.monotonic())))
            if not self._in_main(stop, time.monotonic() + _STOP_S):
                break
            window_s = time.monotonic() - began
            profile.export_chrome_trace(str(file))
            written = file.stat().st_size
            if until - time.monotonic() < window_s or written > _TRACE_BYTES // 2:
                self._note(f"torch's operations were traced for {window_s:.1f} s")
                return
            window_s *= min(_MOST_GROWTH, _TRACE_BYTES / written)
        if not file.exists():
            self._note("there is no trace of torch's operations: the main thread did not return from native code")

    def _in_main(self, function: Callable[[], object], until: float) -> bool:
        """Call a function in the main thread, and raise what it raises. Return False if it was not called in time."""
        done, errors = threading.Event(), []

        def task() -> None:
            try:
                function()
            except Exception as error:
                errors.append(error)
            finally:
                done.set()

        self._tasks.append(task)
        notice_at = time.monotonic() + _NOTICE_S
        while not done.is_set() and time.monotonic() < until:
            signal.pthread_kill(self._main, WAKE_SIGNAL)
            done.wait(min(_WAKE_S, max(0.0, until - time.monotonic())))
            if time.monotonic() > notice_at and not done.is_set():
                notice_at = math.inf
                self._note(f"the main thread has been in native code for {_NOTICE_S:g} s; its stack is sampled")
        if errors:
            raise errors[0]
        return done.is_set()

    # -- messages -------------------------------------------------------------------------------------------------

    def _note(self, text: str) -> None:
        self._send(note=text)

    def _send_file(self, suffix: str, data: bytes) -> None:
        if len(data) > _MOST_BYTES:
            self._note(f"{suffix} has {size(len(data))}, more than {size(_MOST_BYTES)}: use fewer --seconds")
            return
        for start in range(0, len(data), _PART_BYTES):
            self._send(suffix=suffix, body=data[start : start + _PART_BYTES])

    def _send(self, **fields: Any) -> None:
        context = self._session.context
        self._channel.send(wire.ProfilePart(attempt=context.attempt, rank=context.world_rank, **fields))


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

    def take_until(self, until: float, every_s: float) -> None:
        """Take samples until a moment of time.monotonic()."""
        switch_s, seen = sys.getswitchinterval(), time.monotonic()
        sys.setswitchinterval(_SWITCH_S)
        try:
            while seen < until:
                time.sleep(every_s)
                now = time.monotonic()
                self._take(now - seen)
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
        """Return nothing for a thread of distrain, and while torch makes the trace."""
        stack, file = [], ""
        frame: FrameType | None = innermost
        while frame is not None and frame.f_code.co_name != run_rank.__name__:
            if frame.f_code is Profiler.do_tasks.__code__:
                return ()
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
