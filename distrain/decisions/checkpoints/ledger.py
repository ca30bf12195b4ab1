"""The checkpoints that a run has: which there are, where each one is, and which are kept. Runs in: coordinator.

Pure: no I/O, no clock. Nothing else changes the list.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distrain.decisions.checkpoints.actions import Delete, Record, UpdateManifest
from distrain.storage import retention
from distrain.storage.commit import CommittedCheckpoint
from distrain.system.text import without_nonfinite

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from pathlib import Path

    from distrain.decisions.checkpoints.actions import Action
    from distrain.storage.retention import Retention
    from distrain.system.remote_path import RemotePath

_OF_PLACE = ("name", "files")
"""Fields of a manifest that depend on where the checkpoint is."""
_MOST_BAD_IN_A_ROW = 3
"""Rollbacks that bad rows may explain; after more of them, the checkpoint itself is suspect."""


class Ledger:
    """The checkpoints that are kept. Read ``all``: they are in the order of their reports.

    found: those of earlier parts of the run. next_index: the number of the next one.
    ``emit`` is called with what has to be done because the list has changed.
    """

    def __init__(self, found: Iterable[CommittedCheckpoint] = (), next_index: int = 0) -> None:
        self.all = list(found)
        self.next_index = next_index
        self.emit: Callable[[Action], None]
        self._moved: dict[str, str] = {}
        """New paths of checkpoints that got another name when they were stored from memory, by the path ranks have."""
        self._rollbacks = 0
        """The number of rollbacks in a row to the newest one."""

    @property
    def latest(self) -> CommittedCheckpoint | None:
        """The last checkpoint, or None."""
        return self.all[-1] if self.all else None

    @property
    def names(self) -> set[str]:
        """The names of all checkpoints."""
        return {saved.path.name for saved in self.all}

    def path(self, known: str) -> str:
        """Return the path of the checkpoint that ranks know by the path ``known``."""
        return self._moved.get(known, known)

    def is_in_memory(self, path: str | None) -> bool:
        """Return whether the checkpoint ``path`` is one in memory."""
        return any(str(saved.path) == path for saved in self.all if saved.is_in_memory)

    def take_index(self) -> int:
        """Return the number of a new checkpoint. To be called in the order of the reports."""
        self.next_index += 1
        return self.next_index - 1

    # -- changes --------------------------------------------------------------------------------------------------

    def add(self, *new: CommittedCheckpoint) -> None:
        """Add checkpoints in the order of their reports: an older one may have taken longer to commit."""
        self.all = sorted([*self.all, *new], key=lambda saved: saved.index)

    def set_aside(self, newest: int) -> None:
        """Forget so many of the newest checkpoints, which are damaged."""
        self.all = self.all[: len(self.all) - newest]

    def forget_memory(self, but: Collection[str] = ()) -> None:
        """Forget the checkpoints that are only in memory, but those of these names."""
        self.all = [saved for saved in self.all if not saved.is_in_memory or saved.path.name in but]

    def stored(self, now: Mapping[str, Any], written: Mapping[str, Any], path: Path | RemotePath, **more: Any) -> None:
        """Note that a checkpoint that was only in memory is at ``path``.

        now: what its manifest must say, even if the run has given it up. written: what was written. more: for its line
        in events.jsonl.
        """
        if (known := str(path.parent / now["name"])) != str(path):
            self._moved[known] = str(path)
        self.all = [
            replace(saved, path=path, manifest=None) if saved.index == now["index"] else saved for saved in self.all
        ]
        if changed := {name: now[name] for name in now if name not in _OF_PLACE and now[name] != written.get(name)}:
            self.emit(UpdateManifest(CommittedCheckpoint(path, {}), changed))
        self.emit(Record("stored", {"name": path.name, "index": now["index"], **more}))

    def disown(self, rank: int, *, after: int, first_step: int) -> list[CommittedCheckpoint]:
        """Give up the checkpoints that lack files of a rank, as it turns out. Return them.

        after: the index of the checkpoint that the attempt has started from. first_step: the first report of the rank
        that had files.
        """
        later = [saved for saved in self.all if saved.index > after and saved.step >= first_step]
        lacking = [saved for saved in later if rank in saved.silent]
        for saved in lacking:
            self._give_up(saved, {"lacks": rank})
        return lacking

    def roll_back(self, skip_to: Mapping[str, Any], *, reports: int = 0) -> str:
        """Note up to where rows are left out when the run continues at the newest checkpoint.

        The checkpoint is suspect if the run has rolled back to it before, and either no more rows are left out now, or
        this is the fourth time in a row, with at most one report each time. If there is a checkpoint before it, a
        suspect one is given up, and marked as such. Return the name of a checkpoint that was given up, else "".

        reports: the number of reports of the attempt that has ended.
        """
        if not self.all:
            return ""
        latest, suspect, known = self.all[-1], "", self.all[-1].skip_to
        self._rollbacks = self._rollbacks + 1 if known is not None and reports <= 1 else 1
        skip_to = {**(known or {}), **skip_to}
        if len(self.all) > 1 and known is not None and (skip_to == known or self._rollbacks > _MOST_BAD_IN_A_ROW):
            self._give_up(latest, {"suspect": True})
            latest, suspect = self.all[-1], latest.path.name
        self.all[-1] = replace(latest, skip_to={**(latest.skip_to or {}), **skip_to})
        self._note(latest, {"skip_to": self.all[-1].skip_to})
        return suspect

    def validated(self, saved: CommittedCheckpoint, status: str, metrics: Mapping[str, Any]) -> None:
        """Note the status of the validation of a checkpoint, and add its metrics to the checkpoint's own."""
        if saved not in self.all:
            return
        position = self.all.index(saved)
        validation = {**(saved.validation or {}), "status": status, "metrics": list(metrics)}
        metrics = {**saved.metrics, **metrics}
        self.all[position] = replace(saved, metrics=metrics, validation=validation)
        finite, nonfinite = without_nonfinite(metrics)
        self._note(saved, {"metrics": finite, "nonfinite": nonfinite, "validation": validation})

    def delete_surplus(self, rule: Retention, is_needed: Callable[[CommittedCheckpoint], bool]) -> None:
        """Delete the checkpoints on storage that ``rule`` does not keep, but not those that are needed."""
        stored = [saved for saved in self.all if not saved.is_in_memory]
        doubtful = {n for n, saved in enumerate(stored) if saved.silent}
        surplus = retention.surplus([saved.metrics for saved in stored], rule, doubtful)
        if chosen := [stored[n] for n in surplus if not is_needed(stored[n])]:
            self.all = [saved for saved in self.all if saved not in chosen]
            self.emit(Delete(chosen, lambda kept: self.add(*kept)))

    def best_in_memory(self, rule: Retention) -> list[CommittedCheckpoint]:
        """Return those in memory that have to be stored, as ``rule`` keeps them by their score: the best one first."""
        if rule.checkpoint_score_attribute is None:
            return []
        best = retention.best_first([saved.metrics for saved in self.all], rule)[: rule.num_to_keep or 1]
        return [self.all[n] for n in best if self.all[n].is_in_memory]

    def _give_up(self, saved: CommittedCheckpoint, why: Mapping[str, Any]) -> None:
        self.all.remove(saved)
        self._note(saved, why)

    def _note(self, saved: CommittedCheckpoint, fields: Mapping[str, Any]) -> None:
        """Put something into the manifest that the checkpoint has, or will have."""
        if saved.manifest is None:
            self.emit(UpdateManifest(saved, fields))
        else:
            saved.manifest.update(fields)
