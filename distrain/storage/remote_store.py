"""The run directory elsewhere: a local spool of the small files, and a keeper for all that goes there.

Runs in: coordinator.

What is written line by line (metrics, logs, the run manifest) is written here, in the spool, and mirrored every few
seconds by a process of its own, the keeper. Checkpoints go there directly, from the host that has them. The coordinator
itself only looks there while the run is being opened; later it gives orders and hears what came of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from functools import partial
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.checkpoint import MANIFEST_FILE, METADATA_FILE, PENDING_FILE, unread
from distrain.errors import CheckpointError, StorageError
from distrain.storage.executor import StorageExecutor
from distrain.storage.local_store import RunStore
from distrain.storage.paths import DAMAGED_FILE, choose_run, is_copy, number_of, read_manifest
from distrain.storage.records import CommittedCheckpoint, committed_at
from distrain.storage.run_lock import RunLock
from distrain.storage.uploader_link import UploaderLink
from distrain.system import process
from distrain.system.log import say, warn
from distrain.system.remote_path import RemotePath, encode_filesystem, locate, own_temporary_directory

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from distrain.storage.commit import Commit
    from distrain.system.background import Background
    from distrain.system.loop import Loop

_INTERRUPTED = "the wait for the storage was interrupted"


def open_run(storage_path: str | os.PathLike[str] | None, name: str | None, filesystem: Any = None) -> RunStore:
    """The store of the run that :func:`choose_run` names, locked. Raises StorageError, as the stores do."""
    while True:
        root = choose_run(storage_path, name, filesystem)
        store = RemoteStore(root) if isinstance(root, RemotePath) else RunStore(root)
        if read_manifest(root).get("status") != "finished":
            return store
        store.close()  # another process has finished it just before we got the lock


class RemoteStore(RunStore):
    """A run directory that is reached through fsspec. Raises StorageError if it cannot be used or is in use."""

    is_elsewhere = True

    def __init__(self, run: RemotePath) -> None:
        self._run = run
        self._orders: Callable[[wire.Message], None] = self._do_here
        self._link: UploaderLink | None = None
        self._here: StorageExecutor | None = None
        self._token = 0
        self._waiting: dict[int, Callable[[str | None], None]] = {}
        self._directories: dict[tuple[int, int], str] = {}
        self._used: set[str] = set()
        self._held: RunLock | None = None
        self._broken: str | None = None
        try:
            self.is_of_this_process = run.is_of_this_process
            spool = _spool_of(run)
        except OSError as error:
            raise StorageError(f"cannot use the storage: {error}") from error
        super().__init__(spool)
        self._run = RemotePath(run.url, run.given)  # from now on with the usual patience

    @property
    def place(self) -> RemotePath:
        return self._run

    @property
    def storage_path(self) -> str:
        return self._run.parent.url

    @property
    def filesystem(self) -> str:
        return "" if self.is_of_this_process else encode_filesystem(self._run.given)

    def shown(self, path: Path) -> str:
        root = self.paths.root
        return str(self._run / str(path.relative_to(root))) if path.is_relative_to(root) else str(path)

    # -- opening --------------------------------------------------------------------------------------------------

    def _take(self, undo: contextlib.ExitStack) -> None:
        if list(self.paths.root.iterdir()) == [self.paths.lock]:  # and nothing of an earlier run
            undo.callback(_forget, self.paths.root)
        if not self.is_of_this_process:  # else nobody else can get at it
            self._held = RunLock.take(self._run)
            undo.callback(self._release)
        self._fill_spool()

    def _fill_spool(self) -> None:
        """The small files as they are there, unless a run that was killed has left newer ones here."""
        there = read_manifest(self._run)
        here = read_manifest(self.paths.root)
        if here and here.get("run_id") == there.get("run_id"):
            return
        for path in self.paths.root.iterdir():
            if path != self.paths.lock:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for name in (self.paths.manifest.name, self.paths.metrics.name):
            with contextlib.suppress(FileNotFoundError):
                self._run.get(name, self.paths.root / name)

    def _find(self) -> tuple[int, list[CommittedCheckpoint]]:
        """Look at all that is there, and sweep what was never finished."""
        files: dict[str, dict[str, tuple[int, str]]] = {}
        for path, fact in self._run.files().items():
            folder, _, name = path.partition("/")
            files.setdefault(folder, {})[name] = fact
        for folder, found in files.items():
            if PENDING_FILE in found:
                (self._run / folder / PENDING_FILE if MANIFEST_FILE in found else self._run / folder).remove()
        self._used = set(files)
        manifests = self._manifests([folder for folder, found in files.items() if MANIFEST_FILE in found], files)
        manifests.sort(key=lambda pair: pair[1]["index"])
        committed = [committed_at(self._run / folder, said) for folder, said in manifests]
        index = max((said["index"] for _, said in manifests), default=-1)
        return max(index, *map(number_of, self._used), -1) + 1, committed

    def _manifests(
        self, folders: Sequence[str], files: Mapping[str, Mapping[str, tuple[int, str]]]
    ) -> list[tuple[str, dict[str, Any]]]:
        """Of the checkpoints whose files are what their manifests say; others are set aside."""
        intact = []
        for folder in folders:
            text = (self._run / folder / MANIFEST_FILE).read()
            if _is_copy(folder, text):
                continue
            damage = _damage_of(self._run / folder, text, files[folder])
            if damage is None:
                intact.append((folder, json.loads(text)))
            else:
                (self._run / folder / DAMAGED_FILE).write(text)
                (self._run / folder / MANIFEST_FILE).remove()
                warn(f"{self._run / folder} is damaged: {damage}; its manifest is called {DAMAGED_FILE} from now on")
        return intact

    # -- orders ---------------------------------------------------------------------------------------------------

    def drop_end(self) -> None:
        super().drop_end()
        for path in self.paths.end():
            (self._run / path.name).remove()

    def start(self, loop: Loop | None, background: Background, run_id: str, flags: Sequence[str]) -> None:
        super().start(loop, background, run_id, flags)
        if not self.is_of_this_process:
            ids = {process.RUN_IDS: process.extended_run_ids(run_id)}
            self._link = UploaderLink(loop, self.answered, flags=flags, environment=ids)
            self._orders = self._link.order
        lock = self._held.as_text() if self._held else ""
        self._orders(
            wire.OpenStorage(url=self._run.url, filesystem=self.filesystem, spool=str(self.paths.root), lock=lock)
        )

    def opening(self) -> wire.OpenStorage | None:
        return None if self.is_of_this_process else wire.OpenStorage(url=self._run.url, filesystem=self.filesystem)

    def _do_here(self, order: wire.Message) -> None:
        self._answer_here(order, self.answered)

    def upload(self, order: wire.Upload, then: Callable[[wire.Message], None]) -> None:
        self._answer_here(order, then)

    def _answer_here(self, order: wire.Message, then: Callable[[wire.Message], None]) -> None:
        keeper = self._here = self._here or StorageExecutor(self._run, self._warn)
        self._background.do(lambda: keeper.do(order), then)

    def _order(self, kind: Callable[..., wire.Message], then: Callable[[str | None], None], **fields: Any) -> None:
        self._token += 1
        self._waiting[self._token] = then
        self._orders(kind(token=self._token, **fields))

    def answered(self, message: wire.Message) -> None:
        """What a keeper says."""
        match message:
            case wire.StorageOpened(failed=failed):
                if failed is not None:
                    self._fail(f"cannot use the storage: {failed}")
            case wire.OrderDone(token=token, failed=failed):
                self._waiting.pop(token)(failed)
            case wire.Notice(text=text):
                warn(text)
            case wire.HostFailed(text=text):
                self._fail(text)

    def _fail(self, why: str) -> None:
        if self._broken is None:
            self._broken = why
            super()._fail(why)

    @property
    def idle(self) -> bool:
        return not self._waiting and super().idle

    def settle(self) -> None:
        try:
            if self._link is not None:
                self._link.settle(self.tell_wait)
        except KeyboardInterrupt:
            self.abandon()
            raise

    def tell_wait(self) -> None:
        """For whoever wonders why fit() does not end."""
        say(f"waiting for {self._run} to take what has not arrived there yet; Ctrl-C ends the waiting")

    def detach(self) -> None:
        super().detach()
        if self._link is not None:
            self._link.detach()

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def prepare(self, attempt: int, ordinal: int, rank: int, *, name: str | None, then: Callable[[str], None]) -> None:
        then(self._directory(attempt, ordinal, name))

    def _directory(self, attempt: int, ordinal: int, name: str | None) -> str:
        """Choose a name that nothing there has."""
        if (attempt, ordinal) not in self._directories:
            wanted = name or self._next_name()
            free, number = wanted, 1
            while free in self._used:
                number += 1
                free = f"{wanted}-{number}"
            if free != wanted:
                warn(f"there is a {wanted} in {self._run} already; this checkpoint is called {free}")
            self._used.add(free)
            self._directories[attempt, ordinal] = free
        return self._directories[attempt, ordinal]

    def _next_name(self) -> str:
        """A number that was never used, also by a checkpoint that came to nothing: its files may still arrive."""
        number = max(self._next_index, *(number_of(name) + 1 for name in self._used), 0)
        return self.paths.checkpoint(number).name

    def commit(
        self,
        attempt: int,
        commit: Commit,
        *,
        name: str | None = None,
        folder: str | None = None,
        validation: Mapping[str, Any] | None = None,
        then: Callable[[CommittedCheckpoint], None],
    ) -> None:
        directory = folder or self._directory(attempt, commit.ordinal, name)
        self._used.add(directory)
        manifest = self._manifest(attempt, commit, directory, validation)
        self._next_index += 1
        self._commits += 1

        def published(failed: str | None) -> None:
            if failed is not None:
                not_committed(failed)
                return
            saved = committed_at(self._run / directory, manifest)
            if self.is_of_this_process:
                self._background.do(lambda: self._fetch(saved), done, not_committed)
            else:
                done(saved)

        def not_committed(why: object) -> None:
            self._commits -= 1
            self._fail(f"cannot write checkpoint {commit.ordinal}: {why}")

        def done(saved: CommittedCheckpoint) -> None:
            self._commits -= 1
            self.committed.append(saved)
            then(saved)

        self._order(
            wire.PublishCheckpoint, published, directory=directory, manifest=manifest, metadata=dict(self.metadata)
        )

    def _amend_manifest(self, saved: CommittedCheckpoint, fields: Mapping[str, Any]) -> None:
        failed = partial(_warn_if_failed, f"what came of the validation of {saved.path.name} could not be written")
        self._order(wire.UpdateManifest, failed, directory=saved.path.name, fields=dict(fields))

    def delete(self, positions: Sequence[int]) -> None:
        if not positions:
            return
        names = [self.committed.pop(position).path.name for position in sorted(positions, reverse=True)]
        self._background.do(lambda: self._forget_copies(names))
        self._order(
            wire.DeleteCheckpoints,
            partial(_warn_if_failed, "a superfluous checkpoint could not be deleted"),
            directories=names,
        )

    def _forget_copies(self, names: Sequence[str]) -> None:
        for name in names:
            with unread(self.paths.fetched / name) as free:
                if free:
                    shutil.rmtree(self.paths.fetched / name, ignore_errors=True)

    def for_workers(self, saved: CommittedCheckpoint) -> str:
        if not self.is_of_this_process:
            return str(saved.path)
        self._fetch(saved)
        return str(self.paths.fetched / saved.path.name)

    def _fetch(self, saved: CommittedCheckpoint) -> CommittedCheckpoint:
        """Copy a checkpoint to where other processes can read it, unless it is there already; returns it unchanged."""
        copy = self.paths.fetched / saved.path.name
        if not copy.exists():
            try:
                saved.checkpoint.to_directory(copy)
            except CheckpointError as error:
                raise OSError(str(error)) from error
        return saved

    # -- the end --------------------------------------------------------------------------------------------------

    def _manifest_written(self) -> None:
        if self._link or self._here:
            self._order(wire.MirrorRecords, self._mirrored)

    def _mirrored(self, failed: str | None) -> None:
        if failed is not None and self._broken is None:
            warn(f"what happens in this run is only in {self.paths.root} for now: {failed}")

    def close(self) -> None:
        """Bring the last news there, and give the directory free. The spool stays if that cannot be done."""
        kept: str | None = _INTERRUPTED
        try:
            if not self.is_abandoned:
                kept = self._bring_last_news() if self._link or self._here else None
        finally:
            if self._link is not None:
                self._link.close()
            self._give_free(kept)

    def _give_free(self, kept: str | None) -> None:
        """The spool goes while it is still ours: the next run may begin in one of the same name at once."""
        try:
            if not self.is_abandoned:  # else it is free when this process has ended, or in a while
                self._release()
            if kept is None:
                _forget(self.paths.root)
            else:
                warn(f"metrics, logs and the end of this run are only in {self.paths.root}: {kept}")
        finally:
            super().close()

    def _bring_last_news(self) -> str | None:
        """None if all is there, or why not."""
        problems: list[str | None] = []
        committed = {saved.path.name for saved in self.committed}
        pending = sorted(set(self._directories.values()) - committed)
        self._order(wire.DeleteCheckpoints, lambda failed: None, directories=pending)
        self._order(wire.MirrorRecords, problems.append)
        self.settle()
        return next((problem for problem in problems if problem), None)

    def _release(self) -> None:
        if self._held is not None:
            with contextlib.suppress(OSError, StorageError):  # it is free in a while
                self._held.release()


def _is_copy(folder: str, manifest: bytes) -> bool:
    with contextlib.suppress(ValueError):
        said = json.loads(manifest)
        return isinstance(said, dict) and is_copy(folder, said)
    return False


def _warn_if_failed(what: str, failed: str | None) -> None:
    if failed is not None:
        warn(f"{what}: {failed}")


def here_of(run: str) -> Path:
    """The directory on this machine that a run has, or would have; the run directory itself, if it is not elsewhere.
    Raises StorageError.
    """
    try:
        place = locate(run)
        return _spool_of(place) if isinstance(place, RemotePath) else place
    except OSError as error:
        raise StorageError(str(error)) from error


def _spool_of(run: RemotePath) -> Path:
    """The same for every run of this name on this machine, so that what was not mirrored is found again."""
    identity = f"{type(run.filesystem).__name__} {run.url}"
    folder = own_temporary_directory("spool") / hashlib.sha256(identity.encode()).hexdigest()[:16]
    return folder / run.name


def damage_elsewhere(checkpoint: RemotePath) -> str | None:
    """What is wrong with a checkpoint elsewhere, which need not be of a run: one without any manifest is taken for
    somebody's own. Raises OSError.
    """
    present = checkpoint.files()
    if MANIFEST_FILE in present:
        return _damage_of(checkpoint, (checkpoint / MANIFEST_FILE).read(), present)
    return "it was never finished, or is half deleted" if PENDING_FILE in present else None


def _forget(spool: Path) -> None:
    shutil.rmtree(spool, ignore_errors=True)
    with contextlib.suppress(OSError):
        spool.parent.rmdir()


def _damage_of(checkpoint: RemotePath, manifest: bytes, present: Mapping[str, tuple[int, str]]) -> str | None:
    """What is wrong, by its manifest and a listing; metadata may be changed at any time. Files that were written again
    are read: whoever has copied the whole run has changed nothing. Raises OSError.
    """
    try:
        said = json.loads(manifest)
        said["metrics"].items(), int(said["index"])
        files = {
            name: (fact["size"], int(fact["crc32"], 16), fact.get("version")) for name, fact in said["files"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST_FILE} cannot be understood ({type(error).__name__}: {error})"
    files.pop(METADATA_FILE, None)
    for name, (size, crc, version) in files.items():
        if name not in present:
            return f"{name} is missing"
        found, found_version = present[name]
        if found != size:
            return f"{name} has {found} bytes instead of {size}"
        if version and found_version != version and (checkpoint / name).crc32() != (size, crc):
            return f"{name} has changed since it was committed"
    return None
