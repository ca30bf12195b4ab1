"""A run is killed at random moments and started again under its name. An oracle outside notes each report() that
returned, and checks that nothing is lost that report() promised to keep.

What report() promises depends on who dies. It has handed metrics to the kernel when it returns, so that they survive
the worker, the forkserver too, but not the agent that has not read them yet. A checkpoint's report() returns after the
coordinator has read it and all before it; that checkpoint is committed when every rank's next one has returned.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from distrain import Result
from tests.conftest import wait_until
from tests.process.conftest import assert_no_half_checkpoint, records
from tests.tables import SEED

if TYPE_CHECKING:
    from pathlib import Path

WORKERS = 2
MOMENTS = 6
RUNS_OF_ALL, MOMENTS_OF_ALL = 8, 25
VICTIMS = ("user and agent", "user", "agent", "forkserver")

USERS_SCRIPT = """
import json, os, sys, tempfile, time
from pathlib import Path
import distrain

place, life = Path(sys.argv[1]), int(sys.argv[2])

def train():
    context = distrain.get_context()
    rank, run = context.get_world_rank(), Path(context.get_trial_dir())

    def note(what, **facts):
        fd = os.open(place / "oracle.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        facts = {"what": what, "life": life, "attempt": context.attempt, "rank": rank, **facts}
        os.write(fd, f"{json.dumps(facts)}\\n".encode())
        os.close(fd)

    checkpoint = distrain.get_checkpoint()
    step = -1 if checkpoint is None else int(Path(checkpoint.path, f"shard-{rank}").read_text())
    newest = max((int(path.name[-6:]) for path in run.glob("checkpoint_*")), default=-1)
    note("began", step=step, newest=newest)
    ended = False
    while not ended:
        step += 1
        distrain.report({"step": step})
        note("returned", step=step, checkpoint=False)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, f"shard-{rank}").write_text(str(step))
            distrain.report({"step": step}, checkpoint=distrain.Checkpoint.from_directory(folder))
        note("returned", step=step, checkpoint=True)
        ended = step % 4 == 0 and distrain.collective.broadcast_from_rank_zero((place / "end").exists())
    return step

failures = distrain.FailureConfig(max_failures=-1, retry_same_failure=True)
result = distrain.DataParallelTrainer(
    train,
    scaling_config=distrain.ScalingConfig(num_workers=2),
    run_config=distrain.RunConfig(name="run", storage_path=place / "runs", failure_config=failures),
).fit()
print(result.return_value)
"""


@dataclass
class Oracle:
    """Compares what ranks were told with what is on disk, whenever nobody writes. ``kept``: all that was ever seen.
    ``lost_agents``: life and attempt of those that died with their agent, or may have."""

    place: Path
    kept: dict[str, bytes] = field(default_factory=dict)
    lost_agents: set[tuple[int, int]] = field(default_factory=set)

    @property
    def run(self) -> Path:
        return self.place / "runs" / "run"

    def notes(self, what: str) -> list[dict[str, Any]]:
        path = self.place / "oracle.jsonl"
        text = path.read_text() if path.exists() else ""
        found = [json.loads(line) for line in text.split("\n")[:-1]]  # the last one may just be written
        return [note for note in found if note["what"] == what]

    def check(self) -> None:
        """Raises AssertionError if something that a rank was told is not so."""
        if not (self.run / "metrics.jsonl").exists():
            assert not self.notes("began")
            return
        self._check_beginnings()
        self._check_checkpoints()
        returned: dict[tuple[int, int, int], list[dict[str, Any]]] = defaultdict(list)
        for note in self.notes("returned"):
            returned[note["life"], note["attempt"], note["rank"]].append(note)
        self._check_reports(returned)
        self._check_commits(returned)

    def _check_checkpoints(self) -> None:
        try:
            assert_no_half_checkpoint(self.run.parent)
        except FileNotFoundError as error:
            raise AssertionError(f"a half checkpoint: {error}") from None
        now = {str(path): path.read_bytes() for path in self.run.glob("checkpoint_*/*")}
        vanished = [path for path, data in self.kept.items() if now.get(path) != data]
        assert not vanished, f"committed, and lost: {vanished}"
        self.kept = now
        for path, data in now.items():
            folder, _, name = path.rpartition("/")
            assert name == ".manifest.json" or int(data) == int(folder[-6:]), f"{path} holds step {data!r}"

    def _check_beginnings(self) -> None:
        for note in self.notes("began"):
            assert note["step"] == note["newest"], f"did not begin with the latest checkpoint: {note}"

    def lose_agent(self, life: int) -> None:
        """It is about to be killed, in the attempt that the manifest tells of or in the next."""
        manifest = self.run / "run.json"
        attempts = json.loads(manifest.read_text())["attempts"] if manifest.exists() else []
        last = attempts[-1]["attempt"] if attempts else -1
        self.lost_agents |= {(life, last), (life, last + 1)}

    def _gentle(self, life: int, attempt: int) -> bool:
        """Whether only workers, or their forkserver, have died: another attempt has followed in the same life."""
        followed = any(note["life"] == life and note["attempt"] > attempt for note in self.notes("began"))
        return followed and (life, attempt) not in self.lost_agents

    def _check_reports(self, returned: dict[tuple[int, int, int], list[dict[str, Any]]]) -> None:
        found = Counter((line["attempt"], line["rank"], line["index"]) for line in records(self.run))
        assert set(found.values()) <= {1}, f"reports were kept twice: {[key for key, n in found.items() if n > 1]}"
        last = Counter[tuple[int, int]]()
        for attempt, rank, _ in found:
            last[attempt, rank] += 1
        for (attempt, rank), count in last.items():
            gaps = {index for index in range(1, count + 1) if not found[attempt, rank, index]}
            assert not gaps, f"rank {rank} of attempt {attempt} lacks the reports {gaps}"
        for (life, attempt, rank), notes in returned.items():
            safe = max((n + 1 for n, note in enumerate(notes) if note["checkpoint"]), default=0)
            promised = len(notes) if self._gentle(life, attempt) else safe
            assert last[attempt, rank] >= promised, (
                f"rank {rank} of attempt {attempt}, life {life}, made {promised} reports, "
                f"{last[attempt, rank]} were kept"
            )

    def _check_commits(self, returned: dict[tuple[int, int, int], list[dict[str, Any]]]) -> None:
        newest = max((int(path.name[-6:]) for path in self.run.glob("checkpoint_*")), default=-1)
        for life, attempt in {key[:2] for key in returned}:
            lasts = [
                max((note["step"] for note in returned[life, attempt, rank] if note["checkpoint"]), default=-1)
                for rank in range(WORKERS)
            ]
            promised = min(lasts) - (0 if self._gentle(life, attempt) else 1)
            assert newest >= promised, (
                f"step {promised} of attempt {attempt}, life {life}, should be committed, {newest} is"
            )


class Killer:
    """Starts user's processes one after the other and kills them, or what they have started."""

    def __init__(self, place: Path, seed: int) -> None:
        self.oracle = Oracle(place)
        self._random = random.Random(seed)
        self._script = place / "script.py"
        self._script.write_text(USERS_SCRIPT)
        self._lives = 0
        self._user: subprocess.Popen[str] | None = None
        self._struck = False

    def __enter__(self) -> Killer:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._user is not None:
            self._user.kill()
            self.wait()

    def strike(self, times: int) -> None:
        for _ in range(times):
            self._strike()

    def _strike(self) -> None:
        """One kill at a random moment: of the life, its beginning included, or of the training."""
        user = self._user or self._start()
        if self._random.random() < 0.6:
            noted = len(self.oracle.notes("returned"))
            wait_until(lambda: user.poll() is not None or len(self.oracle.notes("returned")) > noted)
            time.sleep(self._random.uniform(0.0, 0.2))
        else:
            time.sleep(self._random.uniform(0.0, 0.8))
        victims = self._random.choice(VICTIMS)
        print(f"life {self._lives}: {victims}")
        if victims == "agent":
            self.oracle.lose_agent(self._lives)
        if user.poll() is None and not self._kill(user, victims):
            self._struck = True
            return
        ended_by_itself, (_, said) = user.returncode is not None, self.wait()
        assert self._struck or not ended_by_itself, f"nobody was killed, and it has ended:\n{said}"
        self.oracle.check()

    def wait(self) -> tuple[int, str]:
        """For the end of the user's process, and of all that has its output."""
        user = self._user or self._start()
        self._user = None
        said, complained = user.communicate(timeout=30)
        return user.returncode, said or complained

    def _start(self) -> subprocess.Popen[str]:
        self._lives += 1
        self._struck = False
        command = [sys.executable, str(self._script), str(self.oracle.place), str(self._lives)]
        self._user = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        return self._user

    @staticmethod
    def _kill(user: subprocess.Popen[str], victims: str) -> bool:
        """Whether it ends the user's process; what is not there yet, or any more, takes that with it. Without its agent
        or forkserver alone, a run goes on."""
        agents = [agent for guard in children(user.pid, "agent") for agent in children(guard.pid, "agent")]
        if victims == "forkserver":
            forkservers = [forkserver for agent in agents for forkserver in children(agent.pid, "forkserver")]
            for forkserver in forkservers:
                forkserver.kill()
            if forkservers:
                return False
        for agent in agents:
            if victims != "user":
                agent.kill()
        if victims == "agent" and agents:
            return False
        user.kill()
        return True


def children(pid: int, program: str) -> list[psutil.Process]:
    """The children of a process that run one of distrain's programs; a sweep is of an earlier life."""
    found = []
    try:
        for child in psutil.Process(pid).children():
            found += [child] if program in child.cmdline() and "sweep" not in child.cmdline() else []
    except psutil.Error:
        return []
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "moments" in metafunc.fixturenames:
        every = [(SEED + run, MOMENTS_OF_ALL) for run in range(RUNS_OF_ALL)]
        chosen = every if metafunc.config.getoption("--all") else [(SEED, MOMENTS)]
        metafunc.parametrize(("seed", "moments"), chosen, ids=[f"seed {seed}" for seed, _ in chosen])


@pytest.mark.timeout(240)
def test_what_a_rank_was_told_is_safe_is_safe_after_any_kill(seed: int, moments: int, tmp_path: Path) -> None:
    with Killer(tmp_path, seed) as killer:
        killer.strike(moments)
        (tmp_path / "end").touch()
        code, said = killer.wait()
    assert code == 0, said
    killer.oracle.check()
    result = Result.from_path(killer.oracle.run)
    assert (result.error, result.metrics, result.return_value) == (None, {"step": int(said)}, int(said))
    assert result.checkpoint is not None
    assert result.checkpoint.path == str(killer.oracle.run / f"checkpoint_{int(said):06d}")
    assert not (killer.oracle.run / ".staging").exists()
