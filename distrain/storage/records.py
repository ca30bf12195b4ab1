"""The manifests of checkpoints: read, completed, and compared with the files. Runs in: anywhere."""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING, Any

from distrain.storage.checkpoint import MANIFEST_FILE, METADATA_FILE, PENDING_FILE, POSITIONS
from distrain.storage.commit import CommittedCheckpoint, committed, file_entry, unreadable, why_disowned
from distrain.storage.file_transfer import Files, hash_files
from distrain.storage.lines import parse_json, read_file
from distrain.system.remote_path import RemotePath

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


def committed_at(path: Path | RemotePath) -> CommittedCheckpoint:
    """Return the checkpoint at ``path`` by its manifest. Raise StorageError."""
    try:
        manifest = parse_json(read_file(path / MANIFEST_FILE))
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    return committed(path, manifest)


def complete_manifest(
    checkpoint: Path | RemotePath,
    manifest: Mapping[str, Any],
    metadata: Mapping[str, Any],
    positions: Mapping[str, Any],
    write: Callable[[bytes], None],
) -> tuple[dict[str, Any], str]:
    """Add the run's metadata to the checkpoint's own, whose entries win. Return the manifest with that file.

    Also return what is wrong with that file, or "". Raise OSError.
    positions: the positions in the data. They replace those in the checkpoint's own metadata, which are old.
    write: replaces the metadata file.
    """
    files = dict(manifest["files"])
    completed = {**manifest, "files": files}
    if not metadata and not positions:
        return completed, ""
    try:
        own = json.loads((checkpoint / METADATA_FILE).read_bytes()) if METADATA_FILE in files else {}
    except ValueError:
        own = None
    if not isinstance(own, dict):
        return completed, "holds no JSON object; the run's metadata and the positions in the data are not added to it"
    data = json.dumps({**metadata, **own, **({POSITIONS: positions} if positions else {})}).encode()
    write(data)
    files[METADATA_FILE] = file_entry(len(data), zlib.crc32(data), rank=0)
    return completed, ""


def manifest_text(manifest: Mapping[str, Any], **fields: Any) -> bytes:
    """Return the text of the manifest of a checkpoint, with some of its fields replaced."""
    return json.dumps({**manifest, **fields}, indent=1).encode()


# -- damage ----------------------------------------------------------------------------------------------------------


def damage_of(
    checkpoint: Path | RemotePath,
    *,
    read_files: bool = True,
    needs_manifest: bool = True,
    is_needed: Callable[[], bool] = lambda: True,
) -> str | None:
    """Return how a checkpoint differs from its manifest, or None. Metadata may differ, as users may change it.

    read_files: compare the bytes of local files, too. Of remote files, only those with another version are read.
    needs_manifest: False for a directory that a user may have made.
    is_needed: once it returns False, local files are read no further.
    Raise OSError if the checkpoint cannot be read, or is not read to its end.
    """
    try:
        manifest = read_file(checkpoint / MANIFEST_FILE)
    except FileNotFoundError:
        if isinstance(checkpoint, RemotePath) and PENDING_FILE in checkpoint.files():
            return "it was never finished, or is being deleted"
        return f"{MANIFEST_FILE} is missing" if needs_manifest else None
    if isinstance(checkpoint, RemotePath):
        return remote_damage(checkpoint, manifest, checkpoint.files())

    def size_of(name: str) -> int | None:
        try:
            return (checkpoint / name).stat().st_size
        except FileNotFoundError:
            return None

    def hash_all(files: Mapping[str, Mapping[str, Any]]) -> Files:
        return hash_files(checkpoint, list(files), is_needed=is_needed) if read_files else []

    return _difference(manifest, size_of, hash_all)


def remote_damage(checkpoint: RemotePath, manifest: bytes, present: Mapping[str, tuple[int, str]]) -> str | None:
    """Return how a remote checkpoint differs from its manifest, or None.

    ``present``: its files, as :meth:`RemotePath.files` returns them. Only a file with another version is read: a run
    that was copied to another bucket has new versions of the same bytes. Raise OSError.
    """

    def hash_others(files: Mapping[str, Mapping[str, Any]]) -> Files:
        return checkpoint.hash_all(
            [name for name in files if files[name].get("version", "") not in ("", present[name][1])]
        )

    return _difference(manifest, lambda name: present.get(name, (None, ""))[0], hash_others)


def _difference(
    manifest: bytes,
    size_of: Callable[[str], int | None],
    hash_some: Callable[[Mapping[str, Mapping[str, Any]]], Files],
) -> str | None:
    """Compare the sizes of all files, and the hashes that ``hash_some`` returns, with the manifest."""
    try:
        fields = parse_json(manifest)
        fields["metrics"].items(), int(fields.get("index", -1))
        if reason := why_disowned(fields):
            return reason
        files = {name: fact for name, fact in fields["files"].items() if name != METADATA_FILE}
        sizes = {name: fact["size"] for name, fact in files.items()}
        hashes = {name: int(fact["crc32"], 16) for name, fact in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST_FILE} cannot be parsed ({type(error).__name__}: {error})"
    for name, size in sizes.items():
        if (found := size_of(name)) != size:
            return f"{name} is missing" if found is None else f"{name} has {found} bytes instead of {size}"
    changed = (name for name, _, crc32 in hash_some(files) if crc32 != hashes[name])
    return next((f"{name} has changed since it was committed" for name in changed), None)
