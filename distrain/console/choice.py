"""Choose the console of a run: a terminal with a footer, a notebook, or lines. Runs in: coordinator."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from distrain.console.run_console import RunConsole
from distrain.system.consoles import Footer
from distrain.system.log import warn
from distrain.system.notebook import is_kernel

if TYPE_CHECKING:
    from distrain.decisions.run_status import RunStatus


def open_console(progress: str, status: RunStatus, logs: str) -> RunConsole:
    """Return the console of a run. Use it as a context; every line that the run prints belongs into that.

    progress: the value of ``RunConfig.progress``.
    logs: the directory of the logs, as users know it.
    """
    if progress in ("auto", "live"):
        if is_kernel():
            from distrain.console.notebook_console import NotebookConsole  # few runs need it

            return NotebookConsole(status, logs)
        if (pinned := Footer.pin()) is not None:
            from distrain.console.terminal_console import TerminalConsole

            return TerminalConsole(status, pinned)
        if progress == "live":
            warn(f"progress='live' has no effect: {_why_no_footer()}")
    return RunConsole(status, shows_progress=progress != "off")


def _why_no_footer() -> str:
    for name in ("stdout", "stderr"):
        try:
            if not getattr(sys, name).isatty():
                return f"{name} is no terminal"
        except (AttributeError, ValueError):  # the user has closed or replaced it
            return f"{name} is no terminal"
    return "another run has its footer in this terminal, or stdout and stderr are two terminals, or it is too small"
