"""The trackers of a run: from objects, texts of the command line, or the environment. Runs in: coordinator."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from distrain.api.tracker import Tracker, name_of
from distrain.errors import LaunchError
from distrain.system.pickling import pickled
from distrain.system.text import did_you_mean
from distrain.trackers.mlflow import Mlflow
from distrain.trackers.tensorboard import TensorBoard
from distrain.trackers.trackio import Trackio
from distrain.trackers.wandb import Wandb
from distrain.worker.job.unpicklable import describe_unpicklable

if TYPE_CHECKING:
    from collections.abc import Iterable

VARIABLE = "DISTRAIN_TRACKERS"
"""Environment variable with trackers as text, separated by semicolons."""
KINDS: dict[str, type[Any]] = {"mlflow": Mlflow, "tensorboard": TensorBoard, "trackio": Trackio, "wandb": Wandb}
_FLAGS = {"true": True, "false": False}


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
    if isinstance(chosen, str) or not isinstance(chosen, Sequence):
        raise TypeError(f"{label} must be a list of trackers, got {chosen!r:.80}")
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
    if chosen.ranks not in (0, "all"):
        raise ValueError(f"{label}: {name_of(chosen)}: ranks must be 0 or 'all', got {chosen.ranks!r}")
    return chosen


def parse_tracker(text: str, label: str = "--tracker") -> Tracker:
    """Return the tracker of a text such as ``wandb:project=my,mode=offline``. Raise ValueError for a wrong one."""
    name, _, options = text.strip().partition(":")
    if name not in KINDS:
        raise ValueError(
            f"{label}: there is no tracker {name!r}{did_you_mean(name, KINDS) or '; there are ' + ', '.join(KINDS)}"
        )
    kind = KINDS[name]
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


def _value(label: str, kind: str, text: str) -> Any:
    if kind == "bool":
        if text.lower() not in _FLAGS:
            raise ValueError(f"{label} must be true or false, got {text!r}")
        return _FLAGS[text.lower()]
    if kind.startswith("Literal"):
        if text not in ("0", "all"):
            raise ValueError(f"{label} must be 0 or all, got {text!r}")
        return 0 if text == "0" else text
    if not kind.startswith("str"):
        raise ValueError(f"{label} can only be given in Python, RunConfig(trackers=[...])")
    return text


def check_packages(trackers: Iterable[Tracker]) -> None:
    """Raise LaunchError if the package of a tracker is not installed."""
    for tracker in trackers:
        package = tracker.package
        if package is not None and find_spec(package.partition(".")[0]) is None:
            wanted = f"'distrain[{package}]'" if package in KINDS else package
            raise LaunchError(
                f"the tracker {name_of(tracker)} needs the package {package}, which is not installed: "
                f"pip install {wanted}"
            )


def pickled_trackers(trackers: Iterable[Tracker]) -> dict[str, bytes]:
    """Return the pickled trackers by name. Raise LaunchError if one cannot be pickled."""
    blobs = {}
    for tracker in trackers:
        try:
            blobs[name_of(tracker)] = pickled(tracker)
        except Exception as error:
            culprit = describe_unpicklable(name_of(tracker), tracker)
            raise LaunchError(
                f"the tracker {name_of(tracker)} cannot be sent to its process: {culprit} cannot be pickled: {error}; "
                "open files and connections in its start()"
            ) from error
    return blobs
