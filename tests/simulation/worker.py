"""A rank of a simulated world: the real session, and a training script that was drawn."""

from __future__ import annotations

import json
import math
import pickle
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.api.backend import BackendConfig
from distrain.api.config import CheckpointUploadMode, StoreOptions, ValidationTaskConfig
from distrain.api.context import CheckpointConsistencyMode, TrainContext
from distrain.data.constructors import run_datasets
from distrain.errors import CheckpointError, Rollback
from distrain.storage.checkpoint import Checkpoint
from distrain.system.peer_errors import blames_peer
from distrain.worker.job.job import Work
from distrain.worker.reporting.memory_part import MemoryParts
from distrain.worker.session import Session
from distrain.worker.standstill import STANDING_S
from tests.simulation.debugging import Debugger
from tests.simulation.world import Process

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.simulation.hosts import Agent
    from tests.simulation.play import Play
    from tests.simulation.scenario import Scenario

BATCH = 2
"""Rows that each rank takes with a step."""
_SAMPLE_S = 0.5
_READ_S = (0.1, 0.3, 3.0)
_MODES = {mode.name: mode for mode in CheckpointUploadMode}


class PeerLost(ConnectionError):
    """What a collective raises when a peer is gone."""


@dataclass
class Call:
    """One call of report(), as the rank made it."""

    life: int
    attempt: int
    rank: int
    index: int
    step: int
    files: dict[str, bytes] | None
    began: float
    ended: float | None = None
    failed: str | None = None
    mode: str = ""
    folder: Path | None = None


class SimulatedRank:
    """The process of a rank."""

    has_uploader = True
    at_end = False

    def __init__(self, agent: Agent, spec: wire.WorkerSpec, play: Play) -> None:
        self.agent, self.spec, self.play, self.world = agent, spec, play, agent.world
        self.number, self.attempt, self.life = spec.rank, spec.attempt, agent.life
        self.is_reported = False
        """True once the agent has reported its end."""
        self.process = Process(self.world, f"rank {spec.rank} of attempt {spec.attempt}", agent.host)
        self._frames: deque[wire.Frame] = deque()
        self._how: dict[str, Any] = {"signal": 9}
        self.main = self.process.start(self._run, is_main=True)
        self.process.at_death += [lambda: agent.exited(self, **self._how), self._close_connections]
        self.in_collective: int | None = None
        self.collectives = 0
        self.is_done = False
        self.activity = "moves"
        """What its main thread does, as the sampler sees it: moves, waits, stuck."""
        self.since = self.world.now
        """Since when it does that."""
        self._debugger = Debugger(self)

    # -- its process ----------------------------------------------------------------------------------------------

    def kill(self, *, by_us: bool = False, lost: str | None = None) -> None:
        """End it with SIGKILL. lost: why nobody sees how it ends."""
        if self.process.is_alive:
            self._how = {"lost": lost} if lost else {"signal": 9, "by_us": by_us}
            self.process.kill()

    def _close_connections(self) -> None:
        if self.agent.host.is_up:  # from a dead machine, others hear nothing
            self.play.collectives.gone(self)

    def signal(self, name: str) -> None:
        """Get a signal: train_func is unwound by it."""
        if self.process.is_alive and not self.is_done:
            self.main.interrupt(KeyboardInterrupt() if name == "SIGINT" else SystemExit(143))

    def _run(self) -> None:
        self.world.pause(0.4)
        session = self.session = self.process.session = self._session()  # type: ignore[attr-defined]
        code, outcome = 0, {"ok": True, "body": pickle.dumps(None)}
        try:
            session.send(wire.Running)
            self.process.start(lambda: self._sample(session))
            outcome["body"] = pickle.dumps(self._train(session))
            session.finish_uploads()
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            rollback = None
            if isinstance(error, Rollback):
                error.skip_to = session.positions_to_skip_to() if error.skip_batch else None
                rollback = {"why": str(error), "skip_to": error.skip_to}
            code = error.code if isinstance(error, SystemExit) else 1
            outcome = {
                "ok": False, "body": b"", "error": f"{type(error).__name__}: {error}", "traceback": str(error),
                "exit_code": code, "blames_peer": isinstance(error, PeerLost) or blames_peer(str(error)),
                "rollback": rollback, "exits": isinstance(error, (SystemExit, KeyboardInterrupt)),
            }  # fmt: skip
        self.is_done = True
        if outcome["ok"] or outcome["exits"]:
            self._tell_collectives(session, "last_collectives")
        elif outcome["blames_peer"]:
            self._tell_collectives(session, has_failed=True)
        session.send(wire.Outcome, stage="run", stopped=session.stopped, **outcome)
        self._how = {"exit_code": code}
        if outcome["ok"]:
            if self.number == 0:
                session.wait_for_release()
            session.wait_for_commits()
        self.world.pause(0.1)

    def _tell_collectives(self, session: Session, what: str = "flight_recorder", *, has_failed: bool = False) -> None:
        """Send what torch's flight recorder has."""
        entries = [
            {
                "collective_seq_id": number, "profiling_name": "gloo:all_reduce", "process_group": ["0", "default_pg"],
                "input_sizes": [[1]], "input_dtypes": ["Float"], "is_p2p": False, "time_created_ns": number,
                "retired": number != self.in_collective,
            }
            for number in range(max(1, self.collectives - 4), self.collectives + 1)
        ]  # fmt: skip
        groups = {"0": [*range(session.context.world_size)]}
        body = json.dumps({"entries": entries, "groups": groups, "has_failed": has_failed}).encode()
        session.send(wire.Dump, what=what, body=body)

    # -- the sampler ----------------------------------------------------------------------------------------------

    def does(self, activity: str) -> None:
        self.activity, self.since = activity, self.world.now
        if activity == "moves":
            self._debugger.stop_if_due()

    def _sample(self, session: Session) -> None:
        """Tell the coordinator when the main thread stands still, and when it moves again, as the sampler does."""
        told = ("", "")
        asked = False

        def ask(_: object) -> None:
            nonlocal asked
            asked = True

        session.hooks["standstill"] = ask
        seen = self.world.now
        while not self.is_done:
            self.world.sleep(_SAMPLE_S * (0.6 + 0.3 * self.world.random.random()))
            session.poll()
            if self.world.now - seen > STANDING_S:  # the process was stopped
                told, self.since = ("?", ""), self.world.now
            seen = self.world.now
            state, since = "", self.since
            if session._call and self.activity == "moves":
                state, since = "asks", self._called_at
            elif self.activity != "moves":
                state = {"waits": "blocked", "stuck": "stuck"}[self.activity]
            if self.world.now - since < STANDING_S:
                state = ""
            now = (state, f"{self.activity} (train.py:1)" if state else "")
            if asked or now != told:
                told, asked = now, False
                seconds = round(self.world.now - since, 3)
                session.send(wire.Standstill, state=now[0], place=now[1], seconds=seconds)

    @property
    def _called_at(self) -> float:
        return max([self.since, *(call.began for call in self.play.calls if call.rank == self.number)])

    def _session(self) -> Session:
        spec = self.spec
        context = TrainContext(**{**spec.context, "devices": tuple(spec.context["devices"])})
        start = context.get_storage().checkpoint(spec.checkpoint) if spec.checkpoint else None
        session = Session(self, context, start)
        session.hooks["flight_recorder"] = lambda _: self._tell_collectives(session)
        session.hooks["debug"] = self._debugger.open
        session.hooks["typed"] = self._debugger.receive
        session.host = self.agent.host  # type: ignore[attr-defined]
        session._nan_metric, session._skip_to = spec.nan_metric, spec.skip_to
        session._prefers_memory = spec.memory_every is not None
        session._memory = MemoryParts(self.agent.host.memory / f"rank_{self.number}")
        return session

    # -- its channel ----------------------------------------------------------------------------------------------

    def send(self, message: wire.FromWorker) -> None:
        """Send a message through the agent, which passes it on when it runs."""
        pass_on = partial(self.agent.up.send, message)
        self.agent.process.unread.append(pass_on) if self.agent.process.is_stopped else pass_on()

    def receive(self, frame: wire.Frame | None = None) -> Any:
        """Return what has arrived, for the session; or take a frame, from the agent."""
        if frame is not None:
            self._frames.append(frame)
            self.main.wake()
            return None
        frames = list(self._frames)
        self._frames.clear()
        return frames

    def wait(self, timeout_s: float | None = None) -> list[wire.Frame]:
        until = None if timeout_s is None else self.world.now + timeout_s
        while not self._frames and (until is None or self.world.now < until):
            self.world.wait(until)
        return self.receive()

    # -- its script -----------------------------------------------------------------------------------------------

    def _train(self, session: Session) -> Any:
        scenario: Scenario = self.play.scenario
        draw = self.play.script_random(self)
        if scenario.builds:  # the model, before the checkpoint is read
            self.world.sleep(draw.choice([0.0, 0.3, 6.0]))
        first = self._resume(session)
        size = session.context.world_size
        last = scenario.early[1] if scenario.early and scenario.early[0] == self.number else math.inf
        for step in self._read(session, first) if scenario.reads else range(first, scenario.steps):
            if step >= last:
                break
            self.world.sleep(draw.expovariate(1 / scenario.step_s[self.number % len(scenario.step_s)]))
            if scenario.collectives and size > 1:
                self.does("waits")
                self.play.collectives.enter(self)
                self.does("moves")
            if (self.number, step, self.attempt) == scenario.sticks:
                self.does("stuck")
                self.play.stuck[self.life, self.attempt] = (self.number, self.world.now)
                self.world.sleep(40)
            self.does("moves")
            if (self.number, step, self.attempt) in scenario.raises:
                raise ValueError(f"step {step} fails")
            if (self.number, step) in scenario.rolls_back and (self.number, step) not in self.play.rolled_back:
                self.play.rolled_back.add((self.number, step))
                raise Rollback("the loss is bad", skip_batch=scenario.reads)
            if scenario.meets and step % 3 == 1:
                session.collective("barrier()", b"")
            stop = scenario.asks_to_stop and session.should_stop()
            if self.number not in scenario.quiet:
                self._report(session, step)
            if scenario.looks and draw.random() < 0.2:
                self._look(session, step)
            if scenario.lists and draw.random() < 0.2:
                session.all_checkpoints(CheckpointConsistencyMode.COMMITTED, None)
            if stop:
                self.world.sleep(200 if scenario.lingers else 0)
                return step
        self._write_notes(session)
        return scenario.steps

    def _read(self, session: Session, first: int) -> Iterator[int]:
        """Yield the number of a step for each batch."""
        datasets = run_datasets(
            {"train": [{"row": row} for row in range(self.play.rows)]}, "all", on_change="error", resume=True
        )
        session.work = Work(backend=BackendConfig(), run_datasets=datasets)
        shard = session.dataset_shard("train")
        taken = self.play.batches[
            self.attempt, self.number
        ] = []  # fit() may have been killed before this attempt was noted
        for _ in range(shard.epoch, 1):
            batches = shard.iter_batches(batch_size=BATCH, prefetch_batches=0)
            for step, batch in enumerate(batches, first):
                rows = [int(row) for row in batch["row"]]
                taken.append((session._reports + 1, rows))
                yield step

    def _write_notes(self, session: Session) -> None:
        """Write a file that belongs into the run directory."""
        if not session.context.sees_storage:
            name = f"notes_{self.number}-{self.attempt}.txt"
            Path(session.context.get_trial_dir(), name).write_text(name)
            self.play.notes.append(name)

    def _resume(self, session: Session) -> int:
        checkpoint = session.get_checkpoint()
        step = self._step_of(checkpoint)
        self.play.looked.append((self, step, -1))
        return step + 1

    def _step_of(self, checkpoint: Checkpoint | None) -> int:
        """Read a checkpoint, and return its step; -1 for none."""
        if checkpoint is None:
            return -1
        return max((int(state["step"]) for state in self._load(checkpoint)), default=-1)

    def _load(self, checkpoint: Checkpoint) -> list[dict[str, Any]]:
        """Read the files of a checkpoint, which takes a while: some ranks first read their own one."""
        own = checkpoint._read_file(f"state_{self.number}.json") if self.number % 2 else None
        with checkpoint.as_directory() as folder:
            paths = sorted(Path(folder).glob("state*.json"))
            self.world.pause(self.world.random.choice(_READ_S))
            states = [json.loads(path.read_bytes()) for path in paths]
        if own is not None and json.loads(own) not in states:
            self.play.violations.append(f"rank {self.number} has read another file alone than with all others")
        self.play.loaded.append((self, checkpoint, states))
        return states

    def _look(self, session: Session, reported: int) -> None:
        """Read the newest checkpoint, unless a newer one has taken its place meanwhile. ``reported``: the last step."""
        scenario: Scenario = self.play.scenario
        may_be_deleted = (
            scenario.num_to_keep is not None or scenario.mode in ("MEMORY", "MIXED") or scenario.memory_every
        )
        checkpoint = session.get_checkpoint()
        try:
            self.play.looked.append((self, self._step_of(checkpoint), reported))
        except CheckpointError as error:
            if not may_be_deleted:
                raise
            self.play.unread.append((checkpoint.path.rpartition("/")[2], self.world.now, str(error)))

    def _report(self, session: Session, step: int) -> None:
        scenario: Scenario = self.play.scenario
        index = session._reports + 1
        files = None
        folder = None
        if scenario.saves(self.number, step, session.context.world_size):
            writes_into_one = scenario.mode == "NO_UPLOAD" and not scenario.own_names
            state = {
                "rank": -1 if writes_into_one else self.number,
                "step": step,
                "attempt": self.attempt,
                "life": self.life,
            }
            name = f"state_{self.number}.json" if scenario.own_names else "state.json"
            files = {name: json.dumps(state).encode()}
            if scenario.own_names:
                files[f"more_{self.number}.bin"] = f"{state}".encode() * 10
            if scenario.mode == "NO_UPLOAD":
                run = self.play.run_directory.parent / session.context.run_name  # perhaps another one
                folder = run / f"checkpoint_own-{self.attempt}-{index}"
            else:
                folder = self.agent.host.root / "local" / f"{self.life}-{self.attempt}-{self.number}-{index}"
            if isinstance(folder, Path):
                folder.mkdir(parents=True, exist_ok=True)
            for file, content in files.items():
                (folder / file).write_bytes(content)
        mode = scenario.mode_at(step)
        call = Call(self.life, self.attempt, self.number, index, step, files, self.world.now, mode=mode, folder=folder)
        self.play.calls.append(call)
        options = StoreOptions(mode=_MODES[mode]) if mode != "SYNC" else StoreOptions()
        if scenario.deletes and mode != "NO_UPLOAD":
            options = replace(options, delete=True)
        if scenario.validates and folder and mode != "MEMORY":
            options = replace(options, validation=ValidationTaskConfig())
        metrics = {"step": step, "loss": self.play.loss(step), "rank": self.number}
        try:
            session.report(metrics, Checkpoint(str(folder)) if folder else None, options)
        except BaseException as error:
            call.failed = f"{type(error).__name__}: {error}"
            if not (scenario.catches and isinstance(error, (OSError, CheckpointError))):
                raise
        finally:
            call.ended = self.world.now


@dataclass
class Collectives:
    """The collectives of torch: a rank waits until all have come, or one is gone."""

    waiting: dict[tuple[int, int, int], list[SimulatedRank]] = field(default_factory=dict)
    lost: set[tuple[int, int]] = field(default_factory=set)
    entered: dict[tuple[int, int, int], dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    """By life, attempt and number of the collective, then by rank: when it came."""

    def enter(self, rank: SimulatedRank) -> None:
        life, world = rank.life, rank.world
        rank.collectives += 1
        key = (life, rank.attempt, rank.collectives)
        self.entered[key][rank.number] = world.now
        here = self.waiting.setdefault(key, [])
        here.append(rank)
        if len(here) == rank.session.context.world_size:
            for other in here:
                other.in_collective = None
                if other is not rank:
                    other.main.wake()
            return
        rank.in_collective = rank.collectives
        while rank.in_collective is not None:
            if (life, rank.attempt) in self.lost:
                rank.in_collective = None
                world.pause(0.05)
                raise PeerLost("connection closed by peer")
            world.wait()

    def gone(self, rank: SimulatedRank) -> None:
        """Note that a rank takes part no more: those who wait for it see a closed connection."""
        self.lost.add((rank.life, rank.attempt))
        for here in self.waiting.values():
            for other in here:
                if (other.life, other.attempt) == (rank.life, rank.attempt) and other.in_collective is not None:
                    other.main.wake()
