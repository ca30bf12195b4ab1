"""A run directory on a local or shared file system. Runs in: coordinator.

A checkpoint is written under another name and flushed to disk with its manifest, then renamed: a directory called
``checkpoint_...`` is always complete. With NO_UPLOAD, the ranks have filled the directory themselves. Then there is no
rename: the manifest is written into that directory. :mod:`distrain.storage.paths` lists the files of a run directory.
"""

from __future__ import annotations

import errno
import json
import shutil
import threading
import uuid
from collections import deque
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain.coordinator.store.run_store import RunStore
from distrain.decisions.checkpoints.ledger import Ledger
from distrain.errors import StorageError
from distrain.storage.checkpoint import MANIFEST_FILE, METADATA_FILE, locked_for_deletion
from distrain.storage.file_transfer import flush
from distrain.storage.files import sync_directories, write_atomically, write_file
from distrain.storage.names import numbered
from distrain.storage.paths import DAMAGED
from distrain.storage.records import committed_at, complete_manifest, damage_of, manifest_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from distrain.decisions.checkpoints.actions import Delete, MakeDirectory, Publish, UpdateManifest
    from distrain.storage.commit import CommittedCheckpoint
    from distrain.system.background import Background


class LocalStore(RunStore):
    """The store of a local run directory. Raises StorageError if it cannot be used or is in use."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, root)
        self._generation = uuid.uuid4().hex[:8]
        """A name that keeps the files of ranks of earlier coordinators apart."""
        self._deleted: deque[Path] = deque()
        """Directories of deleted checkpoints whose space is not free yet."""
        self._deleting: threading.Thread | None = None
        with self._opening():
            self.directory.open()
            self.ledger = Ledger(self._find_intact(), self.paths.next_index())

    def _find_intact(self) -> list[CommittedCheckpoint]:
        """Return the checkpoints of an earlier part of the run, and rename damaged ones.

        Only names and sizes are compared; :meth:`verify` reads the files.
        """
        found: list[CommittedCheckpoint] = []
        for path in reversed(self.paths.checkpoints()):
            damage = _damage_of(path, read_files=False)
            if damage is None:
                found.append(committed_at(path))
            else:
                self._set_aside(path, damage)
        return found[::-1]

    def _set_aside(self, path: Path, damage: str) -> None:
        """Rename a damaged checkpoint, and warn. Raise StorageError."""
        try:
            renamed = self._free_path(f"{DAMAGED}{path.name}")
            path.rename(renamed)
        except OSError as error:
            raise StorageError(f"cannot rename {path}, which is damaged: {damage}: {error}") from error
        self._warn_from_background(f"{path} is damaged: {damage}; it was renamed to {renamed.name}")

    def verify(self, thread: Background, *, is_needed: Callable[[], bool], then: Callable[[int], None]) -> None:
        newest_first = self.ledger.all[::-1]

        def find() -> dict[Path, str]:
            """Return the damage of each checkpoint that is younger than the latest intact one."""
            damages: dict[Path, str] = {}
            for saved in newest_first:
                path = self.paths.root / saved.path.name
                if saved.is_in_memory or (damage := _damage_of(path, is_needed=is_needed)) is None:
                    break
                damages[path] = damage
            return damages

        def set_aside(damages: dict[Path, str]) -> None:
            work = partial(starmap, self._set_aside, damages.items())
            self._background.do(lambda: list(work()), lambda _: then(len(damages)))

        thread.do(find, set_aside)

    def close(self) -> None:
        """Release the directory, after the space of deleted checkpoints is free."""
        if not self.is_stalled and self._deleting is not None:
            self._deleting.join()
        super().close()

    # -- commits --------------------------------------------------------------------------------------------------

    def prepare(self, new: MakeDirectory) -> None:
        self._do("a checkpoint", lambda: str(self.staging_directory(new.key)), new.then)

    def staging_directory(self, key: str) -> Path:
        """Make and return the directory for the files of all ranks. Raise OSError."""
        self.directory.check_same()
        folder = self._staging_path(key)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _staging_path(self, key: str) -> Path:
        return self.paths.staging / f"{self._generation}-{key}"

    def publish(self, new: Publish) -> None:
        folder = new.folder
        work = partial(self._commit_in_place, Path(folder), new) if folder else partial(self._rename, new)
        self._background.do(work, new.done, new.failed)

    def _rename(self, new: Publish) -> Path:
        """Write the manifest into the directory that has the files of all ranks, and rename it. Return its path."""
        manifest = new.manifest
        staged = self._staging_path(new.key)
        self.directory.check_same()
        files = list(manifest["files"])
        _check_sizes(staged, manifest["files"])
        name = manifest["name"] or self.paths.checkpoint(manifest["index"]).name
        final = self._free_path(name)
        if final.name != name:
            self._warn_from_background(f"{self.paths.root / name} exists, so this checkpoint is called {final.name}")
        write_file(staged / MANIFEST_FILE, self._manifest_text(staged, final, new))
        sync_directories(staged, files)
        staged.rename(final)
        flush(self.paths.root)
        return final

    def _commit_in_place(self, folder: Path, new: Publish) -> Path:
        """Write the manifest into a directory that the ranks have filled themselves. Return its path."""
        self.directory.check_same()
        sync_directories(folder, list(new.manifest["files"]))
        write_atomically(folder / MANIFEST_FILE, self._manifest_text(folder, folder, new))
        flush(folder)
        flush(self.paths.root)
        return folder

    def _manifest_text(self, folder: Path, final: Path, new: Publish) -> bytes:
        """Return the manifest of the checkpoint in ``folder``, after adding the run's metadata and the positions."""
        write = partial(write_file, folder / METADATA_FILE)
        manifest, problem = complete_manifest(folder, new.manifest, self.metadata, new.positions, write)
        if problem:
            self._warn_from_background(f"{METADATA_FILE} of {final} {problem}")
        return manifest_text(manifest, name=final.name)

    def _free_path(self, name: str) -> Path:
        """Return a path in the run directory that does not exist: ``name``, or ``name`` with a number."""
        return next(path for one in numbered(name) if not (path := self.paths.root / one).exists())

    def update_manifest(self, new: UpdateManifest) -> None:
        name = new.saved.path.name

        def work() -> None:
            path = self.paths.root / name / MANIFEST_FILE
            try:
                text = manifest_text(json.loads(path.read_text()), **new.fields)
            except (ValueError, TypeError) as error:
                raise OSError(errno.EIO, f"it is damaged ({error})", str(path)) from error
            write_atomically(path, text)

        self._do_optional(f"the manifest of {name} could not be updated", work)

    # -- deletion -------------------------------------------------------------------------------------------------

    def delete(self, surplus: Delete) -> None:
        self._background.do(lambda: self._delete(surplus.chosen), surplus.kept)

    def _delete(self, chosen: Sequence[CommittedCheckpoint]) -> list[CommittedCheckpoint]:
        """Make each checkpoint vanish at once, by a rename. Return those that stay, because a process reads them."""
        kept = []
        for saved in chosen:
            path = self.paths.root / saved.path.name
            renamed = self.paths.staging / f"deleted-{path.name}-{uuid.uuid4().hex[:8]}"
            try:
                self.paths.staging.mkdir(exist_ok=True)
                with locked_for_deletion(path) as is_locked:
                    if is_locked:
                        path.rename(renamed)
                        self._deleted.append(renamed)
                    else:
                        kept.append(saved)
            except OSError as error:
                kept.append(saved)
                self._warn_from_background(f"an old checkpoint could not be deleted: {error}")
        self._free_space()
        return kept

    def _free_space(self) -> None:
        """Delete the renamed directories in a thread, so that later commits need not wait (0.2 s per GB on ext4).

        The next deletion or :meth:`close` deletes what the thread overlooks when it ends.
        """
        if not self._deleted or (self._deleting is not None and self._deleting.is_alive()):
            return
        deleting = threading.Thread(target=_delete_all, args=[self._deleted], name="distrain-delete", daemon=True)
        try:
            deleting.start()
            self._deleting = deleting
        except RuntimeError:  # the user may have no more threads
            _delete_all(self._deleted)


def _damage_of(path: Path, *, read_files: bool = True, is_needed: Callable[[], bool] = lambda: True) -> str | None:
    """Return how a checkpoint of the run is damaged, or None. Raise StorageError."""
    try:
        return damage_of(path, read_files=read_files, is_needed=is_needed)
    except OSError as error:
        raise StorageError(f"cannot read the checkpoint {path}: {error}") from error


def _delete_all(folders: deque[Path]) -> None:
    while folders:
        shutil.rmtree(folders.popleft(), ignore_errors=True)


def _check_sizes(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise OSError if a file that a rank has stored is not there, such as in a directory that hosts do not share."""
    for name, entry in files.items():
        if (folder / name).stat().st_size != entry["size"]:
            raise OSError(errno.EIO, "the file has changed since it was stored", str(folder / name))
