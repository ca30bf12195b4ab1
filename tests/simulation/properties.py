"""What distrain promises, as functions of a play. Each returns a line for every time that a promise was not kept."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from distrain.api.observer import AttemptEnded, Committed
from distrain.storage.checkpoint import MANIFEST_FILE
from distrain.storage.records import damage_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.simulation.play import Play


def _published(play: Play) -> Iterator[tuple[Any, dict[str, Any]]]:
    for path in sorted(play.run_directory.glob("checkpoint_*")):
        yield path, json.loads((path / MANIFEST_FILE).read_text())


def published_checkpoints_are_complete(play: Play) -> Iterator[str]:
    """A checkpoint that you get is complete: it has the bytes that all ranks reported with that call of report()."""
    of: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for call in play.calls:
        of[call.attempt, call.index].append(call)
    for path, manifest in _published(play):
        if damage := damage_of(path):
            yield f"{path.name} is damaged: {damage}"
            continue
        if "lacks" in manifest or "suspect" in manifest:
            continue
        # Attempts keep their numbers over starts, so attempt and index name a call of each rank.
        index = _index_of(manifest, play)
        calls = {call.rank: call for call in of[manifest["attempt"], index] if call.files is not None}
        expected: dict[str, bytes] = {}
        for rank in sorted(calls, reverse=True):
            expected |= calls[rank].files
        found = {
            file.name: file.read_bytes() for file in path.iterdir() if file.is_file() and not file.name.startswith(".")
        }
        if found != expected:
            differing = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
            yield f"{path.name} of report {index} in attempt {manifest['attempt']} differs in {differing}"


def _index_of(manifest: dict[str, Any], play: Play) -> int:
    """Return the number of the report: ``step`` counts those of earlier attempts, too."""
    return int(manifest["step"] - play.first_steps[manifest["attempt"]])


def metrics_have_every_report_once(play: Play) -> Iterator[str]:
    """metrics.jsonl has every report of every rank, once and in order."""
    path = play.run_directory / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
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
    known = ("WorkerGroupError", "PreemptionError", "KeyboardInterrupt", "ControllerError", "StorageError", "LaunchError",
             "ResourcesError")  # fmt: skip
    if error is not None and type(error).__name__ not in known:
        yield f"fit() raised {type(error).__name__}: {error}"
    faults = {fault.kind for fault in play.scenario.faults}
    harmless = not faults & {"kill rank", "kill host", "stop", "kill coordinator", "stop rank", "cut link", "stop coordinator"}
    if harmless and not play.scenario.raises and error is not None:
        yield f"nothing was disturbed, but fit() raised {type(error).__name__}: {error}"
    status = json.loads((play.run_directory / "run.json").read_text())["status"]
    wanted = "finished" if error is None else "stopped" if type(error).__name__ == "PreemptionError" else "failed"
    if status != wanted:
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
                if not hit and first.rank >= 0 and not {"kill host", "cut link", "stop coordinator"} & {
                    fault.kind for fault in play.scenario.faults
                }:
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
    memory = play.scenario.mode == "MEMORY" or play.scenario.memory_every
    newest = -1
    lost = {"kill host", "kill coordinator", "cut link", "stop coordinator"} & {fault.kind for fault in play.scenario.faults}
    if memory and lost:
        return
    for life in play.lives:
        for fact in life.facts:
            if isinstance(fact, Committed):
                newest = max(newest, fact.step)
    del newest


PROPERTIES = [
    published_checkpoints_are_complete,
    metrics_have_every_report_once,
    the_end_is_what_happened,
    the_culprit_was_hit,
    nothing_is_left,
]
