"""Training without workers (``num_workers=0``): train_func runs in the user's process, where a debugger works.

Runs in: coordinator. The run lives in a thread of the process, as that of any other rank, so that reports, checkpoints,
retries, reports of hangs and results are the same.
"""

from __future__ import annotations

import contextlib
import os
import socket
from functools import partial
from typing import TYPE_CHECKING

from distrain.coordinator.ranks.adopted import AdoptedRanks
from distrain.coordinator.ranks.rank_channel import RankChannel
from distrain.coordinator.ranks.stop_signals import stop_signals
from distrain.coordinator.ranks.this_process import OwnRank, Signals, environment, module_path
from distrain.system.loop import SignalRelay

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distrain import wire
    from distrain.api.context import TrainContext
    from distrain.decisions.events import RunRequest
    from distrain.worker.job.job import Work
    from distrain.worker.user_code import RankResult


class InProcessRank(AdoptedRanks):
    """The only rank of a run: this process. See :class:`~distrain.coordinator.ranks.port.Ranks`."""

    def __init__(self, request: RunRequest, work: Work) -> None:
        theirs, ours = socket.socketpair()
        channel = RankChannel(ours, on_stop=lambda name: signals.order(name))
        signals = Signals(stop_signals(request.stop_signals), channel, relay=SignalRelay(), is_alone=True)
        own = OwnRank(channel, signals, fresh=work.fresh, around=_as_rank, leave=partial(_leave, work))
        super().__init__({0: theirs}, own, with_gpus=request.scaling.use_gpu)


@contextlib.contextmanager
def _as_rank(spec: wire.WorkerSpec) -> Iterator[None]:
    """Make this process the only rank within the block."""
    defaults = {name: os.environ.get(name, value) for name, value in spec.defaults.items()}
    with environment({**defaults, **spec.environment}), module_path(spec.sys_path):
        yield


def _leave(work: Work, executed: RankResult, context: TrainContext) -> None:
    if executed.outcome.stage == "run":  # else the backend was not set up
        with contextlib.suppress(Exception):
            work.backend.teardown(context)
