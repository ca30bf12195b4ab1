"""Between the decisions about checkpoints and those who carry them out. Runs in: coordinator.

:class:`~distrain.decisions.checkpoints.life.Checkpoints` decides. Its actions go to the parts that carry them out, and
what comes of these becomes events here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.decisions.checkpoints import actions

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrain.decisions.checkpoints.life import Checkpoints
    from distrain.decisions.hearing import Handler
    from distrain.system.loop import PausableClock


@dataclass(eq=False)
class CheckpointDesk:
    """The desk of one run. flush: has the reports written that have arrived. do: has an action carried out."""

    checkpoints: Checkpoints
    clock: PausableClock
    flush: Callable[[], None]
    do: Callable[[str, object], None]

    def handle(self, event: actions.Event, host: str = "") -> None:
        """Do what follows from an event. ``host``: the one that a message is from."""
        wanted = self.checkpoints.handle(event, self.clock.now(), host)
        if wanted:
            self.flush()  # what ranks are told may let report() return: it is written by then
        for action in wanted:
            self.do("", self._with_answers(action))

    @property
    def handlers(self) -> dict[type, Handler]:
        """The handler of each kind of message or event, except for reports: :class:`ReportHandler` passes those on."""
        return dict.fromkeys(self.checkpoints.kinds - {wire.Reported}, lambda host, event: self.handle(event, host))

    def deadline(self) -> float | None:
        """Return when :meth:`tick` is due (time.monotonic), or None."""
        return self.clock.monotonic(self.checkpoints.deadline())

    def tick(self) -> None:
        """Do whatever is due by now."""
        self.handle(actions.Tick())

    def _with_answers(self, action: Any) -> Any:
        """Let the answer to an action, which calls a function of it, come here as an event."""
        if not hasattr(action, "_asdict"):
            return action
        answers = {name: partial(self._answer, then) for name, then in action._asdict().items() if callable(then)}
        return action._replace(**answers)

    def _answer(self, then: Callable[..., None], *values: Any) -> None:
        self.handle(actions.Answered(then, values))
