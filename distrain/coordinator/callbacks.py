"""Calls of the user's callbacks: at start and end, for reports, checkpoints and failures. Runs in: coordinator."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from distrain.system.background import Background

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from distrain.api.config import RunContext, UserCallback
    from distrain.api.result import Result
    from distrain.storage.checkpoint import Checkpoint


class Callbacks:
    """The callbacks of one run.

    show_error: shows a text to the user.
    """

    def __init__(
        self, callbacks: Sequence[UserCallback], context: RunContext, *, show_error: Callable[[str], None]
    ) -> None:
        self._callbacks = callbacks
        self._context = context
        self._show_error = show_error
        self._background = Background(None, "callbacks")
        self._has_thread = False
        self._is_stuck = False
        self._failed: Counter[tuple[int, str]] = Counter()

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def begin(self, background: Background) -> None:
        """Call the callbacks in the thread of ``background`` from now on, instead of the caller's."""
        self._background, self._has_thread = background, True

    def end(self) -> None:
        """Call the callbacks in the caller's thread again; no more callbacks if one has not returned."""
        self._is_stuck = self._background.pending > 0
        self._background, self._has_thread = Background(None, "callbacks"), False

    def before_run(self) -> None:
        self._background.do(partial(self._call_all, "before_run", list))

    def after_run(self, result: Result, error: BaseException | None) -> None:
        if self._is_stuck:
            self._show_error("after_run() is not called, as a callback has not returned")
            return
        self._background.do(partial(self._call_all, "after_run", lambda: [result, error]))

    def after_report(self, metrics: list[dict[str, Any] | None], checkpoint: Checkpoint | None) -> None:
        call = partial(self._call_all, "after_report", lambda: [list(metrics), checkpoint])
        self._background.do(call)

    def after_checkpoint(self, checkpoint: Checkpoint, metrics: Mapping[str, Any]) -> None:
        self._background.do(partial(self._call_all, "after_checkpoint", lambda: [checkpoint, dict(metrics)]))

    def after_exception(self, worker_exceptions: Callable[[], dict[int, BaseException]]) -> None:
        """Call ``after_exception()``.

        worker_exceptions: makes the exceptions, by rank. It may run the user's code, so it runs like a callback.
        """
        call = partial(self._call_all, "after_exception", lambda: [worker_exceptions()])
        self._background.do(call)

    def _call_all(self, name: str, arguments: Callable[[], Sequence[object]]) -> None:
        """Call a method of every callback.

        arguments: makes new arguments for each callback, because a callback may change them.
        """
        for callback in self._callbacks:
            self._call(callback, name, *arguments())
        for stream in filter(None, (sys.stdout, sys.stderr)):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()  # their output is shown before later output of distrain

    def _call(self, callback: UserCallback, name: str, *arguments: object) -> None:
        try:
            getattr(callback, name)(self._context, *arguments)
        except BaseException as error:
            if not (self._has_thread or isinstance(error, Exception)):
                raise  # Ctrl-C, or sys.exit() in the thread of fit()
            times = self._failed[id(callback), name] = self._failed[id(callback), name] + 1
            who = f"{type(callback).__qualname__}.{name}()"
            if times == 1:
                self._show(f"{who} failed:\n{traceback.format_exc().rstrip()}")
            elif times & (times - 1) == 0:  # the 2nd, 4th, 8th ... time
                self._show(f"{who} failed {times} times so far, now: {type(error).__qualname__}: {error}")

    def _show(self, text: str) -> None:
        self._background.report(lambda: self._show_error(text))
