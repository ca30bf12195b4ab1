"""What the user's process can do when a run begins and ends, and when ranks report or fail. Runs in: coordinator."""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distrain.absent import explaining

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from distrain.backend import BackendConfig
    from distrain.checkpoint import Checkpoint
    from distrain.config import RunConfig, ScalingConfig
    from distrain.result import Result

__all__ = ["Callbacks", "RunContext", "UserCallback"]


@explaining("RunContext")
@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """The run that a callback is called for."""

    run_id: str
    run_config: RunConfig
    scaling_config: ScalingConfig
    backend_config: BackendConfig
    train_loop_config: Mapping[str, Any]

    def get_run_config(self) -> RunConfig:
        return self.run_config


class UserCallback:
    """Derive from it, and hand objects to ``RunConfig(callbacks=[...])``.

    Callbacks run in the process that called ``fit()``, between two messages of the workers: while one runs, the run is
    not supervised, so keep them short. An exception in one is shown, and training goes on.
    """

    def before_run(self, run_context: RunContext) -> None:
        """The run directory is there, and no worker yet."""

    def after_run(self, run_context: RunContext, result: Result, error: BaseException | None) -> None:
        """No worker is left. ``fit()`` returns ``result`` next, or raises ``error``. Not called if ``fit()`` fails
        before it starts any worker."""

    def after_report(
        self, run_context: RunContext, metrics: list[dict[str, Any] | None], checkpoint: Checkpoint | None
    ) -> None:
        """Every rank has made its n-th report, or will make none. ``metrics``: by rank, None for those; ``checkpoint``:
        what was committed with it."""

    def after_exception(self, run_context: RunContext, worker_exceptions: dict[int, BaseException]) -> None:
        """An attempt has failed, and whatever was left of it is gone. ``worker_exceptions``: by rank."""


class Callbacks:
    """The callbacks of one run. ``complain`` shows text to the user."""

    def __init__(
        self, callbacks: Sequence[UserCallback], context: RunContext, *, complain: Callable[[str], None]
    ) -> None:
        self._callbacks = callbacks
        self._context = context
        self._complain = complain
        self._failed: Counter[tuple[int, str]] = Counter()

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def before_run(self) -> None:
        for callback in self._callbacks:
            self._call(callback, "before_run")

    def after_run(self, result: Result, error: BaseException | None) -> None:
        for callback in self._callbacks:
            self._call(callback, "after_run", result, error)

    def after_report(self, metrics: list[dict[str, Any] | None], checkpoint: Checkpoint | None) -> None:
        for callback in self._callbacks:
            self._call(callback, "after_report", list(metrics), checkpoint)

    def after_exception(self, worker_exceptions: dict[int, BaseException]) -> None:
        for callback in self._callbacks:
            self._call(callback, "after_exception", dict(worker_exceptions))

    def _call(self, callback: UserCallback, name: str, *arguments: object) -> None:
        try:
            getattr(callback, name)(self._context, *arguments)
        except Exception as error:
            times = self._failed[id(callback), name] = self._failed[id(callback), name] + 1
            who = f"{type(callback).__qualname__}.{name}()"
            if times == 1:
                self._complain(f"{who} failed:\n{traceback.format_exc().rstrip()}")
            elif times & (times - 1) == 0:  # at the 2nd, 4th, 8th ... time
                self._complain(f"{who} failed {times} times so far, now: {type(error).__qualname__}: {error}")
