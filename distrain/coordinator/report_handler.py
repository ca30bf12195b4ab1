"""Reports of ranks, the barriers in which they meet, and how they fare. Runs in: coordinator.

Writes the reports to metrics.jsonl, and joins those of all ranks for callbacks. Their checkpoints are another matter:
:mod:`distrain.coordinator.checkpoint_desk`.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.api.observer import RankTrains, Reported, ReportsJoined, TroubleBegan, TroubleEnded
from distrain.decisions.barriers import BarrierTracker
from distrain.decisions.checkpoints.actions import Settled
from distrain.decisions.events import AttemptEnded, AttemptStarts
from distrain.decisions.hearing import does, hears
from distrain.decisions.report_rows import RowAssembly
from distrain.hosts.troubles import Trouble
from distrain.system.log import warn
from distrain.system.text import name_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from distrain.api.observer import Fact
    from distrain.coordinator.checkpoint_desk import CheckpointDesk
    from distrain.coordinator.store.run_store import RunStore
    from distrain.decisions.run_status import RunStatus

_ACKNOWLEDGE_AFTER = wire.MOST_UNACKNOWLEDGED // 4
"""Reports of a rank after which it is sent an acknowledgement."""
_MOST_SLOW_SHOWN = 3
"""Ranks that become slow at the same time and get a line each; the slowest."""
_MOST_TROUBLES_SHOWN = 5
"""Troubles with memory and GPUs that get a line each. All GPUs of a run are often full at the same time."""


@dataclass(eq=False)
class ReportHandler:
    """The reports of one attempt after the other.

    desk: gets each report once its metrics are noted, for its checkpoint. status: the live state of the run. tell:
    tells observers a fact. send: sends a message to a rank.
    """

    store: RunStore
    desk: CheckpointDesk
    status: RunStatus
    tell: Callable[[Fact], None]
    send: Callable[[wire.ToWorker], None]

    def __post_init__(self) -> None:
        self.last: dict[str, Any] | None = None
        """Rank 0's latest report: its line with all metrics."""
        self._begin(-1, 0)

    @hears(AttemptStarts)
    def on_attempt(self, _: str, starts: AttemptStarts) -> None:
        """Begin an attempt."""
        self._begin(starts.attempt, len(starts.plan.ranks))

    def _begin(self, attempt: int, world_size: int) -> None:
        self._attempt = attempt
        self._barriers = BarrierTracker(world_size)
        self._rows = RowAssembly(world_size)
        self._troubles_shown: set[Trouble] = set()
        self._unacknowledged: dict[int, int] = {}
        """By rank: the report to acknowledge as soon as it is written."""

    @property
    def waiting(self) -> Collection[int]:
        """The ranks that wait in a barrier."""
        return self._barriers.waiting

    def deadline(self) -> float | None:
        """Return when :meth:`tick` should be called if nothing else happens."""
        return self.desk.clock.monotonic(min(self._rows.deadline(), self._barriers.deadline))

    def tick(self) -> None:
        """Do whatever is due by now."""
        now = self.desk.clock.now()
        self._tell(self._rows.tick(now))
        self._answer(self._barriers.tick(now))

    def flush(self) -> None:
        """Have the reports written that have arrived, then acknowledge them."""
        reports, self._unacknowledged = self._unacknowledged, {}
        self.store.flush(partial(self._acknowledge, self._attempt, reports) if reports else None)

    def _acknowledge(self, attempt: int, reports: Mapping[int, int], _: object) -> None:
        if attempt == self._attempt:
            for rank, index in reports.items():
                self.send(wire.Acknowledged(attempt=attempt, rank=rank, index=index))

    # -- reports --------------------------------------------------------------------------------------------------

    @hears(wire.Reported)
    def on_reported(self, _: str, message: wire.Reported) -> None:
        """Have the metrics of a report written, and tell observers."""
        rank, index, assembly = message.rank, message.index, self.desk.checkpoints.assembly
        if index // _ACKNOWLEDGE_AFTER > assembly.attendance[rank].reports // _ACKNOWLEDGE_AFTER:
            self._unacknowledged[rank] = index
        metrics: dict[str, Any] | None = None
        if message.failed is None:
            metrics = json.loads(message.body)
            line: dict[str, Any] = {"time": message.time, "attempt": message.attempt, "rank": rank, "index": index}
            if message.progress is not None:
                line["progress"] = message.progress
            if message.waited is not None:
                line["waits"] = message.waited
            self.store.append_metrics(line, metrics)
            if rank == 0:
                self.last = {**line, "metrics": metrics}
            number = assembly.first_step + index
            self.tell(Reported(rank, index, number, metrics, message.progress, time.monotonic()))
        self.desk.handle(message)
        has_checkpoint = assembly.has_part(index)
        self._tell(self._rows.reported(rank, index, metrics, self.desk.clock.now(), has_checkpoint=has_checkpoint))

    @hears(wire.Outcome)
    def on_outcome(self, _: str, outcome: wire.Outcome) -> None:
        """Wait no longer for a rank that has finished."""
        if outcome.ok:
            self._answer(self._barriers.finished(outcome.rank))
            self._tell(self._rows.finished(outcome.rank))

    @does(Settled)
    def settled(self, settled: Settled) -> None:
        """Note that the checkpoint of a report is there, or never will be."""
        self._tell(self._rows.settled(settled.ordinal, settled.checkpoint))
        self.end_rows()

    @hears(AttemptEnded)
    def end_rows(self, *_: object) -> None:
        """Complete the rows of an attempt that is over, once its checkpoints are committed."""
        if self.desk.checkpoints.is_over and not self.desk.checkpoints.is_committing:
            self._tell(self._rows.end())

    def _tell(self, rows: Sequence[ReportsJoined]) -> None:
        for row in rows:
            self.tell(row)

    # -- barriers -------------------------------------------------------------------------------------------------

    @hears(wire.CollectiveEntered)
    def on_collective(self, _: str, message: wire.CollectiveEntered) -> None:
        """Let ranks meet in a barrier."""
        self._answer(self._barriers.entered(message, self.desk.clock.now()))

    def _answer(self, answers: Sequence[wire.Answer]) -> None:
        for answer in answers:
            self.send(answer)

    # -- how ranks and hosts fare ---------------------------------------------------------------------------------

    @hears(wire.Running)
    def on_running(self, _: str, message: wire.Running) -> None:
        """Tell observers that a rank trains."""
        self.tell(RankTrains(message.rank, time.monotonic()))

    @hears(wire.Vitals)
    def on_vitals(self, _: str, message: wire.Vitals) -> None:
        """Show and record the ranks that have become slow."""
        slow = self.status.heard_vitals(message, time.monotonic())
        for one in slow[:_MOST_SLOW_SHOWN]:
            warn(str(one))
        if more := slow[_MOST_SLOW_SHOWN:]:
            warn(f"{name_ranks([one.rank for one in more])} also became slow, but less so")
        for one in slow:
            self.tell(one)

    @hears(wire.Troubles, wire.TroublesSeen)
    def on_troubles(self, host: str, message: wire.Troubles | wire.TroublesSeen) -> None:
        """Show and record what is wrong with a host, or with ranks, or is over. A line appears once."""
        source = host if isinstance(message, wire.Troubles) else "ranks"
        new, over = self.status.heard_troubles(source, [Trouble(**fields) for fields in message.troubles])
        for one in new:
            host = self.status.ranks[one.rank].host
            if one not in self._troubles_shown:
                self._troubles_shown.add(one)
                self._show_trouble(f"rank {one.rank} on {host}: {one.text}")
            self.tell(TroubleBegan(host, one))
        for one in over:
            self.tell(TroubleEnded(self.status.ranks[one.rank].host, one))

    def _show_trouble(self, text: str) -> None:
        if len(self._troubles_shown) <= _MOST_TROUBLES_SHOWN:
            warn(text)
        elif len(self._troubles_shown) == _MOST_TROUBLES_SHOWN + 1:
            warn("more ranks have troubles; events.jsonl names them")
