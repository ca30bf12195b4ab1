"""Choose the console of a run: a terminal with a footer, a notebook, or lines. Runs in: coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from distrain.console.run_console import RunConsole
from distrain.system.consoles import Footer
from distrain.system.log import warn
from distrain.system.notebook import is_kernel

if TYPE_CHECKING:
    from distrain.api.config import RunContext
    from distrain.api.observer import RunBegan
    from distrain.decisions.run_status import RunStatus


def observers(context: RunContext, run: RunBegan, status: RunStatus) -> list[RunConsole]:
    """Return the console of a run."""
    config = context.run_config
    progress = "off" if config.logging_config.log_level != "INFO" and config.progress == "auto" else config.progress
    if run.in_process and progress != "off":  # then train_func prints to this terminal itself
        progress = "plain"
    ranks = config.logging_config.ranks
    if progress in ("auto", "live"):
        if is_kernel():
            from distrain.console.notebook_console import NotebookConsole  # few runs need it

            logs = f"{run.location}/logs" if config.log_dir is None else str(Path(config.log_dir, run.name))
            return [NotebookConsole(status, logs, ranks=ranks)]
        if (pinned := Footer.pin()) is not None:
            from distrain.console.live_console import TerminalConsole

            return [TerminalConsole(status, pinned, ranks=ranks)]
        if progress == "live":
            warn("progress='live' has no effect: stdout and stderr are not one terminal that is free and large enough")
    return [RunConsole(status, shows_progress=progress != "off", ranks=ranks)]
