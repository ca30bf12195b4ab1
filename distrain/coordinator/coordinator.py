"""The loop in the user's process. Runs in: coordinator.

It hands what hosts say to the parts of the run (:mod:`distrain.coordinator.engine`), and wakes those that wait for a
moment. The run machine decides when the run has ended; then the loop goes on until everything is written.

The loop runs in the thread that called fit(), without asyncio, so it works in notebooks. It is event-driven: it sleeps
until a descriptor is ready or a deadline comes. It never waits for a disk, a callback of the user's or a console: those
have threads of their own (:mod:`distrain.system.background`, :mod:`distrain.system.consoles`).
"""

from __future__ import annotations

import contextlib
import signal
import time
from functools import partial
from typing import TYPE_CHECKING

from distrain import wire
from distrain.api.observer import Stopping
from distrain.coordinator.connection.agent_link import FILES_PER_HOST
from distrain.coordinator.ranks.stop_signals import note_stop, stop_signals
from distrain.coordinator.requests import DEBUG, PROFILE, STACKS, STOP, TYPED, Requests, answer
from distrain.decisions import events
from distrain.decisions.checkpoints.actions import RunBegins, RunEnds, StoreLast
from distrain.decisions.hearing import hears
from distrain.decisions.states import RunState
from distrain.system.log import say, warn
from distrain.system.process import raise_fd_limit
from distrain.system.text import BY_COMMAND

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrain.coordinator.engine import Engine
    from distrain.wire.channel import Channel

_NOTICE_AFTER_S = 5.0
"""Seconds to wait for the storage before a line on the console says so."""
_LEAST_WAIT_S = 1.0
"""Seconds to wait for the storage at the end of a run, even if Ctrl-C ends the waiting."""


class Coordinator:
    """The loop of one run. engine: has its parts; ``engine.machine`` knows how the run has ended."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._impatient = False
        """True once a stop was requested again after the training."""
        self._signalled_hosts_with: str | None = None
        """The signal of the scheduler that stopped the run through a host, until it has reached this process, too."""
        actions: dict[str, Callable[[Channel, wire.Ask], object]] = {
            STACKS: self._on_stacks_request,
            STOP: self._on_stop_request,
            DEBUG: engine.debuggers.connect,
            TYPED: engine.debuggers.hear_user,
            PROFILE: engine.take_profile,
            **engine.observers.requests,
        }
        self._requests = Requests(engine.loop, engine.store, actions, engine.debuggers.disconnect)
        engine.parts.add(self)

    def run(self) -> None:
        """Train. Return when the run has ended; no process of it survives on any host, even on an error.

        Only an agent of this machine may rest, with its forkserver, for the next run of this process.

        Raises ResourcesError if this process may not open enough files for the connections to all hosts.
        """
        engine, request = self.engine, self.engine.request
        hosts = len(request.hosts)
        more = request.scaling.max_workers + 2 * hosts  # each rank has a log, and a host may have a mover
        try:
            raise_fd_limit(hosts * FILES_PER_HOST, hosts * FILES_PER_HOST + more)
            with engine.loop.signals(stop_signals(request.stop_signals), self._on_signal):
                self._run()
        finally:
            engine.store.detach()
            engine.files.close()
            engine.verification.close()
            engine.loop.close()

    def _run(self) -> None:
        engine, request = self.engine, self.engine.request
        try:
            engine.ranks.open(engine.loop, engine.hear, engine.lose)
            self._requests.open()
            engine.store.start(engine.loop, engine.files, request.run_id, request.python_flags)
            engine.do(engine.machine.start(time.monotonic()))
            engine.desk.handle(RunBegins())
            while not engine.machine.state.is_terminal:
                self._step()
                self._note_outstanding()
                engine.flush()
        finally:
            self._close()

    def _step(self) -> None:
        """Wait until something happens, and handle it."""
        engine = self.engine
        self._note_waits()
        for name, (deadline, tick) in engine.timers.items():
            if (moment := deadline()) is None:
                engine.loop.cancel(name)
            else:
                engine.loop.call_at(name, moment, tick)
        engine.loop.step()

    def _note_waits(self) -> None:
        """Note that ranks wait for files, or for a person. Other ranks wait for the latter, so their time stops."""
        engine, is_waiting = self.engine, self.engine.debuggers.is_waiting
        engine.status.is_debugged = engine.hangs.is_debugged = is_waiting
        engine.hangs.is_serving = engine.copies.is_busy or engine.checkpoints.is_storing_for_ranks
        if is_waiting:
            engine.clock.pause()
        elif engine.clock.is_paused:
            engine.clock.resume()
            engine.watch(engine.hangs.progress)

    # -- what the machine waits for -------------------------------------------------------------------------------

    def _note_outstanding(self) -> None:
        """Tell the machine what is still being done with files, while it waits for that.

        Only between two turns of the loop: in the middle of one, a commit may be half noted.
        """
        engine, machine, before = self.engine, self.engine.machine, None
        while machine.state.waits_for_files and machine.state is not before and not engine.is_over:
            before = machine.state
            engine.do(machine.handle(self._outstanding(before), time.monotonic()))

    def _outstanding(self, state: RunState) -> events.Outstanding:
        engine, machine, checkpoints = self.engine, self.engine.machine, self.engine.checkpoints
        match state:
            case RunState.PREPARING:
                assert machine.plan is not None
                copying = engine.host_files.is_busy(machine.plan.hosts)
                return events.Outstanding(
                    verifying=checkpoints.is_verifying or checkpoints.is_gathering, copying=copying
                )
            case RunState.SAVING:
                standing = {*engine.hangs.standstills.waiting, *engine.reports.waiting}
                saving = checkpoints.assembly.in_progress(machine.failed_ranks, standing, checkpoints.now)
                return events.Outstanding(saving=saving)
        rounds = checkpoints.rounds
        committing = checkpoints.is_committing or rounds.is_settling
        uploading = checkpoints.assembly.awaits_uploads()
        if machine.is_done and not (committing or uploading or machine.storage_failed):
            engine.desk.handle(StoreLast())
            uploading = rounds.is_storing
        return events.Outstanding(committing=committing, uploading=uploading, lost=rounds.lost_work)

    # -- somebody asks the run to stop ----------------------------------------------------------------------------

    @hears(wire.HostSignalled)
    def _on_signal_of_host(self, _: str, signalled: wire.HostSignalled) -> None:
        """Stop the run as if the scheduler had signalled this process. It may signal every host, and this process."""
        if not self.engine.machine.stopping.was_asked:
            self._on_signal(signal.Signals[signalled.signal])
            self._signalled_hosts_with = None if signalled.is_own else signalled.signal

    def _on_signal(self, number: int) -> None:
        why = signal.Signals(number).name
        if why == self._signalled_hosts_with:
            self._signalled_hosts_with = None
        else:
            self._stop_for(why)

    def _stop_for(self, why: str) -> None:
        note_stop(why)
        engine, machine = self.engine, self.engine.machine
        if engine.validations.busy and machine.state is RunState.FINISHED:
            engine.validations.give_up(f"{why} has ended the wait for it")
        elif engine.is_over or machine.state.is_terminal:
            self._impatient = True
        elif machine.state is RunState.SETTLING and machine.stopping.was_asked:
            self._impatient = True  # the run only waits for a checkpoint that is being stored
        engine.observers.tell(Stopping(why))
        engine.happened("", events.StopRequested(why))

    def _on_stop_request(self, asker: Channel, _: wire.Ask) -> None:
        """Stop the run as SIGTERM does, but only once: a second request kills no rank that is storing something."""
        if self.engine.machine.stopping.was_asked or self.engine.is_over:
            answer(asker, "the run is stopping already")
        else:
            self._stop_for(BY_COMMAND)
            answer(asker, "the run is stopping")

    def _on_stacks_request(self, asker: Channel, asked: wire.Ask) -> None:
        self.engine.watch(self.engine.hangs.answer, partial(answer, asker), asked.body.decode())

    # -- the end --------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        engine = self.engine
        engine.is_over = True
        engine.verification.close()
        steps = (
            self._store_memory,
            self._bring_files_back,
            self._close_hosts,
            engine.debuggers.close,
            engine.flush,
            self._requests.close,
            self._await_storage,
            self._await_validations,
        )
        with contextlib.ExitStack() as stack:  # every step is taken, even if another one raises
            for step in reversed(steps):
                stack.callback(step)

    def _store_memory(self) -> None:
        """Store the newest checkpoint in memory before the hosts end; Ctrl-C ends the waiting."""
        self.engine.desk.handle(StoreLast())
        self._wait_until(lambda: not self.engine.checkpoints.rounds.is_storing)
        self.engine.desk.handle(RunEnds())

    def _bring_files_back(self) -> None:
        """Copy what ranks have written on hosts without the storage to the run directory; Ctrl-C ends the waiting."""
        engine, files = self.engine, self.engine.host_files
        for host in engine.request.hosts if engine.attempt >= 0 else ():
            files.bring_back(host)  # one after the other, because they may have files of the same names
            if not self._wait_until(lambda: not files.is_delivering):
                warn("some files of ranks are still on other hosts; they are copied when the run next uses those hosts")
                break
        files.warn_of_lost()

    def _close_hosts(self) -> None:
        engine = self.engine
        engine.host_files.close()
        engine.ranks.close(keep=engine.machine.state in (RunState.FINISHED, RunState.FAILED))

    def _await_storage(self) -> None:
        """Wait until everything is written; Ctrl-C ends the waiting."""
        store = self.engine.store
        if self.engine.machine.state is RunState.FINISHED:
            store.secure_records()
        if not self._wait_until(lambda: store.is_idle):
            store.abandon_pending_work()

    def _wait_until(self, is_done: Callable[[], bool]) -> bool:
        """Wait until something is done, without end. Return False if Ctrl-C ends the waiting before.

        Even then, wait for quick work, ``_LEAST_WAIT_S`` at most.
        """
        loop, least = self.engine.loop, time.monotonic() + _LEAST_WAIT_S
        loop.call_in("storage", _NOTICE_AFTER_S, self.engine.store.announce_wait)
        loop.call_at("least", least, lambda: None)
        try:
            while not is_done():
                if self._impatient and time.monotonic() >= least:
                    return False
                self._step()
                self.engine.flush()
            return True
        finally:
            loop.cancel("storage")

    def _await_validations(self) -> None:
        """Wait for the validations of a finished run; Ctrl-C ends the waiting.

        The validations of any other run are made when it is resumed.
        """
        validations = self.engine.validations
        if validations.busy and self.engine.machine.state is RunState.FINISHED:
            say("waiting for the validation of the last checkpoints")
            while validations.busy:
                self._step()
        validations.abort()
        self._await_storage()
