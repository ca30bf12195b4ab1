"""Faults that distrain had, or might have: each as a change of its source that the simulator has to find."""

from __future__ import annotations

from typing import NamedTuple


class Known(NamedTuple):
    """A change of one file. ``old`` is in it once. only: the themes of ``scripts/fuzz`` that show it, if it is rare."""

    name: str
    file: str
    old: str
    new: str
    only: str = ""


KNOWN = [
    Known(
        "checkpoints in the order of their commits, and not of their reports",
        "decisions/checkpoints/ledger.py",
        "sorted([*self.all, *new], key=lambda saved: saved.index)",
        "[*self.all, *new]",
    ),
    Known(
        "committed without ranks that are slow",
        "decisions/checkpoints/attendance.py",
        "        return self._counts.fewest >= index\n",
        "        return self._counts.fewest_above(0) >= index\n",
    ),
    Known(
        "committed although files are still being stored",
        "decisions/checkpoints/assembly.py",
        "        if joining.unstored:\n            return False\n",
        "",
    ),
    Known(
        "two ranks store a file of one name at the same time",
        "decisions/checkpoints/assembly.py",
        "            if not any(self.ordered.get(file) in self.unstored for file in own):\n",
        "            if True:\n",
        "names,disks",
    ),
    Known(
        "a part that could not be stored is left out",
        "decisions/checkpoints/assembly.py",
        "        if (problem := self._problems.get(ordinal) or _mixed_directories(joining.parts)) is not None:\n",
        "        if (problem := _mixed_directories(joining.parts)) is not None:\n",
    ),
    Known(
        "the checkpoint of the start is deleted while ranks read it",
        "decisions/checkpoints/life.py",
        "        return self._awaits_validation(saved) or (saved.index == self._start and self._is_start_read())\n",
        "        return self._awaits_validation(saved)\n",
    ),
    Known(
        "the first report does not read the start",
        "worker/session.py",
        "if not (checkpoint or self._reports):",
        "if False:",
    ),
    Known(
        "messages of earlier attempts are heard",
        "coordinator/engine.py",
        "        if not isinstance(message, wire.OfAttempt) or message.attempt == self.attempt:\n",
        "        if True:\n",
    ),
    Known(
        "attempts of a continued run begin at 0 again",
        "coordinator/store/manifest.py",
        '        self.first_attempt: int = self._attempts[-1]["attempt"] + 1 if self._attempts else 0\n',
        "        self.first_attempt: int = 0\n",
    ),
    Known(
        "a stopped run counts as failed",
        "coordinator/run/run.py",
        '        status = "failed" if not is_over else "stopped" if reason else end.state.value  # as its error says\n',
        '        status = end.state.value if is_over else "failed"\n',
    ),
    Known(
        "the newest checkpoint in memory is not stored at the end",
        "decisions/checkpoints/rounds.py",
        "        self._is_ending = True\n        self.store_or_copy()\n",
        "        self.store_or_copy()\n",
    ),
    Known(
        "the best checkpoints in memory are lost",
        "decisions/checkpoints/ledger.py",
        "        best = retention.best_first([saved.metrics for saved in self.all], rule)[: rule.num_to_keep or 1]\n",
        "        best = []\n",
    ),
    Known(
        "a round that is being stored is dropped",
        "decisions/checkpoints/rounds.py",
        "{self._start, self._copying, self._storing_name, name}",
        "{self._start, self._copying, name}",
    ),
    Known(
        "parts on a lost host are waited for",
        "decisions/checkpoints/rounds.py",
        "{rank for rank, source in self._storing.sources.items() if source[0] == host}",
        "set()",
    ),
    Known(
        "copies are not used",
        "decisions/checkpoints/rounds.py",
        "            if copies := kept and kept.copies and kept.copies.get(part.copy):\n",
        '            if copies := "":\n',
        "memory,lost",
    ),
    Known(
        "agents delete parts that are being hashed",
        "agent/memory_keeper.py",
        " and part not in self._hashing:\n",
        ":\n",
        "memory",
    ),
    Known(
        "a part is written over files that a reader has",
        "worker/reporting/memory_part.py",
        "            elif path.stat().st_nlink > 1 or str(path.relative_to(folder)) not in files:\n",
        "            elif str(path.relative_to(folder)) not in files:\n",
        "memory,looks",
    ),
    Known(
        "ranks read a checkpoint before all hosts know that they have it",
        "decisions/checkpoints/rounds.py",
        "        if self._untold:\n            self._when_told.append(then)\n",
        "        if False:\n            self._when_told.append(then)\n",
        "memory",
    ),
    Known(
        "damaged bytes in memory are stored",
        "decisions/checkpoints/rounds.py",
        "            if expected[name] != (length, crc):\n",
        "            if False:\n",
    ),
    Known(
        "a stop is not followed by SIGKILL, as its time is not limited",
        "decisions/run/machine.py",
        "        if self.stopping.lets_save:\n            self._deadline = self.stopping.save_by =",
        "        if self.stopping.lets_save:\n            self.stopping.save_by =",
    ),
    Known(
        "a consequence is blamed",
        "decisions/blame.py",
        "    return sorted(judged, key=lambda failure: (failure.consequence, failure.order))\n",
        "    return sorted(judged, key=lambda failure: -failure.order)\n",
    ),
    Known(
        "a rank that reports while a checkpoint is committed without it is not noticed",
        "decisions/checkpoints/life.py",
        "filter(self._first_brought, saved.silent):",
        "():",
        "hasty,disks",
    ),
    Known(
        "the run goes on from a checkpoint that was not verified",
        "coordinator/store/local_store.py",
        "                if saved.is_in_memory or (damage := _damage_of(path, is_needed=is_needed)) is None:\n",
        "                if True:\n",
        "starts",
    ),
    Known(
        "lines that a full disk did not take are lost",
        "coordinator/store/run_store.py",
        "            del self.unwritten[: os.write(self._fd, self.unwritten)]\n",
        "            data, self.unwritten = self.unwritten, bytearray()\n            os.write(self._fd, data)\n",
    ),
    Known(
        "a collective whose rank has failed is never ended",
        "coordinator/report_handler.py",
        "            self._answer(self._barriers.finished(outcome.rank))\n",
        "            pass\n",
    ),
    Known(
        "local files are deleted although the checkpoint was dropped",
        "worker/session.py",
        "        if local_files is not None and has_files:\n",
        "        if local_files is not None:\n",
    ),
    Known(
        "a host that is lost while it stops is waited for",
        "decisions/run/machine.py",
        "        if not (hosts := self.living_hosts):\n",
        "        if not (hosts := self.plan.hosts):\n",
    ),
    Known(
        "the commit is told after older checkpoints are deleted",
        "decisions/checkpoints/life.py",
        "        latest = self.ledger.all[-1]  # a newer one",
        "        latest = saved  # a newer one",
    ),
    Known(
        "hangs are not looked for while an upload is open",
        "decisions/health/hangs.py",
        "(self.is_serving and self.standstills.is_asking)",
        "self.is_serving",
        "hangs",
    ),
    Known(
        "a batch that a Rollback has ended was only a look",
        "data/positions.py",
        "self._is_reported or self._is_interrupted\n",
        "self._is_reported\n",
    ),
    Known(
        "rows are left out only until the next start",
        "decisions/checkpoints/ledger.py",
        '        self._note(latest, {"skip_to": self.all[-1].skip_to})\n',
        "",
        "rollbacks,starts",
    ),
    Known(
        "checkpoints in memory that a Rollback gave up stay",
        "decisions/checkpoints/life.py",
        "        self.rounds.drop_others()\n        self._note_start()\n",
        "        self._note_start()\n",
    ),
    Known(
        "a checkpoint is deleted while it is validated",
        "decisions/checkpoints/life.py",
        "        return self._awaits_validation(saved) or (",
        "        return (",
    ),
    Known(
        "a new start forgets the validations that wait",
        "decisions/checkpoints/life.py",
        "            for saved in filter(self._awaits_validation, self.ledger.all):\n",
        "            for saved in ():\n",
    ),
    Known(
        "files are not flushed before the commit",
        "storage/file_transfer.py",
        "    in_threads(flush, [target / name for name in names])\n    return files\n",
        "    return files\n",
    ),
    Known(
        "the name of a checkpoint is not durable when it is told",
        "coordinator/store/local_store.py",
        "        staged.rename(final)\n        flush(self.paths.root)\n",
        "        staged.rename(final)\n",
    ),
    Known(
        "two processes may have one run",
        "storage/run_lock.py",
        "            if lock_alone(self.fd, time.monotonic() + _READER_S):\n",
        "            if True:\n",
    ),
    Known(
        "a mover is ended while it fetches the last checkpoint in memory",
        "coordinator/engine.py",
        "        if not self.checkpoints.rounds.is_storing:  # that waits for what is fetched\n",
        "        if True:\n",
    ),
    Known(
        "ranks of hosts without the storage are told to copy their files themselves",
        "decisions/checkpoints/site.py",
        " or self.is_remote or self.lacks_storage(self.host_of(report.rank))",
        " or self.is_remote",
    ),
    Known(
        "a rank that asks for a checkpoint which its host has already is not answered",
        "coordinator/checkpoint_copies.py",
        "            if copy.is_ready:\n                self._answer(copy)\n",
        "",
    ),
    Known(
        "a checkpoint that could not be copied to a host is never copied again",
        "coordinator/checkpoint_copies.py",
        "            self._copies[host].remove(copy)\n            failed += full_cache_hint(failed)\n",
        "            failed += full_cache_hint(failed)\n",
    ),
    Known(
        "files on a lost host that later attempts do without are not named",
        "coordinator/host_files.py",
        "        for host in self._lost & self._announced:\n",
        "        for host in ():\n",
    ),
    Known(
        "files of ranks are deleted on their host when half of them have been fetched",
        "transfer/mover.py",
        "            os.replace(staging / file.path, place / file.path)\n",
        "",
    ),
    Known(
        "a checkpoint in a bucket whose marker is left is deleted by the next start",
        "coordinator/store/remote_store.py",
        "(checkpoint / PENDING_FILE if MANIFEST_FILE in found else checkpoint).remove()",
        "checkpoint.remove()",
    ),
    Known(
        "a checkpoint in a bucket gets the name of one that was not finished",
        "coordinator/store/remote_store.py",
        "            self._used.add(free)\n            self._directories",
        "            self._directories",
    ),
    Known(
        "checkpoints that were not committed stay in the bucket",
        "coordinator/store/remote_store.py",
        "uncommitted = sorted(set(self._directories.values()) - self.ledger.names)",
        "uncommitted: list[str] = []",
    ),
    Known(
        "a process that was suspended goes on with a run that another one has taken over",
        "transfer/executor.py",
        "        if abs(time.time() - self._checked_at) > _PAUSE_S:\n            self._owned_run()\n",
        "",
        "takeovers",
    ),
    Known(
        "files that a lost host was to store are waited for",
        "decisions/checkpoints/assembly.py",
        "        self.uploads = {(rank, ordinal) for rank, ordinal in self.uploads if rank not in ranks}\n",
        "",
    ),
    Known(
        "a rank that was stopped while it waited is not to blame",
        "decisions/health/hangs.py",
        "        self.standstills.note_mute(self._silent & self._hang.waiting.keys())  # stopped while they waited\n",
        "",
        "hangs",
    ),
    Known(
        "a host that has come back is believed to see the storage",
        "coordinator/host_files.py",
        "        return host in self._answers and self._answers[host].storage_problem is not None\n",
        "        known = host in self._answers and host in self._hosts and self._hosts[host].is_set_up\n"
        "        return known and self._answers[host].storage_problem is not None\n",
        "apart",
    ),
    Known(
        "timers run while a person looks at a rank",
        "coordinator/coordinator.py",
        "            engine.clock.pause()\n",
        "            pass\n",
    ),
    Known(
        "a rank whose debugger nobody uses any longer waits for a person",
        "coordinator/debuggers.py",
        "            del self._users[rank]\n            self._answer(rank)\n",
        "            del self._users[rank]\n",
    ),
    Known(
        "no hang is shown once a host is lost whose ranks had finished",
        "coordinator/engine.py",
        "lambda: self.machine.living_hosts if",
        "lambda: list(self.machine.plan.hosts) if",
    ),
    Known(
        "a hang whose rank then finishes never ends",
        "decisions/health/hangs.py",
        "        if ok:\n            self._note_move()\n",
        "",
    ),
    Known(
        "a checkpoint that waits for its validation is queued again by a restart",
        "decisions/checkpoints/life.py",
        "        if not self._has_queued_validations:\n",
        "        if True:\n",
    ),
    Known(
        "ranks that say nothing are not asked where they are",
        "decisions/health/hangs.py",
        "        elif not self._looks and (unheard",
        "        elif False and (unheard",
        "hangs",
    ),
    Known(
        "get_checkpoint() does not wait for what was reported",
        "worker/session.py",
        "        if self._reports == self._reports_settled:\n",
        "        if True:\n",
    ),
    Known(
        "run.json does not have the checkpoint from which an attempt starts",
        "coordinator/store/manifest.py",
        "        if latest is not None:\n            now[",
        "        if False:\n            now[",
    ),
    Known(
        "the reports of earlier parts of a run in a bucket are lost",
        "coordinator/store/remote_store.py",
        "        growing = (self.paths.metrics, self.paths.events)\n",
        "        growing = (self.paths.events,)\n",
    ),
    Known(
        "a run that was taken over uses the names of checkpoints that the former owner may still write",
        "coordinator/store/remote_store.py",
        "_SKIPPED = 10\n",
        "_SKIPPED = 0\n",
        "takeovers",
    ),
    Known(
        "get_checkpoint() does not wait for files that are listed once slow ranks are written off",
        "decisions/checkpoints/life.py",
        "(self.is_committing or self.assembly.awaits_uploads())",
        "self.is_committing",
        "quiet",
    ),
    Known(
        "a checkpoint in memory gets the name of one in the bucket",
        "coordinator/engine.py",
        "            new_name=store.new_name,\n",
        "",
    ),
    Known(
        "a rank that fails while the run stops makes it wait for others as long as ever",
        "decisions/run/machine.py",
        "self._deadline = self.stopping.save_by = self._now + grace_s",
        "self._deadline = self._now + grace_s",
    ),
]
