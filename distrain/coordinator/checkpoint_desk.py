"""Between the decisions about checkpoints and those who carry them out. Runs in: coordinator.

:class:`~distrain.decisions.checkpoints.life.Checkpoints` decides. Here, its actions become messages to hosts, orders to
the storage, and facts for observers; what comes of them becomes events.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.api.observer import Committed
from distrain.decisions.checkpoints import actions
from distrain.decisions.events import SendMessage, ShowLine

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrain.api.observer import Fact
    from distrain.coordinator.checkpoint_copies import CheckpointCopies
    from distrain.coordinator.store.run_store import RunStore
    from distrain.coordinator.validations import Validations
    from distrain.decisions.checkpoints.life import Checkpoints
    from distrain.decisions.events import RollBack
    from distrain.decisions.hearing import Handler
    from distrain.storage.checkpoint import Checkpoint
    from distrain.system.background import Background
    from distrain.system.loop import PausableClock


@dataclass(eq=False)
class CheckpointDesk:
    """The desk of one run.

    thread: reads checkpoints. flush: has the reports written that have arrived. send: sends a message to a host.
    upload: has files that are on a host stored. show: shows a line. tell: tells observers a fact. find_other: called in
    ``thread`` if all checkpoints of the run are damaged; returns where to start. on_start: gets the checkpoint at which
    a restart would begin. on_settled: hears which checkpoint a report has got, or None. on_roll_back: gets what was
    asked, and the name of a checkpoint that was given up. is_over: tells whether the run ends.
    """

    checkpoints: Checkpoints
    store: RunStore
    copies: CheckpointCopies
    validations: Validations
    thread: Background
    clock: PausableClock
    flush: Callable[[], None]
    send: Callable[[str, wire.Message], None]
    upload: Callable[[str, wire.Upload], None]
    show: Callable[[ShowLine], None]
    tell: Callable[[Fact], None]
    find_other: Callable[[], str | None]
    on_start: Callable[[str | None], None]
    on_settled: Callable[[int, Checkpoint | None], None]
    on_roll_back: Callable[[RollBack, str], None]
    is_over: Callable[[], bool]

    def handle(self, event: actions.Event, host: str = "") -> None:
        """Do what follows from an event. ``host``: the one that a message is from."""
        wanted = self.checkpoints.handle(event, self.clock.now(), host)
        if wanted:
            self.flush()  # what ranks are told may let report() return: it is written by then
        for action in wanted:
            self._do(action)

    @property
    def handlers(self) -> dict[type, Handler]:
        """What hears each kind of message or event but reports, which come from :class:`ReportHandler`."""
        return dict.fromkeys(self.checkpoints.kinds - {wire.Reported}, lambda host, event: self.handle(event, host))

    def _answers(self, then: Callable[..., None]) -> Callable[..., None]:
        """Return what is called with the answer to an action."""
        return lambda *values: self.handle(actions.Answered(then, values))

    def _do(self, action: actions.Action) -> None:
        match action:
            case SendMessage(host, message):
                self.send(host, message)
            case actions.MakeDirectory(attempt, ordinal, name, then):
                self.store.prepare(attempt, ordinal, name=name, then=self._answers(then))
            case actions.Store(host, order):
                self.upload(host, order)
            case actions.Publish():
                done, failed = self._answers(action.done), self._answers(action.failed)
                self.store.publish(action._replace(done=done, failed=failed))
            case actions.UpdateManifest(saved, fields):
                self.store.update_manifest(saved, fields)
            case actions.Delete(chosen, kept):
                self.store.delete(chosen, self._answers(kept))
            case actions.Adopt(then):
                self.store.adopt(self._answers(then))
            case actions.Record(event, fields):
                self.store.append_event(event, **fields)
            case actions.StorageFails(why):
                self.store.on_failure(why)
            case actions.VerifyLatest(then):
                self.store.verify(self.thread, is_needed=lambda: not self.is_over(), then=self._unless_over(then))
            case actions.FindOther(then):
                self.thread.do(self.find_other, self._answers(then))
            case actions.BringTo(host, path, then):
                self.copies.fetch(host, path, self._answers(then))
            case actions.Validate(saved):
                self.validations.add(saved)
            case actions.NewStart(path):
                self.on_start(path)
            case actions.RolledBack(asked, suspect):
                self.on_roll_back(asked, suspect)
            case actions.Settled(ordinal, checkpoint):
                self.on_settled(ordinal, checkpoint)
            case Committed():
                self.tell(replace(action, now=time.monotonic()))
            case ShowLine():
                self.show(action)

    def _unless_over(self, then: Callable[[int], None]) -> Callable[[int], None]:
        return lambda damaged: None if self.is_over() else self.handle(actions.Answered(then, (damaged,)))

    def validated(self, *values: Any) -> None:
        """Note how a validation has ended."""
        self.handle(actions.Validated(*values))
