"""The exception that fit() raises for a run that did not finish. Runs in: coordinator."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distrain.coordinator.ranks.stop_signals import exit_code
from distrain.decisions.blame import culprit_first, hang_failures, is_refusal
from distrain.decisions.failure_screen import failure_screen
from distrain.decisions.health.collectives import UNKNOWN, Comparison
from distrain.decisions.run.retries import start_without_checkpoint
from distrain.errors import (
    ControllerError,
    DistrainError,
    HangError,
    LaunchError,
    PreemptionError,
    ResourcesError,
    TrainingFailedError,
    WorkerGroupError,
)
from distrain.system.arguments import in_users_words
from distrain.system.log import warn
from distrain.system.text import is_full_disk, without_controls
from distrain.worker.job.job import original

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distrain.decisions.events import HangDetected
    from distrain.decisions.run.machine import RunStateMachine
    from distrain.errors import RankFailure

_LOADING = re.compile(
    r"load_state_dict|load_weights|restore\w*\(|(load|from|get)_checkpoint|torch\.load\(|heckpoint\.(to|as|get)_"
)
"""Signs in the traceback of a rank that could not load its checkpoint."""


def exit_code_of(error: BaseException | None) -> int:
    """Return the exit code of `distrain run` for what fit() has raised."""
    match error:
        case None:
            return 0
        case KeyboardInterrupt():
            return exit_code("SIGINT")
        case WorkerGroupError() | PreemptionError():
            return error.exit_code or 1
        case TrainingFailedError() if not isinstance(error, LaunchError):
            return 1
        case DistrainError():
            return 2
    return 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunErrors:
    """The exceptions of one run, from the state in which it has ended.

    exceptions: those of ranks, if they were raised in this process.
    name: the name under which the user continues the run.
    is_script: the ranks run a script, which may keep snapshots of its own.
    facts: what the user should know of the run, by label, such as its ``step`` and its ``logs``; None if it is not
        known. ``checkpoint``: the latest one, such as ``checkpoint_000003, at step 18 of 120``.
    is_stuck: this ``fit()`` continues the run, but no attempt has reported anything.
    last_lines: the last output of each rank.
    where: lines that describe what the stopped ranks were doing.
    collectives: what is known about collectives that ranks lack, or that do not match.
    """

    end: RunStateMachine
    exceptions: Mapping[int, BaseException]
    name: str
    is_script: bool
    facts: Mapping[str, str | None]
    last_lines: Mapping[int, Sequence[str]]
    where: Sequence[str]
    collectives: Comparison = UNKNOWN
    is_stuck: bool = False

    def error(self) -> BaseException:
        """Return the exception to raise. Show what else went wrong before Ctrl-C: that exception has no text."""
        end = self.end
        if end.stopping.reason is not None:
            return self._stop_error(end.stopping.reason)
        if end.hung is not None and not end.failures:
            return self._hang_error(end.hung)
        if end.failures and not self._problem_explains_failures():
            return self._worker_group_error()
        problem = end.problem or "all workers have ended, but no rank has failed; their logs may show why"
        problem = in_users_words(problem)
        if end.storage_failed:
            return ControllerError(_text([problem, *self._facts("once that is fixed, ")]))
        if end.resources_missing:
            return ResourcesError(_text([problem]))
        kind = ControllerError if end.retries.ever_entered else LaunchError
        return kind(_text([problem, *self._postscript()]))

    def _problem_explains_failures(self) -> bool:
        """Return True if no rank is to blame: its host was lost, or its error came from the full disk of the run."""
        if self.end.problem and all(failure.lost for failure in self.end.failures):
            return True
        return self.end.storage_failed and all(is_full_disk(failure.summary) for failure in self.end.failures)

    def _stop_error(self, reason: str) -> BaseException:
        lines: list[str] = []
        requested = {exit_code("SIGTERM"), exit_code(reason)}
        if own := [one for one in self.end.failures if not one.consequence and one.exit_code not in requested]:
            screen = failure_screen(own, stopped=(), last_lines=self.last_lines)
            lines += ["meanwhile, there was a failure:", *(f"    {line}" for line in screen.splitlines())]
        if self.where:
            head = "before that, the ranks were last seen here:"
            if self.end.stopping.grace_is_over:
                head = "ranks that had not stopped were killed; RunConfig.stop_grace_s gives them more time:"
            lines += [in_users_words(head), *(f"    {line}" for line in self.where)]
        lines += self._other_problems()
        if reason != "SIGINT":
            text = _text([f"the run was stopped by {reason}", *lines, *self._facts()])
            return PreemptionError(text, exit_code=exit_code(reason))
        if lines:
            warn("\n    ".join(lines))
        return KeyboardInterrupt()

    def _hang_error(self, hung: HangDetected) -> WorkerGroupError:
        where = "they were:" if hung.where else "no rank had been started"
        why = hung.deadlock or f"no rank has reported or printed anything for {hung.after_s:g} s"
        lines = [f"{in_users_words(why)}; {where}", *(f"    {line}" for line in hung.where)]
        assert self.end.plan is not None
        blamed = sorted({*self.end.stopped_ranks, *hung.suspects})
        hosts = {rank: self.end.plan.ranks[rank].host for rank in blamed}
        failures = hang_failures(hosts, hung.suspects, after_s=hung.after_s, finished=self.end.finished)
        return self._group_error(HangError, failures, [*lines, *self._postscript()], hung.where)

    def _worker_group_error(self) -> WorkerGroupError:
        failures = culprit_first(self.end.failures)
        screen = failure_screen(
            failures,
            stopped=self.end.stopped_ranks,
            finished=self.end.finished,
            where=self.where,
            last_lines=self.last_lines,
            cure=self.collectives.cure,
        )
        lines = [screen, *self._collectives_of(failures[0]), *self._other_problems(), *self._postscript()]
        return self._group_error(WorkerGroupError, failures, lines, self.where)

    def _group_error(
        self, kind: type[WorkerGroupError], failures: Sequence[RankFailure], lines: Sequence[str], where: Sequence[str]
    ) -> WorkerGroupError:
        return kind(
            _text(lines),
            worker_failures={one.rank: self.exceptions.get(one.rank) or original(one) for one in failures},
            culprit=failures[0].rank,
            exit_code=failures[0].exit_code,
            failures=failures,
            stopped=self.end.stopped_ranks,
            where=where,
            last_lines={one.rank: self.last_lines.get(one.rank, ()) for one in failures},
        )

    def _collectives_of(self, culprit: RankFailure) -> list[str]:
        """Return what flight recorders show. After an exception of its own, a rank lacks collectives in any case."""
        is_between_ranks = culprit.consequence or culprit.signal == signal.SIGABRT
        return [one for one in self.collectives.sentences if is_between_ranks or "do not match" in one]

    def _other_problems(self) -> list[str]:
        """Return what else went wrong. The failure screen shows lost hosts already."""
        if self.end.storage_failed:
            return [in_users_words(f"in addition, the storage has failed: {self.end.problem}")]
        if self.end.problem and not any(failure.lost for failure in self.end.failures):
            return [in_users_words(f"in addition: {self.end.problem}")]
        return []

    def _postscript(self) -> list[str]:
        """Return the last lines of every failure's text."""
        refusal = [in_users_words(self.end.retries.refusal)] if self.end.retries.refusal else []
        return [*self.end.earlier_attempts, *refusal, *self._facts()]

    def _facts(self, condition: str = "") -> list[str]:
        """Return how far the run was, its files, and how to continue it, which ``condition`` allows."""
        is_refused = any(map(is_refusal, self.end.failures))
        can_continue = self.facts["checkpoint"] or (self.end.retries.ever_entered and not is_refused)
        facts = {**self.facts, "continue": f"{condition}{self.how_to_continue}" if can_continue else None}
        return [f"{label + ':':<12}{fact}" for label, fact in facts.items() if fact]

    @property
    def how_to_continue(self) -> str:
        """The way to continue the run, as a request to the user."""
        checkpoint = self.facts["checkpoint"]
        if self.is_stuck and checkpoint and any(_LOADING.search(one.traceback) for one in self.end.failures):
            name, cure = checkpoint.partition(",")[0], in_users_words("another RunConfig(name=...)")
            return f"no attempt could load {name}; use the code and settings that wrote it, or start afresh with {cure}"
        again = in_users_words(f"start the run again with RunConfig(name={self.name!r})")
        return again if checkpoint else f"{again}, from {start_without_checkpoint(is_script=self.is_script)}"


def _text(lines: Sequence[str]) -> str:
    """Return the text of an error, which quotes what ranks have said: Python prints it to a terminal as it is."""
    return without_controls("\n".join(lines))
