"""The user's command for the end of a run, as an observer. Runs in: coordinator."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

from distrain.api.observer import Ended, Fact, RunBegan
from distrain.console.run_console import shown_metrics
from distrain.storage import names
from distrain.storage.lines import read_events
from distrain.storage.runs.details import error_of, verdict
from distrain.storage.runs.listing import run_at
from distrain.system.log import warn
from distrain.system.process import run_shell

if TYPE_CHECKING:
    from distrain.api.config import RunContext
    from distrain.decisions.run_status import RunStatus

VARIABLE = "DISTRAIN_ON_END"
"""Environment variable with the command of runs that have none of their own."""
_LIMIT_S = 60.0


class OnEnd:
    """Runs a shell command at the end of a run, with a summary on stdin. If it fails, that is a warning."""

    hears = (Ended,)

    def __init__(self, command: str, run: RunBegan, status: RunStatus) -> None:
        self._command, self._run, self._status = command, run, status

    def hear(self, fact: Fact) -> None:
        assert isinstance(fact, Ended)
        try:
            summary = self._summary(fact)
            about = {
                "DISTRAIN_RUN": self._run.name,
                "DISTRAIN_RUN_DIRECTORY": self._run.location,
                "DISTRAIN_STATUS": fact.status,
                "DISTRAIN_SUMMARY": summary,
                VARIABLE: "",  # else the end of a run that the command starts would start it again
            }
            run_shell(self._command, f"{summary}\n", os.environ | about, _LIMIT_S)
        except subprocess.TimeoutExpired:
            warn(f"on_end: the command was killed after {_LIMIT_S:g} s: {self._command}")
        except KeyboardInterrupt:
            warn("on_end: Ctrl-C has ended the command")
        except Exception as error:
            warn(f"on_end: {error}")

    def _summary(self, ended: Ended) -> str:
        """Return how the run has ended, who has failed where and why; and in a second line its last metrics."""
        folder = self._run.directory
        run = run_at(folder)._replace(name=self._run.name, state=ended.status)  # run.json may be out of date
        error = error_of(folder) or {"message": str(ended.error or "")}
        text = f"{run.name} {verdict(run, run.last_report(), list(read_events(folder / names.EVENTS)), error)}"
        return "\n".join(filter(None, (text, shown_metrics(self._status.metrics))))


def observers(context: RunContext, run: RunBegan, status: RunStatus) -> list[OnEnd]:
    """Return the observer that runs the user's command, if there is one."""
    command = context.run_config.on_end
    command = os.environ.get(VARIABLE, "") if command is None else command
    return [OnEnd(command, run, status)] if command.strip() else []
