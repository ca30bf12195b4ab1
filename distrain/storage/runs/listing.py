"""The runs in a storage path, and what their run.json says. Runs in: anywhere.

A list of a thousand local runs must appear at once. So a run costs one file that is read, and one more for its last
report; and what is slow to import, as for remote storage, is imported when it is needed.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from distrain.storage import names
from distrain.storage.lines import MOST_BYTES, last_record, parse_json, read_file
from distrain.storage.lock_probe import is_locked
from distrain.system.text import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrain.system.remote_path import RemotePath

RUNNING, FINISHED, FAILED, STOPPED = names.STATUSES
STARTING = "starting"
"""The state of a directory that a coordinator has locked, but not written to yet."""
KILLED = "killed"
"""The state of a run whose run.json says that it is running, while nobody holds its lock."""
DAMAGED = "damaged"
FOREIGN = "not a run"
ENDED = (FINISHED, FAILED, STOPPED, KILLED)
_THREADS = 16
"""Remote runs that are read at the same time."""


class Run(NamedTuple):
    """A directory in a storage path.

    state: a status of run.json, or one of the other states above.
    problem: why it is damaged, or no run.
    manifest: the contents of run.json, {} if it is damaged or missing.
    changed: the time of the last change of a directory without a usable run.json; else 0.
    """

    name: str
    path: str
    state: str
    problem: str = ""
    manifest: dict[str, Any] = {}  # noqa: RUF012 - never changed
    changed: float = 0.0

    @property
    def began(self) -> float:
        """The time at which the last ``fit()`` of the run began."""
        return number_in(self.manifest.get("continued")) or number_in(self.manifest.get("started")) or self.changed

    @property
    def ended(self) -> float:
        """The time at which the run has ended, or of the last sign of life."""
        return number_in(self.manifest.get("updated")) or self.changed

    @property
    def is_run(self) -> bool:
        """True if there is a usable run.json."""
        return bool(self.manifest)

    @property
    def script(self) -> str:
        """The script, module or function, without its directory; "" if unknown."""
        return os.path.basename(str(self.manifest.get("script") or ""))

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """The attempts, the oldest first, without those that are damaged: they have no number, date or first step."""
        attempts: list[dict[str, Any]] = self.manifest.get("attempts", [])
        return attempts

    @property
    def attempts_now(self) -> list[dict[str, Any]]:
        """The attempts of the last ``fit()``, the oldest first."""
        return [attempt for attempt in self.attempts if number_in(attempt.get("started")) >= self.began]

    @property
    def hosts(self) -> dict[str, list[int]]:
        """The hosts of the last attempt, each with its ranks."""
        attempts = self.attempts
        hosts = attempts[-1].get("hosts") if attempts else None
        listed = hosts.items() if isinstance(hosts, dict) else ()
        return {host: ranks for host, ranks in listed if isinstance(ranks, list) and all(map(_is_whole, ranks))}

    @property
    def ranks(self) -> int:
        """The number of ranks of the last attempt."""
        return sum(len(ranks) for ranks in self.hosts.values())

    @property
    def location(self) -> Path | RemotePath:
        """The run directory."""
        if "://" not in self.path:
            return Path(self.path)
        from distrain.system.remote_path import locate

        return locate(self.path)

    def last_report(self, most: int = MOST_BYTES) -> dict[str, Any] | None:
        """Return rank 0's last line among the last bytes of metrics.jsonl, or None. Warn of damaged lines."""
        try:  # making a Path takes as long as the reading
            path = f"{self.path}/{names.METRICS}" if "://" not in self.path else self.location / names.METRICS
            return last_record(path, most)
        except OSError:
            return None

    @property
    def first_steps(self) -> dict[Any, Any]:
        """The first steps of the attempts by number."""
        return {attempt["attempt"]: attempt.get("first_step") for attempt in self.attempts}

    def step_of(self, record: dict[str, Any], first_steps: dict[Any, Any] | None = None) -> int:
        """Return the step of a report over the whole run. ``first_steps``: if they are known."""
        firsts = self.first_steps if first_steps is None else first_steps
        return int(number_in(firsts.get(record["attempt"]))) + int(number_in(record["index"]))

    def bytes(self) -> int:
        """Return the size of all files of the run on disk, in bytes. It looks at each of them."""
        folder = self.location
        if isinstance(folder, Path):
            return _size_of(folder)
        return sum(size for size, _ in folder.files().values())


def _attempts_in(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the attempts that have what all readers need, without damaged times."""
    listed = manifest["attempts"]
    found = (one for one in listed if isinstance(one, dict)) if isinstance(listed, list) else ()
    return [
        {key: value for key, value in one.items() if key not in ("training", "ended") or number_in(value)}
        for one in found
        if _is_whole(one.get("attempt")) and _is_whole(one.get("first_step") or 0) and number_in(one.get("started"))
    ]


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and abs(value) < 1e15


def number_in(value: object) -> float:
    """Return a number from a file of a run if it is usable, and 0 for anything else."""
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e15 else 0.0


def _size_of(folder: str | Path) -> int:
    total, folders = 0, [str(folder)]
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:  # it may be deleted in the meantime
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    total += entry.stat(follow_symlinks=False).st_size
    return total


def storage_at(path: str | os.PathLike[str] | None) -> Path | RemotePath:
    """Return the storage path that a user means, the default for None. Raise OSError for a wrong URL."""
    text = os.fspath(names.DEFAULT_STORAGE if path is None else path)
    if "://" not in text:
        return Path(os.path.abspath(os.path.expanduser(text)))
    from distrain.system.remote_path import OPENING_PATIENCE_S, RemotePath, locate

    found = locate(text)
    return RemotePath(found.url, patience_s=OPENING_PATIENCE_S) if isinstance(found, RemotePath) else found


def list_runs(storage: Path | RemotePath) -> list[Run]:
    """Return what is in a storage path, the newest first, and at the end what isn't a run.

    A run directory itself is listed as one run.

    Files, hidden directories and the output directories of Hydra are left out. Raise OSError if the storage cannot be
    read.
    """
    found = _local_runs(storage) if isinstance(storage, Path) else _remote_runs(storage)
    return sorted(found, key=lambda run: (run.state != FOREIGN, run.began), reverse=True)


def _local_runs(storage: Path) -> list[Run]:
    if (storage / names.MANIFEST).exists():
        return [local_run(str(storage))]
    with os.scandir(storage) as entries:
        found = [local_run(entry.path) for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
    return [run for run in found if run.state != FOREIGN or not os.path.exists(f"{run.path}/.hydra")]


def _remote_runs(storage: RemotePath) -> list[Run]:
    from distrain.system.background import in_threads

    listed = storage.names()
    if names.MANIFEST in listed:
        return [remote_run(storage)]
    folders = [storage / name for name in listed if not name.startswith(".") and not set(name) & set("*?[")]
    return [run for run in in_threads(remote_run, folders, threads=_THREADS) if run.state != FOREIGN or run.problem]


def local_run(path: str) -> Run:
    """Return the run in a local directory. Never raises for what is in it."""
    read = partial(read_file, f"{path}/{names.MANIFEST}")
    run = _read(os.path.basename(path), path, read, partial(is_locked, path))
    return run._replace(changed=_changed(path)) if not run.manifest else run


def remote_run(folder: RemotePath) -> Run:
    """Return the run in a remote directory. Never raises for what is in it."""
    from distrain.errors import StorageError
    from distrain.storage.run_lock import is_in_use

    def is_running() -> bool:
        try:
            return is_in_use(folder)
        except (OSError, StorageError):  # a damaged lock says nothing
            return True

    return _read(folder.name, folder.url, (folder / names.MANIFEST).read_bytes, is_running)


def _read(name: str, path: str, read: Callable[[], bytes], is_in_use: Callable[[], bool]) -> Run:
    """Return a run by its run.json, which is read again if the run has ended meanwhile."""
    for _ in range(2):
        try:
            manifest = parse_json(read())
        except FileNotFoundError:
            return _without_manifest(name, path, is_in_use)
        except OSError as error:
            return Run(name, path, DAMAGED, f"{names.MANIFEST} cannot be read: {error.strerror or error}")
        except ValueError as error:
            return Run(name, path, DAMAGED, f"{names.MANIFEST} is damaged: {error}")
        if not isinstance(manifest, dict) or not {"status", "run_id", "attempts"} <= manifest.keys():
            return Run(name, path, FOREIGN, f"{names.MANIFEST} is another program's")
        status = names.status_in(manifest)
        if status not in names.STATUSES:
            return Run(name, path, DAMAGED, f"{names.MANIFEST} has the status {status!r:.40}")
        manifest["attempts"] = _attempts_in(manifest)
        if status != RUNNING or is_in_use():
            return Run(name, path, status, manifest=manifest)
    return Run(name, path, KILLED, manifest=manifest)


def _without_manifest(name: str, path: str, is_in_use: Callable[[], bool]) -> Run:
    if "://" in path:
        return Run(name, path, FOREIGN)
    if not os.path.exists(f"{path}/{names.LOCK}"):
        return Run(name, path, FOREIGN, f"it has no {names.MANIFEST}")
    if is_in_use():
        return Run(name, path, STARTING)
    return Run(name, path, DAMAGED, f"it has no {names.MANIFEST}: the run was killed as it began")


def _changed(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


# -- by name ---------------------------------------------------------------------------------------------------------

LAST = "last"


class WrongArgument(Exception):
    """A question about runs cannot be answered as it was asked. The text says what to do."""


class NoSuchRun(WrongArgument):
    """No run, or several, have the given name."""


def find_run(given: str, storage: Path | RemotePath) -> Run:
    """Return the run that a user means: a path, a URL, a name or the unique beginning of one, or ``last``.

    Raise NoSuchRun, also for a directory that is not a run, and OSError if the storage cannot be read.
    """
    if "://" in given or os.sep in given or given in (".", ".."):
        return _checked(run_at(storage_at(given)))
    listed = _names_in(storage)
    if given in listed:
        return _checked(run_at(storage / given))
    if given == LAST:
        runs = [run for run in list_runs(storage) if run.state not in (FOREIGN, DAMAGED)]
        if not runs:
            raise NoSuchRun(f"there is no run in {storage}")
        return runs[0]
    matching = [name for name in listed if name.startswith(given)]
    if len(matching) == 1:
        return _checked(run_at(storage / matching[0]))
    if matching:
        shown = matching if len(matching) <= _MOST_SHOWN else [*matching[:_MOST_SHOWN], "..."]
        several = f"{len(matching)} names in {storage} begin with {given!r}; give more of one:"
        raise NoSuchRun("\n  ".join([several, *shown]))
    if os.path.isdir(given):
        return _checked(run_at(storage_at(given)))
    hint = did_you_mean(given, listed)
    raise NoSuchRun(f"no run in {storage} has a name that begins with {given!r}; `distrain ls` lists them{hint}")


_MOST_SHOWN = 10


def _names_in(storage: Path | RemotePath) -> list[str]:
    """Return the names of the directories in a storage path; none if it does not exist."""
    if not isinstance(storage, Path):
        return storage.names()
    try:
        with os.scandir(storage) as entries:
            return sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
    except FileNotFoundError:
        return []


def run_at(folder: Path | RemotePath) -> Run:
    """Return the run in a directory. Never raises for what is in it."""
    return local_run(str(folder)) if isinstance(folder, Path) else remote_run(folder)


def _checked(run: Run) -> Run:
    if run.state == FOREIGN:
        if "://" not in run.path and not os.path.exists(run.path):
            raise NoSuchRun(f"there is no directory {run.path}")
        raise NoSuchRun(f"{run.path} is not a run: {run.problem or f'it has no {names.MANIFEST}'}")
    if run.state == DAMAGED:
        raise NoSuchRun(f"{run.path} is damaged: {run.problem}")
    return run
