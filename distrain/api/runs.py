"""The runs in a storage path, for programs: the Python twin of ``distrain ls``. Runs in: anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distrain.storage.runs.listing import DAMAGED, ENDED, FOREIGN, Run, list_runs, storage_at

if TYPE_CHECKING:
    import os

    from distrain.api.result import Result


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """A run in a storage path, as :func:`runs` and ``distrain ls --json`` list it.

    name, path: the name of the run directory, and the directory itself, a path or URL.
    state: ``finished``, ``failed``, ``stopped`` or ``killed``; ``starting`` or ``running``; ``damaged``; or, in
        ``distrain ls`` only, ``waiting`` in a queue.
    problem: what is damaged, else None.
    started: when the last ``fit()`` of the run began, in seconds since 1970; 0 if that is unknown.
    ended: when it ended, or its last sign of life; None while it runs.
    duration: seconds between the two, or until now.
    script: the script, module or function; None if unknown.
    attempts: the number of attempts, over the whole run.
    hosts: the hosts of the last attempt, each with its ranks.
    step, metrics: those of rank 0's last report; None if it has not reported.
    note, tags: those of ``distrain note``.

    ::

        best = min(distrain.runs(), key=lambda run: (run.metrics or {}).get("loss", math.inf), default=None)
    """

    name: str
    path: str
    state: str
    problem: str | None
    started: float
    ended: float | None
    duration: float
    script: str | None
    attempts: int
    hosts: dict[str, list[int]]
    step: int | None
    metrics: dict[str, Any] | None
    note: str
    tags: tuple[str, ...]

    def result(self) -> Result:
        """Return the :class:`Result` of the run. It unpickles files; see :meth:`Result.from_path`.

        Raises StorageError if the run cannot be read.
        """
        from distrain.api.result import Result  # `distrain ls` does not need it

        return Result.from_path(self.path)


def runs(storage_path: str | os.PathLike[str] | None = None) -> list[RunInfo]:
    """Return the runs in a storage path, the newest first. Warn of damaged files.

    storage_path: a directory or a URL, as ``RunConfig.storage_path``; by default ``~/distrain_results``.

    Raises OSError if it cannot be read.

    ::

        for run in distrain.runs():
            print(run.name, run.state, run.metrics)
    """
    found = list_runs(storage_at(storage_path), may_be_missing=storage_path is None)
    return [info_of(run) for run in found if run.state != FOREIGN]


def info_of(run: Run) -> RunInfo:
    """Return what programs see of a run. Warn of damaged reports."""
    record, until = run.last_report(), run.until
    return RunInfo(
        name=run.name,
        path=run.path,
        state=run.state,
        problem=run.problem or None,
        started=run.began,
        ended=until if run.state in (*ENDED, DAMAGED) else None,
        duration=max(until - run.began, 0.0),
        script=run.manifest.get("script"),
        attempts=len(run.attempts),
        hosts=run.hosts,
        step=None if record is None else record["step"],
        metrics=None if record is None else record["metrics"],
        note=run.notes.text,
        tags=run.notes.tags,
    )
