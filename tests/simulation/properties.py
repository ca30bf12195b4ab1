"""What distrain promises, as functions of a play. Each returns a line for every time that a promise was not kept."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from distrain.api.observer import AttemptEnded, Committed, HangBegan
from distrain.errors import DistrainError
from distrain.storage.checkpoint import MANIFEST_FILE, PENDING_FILE
from distrain.storage.records import damage_of
from tests.simulation.bucket import checkpoint_folders, contents

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.simulation.play import Play


STORAGE_FAULTS = ("full disk", "broken disk", "broken bucket")
"""Faults with which distrain may fail to write something."""


def _published(play: Play) -> Iterator[tuple[Any, dict[str, Any]]]:
    for path in checkpoint_folders(play.run_directory):
        if (path / MANIFEST_FILE).exists():
            yield path, json.loads((path / MANIFEST_FILE).read_bytes())


def published_checkpoints_are_complete(play: Play) -> Iterator[str]:
    """A checkpoint that you get is complete: it has the bytes that all ranks reported with that call of report()."""
    of: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for call in play.calls:
        of[call.attempt, call.index].append(call)
    for path, manifest in _published(play):
        if path.name in {file.parent.name for file in play.flipped}:
            continue
        if "lacks" in manifest or "suspect" in manifest:
            continue
        if damage := damage_of(path):
            yield f"{path.name} is damaged: {damage}"
            continue
        # Attempts keep their numbers over starts, so attempt and index name a call of each rank.
        index = _index_of(manifest, play)
        calls = {call.rank: call for call in of[manifest["attempt"], index] if call.files is not None}
        expected: dict[str, bytes] = {}
        for rank in sorted(calls, reverse=True):
            expected |= calls[rank].files
        found = contents(path)
        if found != expected:
            differing = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
            yield f"{path.name} of report {index} in attempt {manifest['attempt']} differs in {differing}"


def _has(play: Play, *kinds: str) -> bool:
    """Return whether the play has faults of these kinds."""
    return any(fault.kind in kinds for fault in play.scenario.faults)


def _index_of(manifest: dict[str, Any], play: Play) -> int:
    """Return the number of the report: ``step`` counts those of earlier attempts, too."""
    return int(manifest["step"] - play.first_steps[manifest["attempt"]])


def metrics_have_every_report_once(play: Play) -> Iterator[str]:
    """metrics.jsonl has every report of every rank, once and in order."""
    path = play.run_directory / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for line in lines:
        found[line["attempt"], line["rank"]].append(line["index"])
    for key, indexes in found.items():
        failed = {call.index for call in play.calls if (call.attempt, call.rank) == key and call.failed}
        wanted = [n for n in range(1, max(indexes) + 1) if n in indexes or n not in failed]
        if indexes != wanted:
            yield f"attempt {key[0]}, rank {key[1]}: reports {indexes} instead of {wanted}"


def the_end_is_what_happened(play: Play) -> Iterator[str]:
    """The run finishes if all ranks have returned, and only then; fit() raises TrainingFailedError or a stop, else."""
    life = play.lives[-1]
    error = life.process.error
    if life.was_killed:
        return
    if error is not None and not isinstance(error, (DistrainError, KeyboardInterrupt)):
        yield f"fit() raised {type(error).__name__}: {error}"
    if not (play.scenario.faults or play.scenario.raises) and error is not None:
        yield f"nothing was disturbed, but fit() raised {type(error).__name__}: {error}"
    if not (play.run_directory / "run.json").exists() and _has(play, *STORAGE_FAULTS):
        return
    status = json.loads((play.run_directory / "run.json").read_bytes())["status"]
    wanted = "finished" if error is None else "stopped" if type(error).__name__ == "PreemptionError" else "failed"
    if status != wanted and not _has(play, *STORAGE_FAULTS):
        yield f"run.json says {status}, and fit() ended with {error!r}"


def the_culprit_was_hit(play: Play) -> Iterator[str]:
    """The rank that is blamed is one that was hit."""
    raised = {(rank, attempt) for rank, _, attempt in play.scenario.raises}
    stops = any(life.asked_to_stop for life in play.lives)
    for life in play.lives:
        for fact in life.facts:
            if isinstance(fact, AttemptEnded) and fact.failures and not stops:
                first = fact.failures[0]
                hit = (life.number, fact.attempt, first.rank) in play.hit or (first.rank, fact.attempt) in raised
                if (
                    not hit
                    and first.rank >= 0
                    and not _has(
                        play,
                        "kill host",
                        "kill agent",
                        "cut link",
                        "stop coordinator",
                        *STORAGE_FAULTS,
                        "kill child",
                        "no streams",
                        "full cache",
                        "flip disk",
                        "flip memory",
                    )
                ):
                    yield f"attempt {fact.attempt}: {first} is blamed, and was not hit"


def nothing_is_left(play: Play) -> Iterator[str]:
    """Nothing of a run is alive, or in memory, after its end."""
    if play.lives[-1].was_killed and len(play.lives) == 1:
        return
    for host in play.hosts.values():
        for agent in host.agents:
            if agent.process.is_alive:
                yield f"{agent.process.name} is alive"
            for rank in agent.ranks.values():
                if rank.process.is_alive:
                    yield f"{rank.process.name} is alive on {host.name}"
        if host.memory.exists() and any(host.memory.rglob("*")):
            yield f"{host.name} has files in memory: {sorted(map(str, host.memory.rglob('*')))[:3]}"


def no_start_is_too_old(play: Play) -> Iterator[str]:
    """An attempt starts from the newest checkpoint that was committed, if nothing that held it was lost."""
    in_memory = play.scenario.mode == "MEMORY" or play.scenario.memory_every
    if in_memory and _has(
        play, "kill host", "kill agent", "cut link", "stop coordinator", "flip memory", "full memory"
    ):
        return
    if play.flipped or _has(play, *STORAGE_FAULTS):
        return
    if in_memory and _has(play, "kill coordinator") and (play.scenario.bucket or not play.scenario.shares_files):
        return
    given_up = " ".join(text for _, text in play.world.story if "won't be used for restarts" in text)
    seen: set[tuple[int, int]] = set()
    for moment, rank in play.starts:
        if (rank.life, rank.attempt) in seen:
            continue
        seen.add((rank.life, rank.attempt))
        committed = [fact for at, fact in play.told if isinstance(fact, Committed) and at <= moment]
        kept = [fact for fact in committed if fact.name not in given_up]
        index = {fact.name: fact.index for fact in committed}
        newest = max(kept, key=lambda fact: fact.index).name if kept else ""
        start = (rank.spec.checkpoint or "").rpartition("/")[2]
        if (start in index or not start) and index.get(start, -1) < index.get(newest, -1):
            yield f"attempt {rank.attempt} starts from {start or 'scratch'} instead of {newest}"


def the_best_and_the_last_are_kept(play: Play) -> Iterator[str]:
    """num_to_keep keeps the last checkpoint and the best ones; what else there was is deleted."""
    life = play.lives[-1]
    config = play.scenario.checkpoint_config
    if life.was_killed or life.process.error is not None or config.num_to_keep is None:
        return
    found = {path.name: manifest for path, manifest in _published(play)}
    committed = sorted({fact.index: fact for _, fact in play.told if isinstance(fact, Committed)}.items())
    facts = [fact for _, fact in committed]
    if facts and facts[-1].index not in {manifest["index"] for manifest in found.values()}:
        yield f"{facts[-1].name}, the last, is not kept"
    if len(found) > config.num_to_keep + 1:
        yield f"{len(found)} checkpoints are kept: {sorted(found)}"


def report_returns_soon(play: Play) -> Iterator[str]:
    """report() returns within its bounds while the world is healthy."""
    if play.scenario.faults or play.scenario.raises or play.scenario.rolls_back or play.scenario.sticks:
        return
    for call in play.calls:
        if call.ended is None or call.ended - call.began > 8 * max(play.scenario.step_s) * play.scenario.steps + 15:
            yield f"report {call.index} of rank {call.rank} took {(call.ended or 0) - call.began:.1f} s"


def hangs_are_named(play: Play) -> Iterator[str]:
    """A hang is named within seconds, with the right rank; ranks that are only busy, or slow, never are."""
    hangs = [(at, fact) for at, fact in play.told if isinstance(fact, HangBegan)]
    made = {number for number, _ in play.stuck.values()} | {number for _, _, number, _, _ in play.stopped}
    for at, fact in hangs:
        if not set(fact.culprits) <= made:
            yield f"at {at:.1f} ranks {fact.culprits} were called stuck: {fact.text}"
    quiet = not play.scenario.faults and not play.scenario.raises and not play.scenario.rolls_back
    others_wait = play.scenario.sticks and play.scenario.sticks[1] < play.scenario.steps - 1
    if quiet and others_wait and play.scenario.collectives and play.scenario.ranks > 1:
        for number, began in play.stuck.values():
            limit = began + 20 * max(play.scenario.step_s) + 12
            if not any(began < at < limit and fact.culprits == [number] for at, fact in hangs):
                yield f"rank {number} was stuck since {began:.1f}, and is not named"


def all_processes_know_what_to_do(play: Play) -> Iterator[str]:
    """No process of distrain ends with an exception that it did not expect."""
    for process in play.world.processes:
        expected = isinstance(process.error, SystemExit) or process.name.startswith(("fit()", "rank"))
        if process.error is not None and not expected:
            yield f"{process.name} ended with {process.error!r}"


def nothing_unfinished_is_left(play: Play) -> Iterator[str]:
    """After a run, a bucket has no file of a checkpoint that was not committed, and hosts no copy of a checkpoint."""
    if play.lives[-1].was_killed or _has(play, "broken bucket", "kill host"):
        return
    stores_itself = play.scenario.bucket and play.scenario.mode != "NO_UPLOAD"
    for folder in checkpoint_folders(play.run_directory) if stores_itself else ():
        if (folder / PENDING_FILE).exists() or not (folder / MANIFEST_FILE).exists():
            yield f"{folder} is unfinished: {sorted(folder.files())}"
    for host in play.hosts.values():
        for path in host.root.glob("cache/runs/*/checkpoints"):
            yield f"{host.name} still has {path}: {sorted(path.rglob('*'))[:3]}"


def files_come_back(play: Play) -> Iterator[str]:
    """What a rank has written into get_trial_dir() is in the run directory after the run, or a warning names it."""
    said = " ".join(text for _, text in play.world.story)
    if any(life.was_killed for life in play.lives):
        return
    for name in play.notes:
        if not list(play.run_directory.rglob(name)) and not re.search("files .*ranks are still on", said):
            yield f"{name} is not in the run directory"


def ranks_read_whole_checkpoints(play: Play) -> Iterator[str]:
    """What a rank reads has been saved with one call of report() of all ranks."""
    for rank, checkpoint, states in play.loaded:
        if len({(state["step"], state["attempt"], state["life"]) for state in states}) > 1 and not play.flipped:
            yield f"{rank.process.name} reads {checkpoint.path}, which mixes {states}"


PROPERTIES = [
    ranks_read_whole_checkpoints,
    nothing_unfinished_is_left,
    files_come_back,
    all_processes_know_what_to_do,
    published_checkpoints_are_complete,
    metrics_have_every_report_once,
    the_end_is_what_happened,
    the_culprit_was_hit,
    nothing_is_left,
    no_start_is_too_old,
    the_best_and_the_last_are_kept,
    report_returns_soon,
    hangs_are_named,
]
