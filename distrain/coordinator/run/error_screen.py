"""The error of a run, as one screen of a terminal. Runs in: coordinator."""

from __future__ import annotations

import sys
import threading
import traceback
from typing import TYPE_CHECKING

from distrain.errors import DistrainError, LaunchError, PreemptionError, TrainingFailedError
from distrain.system.text import without_controls

if TYPE_CHECKING:
    from types import TracebackType

_ENDS = (DistrainError, KeyboardInterrupt)
"""What ``fit()`` raises for a run."""


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

    What does not come from ``fit()``, and everything if the user has a hook, goes to the hook that was there before.
    After a PreemptionError, the process exits with its exit code. Python itself sees to that of Ctrl-C.

    module: the name of the module of ``fit()``.
    """
    hook = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.excepthook = hook
        frames = [frame for frame, _ in traceback.walk_tb(trace)]
        is_raised_by_fit = bool(frames) and frames[-1].f_globals.get("__name__") == module
        if hook is not sys.__excepthook__ or not is_raised_by_fit or not isinstance(error, _ENDS):
            hook(kind, error, trace)
        elif not isinstance(error, KeyboardInterrupt):
            show_error(kind, "\n".join([str(error), *getattr(error, "__notes__", ())]))
        if isinstance(error, PreemptionError):
            sys.exit(error.exit_code)

    if threading.current_thread() is threading.main_thread() and getattr(hook, "__module__", "") != __name__:
        sys.excepthook = show
