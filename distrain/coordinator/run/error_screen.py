"""The error of a run, as one screen of a terminal. Runs in: coordinator."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

from distrain.errors import DistrainError, LaunchError, PreemptionError, TrainingFailedError
from distrain.system.text import without_controls

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType


def show_error(kind: type[BaseException], text: str) -> None:
    """Show the error of a run on stderr."""
    from rich.console import Console  # these take a while, and most commands show no such error
    from rich.rule import Rule
    from rich.text import Text

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Rule(f"distrain: {_title_of(kind)}", style="red"))
    first, _, rest = without_controls(text).partition("\n")
    console.print(Text(first, style="bold red"))
    if rest:
        console.print(Text(rest))


def _title_of(kind: type[BaseException]) -> str:
    if issubclass(kind, PreemptionError):
        return "stopped"
    return "training failed" if issubclass(kind, TrainingFailedError) and kind is not LaunchError else "cannot launch"


# -- of scripts ------------------------------------------------------------------------------------------------------


def show_if_uncaught(module: str) -> None:
    """Have the exception that ``fit()`` raises shown as a screen, as `distrain run` does, if it ends the process.

    module: the name of the module of ``fit()``.
    """
    if threading.current_thread() is threading.main_thread() and not isinstance(sys.excepthook, _ErrorScreen):
        sys.excepthook = _ErrorScreen(sys.excepthook, module)


class _ErrorScreen:
    """An excepthook. What does not come from ``fit()``, and all for a user with a hook, goes to the previous hook.

    After a PreemptionError, the process exits with its exit code. Python itself sees to that of Ctrl-C.
    """

    def __init__(
        self, hook: Callable[[type[BaseException], BaseException, TracebackType | None], object], module: str
    ) -> None:
        self._hook = hook
        self._module = module

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.excepthook = self._hook
        if self._hook is not sys.__excepthook__ or not _is_raised_in(self._module, error, trace):
            self._hook(kind, error, trace)
        elif isinstance(error, DistrainError):
            show_error(kind, "\n".join([str(error), *getattr(error, "__notes__", ())]))
        if isinstance(error, PreemptionError):
            sys.exit(error.exit_code)


def _is_raised_in(module: str, error: BaseException, trace: TracebackType | None) -> bool:
    """Tell if an exception that ends a run was raised in this module."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = None if trace is None else trace.tb_frame.f_globals.get("__name__")
    return isinstance(error, (DistrainError, KeyboardInterrupt)) and name == module
