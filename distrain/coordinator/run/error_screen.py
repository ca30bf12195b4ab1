"""The error of a run, as one screen of a terminal. Runs in: coordinator."""

from __future__ import annotations

import sys
import threading
import traceback
from typing import TYPE_CHECKING

from distrain.errors import DistrainError, LaunchError, PreemptionError, TrainingFailedError
from distrain.system.arguments import in_users_words
from distrain.system.text import without_controls

if TYPE_CHECKING:
    from types import TracebackType


def show_error(error: BaseException) -> None:
    """Show what has ended a run on stderr. After Ctrl-C, the console has said all."""
    if isinstance(error, KeyboardInterrupt):
        return
    from rich.console import Console  # these take a while, and most commands show no such error
    from rich.rule import Rule
    from rich.text import Text

    text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    if not isinstance(error, TrainingFailedError):  # that one may quote ranks, and its own words are right already
        text = in_users_words(text)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Rule(f"distrain: {_title_of(type(error))}", style="red"))
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
        modules = [frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(trace)]
        is_known = isinstance(error, (DistrainError, KeyboardInterrupt)) and modules[-1:] == [module]
        if is_known and hook is sys.__excepthook__:
            show_error(error)
        else:
            hook(kind, error, trace)
        if isinstance(error, PreemptionError):
            sys.exit(error.exit_code)

    if threading.current_thread() is threading.main_thread() and getattr(hook, "__module__", "") != __name__:
        sys.excepthook = show
