"""The events that :class:`~distrain.decisions.checkpoints.life.Checkpoints` hears, and the actions that it returns.

Runs in: coordinator.

``then``, ``done`` and ``failed`` get the answer, by the event :class:`Answered`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from distrain import wire
    from distrain.api.observer import Committed
    from distrain.decisions.events import AttemptEnded, AttemptStarts, HostLost, RollBack, SendMessage, ShowLine
    from distrain.storage.checkpoint import Checkpoint
    from distrain.storage.commit import CommittedCheckpoint
    from distrain.system.remote_path import RemotePath


class MakeDirectory(NamedTuple):
    """Make the directory for the files of a checkpoint, which will be called ``name``. ``then`` gets its path.

    key: names the checkpoint until it is published.
    """

    key: str
    name: str | None
    then: Callable[[str], None]


class Store(NamedTuple):
    """Have files that are on a host stored."""

    host: str
    order: wire.Upload


class Publish(NamedTuple):
    """Write the metadata, then the manifest of a checkpoint whose files are all stored.

    key: as in :class:`MakeDirectory`. folder: the directory that the ranks have filled themselves, or None.
    positions: those in the data.
    done: gets the checkpoint's path. failed: gets the reason.
    """

    key: str
    folder: str | None
    manifest: dict[str, Any]
    positions: Mapping[str, Any]
    done: Callable[[Path | RemotePath], None]
    failed: Callable[[object], None]


class UpdateManifest(NamedTuple):
    """Replace fields of the manifest of a checkpoint on storage. It is only warned of if that fails."""

    saved: CommittedCheckpoint
    fields: Mapping[str, Any]


class Delete(NamedTuple):
    """Delete checkpoints from the storage. ``kept`` gets those that a process reads."""

    chosen: Sequence[CommittedCheckpoint]
    kept: Callable[[Sequence[CommittedCheckpoint]], None]


class Record(NamedTuple):
    """Add a line to events.jsonl."""

    event: str
    fields: Mapping[str, Any]


class Settled(NamedTuple):
    """The checkpoint of a report is there, or (None) it never will be."""

    ordinal: int
    checkpoint: Checkpoint | None


class Brought(NamedTuple):
    """A rank gets files of a checkpoint for which it has waited, or hears why not."""

    rank: int


class NewStart(NamedTuple):
    """A restart would begin from another checkpoint than before.

    path: None if there is none. is_new: it was committed just now, and is not that of the last step.
    """

    path: str | None
    is_new: bool = False


class Validate(NamedTuple):
    """Have a checkpoint validated. :class:`Validated` says how it went."""

    saved: CommittedCheckpoint


class VerifyLatest(NamedTuple):
    """Compare the latest checkpoint with its manifest, and set damaged ones aside. ``then`` gets how many there are."""

    then: Callable[[int], None]


class FindOther(NamedTuple):
    """Find out where to start, as all checkpoints of the run are damaged. ``then`` gets the path, or None."""

    then: Callable[[str | None], None]


class BringTo(NamedTuple):
    """Copy a checkpoint to a host that does not see the storage.

    ``then`` gets its directory there, and why it could not be copied.
    """

    host: str
    path: str
    then: Callable[[str, str | None], None]


class RolledBack(NamedTuple):
    """The run goes back to its latest checkpoint. suspect: the name of one after it that was given up, or ""."""

    asked: RollBack
    suspect: str


class StorageFails(NamedTuple):
    """End the run: what comes could not be stored."""

    why: str


# -- events -----------------------------------------------------------------------------------------------------------


class Answered(NamedTuple):
    """The answer to an action: ``then(*values)`` decides what follows from it."""

    then: Callable[..., None]
    values: tuple[Any, ...] = ()


class RunBegins(NamedTuple):
    """The run begins. Its hosts connect."""


class Validated(NamedTuple):
    """The validation of a checkpoint has ended. status: the name of a :class:`ReportedCheckpointStatus`."""

    saved: CommittedCheckpoint
    status: str
    metrics: Mapping[str, Any]


class StoreLast(NamedTuple):
    """The run ends: what is only in memory has to be stored."""


class RunEnds(NamedTuple):
    """The hosts end, and what is only in their memory is lost."""


class Tick(NamedTuple):
    """The moment of :meth:`~distrain.decisions.checkpoints.life.Checkpoints.deadline` has come."""


if TYPE_CHECKING:
    ForStorage = MakeDirectory | Store | Publish | UpdateManifest | Delete | Record | StorageFails
    ForHosts = SendMessage | BringTo | Brought
    ForOthers = Settled | NewStart | RolledBack | Validate | VerifyLatest | FindOther | ShowLine | Committed
    Action = ForStorage | ForHosts | ForOthers
    FromOthers = Answered | RunBegins | Validated | StoreLast | RunEnds | Tick
    Event = wire.Message | AttemptStarts | AttemptEnded | HostLost | RollBack | FromOthers
