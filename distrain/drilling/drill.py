"""The drill: undisturbed runs, disturbed ones, and their comparison. Runs in: the user's process."""

from __future__ import annotations

import os
import shlex
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from distrain.coordinator.run.trainer import DataParallelTrainer
from distrain.drilling.causes import Cause
from distrain.drilling.compare import Comparison, Straight
from distrain.drilling.isolation import landlock_version, remove, scratch
from distrain.drilling.journal import LEAST, Attempt, Journal
from distrain.drilling.order import Order, ProbeOrder, Unit
from distrain.drilling.ranks import Ranks
from distrain.drilling.trial import Trial
from distrain.errors import JobError
from distrain.system.log import warn
from distrain.transfer.project.directories import is_below

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

DISTURBANCES = ("kill", "all", "stop", "report", "host", "workers", "ranks")
_NOTICED_S = 45.0
"""Seconds after which a launcher has noticed that a rank was killed. torchrun gives the other ranks 30 to end."""
_SNAPSHOTS = (".bin", ".ckpt", ".h5", ".keras", ".npz", ".pickle", ".pkl", ".pt", ".pth", ".safetensors")
"""Usual endings of files with the state of a training."""


# -- the findings ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    """The finding about one disturbance.

    disturbance: such as ``kill -9 of rank 1``.
    outcome: ``noise``: equal within it; ``state``: the state at the start is the same, with another number of workers;
        ``failed``: the script does not go on; ``refused``: it does not start with another number of workers;
        ``untested``: it ended too early.
    text: the verdict in words. lost: units that were repeated.
    """

    disturbance: str
    outcome: Literal["exact", "noise", "state", "drift", "failed", "refused", "untested"]
    text: str
    causes: Sequence[Cause] = ()
    lost: int | None = None

    @property
    def is_good(self) -> bool:
        """True unless the training goes on in another way, or not at all."""
        return self.outcome not in ("drift", "failed")


@dataclass(frozen=True, slots=True)
class DrillReport:
    """The findings of a drill.

    unit: what is counted, ``report`` or ``step``; ``until`` so many. workers: of the undisturbed run.
    notes: what the drill could not compare. directory: all files, if they were kept.
    """

    target: str
    workers: int
    unit: Unit
    until: int
    verdicts: Sequence[Verdict]
    notes: Sequence[str]
    seconds: float
    directory: str | None = None

    @property
    def ok(self) -> bool:
        """True if every resume was exact, or equal within noise."""
        return all(one.is_good for one in self.verdicts)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON."""
        return {"ok": self.ok, **asdict(self)}


# -- the drill -------------------------------------------------------------------------------------------------------


def drill(
    target: DataParallelTrainer | str | Sequence[str],
    *,
    workers: int | None = None,
    reports: int = 20,
    minutes: float = 2.0,
    only: Collection[str] = DISTURBANCES,
    keep: bool = False,
    fresh: Collection[str] = (),
    resume_with: str = "",
) -> DrillReport:
    """Find out whether a training resumes exactly: run it undisturbed, then with one disturbance each, and compare.

    All runs have a directory of their own, which is deleted. See docs/drill.md.

    target: a trainer, or the command of a script, which may use any launcher.
    workers: the number that replaces ``{workers}`` in a command.
    reports: the number of reports, or steps, of an undisturbed run, which also continues until it has three
        checkpoints.
    minutes: the longest time of an undisturbed run.
    only: some of ``kill`` (of a rank), ``all`` (everything is killed), ``stop`` (SIGTERM), ``report`` (a rank dies
        before it reports a checkpoint), ``host`` (the loss of one of several), ``workers`` (one fewer) and ``ranks``
        (not a disturbance: ranks are compared with each other).
    keep: do not delete the directory, which is ``report.directory``.
    fresh: patterns of files to hide from the runs, such as ``snapshot*.pt``.
    resume_with: what a shell appends to a command that continues, such as ``--resume out/last.pt``.

    Raises JobError if the target fails undisturbed or does too little to compare, and errors from pickling it. ::

        report = distrain.drill("torchrun --nproc-per-node {workers} train.py", workers=2)
        assert report.ok, [verdict.text for verdict in report.verdicts]
    """
    roots: list[str] = []
    if isinstance(target, DataParallelTrainer):
        order = Order(trainer=target, workers=workers)
    else:
        words = shlex.split(target) if isinstance(target, str) else [*target]
        order = Order.of_command(words, workers, resume_with)
        roots = [os.path.dirname(os.path.abspath(one)) for one in words if os.path.isfile(one)]
    return Drill(order, reports=reports, minutes=minutes, keep=keep, fresh=fresh, roots=roots).run(only)


@dataclass(kw_only=True)
class Drill:
    """One drill. ``folder`` has its files.

    template: what all trials run. tell: hears each verdict as soon as it is known. Others: see :func:`drill`.
    roots: directories of which trials get overlays, in addition to the working directory and the home.
    """

    template: Order = field(kw_only=False)
    reports: int
    minutes: float
    keep: bool
    fresh: Collection[str] = ()
    roots: Sequence[str] = ()
    tell: Callable[[Verdict], None] = lambda verdict: None

    def __post_init__(self) -> None:
        every = list(dict.fromkeys(map(os.path.realpath, (".", *self.roots))))
        outer = tuple(one for one in every if not any(one != other and is_below(one, other) for other in every))
        self.folder = scratch(outer)
        self._began = time.time()
        self.template = replace(self.template, roots=outer, began=self._began)
        self._limit_s = self.minutes * 60 + 60
        self._straight: Straight
        self._checkpoints: list[Mapping[int, Path]] = []
        """Those of the undisturbed runs."""
        self._written: set[str] = set()
        """Files that an undisturbed run has written outside its run directory."""
        self._files: set[str] = set()
        """The same, if it has finished."""
        self._trial: Trial | None = None
        self._verdicts: list[Verdict] = []
        self._size: tuple[int, Unit, int]
        """The workers of the undisturbed run, what is counted, and how far."""
        self._notes: list[str] = []

    def run(self, only: Collection[str] = DISTURBANCES) -> DrillReport:
        """Run all trials. Raises JobError for a script that fails by itself, or cannot be compared."""
        try:
            return self._run(only)
        finally:
            if self._trial is not None:
                self._trial.kill()
            if not self.keep:
                remove(self.folder)

    def _run(self, only: Collection[str]) -> DrillReport:
        self._choose_isolation()
        if {*only} != {"ranks"}:
            self._drill_resume(only)
        is_alone = not self._verdicts
        if "ranks" in only and (is_alone or (self._size[0] > 1 and self._straight.attempt.of("step"))):
            self._compare_ranks(is_alone=is_alone)
        workers, unit, until = self._size
        return DrillReport(
            target=" ".join(self.template.command or self.template.arguments) or "trainer",
            workers=workers,
            unit=unit,
            until=until,
            verdicts=self._verdicts,
            notes=self._notes,
            seconds=time.time() - self._began,
            directory=str(self.folder) if self.keep else None,
        )

    def _drill_resume(self, only: Collection[str]) -> None:
        first = self._undisturbed("undisturbed-1", self._is_enough)
        attempt = first.attempts[0]
        unit, until = attempt.unit, attempt.done(attempt.unit)
        seconds, steps = time.time() - self._began, attempt.of("step")
        blind = [step["blind"] for step in steps if "blind" in step]
        if until < LEAST or (unit == "step" and len(blind) == len(steps)):
            raise JobError(
                f"there is too little to compare in {seconds:.0f} s: {until} calls of report(), or steps of an "
                f"optimizer of torch{''.join(f' ({why})' for why in blind[:1])}. " + self._advice(first)
            )
        models = [step.get("model") for step in attempt.of("step", attempt.rank)]
        if unit == "step" and not blind and all(one == models[0] for one in models):
            raise JobError("no step changes the parameters, as if all gradients were 0: there is nothing to compare")
        self._limit_s = 3 * seconds + 60
        second = self._undisturbed("undisturbed-2", lambda now: now.attempts[0].done(unit) >= until)
        self._straight = Straight(attempt, unit, until).with_second(second.attempts[0])
        self._checkpoints = [first.checkpoints, second.checkpoints]
        self._size = (len(attempt.notes), unit, until)
        is_exact = self._straight.is_deterministic
        why = "the same, bit by bit" if is_exact else self._straight.why_noisy(second.attempts[0])
        self._add(Verdict("undisturbed, twice", "exact" if is_exact else "noise", why))
        saves = [count for count in attempt.saves(unit) if 0 < count < until]
        if not saves and not first.has_finished:
            raise JobError(f"there is no checkpoint in {until} {unit}s. {self._advice(first)}")
        if saves:
            self._disturb(saves, first.hosts, only)
        else:
            text = f"no checkpoint in {until} {unit}s: training starts again from the beginning"
            self._add(Verdict("any failure", "failed", text, [Cause("not-loaded", "")]))
        if len(self._verdicts) == 1 and "ranks" not in only:
            raise JobError(f"none of {', '.join(only)} can be tried with this script, these workers and these hosts")
        self._notes += self._notes_of(attempt, blind)

    def _compare_ranks(self, *, is_alone: bool) -> None:
        def has_enough(now: Journal) -> bool:
            steps = [now.attempts[0].of("replicas", rank) for rank in now.attempts[0].notes]
            fewest, passes = min(map(len, steps), default=0), {note.get("pass") for note in now.attempts[0].of("rows")}
            return fewest >= self.reports * (1 if len(passes) > 1 else 3) or time.time() > deadline

        deadline = time.time() + self.minutes * 60
        seen = self._undisturbed("ranks", has_enough, ProbeOrder(act="ranks"))
        attempt = seen.attempts[0]
        ranks, blind = Ranks(attempt, has_finished=seen.has_finished), attempt.of("blind")
        if len(attempt.notes) < 2 or not ranks.count or blind:
            why = blind[0]["why"] if blind else "it needs two, and steps of an optimizer of torch"
            if is_alone:
                raise JobError(f"there are no ranks to compare: {why}. Pass --workers 2, or train for longer")
            return
        if is_alone:
            self._size = (len(attempt.notes), "step", len(attempt.of("replicas", min(attempt.notes))))
        faults, remarks = ranks.faults(), ranks.remarks()
        if ranks.count > 1 and self.template.takes_workers and not faults:
            order = ProbeOrder(act="ranks", rows=ranks.rows_at_once)
            try:
                alone = self._undisturbed("one-rank", lambda now: bool(now.attempts[0].of("gradients")), order, 1)
                single = Ranks(alone.attempts[0], has_finished=alone.has_finished)
                remarks += ranks.rates_against(single)
                faults, more = ranks.against(single)
                remarks += more
            except JobError as error:
                self._notes.append(f"gradients were not compared with those of one rank: {error}")
        text = "the ranks do not train as one" if faults else "the ranks train as one"
        words = "; remark: ".join([text, *remarks])
        self._add(Verdict("ranks, compared", "drift" if faults else "exact", words, faults))

    def _choose_isolation(self) -> None:
        """Find out whether trials can have overlays, and which files to hide. Raise JobError for wrong patterns."""
        here, found = os.path.realpath("."), set()
        for pattern in self.fresh:
            matches = [os.path.relpath(path) for path in Path.cwd().glob(os.path.relpath(pattern))]
            inside = [one for one in matches if is_below(os.path.realpath(os.path.dirname(one) or "."), here)]
            if not inside or len(inside) < len(matches):
                raise JobError(f"--fresh {pattern}: must match files in {here}")
            found.update(inside)
        self.template = replace(self.template, fresh=tuple(found))
        trial = Trial(Order(roots=self.template.roots), self.folder / "isolation", self._limit_s)
        trial.start(ProbeOrder())
        trial.watch(lambda _: False)
        if trial.kill():
            self.template = replace(self.template, copies=trial.why_failed()[0])
            if not landlock_version():
                warn("this kernel cannot keep a script from changing files under absolute paths")

    def _advice(self, first: Journal) -> str:
        """Say how more could be compared."""
        if self.template.command and not first.attempts[0].notes:
            return "No process was seen to import torch. Set PYTHONPATH for `distrain drill`, not in the command"
        if not first.has_finished:
            return "Report or save more often, or raise --minutes"
        opened = dict.fromkeys(str(note["path"]) for note in first.attempts[0].of("open"))
        usual = [path for path in opened if path.endswith(_SNAPSHOTS)]
        return continued(self._written & opened.keys() or usual or opened) or (
            "The script ends by itself: train for longer or, if it has continued an earlier training, hide the files "
            "of that: --fresh PATTERN"
        )

    def _add(self, verdict: Verdict) -> None:
        self._verdicts.append(verdict)
        self.tell(verdict)

    def _begin(self, name: str, order: ProbeOrder, workers: int | None = None) -> Trial:
        trial = Trial(self.template, self.folder / name, self._limit_s)
        trial.start(order, workers)
        self._trial = trial
        return trial

    def _is_enough(self, now: Journal) -> bool:
        attempt = now.attempts[0]
        unit: Unit = "report" if attempt.of("report") else "step"
        has_enough = attempt.done(unit) >= self.reports and len(attempt.saves(unit)) >= LEAST
        return has_enough or time.time() > self._began + self.minutes * 60

    def _undisturbed(
        self,
        name: str,
        is_enough: Callable[[Journal], bool],
        order: ProbeOrder = ProbeOrder(),  # noqa: B008 - it is frozen
        workers: int | None = None,
    ) -> Journal:
        trial = self._begin(name, order, workers)
        is_stopped = trial.watch(is_enough) and trial.is_running
        seen, code = trial.journal(), trial.stop()
        journal = trial.journal()
        self._written = trial.files()
        self._files = self._written if journal.has_finished else set()
        if (code and not is_stopped) or journal.resumed.number:
            why = "it restarts by itself" if journal.resumed.number else trial.why_failed()[0]
            raise JobError(f"the script fails without any disturbance: {why}")
        return replace(journal, attempts=seen.attempts) if is_stopped else journal  # without what the stop has caused

    # -- disturbances ---------------------------------------------------------------------------------------------

    def _disturb(self, saves: Sequence[int], hosts: Mapping[str, Sequence[int]], only: Collection[str]) -> None:
        attempt, unit, until = self._straight.attempt, self._straight.unit, self._straight.until
        middle, early = (_between(saves, until, until * share) for share in (0.5, 0.25))
        order = ProbeOrder(unit=unit, at=middle, rank=max(rank for rank in attempt.notes if attempt.of(unit, rank)))
        host = next((name for name, ranks in hosts.items() if order.rank in ranks), "")
        if "kill" in only:
            self._killed(f"kill -9 of rank {order.rank}", replace(order, act="kill"))
        pause = replace(order, act="pause", at=early)
        if "all" in only:
            self._all_killed(pause)
        if "workers" in only and len(attempt.notes) > 1 and self.template.takes_workers:
            self._fewer_workers(pause, len(attempt.notes) - 1)
        if "stop" in only:
            self._preempted(order)
        if "report" in only and unit == "report":
            at = middle if saves[-1] > middle else 1
            act = replace(order, act="kill before report", rank=attempt.rank, at=at)
            self._killed(f"rank {attempt.rank} dies between its checkpoint and report()", act)
        if "host" in only and len(hosts) > 1:
            self._killed(f"host {host} is lost", replace(order, act="kill host"))

    def _has_caught_up(self, now: Journal) -> bool:
        """Return whether a resumed attempt has come as far as the undisturbed run."""
        straight, resumed = self._straight, now.resumed
        before = straight.start_of(resumed, straight.until) if straight.unit == "step" else 0
        done = resumed.done(straight.unit)  # 0 if only other ranks have begun a step
        return resumed.number > 0 and done > 0 and before + done >= straight.until

    def _killed(self, disturbance: str, order: ProbeOrder) -> None:
        trial = self._begin(order.act.replace(" ", "-"), order)
        if self.template.command:  # its launcher may start it again, or end
            trial.watch(lambda now: now.resumed.number > 0 or _is_overdue(now))
            if not trial.journal().resumed.number:
                trial.kill()
                trial.start(ProbeOrder())
        self._judge(disturbance, trial)

    def _killed_in_a_pause(self, name: str, order: ProbeOrder) -> Trial:
        trial = self._begin(name, order)
        trial.watch(lambda now: bool(now.attempts[0].of("pause")))
        trial.kill()
        return trial

    def _all_killed(self, order: ProbeOrder) -> None:
        trial = self._killed_in_a_pause("all", order)
        trial.start(ProbeOrder())
        self._judge("everything is killed, then a new start", trial)

    def _fewer_workers(self, order: ProbeOrder, workers: int) -> None:
        disturbance, trial = f"{workers} instead of {workers + 1} workers", self._killed_in_a_pause("workers", order)
        trial.start(ProbeOrder(), workers)
        goal = order.at if order.unit == "report" else 0
        trial.watch(lambda now: now.resumed.number > 0 and now.resumed.done(order.unit) > goal)
        trial.stop()
        resumed = trial.journal().resumed
        if not resumed.number:
            why, causes = trial.why_failed()
            self._add(Verdict(disturbance, "refused", f"does not start: {why}", causes))
        elif causes := self._straight.compare_start(resumed, self._straight.start_of(resumed, order.at)):
            self._add(Verdict(disturbance, "drift", "begins with another state", causes))
        else:
            self._add(Verdict(disturbance, "state", "begins with the same state; its batches must differ"))

    def _preempted(self, order: ProbeOrder) -> None:
        trial = self._begin("stop", replace(order, act="linger"))
        trial.watch(lambda now: bool(now.attempts[0].of("linger")))
        signalled = time.time()
        trial.ask_to_stop()
        trial.watch(lambda now: not trial.is_running)
        ended, attempt = time.time(), trial.journal().attempts[0]
        notes = [*attempt.of("save"), *(attempt.of("report") if attempt.of("should_stop") else [])]
        saved = [note["time"] - signalled for note in notes if note.get("saves", True) and note["time"] > signalled]
        if saved:
            how = f"saves {max(saved):.1f} s after SIGTERM"
        elif attempt.of("should_stop"):
            how = f"saves nothing in its grace, which ends {ended - signalled:.0f} s after SIGTERM"
        else:
            how = "never saves" if self.template.command else "never saves: no rank called should_stop()"
        trial.start(ProbeOrder())
        self._judge("SIGTERM, then a new start", trial, f"{how}; ")

    # -- verdicts -------------------------------------------------------------------------------------------------

    def _judge(self, disturbance: str, trial: Trial, prefix: str = "") -> None:
        """Wait until a trial has resumed and caught up, and compare."""
        has_caught_up = trial.watch(self._has_caught_up)
        if self._files:  # as it has ended without a disturbance
            trial.watch(lambda now: not trial.is_running)
        hangs = f"hangs after: {trial.why_failed()[0]}" if trial.is_running and not has_caught_up else ""
        trial.stop()
        journal, straight = trial.journal(), self._straight
        resumed, unit = journal.resumed, straight.unit
        if journal.has_finished and not resumed.number:
            self._add(Verdict(disturbance, "untested", f"{prefix}the script ends before anything is left to train"))
            return
        if not resumed.number or not (has_caught_up or journal.has_finished):
            why, causes = trial.why_failed()
            self._add(Verdict(disturbance, "failed", f"{prefix}does not go on: {hangs or why}", causes))
            return
        before = next(one for one in journal.attempts if one.number == resumed.number - 1)
        start = straight.start_of(resumed, before.done(unit))
        found = straight.compare(resumed, start)
        if found.outcome == "exact" and straight.attempt.steps_before(resumed.first) == resumed.offset:
            found = self._with_checkpoints(found, journal, start)
        lost = before.done(unit) - (resumed.first if unit == "report" else start)
        loss = f"loses {lost} {unit}{'s' * (lost > 1)}" if lost > 0 else ""
        lacking = sorted(self._files - trial.files()) if journal.has_finished else []
        files = f"has not written {', '.join(lacking[:3])}" if lacking else ""
        words = "; ".join(filter(None, (found.text, *found.aside, files, loss)))
        self._add(Verdict(disturbance, found.outcome, prefix + words, found.causes, lost))

    def _with_checkpoints(self, found: Comparison, journal: Journal, start: int) -> Comparison:
        """Return the comparison with what only the checkpoints show."""
        if find_spec("torch") is None:
            return found
        from distrain.torch.drill.contents import differing_tensors

        for number, path in sorted(journal.checkpoints.items()):
            undisturbed = [each[number] for each in self._checkpoints if number in each]
            if number <= journal.resumed.first or number > self._straight.until or len(undisturbed) < 2:
                continue
            if tensors := differing_tensors(path, *undisturbed):
                named = ", ".join(f"`{name}`" for name in tensors[:2]) + (" and more" if len(tensors) > 2 else "")
                text = f"drifts from {self._straight.unit} {number}: in {path.name}, {named} differ"
                return replace(found, outcome="drift", text=text, causes=self._straight.causes(journal.resumed, start))
        return found

    def _notes_of(self, attempt: Attempt, blind: Sequence[str]) -> list[str]:
        found = []
        if self._straight.measured:
            found.append("not compared, as they differ between equal models: " + ", ".join(self._straight.measured))
        if text := continued(self._written & {note["path"] for note in attempt.of("open")}):
            found.append(text)
        if blind:
            found.append(f"the state of the training could not be read: {blind[0]}")
        elif not attempt.of("step"):
            found.append("no optimizer of torch was seen, so only metrics and checkpoints are compared")
        return found


def _is_overdue(now: Journal) -> bool:
    """Return whether a launcher has had enough time to notice that a rank was killed."""
    return any(time.time() > note["time"] + _NOTICED_S for note in now.attempts[0].of("kill"))


def continued(paths: Collection[str]) -> str:
    """Say that the script may have continued an earlier training whose files it has read; ``""`` without such files."""
    parents = Counter(map(os.path.dirname, paths))
    named = {parent if (parent := os.path.dirname(path)) and parents[parent] > 2 else path for path in sorted(paths)}
    options = [f"--fresh {shlex.quote(path)}" for path in sorted(named) if not path.startswith("..")]
    cure = f"Hide them from the drill: {' '.join(options[:5])}" if options else "Move them away for the drill"
    more = f" and {len(named) - 3} more" if len(named) > 3 else ""
    text = f"The script has read {', '.join(sorted(named)[:3])}{more}, older than the drill"
    return f"{text}, and may have continued an earlier training. {cure}" if named else ""


def _between(saves: Sequence[int], until: int, goal: float) -> int:
    """Return a number in the middle between two saves, the first of which is at most ``goal`` if one is."""
    at = max((save for save in saves if save <= goal), default=saves[0])
    after = min((save for save in saves if save > at), default=until)
    return at + (after - at) // 2
