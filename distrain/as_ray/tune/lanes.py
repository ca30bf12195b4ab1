"""Trials side by side: in lanes, each a thread that runs one trial after the other. Runs in: coordinator."""

from __future__ import annotations

import os
import signal
from collections import deque
from typing import TYPE_CHECKING

from distrain.coordinator.connection.choice import hosts_of
from distrain.coordinator.stop_signals import note_stop, preempted, stop_signals
from distrain.hosts.gpus import find_gpus
from distrain.hosts.host_info import usable_cpus
from distrain.system.background import Background
from distrain.system.log import log_level, say
from distrain.system.loop import Loop, SignalRelay

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from distrain.api.config import ScalingConfig
    from distrain.as_ray.tune.sweep import Trial


def lanes_for(scaling: ScalingConfig, limit: int) -> list[list[str]]:
    """Return the GPUs of each lane, of which there are as many as the machine has CPUs and GPUs for, but one at least.

    Trials of several hosts, of no workers, or of a varying number of workers run one by one.
    """
    hosts = hosts_of(scaling, os.environ)
    if len(hosts) > 1 or not hosts[0].is_local or scaling.min_workers != scaling.max_workers or not scaling.min_workers:
        return [[]]
    needs = {"CPU": 1.0, **(scaling.resources_per_worker or {})}
    count = int(usable_cpus() / max(needs["CPU"] * scaling.max_workers, 1e-9))
    devices: list[str] = []
    share = 0.0
    if scaling.use_gpu:
        devices = list(hosts[0].gpus) or [gpu.uuid for gpu in find_gpus(os.environ)[0]]
        share = needs.get("GPU", 1.0) * scaling.max_workers
        count = min(count, int(len(devices) / max(share, 1e-9)))
    count = max(1, min(count, limit))
    return [devices[int(lane * share) : max(int(lane * share) + 1, int((lane + 1) * share))] for lane in range(count)]


def hostfile_of(path: Path, gpus: list[str]) -> str | None:
    """Write the hostfile of a lane with GPUs of its own."""
    if not gpus:
        return None
    path.write_text(f"localhost gpus={','.join(gpus)}\n")
    return str(path)


class SideBySide:
    """Trials in lanes. The main thread passes signals on to all of them."""

    def __init__(self, lanes: Sequence[Callable[[Trial], None]], waiting: Sequence[Trial]) -> None:
        self._loop = Loop()
        self._lanes = [(Background(self._loop, f"lane-{i}"), run) for i, run in enumerate(lanes)]
        self._waiting = deque(waiting)
        self._relay = SignalRelay()
        self._error: BaseException | None = None
        self._stopped_by: signal.Signals | None = None

    def run(self) -> None:
        """Run all trials. If one could not begin, or was stopped, stop the others, and raise its error."""
        try:
            with self._relay, self._loop.signals(stop_signals(), self._on_signal):
                for lane, run in self._lanes:
                    self._next(lane, run)
                while any(lane.pending for lane, _ in self._lanes):
                    self._loop.step()
        finally:
            for lane, _ in self._lanes:
                lane.close()
            self._loop.close()
        if self._error is not None:
            raise self._error.with_traceback(None)
        if self._waiting and self._stopped_by is not None:  # the trials that ran have finished all the same
            name = self._stopped_by.name
            raise KeyboardInterrupt if name == "SIGINT" else preempted(f"the sweep was stopped by {name}", name)

    def _next(self, lane: Background, run: Callable[[Trial], None]) -> None:
        if self._waiting and self._error is None and self._stopped_by is None:
            trial = self._waiting.popleft()
            lane.do(lambda: _outcome(run, trial), lambda error: self._ended(lane, run, error))

    def _ended(self, lane: Background, run: Callable[[Trial], None], error: BaseException | None) -> None:
        if error is not None and self._error is None:
            self._error = error
            if self._stopped_by is None:
                self._relay.pass_on(signal.SIGINT)  # not SIGTERM, after which no run of this process may begin
        self._next(lane, run)

    def _on_signal(self, number: int) -> None:
        """Stop all trials. A second signal reaches them, too, and kills their workers."""
        note_stop(number)
        if self._stopped_by is None:
            self._stopped_by = signal.Signals(number)
            with log_level("INFO"):
                say(f"{self._stopped_by.name}: all trials stop")
        self._relay.pass_on(number)


def _outcome(run: Callable[[Trial], None], trial: Trial) -> BaseException | None:
    try:
        run(trial)
    except BaseException as error:
        return error
    return None
