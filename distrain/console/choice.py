"""Choose the console of a run: a terminal with a footer, a notebook, or lines. Runs in: coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distrain.console.run_console import RunConsole
from distrain.system.consoles import Footer
from distrain.system.log import warn
from distrain.system.notebook import is_kernel

if TYPE_CHECKING:
    from distrain.console.run_status import RunStatus


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
            warn("progress='live' has no effect: stdout and stderr are not one terminal, or another run uses it")
    return RunConsole(status, shows_progress=progress != "off")
