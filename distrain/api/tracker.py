"""The interface of a tracker, what it is told, and the choice of trackers. Runs in: coordinator."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar

from distrain.errors import LaunchError
from distrain.system.imports import install_command
from distrain.system.text import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from distrain.storage.checkpoint import Checkpoint

VARIABLE = "DISTRAIN_TRACKERS"
"""Environment variable with trackers as text, separated by semicolons."""
TRACKERS = {
    "mlflow": "distrain.trackers.mlflow:Mlflow",
    "tensorboard": "distrain.trackers.tensorboard:TensorBoard",
    "wandb": "distrain.trackers.wandb:Wandb",
}
"""The classes of trackers by name. Other packages add theirs as entry points of the group ``distrain.trackers``."""
_FLAGS = {"true": True, "false": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The run that a tracker follows.

    id: identifies the run, also after restarts.
    name: the name of the run.
    directory: the local run directory; with remote storage the local copy of its small files. What a tracker writes
        there is mirrored with them.
    location: the run directory as users know it, a path or URL.
    config: train_loop_config, and the ScalingConfig as ``config["scaling"]``. Values that aren't JSON are text.
    tags: facts such as the version of distrain.
    state: the tracker's own, a JSON object that :meth:`Tracker.start` and :meth:`Tracker.flush` may change. It is
        saved after each of them, and the next start of the run gets it back. ``state["url"]`` is shown to the user.

    ::

        class Service(Tracker):
            def start(self, run):
                self.run_id = run.state.setdefault("run_id", my_service.create(run.name))
    """

    id: str
    name: str
    directory: Path
    location: str
    config: Mapping[str, Any]
    tags: Mapping[str, str]
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One report of rank 0.

    step: from ``report(progress=(step, total))`` if that is a whole number and not below the last step; else the number
        of the report over the whole run. Steps never decrease.
    time: when it was reported, in seconds since 1970.
    attempt: counts the starts of the run from 0.
    metrics: the numbers of the report, nested ones as ``"eval/loss"``. They may be NaN or infinite. True is 1.0.

    ::

        def log(self, report):
            print(report.step, report.metrics["loss"])
    """

    step: int
    time: float
    attempt: int
    metrics: dict[str, float]


class Tracker:
    """A place for the metrics of a run, beside its directory. Derive from this class to write one.

    distrain copies the object at each start, and calls the methods of the copy in a thread of its own. Training neither
    waits for it nor notices an exception. Attributes of the class, or of the object, are settings:

    name: names the tracker in messages, and its file in the run directory; by default the name of the class.
    checkpoints: True to be told of checkpoints.

    ::

        class Lines(Tracker):
            def start(self, run):
                self.file = open(run.directory / "lines.txt", "a")

            def log(self, report):
                self.file.write(f"{report.step} {report.metrics['loss']}\\n")

            def flush(self):
                self.file.flush()

        run_config = RunConfig(trackers=[Lines()])
    """

    name: str = ""
    checkpoints: bool = False
    package: ClassVar[str | None] = None
    """Module that the tracker needs; its absence is an error before the run starts."""

    def start(self, run: TrackedRun) -> None:
        """Begin, or continue with the tracked run that ``run.state`` names."""

    def log(self, report: Report) -> None:
        """Log one report. A report that a restart repeats does not come again."""

    def checkpoint(self, checkpoint: Checkpoint, step: int) -> None:
        """Log a committed checkpoint.

        step: the reports of a rank over the whole run up to this checkpoint.
        """

    def flush(self) -> None:
        """Keep what was logged, for good: distrain notes then that it was logged. Called about once per second."""

    def finish(self, status: str) -> None:
        """End the tracked run.

        status: ``"finished"``, ``"failed"`` or ``"stopped"`` (by the user).
        """


def name_of(tracker: Tracker) -> str:
    """Return the name of a tracker."""
    return tracker.name or type(tracker).__name__.lower()


# -- the choice ------------------------------------------------------------------------------------------------------


def trackers_of(
    chosen: Sequence[Tracker | str] | None, environment: Mapping[str, str], label: str = "RunConfig.trackers"
) -> list[Tracker]:
    """Return the trackers that the user has chosen, or else those that the environment names.

    Raise TypeError or ValueError, which begin with the label, for trackers that do not exist or have wrong settings.

    >>> trackers_of(None, {"DISTRAIN_TRACKERS": "tensorboard; wandb:project=my,mode=offline"})[1].project
    'my'
    """
    if chosen is None:
        label, chosen = VARIABLE, list(filter(None, map(str.strip, environment.get(VARIABLE, "").split(";"))))
    trackers = [_tracker(label, one) for one in chosen]
    names = [name_of(tracker) for tracker in trackers]
    for name in names:
        if not name.isascii() or not name.replace("-", "_").isidentifier():
            raise ValueError(f"{label}: the name of a tracker must be letters, digits, - and _, got {name!r}")
        if names.count(name) > 1:
            raise ValueError(f"{label}: two trackers are called {name!r}; give one of them another name (name=...)")
    return trackers


def _tracker(label: str, chosen: object) -> Tracker:
    if isinstance(chosen, str):
        return parse_tracker(chosen, label)
    if inspect.isclass(chosen) and issubclass(chosen, Tracker):
        raise TypeError(f"{label}: {chosen.__name__} is a class; give an object of it, {chosen.__name__}()")
    if not isinstance(chosen, Tracker):
        raise TypeError(
            f"{label} must hold names such as 'tensorboard', or objects of distrain.trackers.Tracker, got "
            f"{chosen!r:.80} ({type(chosen).__name__})"
        )
    return chosen


def parse_tracker(text: str, label: str = "--tracker") -> Tracker:
    """Return the tracker of a text such as ``wandb:project=my,mode=offline``. Raise ValueError for a wrong one."""
    name, _, options = text.strip().partition(":")
    kind = tracker_class(name)
    if kind is None:
        advice = did_you_mean(name, TRACKERS) or "; there are " + ", ".join(TRACKERS)
        raise ValueError(f"{label}: there is no tracker {name!r}{advice}")
    known = {field.name: str(field.type) for field in fields(kind) if field.init}
    settings: dict[str, Any] = {}
    for option in filter(None, options.split(",")):
        key, equals, value = option.partition("=")
        if key not in known:
            raise ValueError(
                f"{label}: {name} has no option {key!r}{did_you_mean(key, known) or '; it has ' + ', '.join(known)}"
            )
        if not equals:
            raise ValueError(f"{label}: {name}: give {key} a value, {key}=...")
        settings[key] = _value(f"{label}: {name}: {key}", known[key], value)
    tracker: Tracker = kind(**settings)
    return tracker


def tracker_class(name: str) -> type[Any] | None:
    """Return the class of a tracker, None if there is none."""
    if name in TRACKERS:
        found: type[Any] = resolve_name(TRACKERS[name])
        return found
    from importlib.metadata import entry_points  # it takes long

    return next((point.load() for point in entry_points(group="distrain.trackers") if point.name == name), None)


def _value(label: str, kind: str, text: str) -> Any:
    if kind == "bool":
        if text.lower() not in _FLAGS:
            raise ValueError(f"{label} must be true or false, got {text!r}")
        return _FLAGS[text.lower()]
    if not kind.startswith("str"):
        raise ValueError(f"{label} can only be given in Python, RunConfig(trackers=[...])")
    return text


def check_packages(trackers: Iterable[Tracker]) -> None:
    """Raise LaunchError if the package of a tracker is not installed."""
    for tracker in trackers:
        package = tracker.package
        if package is not None and find_spec(package.partition(".")[0]) is None:
            raise LaunchError(
                f"the tracker {name_of(tracker)} needs the package {package}, which is not installed: "
                f"{install_command(package)}"
            )
