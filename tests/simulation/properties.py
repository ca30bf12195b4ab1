"""The promises of distrain, as functions of a play. Each yields a line for every time that one was broken."""

from __future__ import annotations

import itertools
import json
import math
import re
import select
import sys
import warnings
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distrain import Result
from distrain.api.observer import (
    AttemptBegan,
    AttemptEnded,
    Committed,
    Ended,
    HangBegan,
    HangEnded,
    Printed,
    RankTrains,
    Reported,
    RunBegan,
)
from distrain.decisions.run.growth import LONGEST_INTERVAL_S
from distrain.errors import DistrainError, PreemptionError
from distrain.page.facts import Facts
from distrain.storage.checkpoint import MANIFEST_FILE, PENDING_FILE
from distrain.storage.commit import PENDING
from distrain.storage.paths import DAMAGED_FILE
from distrain.storage.records import damage_of
from distrain.storage.retention import score
from distrain.storage.runs.listing import run_at
from tests.simulation.bucket import checkpoint_folders, contents
from tests.simulation.hosts import STOP_GRACE_S
from tests.simulation.worker import BATCH

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.simulation.play import Life, Play

_STOPS = (PreemptionError, KeyboardInterrupt)
STORAGE_FAULTS = ("full disk", "broken disk", "read only disk", "broken bucket")
"""Faults with which distrain may fail to write something."""
_LOST_HOSTS = ("kill host", "late host", "sick host", "flaky host")
_SLOW = ("slow disk", "slow bucket", "slow link", "stop agent", "stop rank", "debug", "cut link", "stop coordinator")
_STOPPING = ("stop coordinator", "take over")
_LOSING_MORE = ("kill coordinator", "lose power", "kill child", *_STOPPING)
FLIPS = ("flip disk", "flip memory", "flip bucket")


def _published(play: Play) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the checkpoints that a run may continue from, with their manifests."""
    for path in checkpoint_folders(play.run_directory):
        if (path / MANIFEST_FILE).exists():
            manifest = json.loads((path / MANIFEST_FILE).read_bytes())
            if not manifest.keys() & {"lacks", "suspect"}:
                yield path, manifest


def published_checkpoints_are_complete(play: Play) -> Iterator[str]:
    """A checkpoint that you get is complete: it has the bytes that all ranks reported with that call of report()."""
    for path, manifest in _published(play):
        if path.name in {file.parent.name for file in play.flipped}:
            continue
        if damage := damage_of(path):
            yield f"{path.name} is damaged: {damage}"
            continue
        found = contents(path)
        reported = [_reported_files(play, manifest, life) for life in play.first_steps[manifest["attempt"]]]
        if play.scenario.mode == "NO_UPLOAD" and manifest["silent"]:  # these ranks may have written into it
            found = {name: data for name, data in found.items() if any(name in files for files in reported)}
        if found not in reported:
            expected = _reported_files(play, manifest, play.life)
            differing = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
            yield f"{path.name} of attempt {manifest['attempt']} differs in {differing}"


def _reported_files(play: Play, manifest: dict[str, Any], life: int) -> dict[str, bytes]:
    """Return the files that the ranks of a life have reported for a checkpoint."""
    attempt, files = manifest["attempt"], dict[str, bytes]()
    index = manifest["step"] - play.first_steps[attempt].get(life, 0)
    calls = [call for call in play.calls if (call.life, call.attempt, call.index) == (life, attempt, index)]
    for call in sorted(calls, key=lambda call: -call.rank):
        if call.files is not None and call.rank not in _written_off(play, manifest):
            files |= call.files
    return files


def _written_off(play: Play, manifest: dict[str, Any]) -> list[int]:
    """Return the ranks without which a checkpoint may have been committed."""
    return manifest["silent"] if _is_hasty(play) else []


def _is_hasty(play: Play) -> bool:
    """Return whether a run waits so briefly for ranks that have not reported that it loses checkpoints of slow ones."""
    return play.scenario.missing_rank_s < 60


def _begins_twice(play: Play) -> bool:
    """Return whether two processes gave an attempt the same number, as the first one's last writes were lost."""
    lives = defaultdict(set)
    for _, rank in play.starts:
        lives[rank.attempt].add(rank.life)
    return any(len(those) > 1 for those in lives.values())


def _strands(play: Play) -> bool:
    """Return whether a rank ends its training while others still wait for it."""
    return play.scenario.early is not None and (play.scenario.collectives or play.scenario.meets)


def _is_quiet(play: Play) -> bool:
    """Return whether nothing disturbs the run."""
    return not (play.scenario.faults or play.scenario.raises or _is_hasty(play) or _strands(play))


def _has(play: Play, *kinds: str) -> bool:
    """Return whether the play has faults of these kinds."""
    return any(fault.kind in kinds for fault in play.scenario.faults)


def checkpoints_wait_for_each_rank(play: Play) -> Iterator[str]:
    """No checkpoint is committed without a rank that reports in time; time stands still while somebody debugs."""
    kinds = {fault.kind for fault in play.scenario.faults} - {"debug", "request", "clock jump", "kill rank"}
    if not (kinds or _is_hasty(play) or play.scenario.sticks or play.scenario.lingers or play.scenario.quiet):
        yield from (text for _, text in play.world.story if "checkpoints are committed without" in text)


def _index_of(step: int, attempt: int, play: Play) -> int:
    """Return the number of a report in its attempt: ``step`` counts those of earlier attempts, too."""
    by_life = play.first_steps[attempt]
    return step - by_life[max(by_life)]


def metrics_have_every_report_once(play: Play) -> Iterator[str]:
    """metrics.jsonl has every report of every rank, once and in order."""
    if _begins_twice(play) and play.scenario.bucket:
        return  # two attempts have the number 0
    lines = play.reports()
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for line in lines:
        found[line["attempt"], line["rank"]].append(line["index"])
    is_cut = any(life.was_killed for life in play.lives) or _was_refused(play.lives[-1]) or _was_interrupted(play)
    is_cut = is_cut or (play.lives[-1].asked_to_stop > 1 and _has(play, "slow disk", "slow bucket"))
    is_whole = not (is_cut or play.hit_hosts or (play.lives[-1].process.error and _has(play, *STORAGE_FAULTS)))
    lost = play.lines - {(line["attempt"], line["rank"], line["index"]) for line in lines}
    if lost and not _has(play, "lose power"):
        yield f"reports that were there at a start are gone: {sorted(lost)}"
    for key in {(call.attempt, call.rank) for call in play.calls}:
        calls = [call for call in play.calls if (call.attempt, call.rank) == key]
        indexes, failed = found[key], {call.index for call in calls if call.failed}
        returned = max((call.index for call in calls if is_whole and call.ended is not None), default=0)
        wanted = [n for n in range(1, max([*indexes, returned]) + 1) if n in indexes or n not in failed]
        if indexes != wanted:
            yield f"attempt {key[0]}, rank {key[1]}: reports {indexes} instead of {wanted}"


def the_end_is_what_happened(play: Play) -> Iterator[str]:
    """The run finishes if all ranks have returned, and only then; fit() raises TrainingFailedError or a stop, else."""
    life = play.lives[-1]
    error = life.process.error
    if life.was_killed or _was_refused(life):
        return
    if error is not None and not isinstance(error, (DistrainError, KeyboardInterrupt)):
        yield f"fit() raised {type(error).__name__}: {error}"
    if _is_quiet(play) and error is not None:
        yield f"nothing was disturbed, but fit() raised {type(error).__name__}: {error}"
    had_failed = error is not None and not isinstance(error, _STOPS)  # a signal only ends the wait for the storage
    is_slow = _has(play, "slow disk", "slow bucket", "stop coordinator")
    if _was_interrupted(play) or (is_slow and life.asked_to_stop > (not had_failed)):
        return
    if error is not None and not (life.facts and (play.run_directory / "run.json").exists()):
        return  # it has not begun
    status = json.loads((play.run_directory / "run.json").read_bytes())["status"]
    wanted = "finished" if error is None else "stopped" if isinstance(error, _STOPS) else "failed"
    if status != wanted and not _has(play, *STORAGE_FAULTS):
        yield f"run.json says {status}, and fit() ended with {error!r}"


def the_culprit_was_hit(play: Play) -> Iterator[str]:
    """The rank that is blamed is one that was hit, or is on a host that was."""
    raised = {(rank, attempt) for rank, _, attempt in play.scenario.raises}
    if any(life.asked_to_stop for life in play.lives) or _has(play, *_STOPPING, *STORAGE_FAULTS, *FLIPS):
        return  # those hit all ranks
    if _is_hasty(play) or _strands(play):
        return  # a rank that comes late fails
    for life in play.lives:
        for fact in life.facts:
            if isinstance(fact, AttemptEnded) and fact.failures and (first := fact.failures[0]).rank >= 0:
                was_hit = (life.number, fact.attempt, first.rank) in play.hits or first.host in play.hit_hosts
                if not was_hit and (first.rank, fact.attempt) not in raised:
                    yield f"attempt {fact.attempt}: {first} is blamed, and was not hit"


def _given_up(play: Play) -> str:
    """Return the lines that name checkpoints which lack files of a rank, as it turned out."""
    return " ".join(text for _, text in play.world.story if "won't be used for restarts" in text)


def _was_interrupted(play: Play) -> bool:
    """Return whether somebody did not wait until the end was written, which a line asks for."""
    return any("the wait for the storage was interrupted" in text for _, text in play.world.story)


def _was_refused(life: Life) -> bool:
    """Return whether another process had the run: of two that start at once, either may be the first."""
    return re.search("another run|is in use by", str(life.process.error)) is not None


def a_second_start_is_refused(play: Play) -> Iterator[str]:
    """A run has one coordinator: the same command is refused while it runs, and disturbs nothing."""
    for rival in play.rivals if all(life.facts for life in play.lives) else ():  # else it came first
        error = rival.process.error
        if error is not None and not (isinstance(error, DistrainError) and "run" in str(error)):
            yield f"a second start raised {type(error).__name__}: {error}"
        is_later = any("is finished, so this one is called" in text for _, text in play.world.story)
        if (rival.facts or rival.result is not None) and not is_later:
            yield "a second start was not refused"


def requests_are_answered(play: Play) -> Iterator[str]:
    """Each request of another process is answered within ten seconds, if the run goes on for so long."""
    for life, at, asker in play.asked:
        if not select.select([asker.read_fd], [], [], 0.0)[0] and life.process.is_alive and play.world.now > at + 10:
            yield f"the request at {at:.1f} was not answered"


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
    if play.flipped or _is_hasty(play) or _has(play, *STORAGE_FAULTS):
        return
    is_lost = play.hit_hosts or _has(play, "kill coordinator", "lose power", *_STOPPING)
    given_up = _given_up(play)
    seen: set[tuple[int, int]] = set()
    rivals = {rival.number for rival in play.rivals}  # a later one begins another run
    for moment, rank in [start for start in play.starts if start[1].life not in rivals]:
        if (rank.life, rank.attempt) in seen or any(other.life > rank.life for at, other in play.starts if at < moment):
            continue  # the second: another process has taken over the run
        seen.add((rank.life, rank.attempt))
        committed = [fact for at, fact in play.told if isinstance(fact, Committed) and at <= moment]
        committed = [fact for fact in committed if not (fact.is_in_memory and is_lost)]
        kept = [fact for fact in committed if fact.name not in given_up]
        index = {fact.name: fact.index for fact in committed}
        newest = max(kept, key=lambda fact: fact.index).name if kept else ""
        start = _name(rank.spec.checkpoint)
        if (start in index or not start) and index.get(start, -1) < index.get(newest, -1):
            yield f"attempt {rank.attempt} starts from {start or 'scratch'} instead of {newest}"


def a_lost_host_costs_no_copied_checkpoint(play: Play) -> Iterator[str]:
    """After the death of a host, the next attempt starts from the last checkpoint that was copied, or a newer one."""
    if len(play.copied) != 1 or play.scenario.rolls_back or _has(play, *_LOSING_MORE, *STORAGE_FAULTS, *FLIPS):
        return
    if _has(play, "no peers"):  # the copy is there, and nobody gets it
        return
    if _is_hasty(play):  # one that lacks ranks is given up
        return
    moment, copied = play.copied[0]
    index = {fact.name: fact.index for _, fact in play.told if isinstance(fact, Committed)}
    for at, rank in play.starts:
        start = _name(rank.spec.checkpoint)
        if at > moment and index.get(start, -1) < index.get(copied, -1):
            yield f"attempt {rank.attempt} starts from {start or 'scratch'} instead of {copied}"


def names_are_given_once(play: Play) -> Iterator[str]:
    """No two checkpoints of a run have the same name, in memory or on storage."""
    for life in play.lives:
        names = Counter(fact.name for fact in life.facts if isinstance(fact, Committed))
        yield from (f"{count} checkpoints are called {name}" for name, count in names.items() if count > 1)


def the_newest_checkpoint_can_be_read(play: Play) -> Iterator[str]:
    """A rank can read the checkpoint that it gets, at once and for as long as there is no newer one."""
    if play.hit_hosts or play.scenario.rolls_back or _has(play, *_LOSING_MORE, *STORAGE_FAULTS, *FLIPS):
        return
    committed = [(at, fact) for at, fact in play.told if isinstance(fact, Committed)]
    for name, moment, why in play.unread:
        index = max((fact.index for _, fact in committed if fact.name == name), default=-1)
        has_newer = any(fact.index > index for at, fact in committed if at <= moment)
        if not (has_newer or name in _given_up(play)):
            yield f"{name} could not be read: {why}"


def a_quiet_run_loses_nothing(play: Play) -> Iterator[str]:
    """As long as nothing disturbs a run, no line says that something could not be read, copied or stored."""
    if _is_quiet(play) and not play.scenario.rolls_back:
        bad = re.compile("cannot be used|cannot copy|cannot write|has the checksum|was only in memory")
        yield from (text for _, text in play.world.story if bad.search(text))


def every_row_is_used_once(play: Play) -> Iterator[str]:
    """A run that continues takes each row of its data once, but not those that a Rollback leaves out."""
    life = play.lives[-1]
    if not play.scenario.reads or life.was_killed or life.process.error:
        return
    if _is_hasty(play) or _has(play, "lose power", "take over", *STORAGE_FAULTS):
        return
    if play.scenario.quiet or play.scenario.early:
        return  # nobody knows what they have taken, or they leave some
    if _begins_twice(play):
        return
    made = {fact.name: fact.index for _, fact in play.told if isinstance(fact, Committed)}
    started = {rank.attempt: made.get(_name(rank.spec.checkpoint), -1) for _, rank in play.starts}
    rollbacks = {event["attempt"]: event for event in _events(play) if event["event"] == "rollback"}
    if len(rollbacks) < sum("asked to roll back" in text for _, text in play.world.story):
        return  # the process was killed before it had written the line
    attempt, until, used, spare = max(rank.attempt for _, rank in play.starts), sys.maxsize, Counter[int](), 0
    while True:
        ranks = {rank.number: rank for _, rank in play.starts if rank.attempt == attempt}
        spare += len(ranks)  # rows that do not divide evenly among the ranks are dropped
        for number in ranks:
            used.update(row for index, rows in play.batches[attempt, number] if index <= until for row in rows)
        if not (start := _name(ranks[0].spec.checkpoint)):
            break
        if (reported := _reported(play, start)) is None:
            return
        attempt, until = reported
    left_out: set[int] = set()
    for attempt, event in rollbacks.items():
        back_to = made.get(_name(event["checkpoint"]), -1)
        if any(index < back_to for later, index in started.items() if later > attempt):
            return  # the checkpoint was lost, and with it which rows are left out after it
        of, kept = _reported(play, _name(event["checkpoint"])) or (-1, 0)
        last = len(play.batches[attempt, event["rank"]])
        for number in range(play.sizes[attempt]):
            batches = play.batches[attempt, number]
            spare += BATCH * max(0, last - len(batches))  # that a rank behind would have taken
            left_out |= {row for index, rows in batches[:last] if of != attempt or index > kept for row in rows}
    if twice := sorted(row for row, count in used.items() if count > 1 or row in left_out):
        yield f"rows {twice} were used again"
    missing = set(range(play.rows)) - used.keys() - left_out
    if len(missing) > spare:
        yield f"rows {sorted(missing)} were not used"


def _events(play: Play) -> Iterator[dict[str, Any]]:
    path = play.run_directory / "events.jsonl"
    yield from map(json.loads, path.read_bytes().splitlines() if path.exists() else ())


def _name(path: str | None) -> str:
    """Return the name of a checkpoint."""
    return (path or "").rpartition("/")[2]


def _reported(play: Play, name: str) -> tuple[int, int] | None:
    """Return the attempt that has reported a checkpoint, and the number of the report in it; None if nobody knows."""
    if not name:
        return None
    path = play.run_directory / name / MANIFEST_FILE
    if path.exists():
        manifest = json.loads(path.read_bytes())
        return manifest["attempt"], _index_of(manifest["step"], manifest["attempt"], play)
    facts = [fact for _, fact in play.told if isinstance(fact, Committed) and fact.name == name]
    return (facts[-1].attempt, _index_of(facts[-1].step, facts[-1].attempt, play)) if facts else None


def the_best_and_the_last_are_kept(play: Play) -> Iterator[str]:
    """num_to_keep keeps the last checkpoint and the best ones; what else there was is deleted."""
    life = play.lives[-1]
    config = play.scenario.checkpoint_config
    if life.was_killed or life.process.error is not None or config.num_to_keep is None or _has(play, *STORAGE_FAULTS):
        return
    if life.asked_to_stop > 1 and _has(play, "slow disk", "slow bucket"):  # the next start deletes the rest
        return
    found = {path.name: manifest for path, manifest in _published(play)}
    committed = sorted({fact.index: fact for _, fact in play.told if isinstance(fact, Committed)}.items())
    is_lost = play.hit_hosts or _has(play, "lose power") or any(life.was_killed for life in play.lives)
    facts = [fact for _, fact in committed if not ((fact.is_in_memory and is_lost) or _given_up(play))]
    kept = {manifest["index"]: manifest["metrics"] for manifest in found.values()}
    damaged = {file.parent.name for file in play.flipped}  # they are set aside
    last = facts[-1].index if facts and facts[-1].name not in damaged else -1
    if last > max(kept, default=-1):  # the one after it may be there: fit() was killed then
        yield f"{facts[-1].name}, the last, is not kept"
    name, order = config.checkpoint_score_attribute, config.checkpoint_score_order
    if name and not (play.scenario.rolls_back or play.scenario.validates or play.flipped):  # nothing else gives one up
        is_sure = play.scenario.saving == "all" and not play.scenario.quiet and len(facts) == len(committed)
        is_sure = is_sure and not _is_hasty(play)  # one that lacks ranks is worse than any other
        complete = facts if is_sure else []  # a better one in memory may have taken its place, and be lost
        best = max(complete, key=lambda fact: score(fact.metrics, name, order), default=None)
        if best and score(best.metrics, name, order) > max(score(metrics, name, order) for metrics in kept.values()):
            yield f"{best.name}, the best, is not kept"
    if len(found) > config.num_to_keep + 1:
        yield f"{len(found)} checkpoints are kept: {sorted(found)}"


def local_files_are_deleted_after_the_commit(play: Play) -> Iterator[str]:
    """Local files go once their checkpoint is committed, if the user wants that; else they stay as they are."""
    if _begins_twice(play):
        return
    facts = [fact for _, fact in play.told if isinstance(fact, Committed)]
    committed = {(fact.attempt, _index_of(fact.step, fact.attempt, play)) for fact in facts}
    is_quiet = _is_quiet(play) and not play.scenario.rolls_back
    for call in play.calls:
        if call.folder is None or call.mode == "NO_UPLOAD":
            continue
        name = f"{call.folder.name}, of report {call.index} of rank {call.rank},"
        may_go = (play.scenario.deletes or call.mode == "ASYNC") and (call.attempt, call.index) in committed
        found = {path.name: path.read_bytes() for path in call.folder.iterdir()} if call.folder.exists() else None
        if found is None and not may_go:
            yield f"{name} was deleted"
        elif found not in (None, call.files):
            yield f"{name} has changed"
        elif found and may_go and is_quiet:
            yield f"{name} was not deleted"


def all_views_of_a_run_agree(play: Play) -> Iterator[str]:
    """fit()'s Result, Result.from_path() and the facts of the page and of `distrain show` say the same."""
    life = play.lives[-1]
    if life.was_killed or _was_interrupted(play) or _has(play, *STORAGE_FAULTS):
        return
    if not (play.run_directory / "run.json").exists():
        return
    with warnings.catch_warnings():  # of checkpoints that lack files
        warnings.simplefilter("ignore")
        stored = Result.from_path(str(play.run_directory))
    run = run_at(play.run_directory)
    facts = Facts(run, run.location)
    published = {manifest["index"]: path.name for path, manifest in _published(play)}
    names = [published[index] for index in sorted(published)]  # in a bucket, they may have another order
    shown = [saved.path.name for saved in facts.checkpoints]
    if shown != names:
        yield f"the page has {shown}, and the disk {names}"
    if facts.notes and not (play.flipped or _given_up(play)):
        yield f"the page notes {facts.notes}"
    starts = {rank.attempt: _name(rank.spec.checkpoint) for _, rank in play.starts}
    for one in json.loads((play.run_directory / "run.json").read_bytes())["attempts"]:
        if one["training"] and one["checkpoint"] != (starts[one["attempt"]] or None):
            yield f"run.json has attempt {one['attempt']} start from {one['checkpoint']}"
    if life.result is not None:
        own = life.result.checkpoint and _name(life.result.checkpoint.path)
        other = stored.checkpoint and _name(stored.checkpoint.path)
        if own != other or (names and own != names[-1]):
            yield f"Result.checkpoint is {own}, from_path() has {other}, and the disk {names}"
        if repr(life.result.metrics) != repr(stored.metrics):
            yield f"Result.metrics are {life.result.metrics}, from_path() has {stored.metrics}"


def checkpoints_are_validated(play: Play) -> Iterator[str]:
    """Each checkpoint for which that was asked is validated; it is not deleted before, and the run waits for it."""
    if not (play.flipped or _has(play, "take over")):  # a damaged one is renamed
        yield from (text for _, text in play.world.story if "while it was validated" in text)
    life = play.lives[-1]
    if life.was_killed or life.process.error is not None or _has(play, "signal", "signal twice", *STORAGE_FAULTS):
        return
    for path, manifest in _published(play):
        if (manifest.get("validation") or {}).get("status") == PENDING:
            yield f"{path.name} was not validated"


def observers_hear_facts_in_order(play: Play) -> Iterator[str]:
    """RunBegan comes first and Ended last; what a rank does is between the beginning and the end of its attempt."""
    for life in play.lives:
        facts = [fact for fact in life.facts if not isinstance(fact, Printed)]
        kinds = [type(fact) for fact in facts]
        if kinds and (kinds[0] is not RunBegan or kinds.count(RunBegan) != 1 or Ended in kinds[:-1]):
            yield f"start {life.number}: {[kind.__name__ for kind in kinds]}"
        attempts = [fact.attempt for fact in facts if isinstance(fact, AttemptBegan)]
        ended = [fact.attempt for fact in facts if isinstance(fact, AttemptEnded)]
        if attempts != sorted(set(attempts)) or ended != attempts[: len(ended)] or len(attempts) > len(ended) + 1:
            yield f"start {life.number}: attempts {attempts} began, and {ended} ended"
        is_open = False
        for fact in facts:
            is_open = isinstance(fact, AttemptBegan) or (is_open and not isinstance(fact, AttemptEnded))
            if not is_open and isinstance(fact, (RankTrains, Reported)):
                yield f"start {life.number}: {fact} outside of an attempt"
        if kinds.count(HangEnded) > kinds.count(HangBegan):
            yield f"start {life.number}: a hang ended that had not begun"


def get_checkpoint_never_goes_back(play: Play) -> Iterator[str]:
    """get_checkpoint() returns the checkpoint of the start, or a newer one; after report(), that of the report."""
    newest: dict[tuple[int, int, int], int] = {}
    for rank, step, _ in play.looked:
        key = rank.life, rank.attempt, rank.number
        if step < newest.get(key, step):
            yield f"rank {rank.number} of attempt {rank.attempt} got a checkpoint of step {step} after {newest[key]}"
        newest[key] = step
    if not (_is_quiet(play) and play.scenario.collectives):  # in memory, newer ones of fast ranks replace others
        return
    for rank, step, reported in play.looked:
        own = [call for call in play.calls if call.rank == rank.number and call.files is not None]
        saved = max((call.step for call in own if call.step <= reported and call.mode != "ASYNC"), default=-1)
        if step < saved:
            yield f"rank {rank.number} got a checkpoint of step {step} after that of step {saved} was reported"


def a_run_ends(play: Play) -> Iterator[str]:
    """A run ends soon after the last fault is over: no wait is longer than a lease, a stop or a hang."""
    over = max(
        (fault.at + fault.lasts + 90 * (fault.kind == "take over") for fault in play.scenario.faults),
        default=0.0,
    )
    over += 90 * sum(fault.kind == "debug" for fault in play.scenario.faults)  # one person after the other
    took = play.ended - over - 40 * (play.scenario.sticks is not None)
    attempts = len(play.first_steps)
    took -= 60 * bool(play.scenario.quiet) * (attempts + play.scenario.lists * play.scenario.steps)
    took -= 30 * (_strands(play) or _is_hasty(play)) * attempts
    own_s = play.scenario.steps * max(play.scenario.step_s)  # of a long run, much is waiting for the slowest rank
    if took > 60 + (4 if play.scenario.grow else 2) * own_s:
        yield f"the run took {took:.0f} s longer than its faults"


def a_stop_is_obeyed(play: Play) -> Iterator[str]:
    """A run that is asked to stop ends soon after ``stop_grace_s``, whatever its ranks do."""
    kinds = {fault.kind for fault in play.scenario.faults} - {
        "signal",
        "signal twice",
        "request",
        "debug",
        "kill rank",
        "stop rank",
    }
    life = play.lives[-1]
    if not kinds and life.ended_at > life.stops_at + STOP_GRACE_S + 20:
        yield f"the run ended {life.ended_at - life.stops_at:.0f} s after it was asked to stop"


def no_damaged_checkpoint_is_continued(play: Play) -> Iterator[str]:
    """A run that is started again verifies the checkpoint first from which it continues."""
    firsts: dict[int, tuple[float, Any]] = {}
    for at, rank in play.starts:
        firsts.setdefault(rank.life, (at, rank))
    for life, (at, rank) in firsts.items():
        damaged = {file.parent.name for file, flipped_at in play.flipped.items() if flipped_at < at - 5}
        if life > 0 and _name(rank.spec.checkpoint) in damaged and not _has(play, "second start", "take over"):
            yield f"start {life} continues from {rank.spec.checkpoint}, which is damaged"


def report_returns_soon(play: Play) -> Iterator[str]:
    """report() returns within its bounds while the world is healthy."""
    if play.scenario.faults or play.scenario.raises or play.scenario.rolls_back or play.scenario.sticks:
        return
    if play.scenario.quiet or _strands(play) or _is_hasty(play):
        return
    for call in play.calls:
        if call.ended is None or call.ended - call.began > 8 * max(play.scenario.step_s) * play.scenario.steps + 15:
            yield f"report {call.index} of rank {call.rank} took {(call.ended or 0) - call.began:.1f} s"


def hangs_are_named(play: Play) -> Iterator[str]:
    """A hang is named within seconds, with the right rank; ranks that are only busy, or slow, never are."""
    hangs = [(at, fact) for at, fact in play.told if isinstance(fact, HangBegan)]
    made = {number for number, _ in play.stuck.values()} | {number for _, _, number, _, _ in play.stopped}
    made |= {play.scenario.early[0]} if play.scenario.early and _strands(play) else set()
    for at, fact in hangs:
        if not set(fact.culprits) <= made and not _has(play, "take over"):  # its host has agents of two runs
            yield f"at {at:.1f} ranks {fact.culprits} were called stuck: {fact.text}"
        is_stopped = any(began < at < ended for *_, began, ended in play.stopped)
        if not is_stopped and any(began + 1 < at < ended for began, ended in play.debugged):
            yield f"at {at:.1f} ranks {fact.culprits} were called stuck, while somebody debugged one: {fact.text}"
    scenario = play.scenario
    if scenario.raises or scenario.rolls_back or _strands(play) or not scenario.collectives:
        return
    if scenario.sticks and not scenario.faults and scenario.sticks[1] < scenario.steps - 1 and scenario.ranks > 1:
        for number, began in play.stuck.values():
            limit = began + 20 * max(scenario.step_s) + 12
            if not any(began < at < limit and fact.culprits == [number] for at, fact in hangs):
                yield f"rank {number} was stuck since {began:.1f}, and is not named"
        said = "".join(text for _, text in play.world.story)
        yield from (f"{fact.text} is not said" for _, fact in hangs if fact.text.partition(";")[0] not in said)
        if len(hangs) != sum(isinstance(fact, HangEnded) for _, fact in play.told):
            yield "nobody is told that the hang has ended"
    # Others wait in report() for ranks that are quiet, whether they are stopped or not.
    is_clear = len(scenario.faults) == 1 and not (scenario.sticks or scenario.quiet)
    for life, attempt, number, began, ended in play.stopped if is_clear else ():
        calls = [by_rank for key, by_rank in sorted(play.collectives.entered.items()) if key[:2] == (life, attempt)]
        missed = next((by_rank for by_rank in calls if by_rank.get(number, 0) > ended), {})
        others_wait = all(at < began + 2 for rank, at in missed.items() if rank != number) and len(missed) > 1
        trains = any(isinstance(fact, RankTrains) and fact.rank == number and at < began for at, fact in play.told)
        if trains and others_wait and ended > began + 19 and not any(fact.culprits == [number] for _, fact in hangs):
            yield f"rank {number} was stopped at {began:.1f}, and is not named"


def all_processes_know_what_to_do(play: Play) -> Iterator[str]:
    """No process of distrain ends with an exception that it did not expect."""
    for process in play.world.processes:
        expected = isinstance(process.error, SystemExit) or process.name.startswith(("fit()", "rank"))
        if process.error is not None and not expected:
            yield f"{process.name} ended with {process.error!r}"


def nothing_unfinished_is_left(play: Play) -> Iterator[str]:
    """After a run, a bucket has no file of a checkpoint that was not committed, and hosts no copy of a checkpoint."""
    life = play.lives[-1]
    if life.was_killed or life.asked_to_stop > 1 or _was_interrupted(play) or _was_refused(life):
        return
    if _has(play, "broken bucket", "lose power", "take over", *_LOST_HOSTS):
        return
    stores_itself = play.scenario.bucket and play.scenario.mode != "NO_UPLOAD"
    for folder in checkpoint_folders(play.run_directory) if stores_itself else ():
        is_committed = any((folder / name).exists() for name in (MANIFEST_FILE, DAMAGED_FILE))
        if (folder / PENDING_FILE).exists() or not is_committed:
            yield f"{folder} is unfinished: {sorted(folder.files())}"
    for host in play.hosts.values():
        for path in host.root.glob("cache/runs/*/checkpoints"):
            yield f"{host.name} still has {path}: {sorted(path.rglob('*'))[:3]}"


def files_come_back(play: Play) -> Iterator[str]:
    """Files that a rank has written into get_trial_dir() come to the run directory, or a warning names them."""
    said = " ".join(text for _, text in play.world.story)
    if any(life.was_killed for life in play.lives):
        return
    for name in play.notes:
        if not list(play.run_directory.rglob(name)) and not re.search("files .*ranks are still on", said):
            yield f"{name} is not in the run directory"


def ranks_read_whole_checkpoints(play: Play) -> Iterator[str]:
    """A checkpoint that a rank reads was saved with one call of report() of all ranks."""
    for rank, checkpoint, states in play.loaded:
        if len({(state["step"], state["attempt"], state["life"]) for state in states}) > 1 and not play.flipped:
            yield f"{rank.process.name} reads {checkpoint.path}, which mixes {states}"


# -- growth ----------------------------------------------------------------------------------------------------------

_GROWTH_S = LONGEST_INTERVAL_S + 30.0
"""Seconds within which a run has an agent on a host that is back, after it has begun to train."""


@dataclass
class _Attempt:
    """An attempt of the last life that has ended. commits: when, and the facts. trains: since when all its ranks did.

    lost: the host that was lost, if that was its failure.
    """

    number: int
    hosts: Sequence[str]
    trained: list[float] = field(default_factory=list)
    commits: list[tuple[float, Committed]] = field(default_factory=list)
    ended: float = math.inf
    grows: bool = False
    failed: bool = False
    lost: str = ""

    @property
    def trains(self) -> float:
        return max(self.trained) if len(self.trained) == len(self.hosts) else math.inf


def _attempts(play: Play) -> list[_Attempt]:
    """Return the attempts of the last process that called fit() which have ended."""
    own = {id(fact) for fact in play.lives[-1].facts}
    found: dict[int, _Attempt] = {}
    now = _Attempt(-1, ())
    for at, fact in play.told:
        match fact if id(fact) in own else None:
            case AttemptBegan(attempt=number, hosts=hosts):
                now = found[number] = _Attempt(number, hosts)
            case RankTrains():
                now.trained.append(at)
            case Committed(attempt=number) if number in found:
                found[number].commits.append((at, fact))
            case AttemptEnded(failures=failures, why=why):
                now.ended, now.failed = at, bool(failures)
                now.grows = re.search("(is|are) back$", why or "") is not None
                now.lost = failures[0].host if failures and failures[0].lost else ""
    return [one for one in found.values() if one.ended < math.inf]


def a_run_grows_at_a_checkpoint(play: Play) -> Iterator[str]:
    """A run with ``grow`` uses a host that is back at a checkpoint: at once when it has an agent there."""
    if not play.scenario.grow or any(life.asked_to_stop for life in play.lives):
        return
    if {fault.kind for fault in play.scenario.faults} - {"kill rank", "clock jump", *_LOST_HOSTS}:
        return
    attempts = _attempts(play)
    if not all(has_worked for _, _, has_worked in _growths(attempts)):
        return  # it waits for longer
    for one in attempts:
        for host in play.hosts.values():
            changes = play.changes[host.name]
            steady = max([one.trains, *(at for at in changes if at <= one.ended)])
            if host.name in one.hosts or not host.is_up or len(one.hosts) >= play.scenario.ranks:
                continue
            late = [(at, commit) for at, commit in one.commits if at > steady + _GROWTH_S]
            if late[1:] or (late and one.ended > late[0][0] + 20):
                yield f"attempt {one.number} did not end at {late[0][1].name}, {host.name} was back at {steady:.1f}"


def _growths(attempts: list[_Attempt]) -> list[tuple[float, float, bool]]:
    """Return when the run has grown, when it has grown again, and if more ranks have committed a checkpoint since."""
    ends = [n for n, one in enumerate(attempts) if one.grows]
    found = []
    for n, after in itertools.zip_longest(ends, ends[1:]):
        size, until = len(attempts[n].hosts), len(attempts) if after is None else after + 1
        has_worked = any(one.commits and len(one.hosts) > size for one in attempts[n + 1 : until])
        found.append((attempts[n].ended, math.inf if after is None else attempts[after].ended, has_worked))
    return found


def growth_is_no_failure(play: Play) -> Iterator[str]:
    """Growth uses none of ``max_failures``, is no failure of a rank, and does not end the run."""
    if not play.scenario.grow:
        return
    attempts = _attempts(play)
    for one in attempts:
        if one.grows and one.failed:
            yield f"attempt {one.number} was ended to grow, and has failed"
        if one.grows and not one.commits:
            yield f"attempt {one.number} was ended to grow, without a checkpoint"
        elif one.grows and one.ended > one.commits[-1][0] + 15 and not _has(play, *_SLOW):
            yield f"attempt {one.number} ended {one.ended - one.commits[-1][0]:.1f} s after its last checkpoint"
    error, failed = play.lives[-1].process.error, [one for one in attempts if one.failed]
    undone = [one for before, one in itertools.pairwise(attempts) if before.grows and one.failed and not one.commits]
    most = play.scenario.max_failures
    if most >= 0 and len(failed) > most + 1 + len(undone):
        yield f"{len(failed)} attempts have failed"
    is_last = attempts and attempts[-1].grows
    if is_last and error is not None and not (isinstance(error, _STOPS) or _has(play, *STORAGE_FAULTS)):
        yield f"the run has ended after attempt {attempts[-1].number}, which was ended to grow: {error}"
    if error is None or isinstance(error, _STOPS) or len(attempts) < 2:
        return
    before, last = attempts[-2:]
    if before.grows and not last.commits and "forkserver has died before" in str(error):
        yield f"a host that the run could do without has ended it: {error}"
    are_well = all(at < before.ended for host in before.hosts for at in play.changes[host])
    if before.grows and not last.commits and last.lost and last.lost not in before.hosts and are_well:
        yield f"the loss of {last.lost}, which the run could do without, has ended it: {error}"


def growth_loses_no_checkpoint(play: Play) -> Iterator[str]:
    """After growth, the run continues from the newest checkpoint, even one in memory, if no host was lost meanwhile."""
    if not play.scenario.grow or play.flipped or _is_hasty(play) or _has(play, *STORAGE_FAULTS):
        return
    if _has(play, "no peers"):  # the new host gets none of the files in memory
        return
    for before, one in itertools.pairwise(_attempts(play)):
        started = [(at, rank) for at, rank in play.starts if rank.attempt == one.number and rank.life == play.life]
        if not (before.grows and started):
            continue
        moment, rank = started[0]
        committed_at, newest = max(before.commits, key=lambda commit: commit[1].index)
        if any(committed_at - 20 < at < moment for changes in play.changes.values() for at in changes):
            continue
        names = {_name(rank.spec.checkpoint)} | {fact.name for at, fact in before.commits if at > moment}
        if newest.name not in names and newest.name not in _given_up(play):
            yield f"attempt {one.number} starts from {rank.spec.checkpoint} instead of {newest.name}"


def growth_that_fails_waits(play: Play) -> Iterator[str]:
    """After growth without a checkpoint of more ranks, the run waits for a minute before it grows again; then two.

    Growth that works ends that.
    """
    wait_s = 60.0
    for ended, again, has_worked in _growths(_attempts(play)) if play.scenario.grow else ():
        if not has_worked and again < ended + wait_s:
            yield f"the run has grown in vain at {ended:.1f}, and again at {again:.1f}"
        wait_s = 60.0 if has_worked else 2 * wait_s


PROPERTIES = [
    a_run_grows_at_a_checkpoint,
    growth_is_no_failure,
    growth_loses_no_checkpoint,
    growth_that_fails_waits,
    ranks_read_whole_checkpoints,
    nothing_unfinished_is_left,
    files_come_back,
    all_processes_know_what_to_do,
    published_checkpoints_are_complete,
    checkpoints_wait_for_each_rank,
    metrics_have_every_report_once,
    the_end_is_what_happened,
    the_culprit_was_hit,
    a_second_start_is_refused,
    requests_are_answered,
    nothing_is_left,
    names_are_given_once,
    no_start_is_too_old,
    a_lost_host_costs_no_copied_checkpoint,
    the_newest_checkpoint_can_be_read,
    a_quiet_run_loses_nothing,
    every_row_is_used_once,
    the_best_and_the_last_are_kept,
    local_files_are_deleted_after_the_commit,
    all_views_of_a_run_agree,
    checkpoints_are_validated,
    observers_hear_facts_in_order,
    get_checkpoint_never_goes_back,
    a_run_ends,
    a_stop_is_obeyed,
    no_damaged_checkpoint_is_continued,
    report_returns_soon,
    hangs_are_named,
]
