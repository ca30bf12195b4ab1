"""The runs in a storage path, and what their run.json says. Runs in: anywhere.

A list of a thousand local runs must appear at once. So a run costs one file that is read, and one more for its last
report; and what is slow to import, as for remote storage, is imported when it is needed.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from distrain.storage import names
from distrain.storage.lines import MOST_BYTES, is_number, last_record, parse_json, read_file
from distrain.storage.runs.notes import Notes, notes_of
from distrain.system.locks import is_locked
from distrain.system.text import did_you_mean, flatten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from distrain.system.remote_path import RemotePath

RUNNING, FINISHED, FAILED, STOPPED = names.STATUSES
STARTING = "starting"
"""The state of a directory that a coordinator has locked, but not written to yet."""
WAITING = "waiting"
"""The state of a job in a queue that has no run directory yet."""
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
    notes: those of its users.
    """

    name: str
    path: str
    state: str
    problem: str = ""
    manifest: dict[str, Any] = {}  # noqa: RUF012 - never changed
    notes: Notes = Notes()

    @property
    def changed(self) -> float:
        """The time of the last change of a local directory without a usable run.json; else 0."""
        with suppress(OSError):
            return 0.0 if self.manifest or "://" in self.path else os.stat(self.path).st_mtime
        return 0.0

    @property
    def began(self) -> float:
        """The time at which the last ``fit()`` of the run began."""
        return number_in(self.manifest.get("continued")) or number_in(self.manifest.get("started")) or self.changed

    @property
    def ended(self) -> float:
        """The time at which the run has ended, or of the last sign of life."""
        updated = number_in(self.manifest.get("updated")) or self.changed
        last = self.last_report() if self.state == KILLED else None  # run.json was written when the attempt began
        return max(updated, float(last["time"])) if last else updated

    @property
    def until(self) -> float:
        """The time at which the run has ended; now, if it has not."""
        return time.time() if self.is_active or self.state == WAITING else self.ended

    @property
    def is_active(self) -> bool:
        """True if it has not ended."""
        return self.state in (RUNNING, STARTING)

    @property
    def script(self) -> str:
        """The script, module or function, without its directory; "" if unknown."""
        return os.path.basename(str(self.manifest.get("script") or ""))

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """The attempts, the oldest first, without those that are damaged.

        Each has ``attempt`` and ``started``. Times are numbers, ``first_step`` is an integer; they may be missing.
        ``hosts``, by name with their ranks, is there.
        """
        attempts: list[dict[str, Any]] = self.manifest.get("attempts", [])
        return attempts

    @property
    def attempts_now(self) -> list[dict[str, Any]]:
        """The attempts of the last ``fit()``, the oldest first."""
        return [attempt for attempt in self.attempts if attempt["started"] >= self.began]

    @property
    def hosts(self) -> dict[str, list[int]]:
        """The hosts of the last attempt, each with its ranks."""
        hosts: dict[str, list[int]] = self.attempts[-1]["hosts"] if self.attempts else {}
        return hosts

    @property
    def ranks(self) -> int:
        """The number of ranks of the last attempt."""
        return sum(len(ranks) for ranks in self.hosts.values())

    @property
    def settings(self) -> dict[str, Any]:
        """Its settings; ``arguments`` are those of a script that the ranks run."""
        arguments = self.manifest.get("arguments")
        return {**({"arguments": arguments} if arguments else {}), **settings_in(self.manifest)}

    @property
    def location(self) -> Path | RemotePath:
        """The run directory."""
        if "://" not in self.path:
            return Path(self.path)
        from distrain.system.remote_path import locate

        return locate(self.path)

    def last_report(self, most: int = MOST_BYTES) -> dict[str, Any] | None:
        """Return rank 0's last line among the last bytes of metrics.jsonl, with its step. Warn of damaged lines."""
        try:  # a Path object takes as long as the reading
            path = f"{self.path}/{names.METRICS}" if "://" not in self.path else self.location / names.METRICS
            record = last_record(path, most)
        except OSError:
            return None
        return None if record is None else next(self.with_steps([record]))

    def with_steps(self, records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield reports with their ``step`` over the whole run."""
        firsts = {attempt["attempt"]: attempt.get("first_step", 0) for attempt in self.attempts}
        for record in records:
            yield {**record, "step": firsts.get(record["attempt"], 0) + int(record["index"])}

    def bytes(self) -> int:
        """Return the size of all files of the run on disk, in bytes. It looks at each of them."""
        folder, total = self.location, 0
        if not isinstance(folder, Path):
            return sum(size for size, _ in folder.files().values())
        for above, _, listed in os.walk(folder):
            for name in listed:
                with suppress(OSError):  # it may be deleted in the meantime
                    total += os.lstat(f"{above}/{name}").st_size
        return total


def settings_in(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the train_loop_config in a run.json, with ``/`` between the names of nested settings."""
    config = manifest.get("train_loop_config")
    return flatten(config) if isinstance(config, dict) else {}


def differing(found: Sequence[Mapping[str, Any]], missing: Any = None) -> dict[str, list[Any]]:
    """Return the values of each name that are not the same in all of several dicts, one for each dict.

    >>> differing([{"lr": 0.1, "seed": 1}, {"lr": 0.2, "seed": 1}, {"seed": 1}])
    {'lr': [0.1, 0.2, None]}
    """
    listed = {name: [one.get(name, missing) for one in found] for one in found for name in one}
    return {name: values for name, values in listed.items() if len(set(map(_masked, values))) > 1}


def _masked(value: Any) -> str:
    """Return a value as text, without the addresses of objects, which differ in every process."""
    return re.sub(r"0x[0-9a-f]+", "", repr(value))


def _attempts_in(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the attempts that have a number and a date, without what is damaged in them."""
    listed = manifest["attempts"]
    found = (one for one in listed if isinstance(one, dict)) if isinstance(listed, list) else ()
    return [
        {**{key: value for key, value in one.items() if key not in _CHECKS or _CHECKS[key](value)}, **_hosts_in(one)}
        for one in found
        if _is_whole(one.get("attempt")) and number_in(one.get("started"))
    ]


def _hosts_in(attempt: dict[str, Any]) -> dict[str, dict[str, list[int]]]:
    hosts = attempt.get("hosts")
    listed = hosts.items() if isinstance(hosts, dict) else ()
    return {"hosts": {host: ranks for host, ranks in listed if isinstance(ranks, list) and all(map(_is_whole, ranks))}}


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and abs(value) < 1e15


def number_in(value: object) -> float | None:
    """Return a number of a file of a run as one to compute with; None for anything else."""
    return float(value) if is_number(value) else None  # type: ignore[arg-type]


_CHECKS: dict[str, Callable[[object], object]] = {"training": number_in, "ended": number_in, "first_step": _is_whole}
"""Of fields of an attempt that are left out if they are damaged."""


def storage_at(path: str | os.PathLike[str] | None) -> Path | RemotePath:
    """Return the storage path that a user means, the default for None. Raise OSError for a wrong URL."""
    text = os.fspath(names.DEFAULT_STORAGE if path is None else path)
    if "://" not in text:
        return Path(os.path.abspath(os.path.expanduser(text)))
    from distrain.system.remote_path import OPENING_PATIENCE_S, RemotePath, locate

    found = locate(text)
    return RemotePath(found.url, patience_s=OPENING_PATIENCE_S) if isinstance(found, RemotePath) else found


def list_runs(storage: Path | RemotePath, *, may_be_missing: bool = False) -> list[Run]:
    """Return what is in a storage path, the newest first, and at the end what isn't a run.

    A run directory itself is listed as one run. may_be_missing: return nothing if the directory does not exist.

    Files, hidden directories and the output directories of Hydra are left out. Raise OSError if the storage cannot be
    read.
    """
    if (storage / names.MANIFEST).exists():
        return [run_at(storage)]
    listed = folders_in(storage, may_be_missing=may_be_missing)
    if isinstance(storage, Path):
        found = [run_at(f"{storage}/{name}") for name in listed]
        shown = [run for run in found if run.state != FOREIGN or not os.path.exists(f"{run.path}/.hydra")]
    else:
        from distrain.system.background import in_threads

        every = in_threads(run_at, [storage / name for name in listed], threads=_THREADS)
        shown = [run for run in every if run.state != FOREIGN or run.problem]
    return sorted(shown, key=lambda run: (run.state != FOREIGN, run.began), reverse=True)


def folders_in(storage: Path | RemotePath, *, may_be_missing: bool = False) -> list[str]:
    """Return the sorted names of what may be runs in a storage path."""
    if not isinstance(storage, Path):
        return [name for name in storage.names() if not name.startswith(".") and not set(name) & set("*?[")]
    if may_be_missing and not storage.exists():
        return []
    with os.scandir(storage) as entries:
        return sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())


def run_at(folder: str | Path | RemotePath) -> Run:
    """Return the run in a directory; a string is a local path. Never raises for what is in it."""
    run = _without_notes(folder)
    return run if run.state == FOREIGN else run._replace(notes=notes_of(folder))


def _without_notes(folder: str | Path | RemotePath) -> Run:
    path, name = str(folder), os.path.basename(str(folder).rstrip("/"))
    file = f"{path}/{names.MANIFEST}" if isinstance(folder, (str, Path)) else folder / names.MANIFEST
    for _ in range(2):  # again, if it has ended meanwhile
        try:
            manifest = parse_json(read_file(file))
        except FileNotFoundError:
            return _without_manifest(name, path, folder)
        except OSError as error:
            return Run(name, path, DAMAGED, f"{names.MANIFEST} cannot be read: {error.strerror or error}")
        except ValueError as error:
            return Run(name, path, DAMAGED, f"{names.MANIFEST} is damaged: {error}")
        if not isinstance(manifest, dict) or not {"status", "run_id", "attempts"} <= manifest.keys():
            return Run(name, path, FOREIGN, f"{names.MANIFEST} is another program's")
        status = manifest["status"]
        if status not in names.STATUSES:
            return Run(name, path, DAMAGED, f"{names.MANIFEST} has the status {status!r:.40}")
        manifest["attempts"] = _attempts_in(manifest)
        if status != RUNNING or _is_in_use(folder):
            return Run(name, path, status, manifest=manifest)
    return Run(name, path, KILLED, manifest=manifest)


def _without_manifest(name: str, path: str, folder: str | Path | RemotePath) -> Run:
    if "://" in path:
        return Run(name, path, FOREIGN)
    if not os.path.exists(f"{path}/{names.LOCK}"):
        return Run(name, path, FOREIGN, f"it has no {names.MANIFEST}")
    if _is_in_use(folder):
        return Run(name, path, STARTING)
    return Run(name, path, DAMAGED, f"it has no {names.MANIFEST}: the run was killed as it began")


def _is_in_use(folder: str | Path | RemotePath) -> bool:
    if isinstance(folder, (str, Path)):
        return is_locked(os.path.join(folder, names.LOCK))
    from distrain.errors import StorageError
    from distrain.storage.run_lock import is_in_use

    try:
        return is_in_use(folder)
    except (OSError, StorageError):  # a damaged lock says nothing
        return True


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
    listed = folders_in(storage, may_be_missing=True)
    if given == LAST and given not in listed:
        runs = [run for run in list_runs(storage) if run.state not in (FOREIGN, DAMAGED)]
        if not runs:
            raise NoSuchRun(f"there is no run in {storage}")
        return runs[0]
    matching = [given] if given in listed else [name for name in listed if name.startswith(given)]
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


def _checked(run: Run) -> Run:
    if run.state == FOREIGN:
        if "://" not in run.path and not os.path.exists(run.path):
            raise NoSuchRun(f"there is no directory {run.path}")
        raise NoSuchRun(f"{run.path} is not a run: {run.problem or f'it has no {names.MANIFEST}'}")
    if run.state == DAMAGED:
        raise NoSuchRun(f"{run.path} is damaged: {run.problem}")
    return run
