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
        "coordinator/store/run_store.py",
        "sorted([*self.committed, *new], key=lambda saved: saved.index)",
        "[*self.committed, *new]",
    ),
    Known(
        "committed without ranks that are slow",
        "decisions/checkpoint_assembly.py",
        "        return self._counts.fewest >= ordinal\n",
        "        return self._counts.fewest_above(0) >= ordinal\n",
    ),
    Known(
        "committed although files are still being stored",
        "decisions/checkpoint_assembly.py",
        "        if pending.unstored:\n            return None\n        in_memory = [",
        "        in_memory = [",
    ),
    Known(
        "two ranks store a file of one name at the same time",
        "decisions/checkpoint_assembly.py",
        "            if storing is None:\n",
        "            if True:\n",
    ),
    Known(
        "a part that could not be stored is left out",
        "decisions/checkpoint_assembly.py",
        "        if (problem := pending.problem or _mixed_directories(pending.parts)) is not None:\n",
        "        if (problem := _mixed_directories(pending.parts)) is not None:\n",
    ),
    Known(
        "the checkpoint of the start is deleted while ranks read it",
        "coordinator/report_handler.py",
        "        return self.validations.awaits(saved) or (saved.index == self._start and self._is_start_read())\n",
        "        return self.validations.awaits(saved)\n",
    ),
    Known(
        "the first report does not read the start",
        "worker/session.py",
        "if not (checkpoint or self._reports):",
        "if False:",
    ),
    Known(
        "messages of earlier attempts are heard",
        "coordinator/coordinator.py",
        '        if getattr(message, "attempt", self._attempt) != self._attempt:\n            return\n',
        "",
    ),
    Known(
        "attempts of a continued run begin at 0 again",
        "coordinator/run/manifest.py",
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
        "coordinator/memory_rounds.py",
        "        self._is_ending = True\n        self.store_or_copy()\n",
        "        self.store_or_copy()\n",
    ),
    Known(
        "the best checkpoints in memory are lost",
        "coordinator/memory_rounds.py",
        "        best = best_first([each.metrics for each in saved], rule)[: rule.num_to_keep or 1]\n",
        "        best = []\n",
    ),
    Known(
        "a round that is being stored is dropped",
        "coordinator/memory_rounds.py",
        "[self._start, self._copying, self._storing_name, *(",
        "[self._start, self._copying, *(",
    ),
    Known(
        "parts on a lost host are waited for",
        "coordinator/memory_rounds.py",
        "{rank for rank, source in self._storing.sources.items() if source[0] == host}",
        "set()",
    ),
    Known(
        "copies are not used",
        "coordinator/memory_rounds.py",
        "            if copies := self._copy_folders.get(kept.name, {}).get(part.copy):\n",
        "            if False:\n",
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
        "memory",
    ),
    Known(
        "agents store an older checkpoint after the coordinator is gone",
        "agent/memory_keeper.py",
        "            kept = known[max(known)]\n",
        "            kept = known[min(known)]\n",
    ),
    Known(
        "a run does not look at what agents have stored alone",
        "coordinator/store/local_store.py",
        "            take_over(root)\n            self.directory.open()\n",
        "            self.directory.open()\n",
        "memory,starts",
    ),
    Known(
        "damaged bytes in memory are stored",
        "coordinator/memory_rounds.py",
        "            if expected[name] != (length, crc):\n",
        "            if False:\n",
    ),
    Known(
        "a stop is not followed by SIGKILL, as its time is not limited",
        "decisions/run_machine.py",
        "        if self.saves_on_stop:\n            self._deadline = self._stop_by = now + grace_s\n",
        "        if self.saves_on_stop:\n",
    ),
    Known(
        "a consequence is blamed",
        "decisions/blame.py",
        "    return sorted(judged, key=lambda failure: (failure.consequence, failure.order))\n",
        "    return sorted(judged, key=lambda failure: -failure.order)\n",
    ),
    Known(
        "a rank that reports while a checkpoint is committed without it is not noticed",
        "coordinator/report_handler.py",
        "self._bringing.keys() & saved.silent:",
        "():",
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
        "                self._do(self._barriers.finished(rank))\n",
        "",
    ),
    Known(
        "local files are deleted although the checkpoint was dropped",
        "worker/session.py",
        "        if local_files is not None and has_files:\n",
        "        if local_files is not None:\n",
    ),
    Known(
        "a host that is lost while it stops is waited for",
        "decisions/run_machine.py",
        "        if not (hosts := self.living_hosts):\n",
        "        if not (hosts := self.plan.hosts):\n",
    ),
    Known(
        "the commit is told after older checkpoints are deleted",
        "coordinator/report_handler.py",
        "latest, ranks = self.store.committed[-1], ",
        "latest, ranks = saved, ",
    ),
    Known(
        "hangs are not looked for while an upload is open",
        "coordinator/coordinator.py",
        "waits = (is_storing and self.hang_monitor.standstills.is_asking) or self._clock.is_paused",
        "waits = is_storing or self._clock.is_paused",
        "hangs",
    ),
    Known(
        "checkpoints are joined by their own number, and not by that of the report",
        "worker/session.py",
        "self.send(wire.Reported, index=index, ordinal=index if checkpoint else None, **fields)",
        "self.send(wire.Reported, index=index, ordinal=self._checkpoints if checkpoint else None, **fields)",
    ),
    Known(
        "a batch that a Rollback has ended was only a look",
        "data/positions.py",
        "self._is_reported or self._is_interrupted\n",
        "self._is_reported\n",
    ),
    Known(
        "rows are left out only until the next start",
        "coordinator/store/run_store.py",
        '        self._note_in_manifest(latest, {"skip_to": self.committed[-1].skip_to})\n',
        "",
        "rollbacks,starts",
    ),
    Known(
        "checkpoints in memory that a Rollback gave up stay",
        "coordinator/coordinator.py",
        "        self._memory.drop_others()\n",
        "",
    ),
    Known(
        "a checkpoint is deleted while it is validated",
        "coordinator/report_handler.py",
        "        return self.validations.awaits(saved) or (",
        "        return (",
    ),
    Known(
        "a new start forgets the validations that wait",
        "coordinator/coordinator.py",
        "            self._validations.start(self._loop)\n",
        "            self._validations._loop = self._loop\n",
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
        "coordinator/coordinator.py",
        "        if not self._memory.is_storing:  # that waits for what is fetched\n",
        "        if True:\n",
    ),
    Known(
        "ranks of hosts without the storage are told to copy their files themselves",
        "coordinator/report_handler.py",
        " or self.store.is_remote or self.lacks_storage(report.rank)",
        " or self.store.is_remote",
    ),
    Known(
        "agents without the storage store a checkpoint there when the coordinator is gone",
        "coordinator/coordinator.py",
        'storage_of=lambda host: "" if store.is_remote or lacks_storage(host) else str(store.location)',
        'storage_of=lambda host: "" if store.is_remote else str(store.location)',
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
        "                os.replace(staging / file.path, place / file.path)\n",
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
        "uncommitted = sorted(set(self._directories.values()) - committed)",
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
        "coordinator/report_handler.py",
        "        self._uploads = {(rank, ordinal) for rank, ordinal in self._uploads if rank not in ranks}\n",
        "",
    ),
    Known(
        "a rank that was stopped while it waited is not to blame",
        "coordinator/hang_monitor.py",
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
        "            self._clock.pause()\n",
        "            pass\n",
    ),
    Known(
        "a rank whose debugger nobody uses any longer waits for a person",
        "coordinator/debuggers.py",
        "            debugger.user = None\n            self._tell(rank)\n",
        "            debugger.user = None\n",
    ),
    Known(
        "no hang is shown once a host is lost whose ranks had finished",
        "coordinator/coordinator.py",
        "        hosts = self.machine.living_hosts\n",
        "        hosts = list(self.machine.plan.hosts)\n",
    ),
    Known(
        "a hang whose rank then finishes never ends",
        "coordinator/hang_monitor.py",
        "        if ok:\n            self._note_move()\n",
        "",
    ),
    Known(
        "a checkpoint that waits for its validation is queued again by a restart",
        "coordinator/validations.py",
        " and self._request.validator is not None and not self.awaits(saved):\n",
        " and self._request.validator is not None:\n",
    ),
    Known(
        "ranks that say nothing are not asked where they are",
        "coordinator/hang_monitor.py",
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
        "coordinator/run/manifest.py",
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
        "coordinator/report_handler.py",
        "(self.store.is_committing or self.awaits_uploads())",
        "self.store.is_committing",
        "quiet",
    ),
    Known(
        "a checkpoint in memory gets the name of one in the bucket",
        "coordinator/memory_rounds.py",
        'self.store.new_name(manifest["index"])',
        'self.store.paths.checkpoint(manifest["index"]).name',
    ),
    Known(
        "a rank that fails while the run stops makes it wait for others as long as ever",
        "decisions/run_machine.py",
        "self._deadline = self._stop_by = now + grace_s",
        "self._deadline = now + grace_s",
    ),
]
