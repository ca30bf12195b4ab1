"""The drill: undisturbed runs, disturbed ones, and their comparison. Runs in: the user's process."""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.drilling.causes import Cause
from distrain.drilling.compare import Comparison, Drift, Straight, compare, compare_start, start_of, straight_of, why_noisy
from distrain.drilling.contents import differing_tensors
from distrain.drilling.order import REPORTS, STEPS, ProbeOrder
from distrain.drilling.trial import Target, Trial
from distrain.drilling.verdict import DrillReport, Saving, Times, Verdict
from distrain.errors import JobError
from distrain.storage import names
from distrain.system.pickling import pickled

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from distrain.coordinator.trainer import DataParallelTrainer
    from distrain.drilling.journal import Attempt, Journal

__all__ = ["drill"]

DISTURBANCES = ("kill", "all", "stop", "report", "host", "workers")
_LEAST_SAVES = 3
_LEAST = 3
"""Reports or steps without which there is nothing to compare."""


def drill(
    trainer: DataParallelTrainer,
    *,
    reports: int = 20,
    minutes: float = 2.0,
    only: Collection[str] = DISTURBANCES,
    keep: bool = False,
) -> DrillReport:
    """Find out whether a trainer resumes exactly: run it undisturbed, then with one disturbance each, and compare.

    Nothing of it is left but the report. All runs have a directory of their own.

    reports: the number of reports of a run. A run also goes on until it has three checkpoints.
    minutes: the longest time of an undisturbed run.
    only: some of ``kill`` (of a rank), ``all`` (everything is killed), ``stop`` (SIGTERM), ``report`` (a rank dies
        before it reports a checkpoint), ``host`` (the loss of one of several) and ``workers`` (one fewer).
    keep: leave the directory of the drill, ``report.directory``.

    Raises JobError if the trainer cannot be pickled, fails undisturbed, or reports too little to compare. ::

        report = distrain.drill(TorchTrainer(train_func, scaling_config=ScalingConfig(num_workers=2)))
        assert report.ok, [verdict.text for verdict in report.verdicts]
    """
    with drill_directory(keep=keep) as folder:
        path = folder / "trainer.pkl"
        try:
            path.write_bytes(pickled(trainer))
        except Exception as error:
            raise JobError(f"cannot pickle the trainer for the processes of a drill: {error}") from error
        target = Target("trainer", (str(path),), Path.cwd(), fenced_directories(Path.cwd()))
        report = Drill(target, folder, type(trainer).__name__, reports=reports, minutes=minutes).run(only)
        return replace(report, directory=str(folder) if keep else None)


@contextlib.contextmanager
def drill_directory(*, keep: bool):  # type: ignore[no-untyped-def]
    """Make a directory for a drill, and delete it afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="distrain-drill-"))
    try:
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def fenced_directories(*directories: Path) -> tuple[str, ...]:
    """Return where a drill must not write: in these, and where runs usually are."""
    return tuple(os.path.realpath(one) for one in (*directories, Path(names.DEFAULT_STORAGE).expanduser()))


class Drill:
    """One drill. ``tell``: hears each verdict as soon as it is known."""

    def __init__(
        self,
        target: Target,
        folder: Path,
        name: str,
        *,
        reports: int,
        minutes: float,
        tell: Callable[[Verdict], None] = lambda verdict: None,
    ) -> None:
        self._target, self._folder, self._name = target, folder, name
        self._reports, self._limit_s = reports, minutes * 60
        self._tell = tell
        self._verdicts: list[Verdict] = []
        self._saves_after_s: float | None = None
        self._began = time.time()
        self._trial_s = 3 * self._limit_s + 60
        self._straight: Straight
        self._journals: list[Journal] = []
        """Of the undisturbed runs."""

    def run(self, only: Collection[str] = DISTURBANCES) -> DrillReport:
        """Run all trials. Raises JobError for a script that fails by itself."""
        first = self._undisturbed("undisturbed-1", self._is_enough)
        self._trial_s = 3 * (time.time() - self._began) + 60
        attempt = first.attempts[0]
        unit = REPORTS if attempt.of("report") else STEPS
        until = attempt.done(unit)
        if until < _LEAST:
            raise JobError(
                f"there is nothing to compare: the script has made {until} {unit} in {time.time() - self._began:.0f} s. "
                "Let it report more often, or longer with --minutes"
            )
        second = self._undisturbed("undisturbed-2", lambda now: now.attempts[0].done(unit) >= until)
        self._journals = [first, second]
        self._straight = straight_of(attempt, second.attempts[0], unit, until)
        self._add(self._of_undisturbed(second))
        if saves := [count for count in attempt.saves(unit) if count < until]:
            self._disturb(saves, only)
        else:
            text = f"never saves: no checkpoint in {until} {unit}, so a failure starts the training from the beginning"
            self._add(Verdict("any failure", "failed", text))
        return DrillReport(
            target=self._name,
            workers=len(attempt.notes),
            unit=unit,
            until=until,
            verdicts=self._verdicts,
            saving=self._saving(),
            saves_after_s=self._saves_after_s,
            notes=self._notes(),
            seconds=time.time() - self._began,
        )

    def _add(self, verdict: Verdict) -> None:
        self._verdicts.append(verdict)
        self._tell(verdict)

    # -- undisturbed ----------------------------------------------------------------------------------------------

    def _is_enough(self, now: Journal) -> bool:
        attempt = now.attempts[0]
        unit = REPORTS if attempt.of("report") else STEPS
        is_late = time.time() > self._began + self._limit_s
        return is_late or (attempt.done(unit) >= self._reports and len(attempt.saves(unit)) >= _LEAST_SAVES)

    def _undisturbed(self, name: str, is_enough: Callable[[Journal], bool]) -> Journal:
        trial = self._trial(name)
        trial.start(ProbeOrder())
        is_stopped = trial.watch(is_enough) and trial.is_running
        code = trial.stop()
        journal = trial.journal()
        if (code and not is_stopped) or journal.resumed.number:
            raise JobError(f"the script fails without any disturbance: {journal.error or trial.last_words()}")
        return journal

    def _trial(self, name: str) -> Trial:
        return Trial(self._target, self._folder / name, self._trial_s)

    def _of_undisturbed(self, second: Journal) -> Verdict:
        straight = self._straight
        if straight.is_deterministic:
            return Verdict("undisturbed, twice", "exact", "the same, bit by bit")
        return Verdict("undisturbed, twice", "noise", why_noisy(straight, second.attempts[0]))

    # -- disturbed ------------------------------------------------------------------------------------------------

    def _disturb(self, saves: Sequence[int], only: Collection[str]) -> None:
        attempt, unit, until = self._straight.attempt, self._straight.unit, self._straight.until
        middle, early = (_between(saves, until, until * share) for share in (0.5, 0.25))
        reporting = [rank for rank in attempt.notes if attempt.of("report" if unit == REPORTS else "step", rank)]
        order = ProbeOrder(unit=unit, at=middle, rank=max(reporting))
        hosts = self._journals[0].hosts
        if "kill" in only:
            self._add(self._killed(f"kill -9 of rank {order.rank}", replace(order, act="kill")))
        if "all" in only:
            self._add(self._all_killed("everything is killed, then a new start", replace(order, at=early)))
        if "stop" in only:
            self._add(self._preempted(order))
        if "report" in only and unit == REPORTS:
            act = replace(order, act="kill before report", rank=attempt.rank)
            self._add(self._killed(f"rank {attempt.rank} dies between its checkpoint and report()", act))
        if "host" in only and len(hosts) > 1:
            name = next(host for host, ranks in hosts.items() if order.rank in ranks)
            self._add(self._killed(f"host {name} is lost", replace(order, act="kill host")))
        if "workers" in only and len(attempt.notes) > 1:
            self._add(self._fewer_workers(order, len(attempt.notes) - 1))

    def _reached(self, now: Journal) -> bool:
        """Return whether a resumed attempt has come as far as the undisturbed run."""
        straight, resumed = self._straight, now.resumed
        if not resumed.number:
            return False
        start = 0 if straight.unit == REPORTS else start_of(straight, resumed, straight.until)
        return start + resumed.done(straight.unit) >= straight.until

    def _killed(self, disturbance: str, order: ProbeOrder) -> Verdict:
        trial = self._trial(order.act.replace(" ", "-"))
        trial.start(order)
        is_done = trial.watch(self._reached)
        return self._judged(disturbance, trial, is_done=is_done)

    def _all_killed(self, disturbance: str, order: ProbeOrder) -> Verdict:
        trial = self._trial("all")
        if not self._pause_and_kill(trial, order):
            return self._did_not_start(disturbance, trial)
        began = time.time()
        trial.start(ProbeOrder())
        return self._judged(disturbance, trial, is_done=trial.watch(self._reached), started=began)

    def _pause_and_kill(self, trial: Trial, order: ProbeOrder) -> bool:
        trial.start(replace(order, act="pause"))
        has_paused = trial.watch(lambda now: bool(now.attempts[0].of("pause")))
        trial.kill()
        return has_paused

    def _preempted(self, order: ProbeOrder) -> Verdict:
        disturbance = "SIGTERM, then a new start"
        trial = self._trial("stop")
        trial.start(ProbeOrder())
        if not trial.watch(lambda now: now.attempts[0].done(order.unit) >= order.at):
            return self._did_not_start(disturbance, trial)
        signalled = time.time()
        trial.ask_to_stop()
        trial.watch(lambda now: not trial.is_running)
        ended, journal = time.time(), trial.journal()
        attempt = journal.attempts[0]
        saves = [note["time"] for note in (*attempt.of("report"), *attempt.of("save")) if note.get("saves", True)]
        saved = max((moment for moment in saves if moment > signalled), default=None)
        if saved is not None:
            self._saves_after_s = ended - signalled
            prefix = f"saves {saved - signalled:.1f} s after SIGTERM, ends after {ended - signalled:.1f} s"
        elif not attempt.of("should_stop"):
            prefix = "never saves: no rank called should_stop()"
        else:
            prefix = f"saves nothing after SIGTERM, and is killed {ended - signalled:.0f} s later"
        began = time.time()
        trial.start(ProbeOrder())
        is_done = journal.has_finished or trial.watch(self._reached)
        return self._judged(disturbance, trial, is_done=is_done, started=began, prefix=prefix)

    def _fewer_workers(self, order: ProbeOrder, workers: int) -> Verdict:
        disturbance = f"{workers} instead of {workers + 1} workers"
        trial = self._trial("workers")
        if not self._pause_and_kill(trial, order):
            return self._did_not_start(disturbance, trial)
        trial.start(ProbeOrder(), workers=workers)
        goal = order.at + 1
        trial.watch(lambda now: bool(now.resumed.number) and now.resumed.done(self._straight.unit) >= goal)
        trial.stop()
        journal = trial.journal()
        resumed = journal.resumed
        if not resumed.number:
            return Verdict(disturbance, "skipped", f"does not start: {journal.error or trial.last_words()}")
        start = start_of(self._straight, resumed, order.at)
        found = compare_start(self._straight, resumed, start)
        if found:
            return Verdict(disturbance, "drift", f"starts from another state: {found[0]}", causes=found)
        return Verdict(disturbance, "changed", "starts from the same state; batches differ, as they must")

    # -- verdicts -------------------------------------------------------------------------------------------------

    def _did_not_start(self, disturbance: str, trial: Trial) -> Verdict:
        trial.stop()
        return Verdict(disturbance, "failed", f"does not get that far: {trial.last_words()}")

    def _judged(
        self, disturbance: str, trial: Trial, *, is_done: bool, started: float | None = None, prefix: str = ""
    ) -> Verdict:
        trial.stop()
        journal, straight = trial.journal(), self._straight
        resumed = journal.resumed
        prefix = f"{prefix}; " if prefix else ""
        if not resumed.number or not (is_done or journal.has_finished):
            why = journal.error or trial.last_words()
            causes = [Cause("prefix", "keys do not fit the model")] if "module." in why else []
            return Verdict(disturbance, "failed", f"{prefix}does not go on: {why}", causes)
        before = journal.attempts[journal.attempts.index(resumed) - 1]
        start = start_of(straight, resumed, before.done(straight.unit))
        found = compare(straight, resumed, start)
        found = self._with_contents(found, journal)
        lost = before.done(straight.unit) - (resumed.first if straight.unit == REPORTS else start)
        times = _times(straight.attempt, before, resumed, started)
        text = f"{prefix}{_in_words(found, straight)}"
        if found.kind != "drift" and lost > 0:
            text += f"; loses {lost} {straight.unit}"
        return Verdict(disturbance, found.kind, text, found.causes, lost, times)

    def _with_contents(self, found: Comparison, journal: Journal) -> Comparison:
        """Return the comparison with what only the checkpoints show."""
        if found.kind == "drift":
            return found
        for step, path in sorted(journal.checkpoints.items()):
            straight = [one.checkpoints[step] for one in self._journals if step in one.checkpoints]
            if len(straight) > 1 and step > journal.resumed.first and (names := differing_tensors(path, *straight)):
                what = f"`{names[0]}` and {len(names) - 1} more tensors" if len(names) > 1 else f"`{names[0]}`"
                return replace(found, kind="drift", drift=Drift(step, f"in {path.name}, {what} differ"))
        return found

    def _saving(self) -> Saving | None:
        attempt, unit = self._straight.attempt, self._straight.unit
        kind = "report" if unit == REPORTS else "save"
        notes = attempt.of(kind, attempt.rank)
        saving = [note for note in notes if note.get("saves", True)]
        restarts = [one.times.total_s for one in self._verdicts if one.times is not None]
        if len(saving) < 2 or not restarts:
            return None
        plain = [note["seconds"] for note in notes if not note.get("saves", True)] or [0.0]
        cost = statistics.median(note["seconds"] for note in saving) - statistics.median(plain)
        apart = (saving[-1]["time"] - saving[0]["time"]) / (len(saving) - 1)
        return Saving(max(cost, 1e-6), apart, max(restarts))

    def _notes(self) -> list[str]:
        straight = self._straight
        found = []
        if straight.measured:
            named = ", ".join(sorted(straight.measured))
            found.append(f"not compared, as undisturbed runs of equal state differ in it: {named}")
        blind = [note["blind"] for note in straight.attempt.of("step") if "blind" in note]
        if blind:
            found.append(f"the state of the training could not be read: {blind[0]}")
        elif not straight.attempt.of("step"):
            found.append("no optimizer of torch was seen: only metrics and checkpoints are compared")
        return found


def _between(saves: Sequence[int], until: int, goal: float) -> int:
    """Return a number in the middle between two saves, the first of which is at most ``goal`` if there is such a one."""
    at = max((save for save in saves if save <= goal), default=saves[0])
    after = min((save for save in saves if save > at), default=until)
    return at + (after - at) // 2


def _times(straight: Attempt, before: Attempt, resumed: Attempt, started: float | None) -> Times | None:
    killed = [note["time"] for note in before.of("kill")]
    began = min((note["time"] for note in resumed.of("begin")), default=0.0)
    trains = min((note["time"] for note in (*resumed.of("step"), *resumed.of("report"))), default=0.0)
    if not began or not trains or (started is None and not (killed and before.ended)):
        return None
    known = started if started is not None else before.ended or 0.0
    moments = [note["time"] for note in straight.of("report", straight.rank)]
    done = before.done(REPORTS)
    repeat_s = moments[done - 1] - moments[resumed.first - 1] if 0 < resumed.first < done <= len(moments) else 0.0
    detection_s = 0.0 if started is not None else known - killed[0]
    return Times(max(detection_s, 0.0), began - known, trains - began, repeat_s)


def _in_words(found: Comparison, straight: Straight) -> str:
    words = {"exact": "exact", "noise": "equal within noise"}
    aside = f"; {', '.join(found.aside)}, without an effect" if found.aside else ""
    if found.kind != "drift":
        return words[found.kind] + aside
    assert found.drift is not None
    unit = {REPORTS: "report", STEPS: "step"}[straight.unit]
    causes = "; ".join(map(str, found.causes))
    return f"drifts from {unit} {found.drift.at}: {found.drift.what}" + (f". {causes}" if causes else "")
