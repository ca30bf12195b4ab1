"""Every damage of every file of a run, for all that reads runs."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain.api.result import Result
from distrain.api.runs import runs
from distrain.board.runs import Board
from distrain.cli.main import run_main
from distrain.errors import DistrainError
from distrain.storage.lines import read_file
from distrain.storage.names import EVIDENCE
from distrain.storage.runs.details import evidence_of
from tests.unit.storage.made import add_reports, make_run

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

WRONG: list[Any] = [
    None, True, -1, 0, 1e308, 10**400, 1e400, "", "x", "\ud800\x1b[2J\0",
    [], {}, [[]], [None], [{}], {"": {}}, {"a": [1]},
]  # fmt: skip
"""Values of every type, in place of any other one."""
HUGE = 12 << 20


@dataclass(frozen=True)
class Damage:
    """A change of one file. ``name``: of the file, and of the damage, for messages."""

    name: str
    do: Callable[[Path], object]


def make_whole_run(storage: Path) -> Path:
    """Make a run with every kind of file that is read."""
    attempt = {"attempt": 0, "started": 1.0, "training": 2.0, "ended": 3.0, "hosts": {"alpha": [0], "beta": [1]}}
    second = {**attempt, "attempt": 1, "started": 4.0, "ended": None, "first_step": 1}
    second["checkpoint"] = "checkpoint_000000"
    run = make_run(
        storage, "run", status="failed", attempts=[{**attempt, "failure": "rank 0: boom"}, second],
        changes=[{"attempt": 1, "lines": ["lr 0.1 → 0.01"]}], train_loop_config={"lr": 0.1, "nested": {"a": [1]}},
        run_config={"log_dir": None}, checkpoint_config={"num_to_keep": 2}, git={"commit": "c", "dirty": True},
        versions={"torch": "2"}, user="me", host="alpha", pid=1,
        exit_code=1,
    )  # fmt: skip
    add_reports(run, {"loss": 1.0}, {"loss": 0.5, "eval": {"score": 1}})
    add_reports(run, {"loss": 0.25}, attempt=1)
    with (run / "metrics.jsonl").open("a") as file:
        line = {"time": 1.0, "attempt": 1, "rank": 0, "index": 2, "progress": [1, 2], "waits": {"data": 1.0}}
        file.write(json.dumps({**line, "metrics": {"loss": None}, "nonfinite": {"/loss": "nan"}}) + "\n")
    events: list[dict[str, Any]] = [
        {"event": "checkpoint", "name": "checkpoint_000000", "step": 1, "bytes": 1, "seconds": 1.0},
        {"event": "checkpoint", "name": "checkpoint_000001", "step": 2, "bytes": 1, "seconds": 1.0, "tier": "memory"},
        {"event": "hang_began", "since": 1.0, "text": "rank 0 is stuck"},
        {"event": "hang", "since": 1.0, "text": "rank 0 is stuck"},
        {"event": "trouble", "kind": "memory", "problem": "low", "rank": 0, "host": "alpha", "text": "low"},
        {"event": "slow", "since": "step 3", "rank": 0},
    ]
    lines = [json.dumps({"time": 5.0, "attempt": 1, **event}) + "\n" for event in events]
    failure = {"rank": 0, "host": "alpha", "summary": "boom", "role": "culprit", "traceback": "", "last_lines": ["x"]}
    manifest = {
        "name": "checkpoint_000000", "index": 0, "attempt": 0, "step": 1, "metrics": {"loss": 1.0}, "time": 2.0,
        "files": {"model.pt": {"size": 1, "crc32": "0", "rank": 0}}, "validation": {"status": "PENDING_VALIDATION"},
        "ranks": [0], "world_size": 2, "silent": [], "skip_to": None, "progress": [1, 2], "nonfinite": {},
    }  # fmt: skip
    for name, text in {
        "events.jsonl": "".join(lines),
        "error.json": json.dumps({"message": "boom", "where": ["here"], "failures": [failure]}),
        "checkpoint_000000/.manifest.json": json.dumps(manifest),
        "logs/attempt_1/rank_0.log": "a line\n",
        "evidence/attempt_1/stacks/rank_0.txt": "a stack\n",
        "error.pkl": "no pickle",
        "return_value.pkl": "no pickle",
    }.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(text)
    return run


def damages(run: Path) -> Iterator[tuple[str, Damage]]:
    """Yield the name of each file of a run, with each damage. Files below a directory that is damaged are included."""
    files = sorted(str(path.relative_to(run)) for path in run.rglob("*"))
    for name in files:
        whole = (run / name).read_bytes() if (run / name).is_file() else b""
        for damage in (*_places(), *_bytes(whole), *(_values(whole) if name.endswith((".json", ".jsonl")) else ())):
            yield name, damage


def _places() -> Iterator[Damage]:
    """Yield what there may be in place of a file or a directory."""
    yield Damage("missing", lambda _: None)
    yield Damage("FIFO", os.mkfifo)
    yield Damage("directory", Path.mkdir)
    yield Damage("file", Path.touch)
    yield Damage("link to itself", lambda path: path.symlink_to(path))
    yield Damage("link to above", lambda path: path.symlink_to(path.parent))
    yield Damage("link to /dev/zero", lambda path: path.symlink_to("/dev/zero"))
    yield Damage("link to nothing", lambda path: path.symlink_to("nothing"))
    yield Damage("sparse", lambda path: _sparse(path, 1 << 36))
    yield Damage("unreadable", lambda path: (path.touch(), path.chmod(0)))


def _sparse(path: Path, size: int) -> None:
    with path.open("wb") as file:
        file.truncate(size)


def _bytes(whole: bytes) -> Iterator[Damage]:
    """Yield damages of what is in a file."""
    texts = {f"the first {part} bytes": whole[:part] for part in range(0, len(whole), max(1, len(whole) // 7))}
    texts |= {
        "NUL bytes": whole[: len(whole) // 2] + b"\0" * 100 + whole[len(whole) // 2 :],
        "invalid UTF-8": b"\xff\xfe" + whole,
        "huge line": b'{"rank":0,"time":1,"attempt":0,"index":1,"metrics":{"a":"' + b"z" * HUGE + b'"}}\n' + whole,
        "a line that does not end": whole + b"x" * HUGE,
        "deep": b"[" * 200_000 + b"]" * 200_000 + b"\n" + whole,
        "deep objects": b'{"metrics":' * 300 + b"{}" + b"}" * 300 + b"\n" + whole,
        "no JSON": b"\n\n{\n[]\n7\n" + whole,
        "twice": whole + whole,
        "many damaged lines": whole + b"{\n" * 20_000,
        "duplicate keys": whole.replace(b"{", b'{"time":[],"status":{},"metrics":7,', 3),
    }
    for name, text in texts.items():
        yield Damage(name, lambda path, text=text: path.write_bytes(text))  # type: ignore[misc]


def _values(whole: bytes) -> Iterator[Damage]:
    """Yield the file with a wrong value in each place of its JSON."""
    lines = whole.decode().splitlines()
    for number, line in enumerate(lines):
        try:
            value = json.loads(line)
        except ValueError:
            return
        for place in _paths(value):
            for wrong in WRONG:
                changed = [*lines[:number], json.dumps(_with(value, place, wrong)), *lines[number + 1 :]]
                text = "\n".join([*changed, ""])
                yield Damage(f"{number}{place} = {wrong!r:.20}", lambda path, text=text: path.write_text(text))  # type: ignore[misc]


def _paths(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from _paths(item, (*place, key))


def _with(value: Any, place: tuple[Any, ...], wrong: Any) -> Any:
    if not place:
        return wrong
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[place[0]] = _with(copy[place[0]], place[1:], wrong)
    return copy


# -- readers ---------------------------------------------------------------------------------------------------------


def _board(run: Path, target: Path) -> None:
    board = Board(run.parent)
    board.look()
    while board.read(1.0):
        pass
    (target / "board.json").write_text(json.dumps(board.data(0, ["loss"], [run.name]), allow_nan=False))


def _evidence(run: Path, target: Path) -> None:
    """Read what the board shows of the evidence."""
    found = [read_file(run / EVIDENCE / name, run) for name in evidence_of(run)]
    (target / "evidence.txt").write_bytes(b"".join(found))


def _command(*words: str) -> Callable[[Path, Path], None]:
    def call(run: Path, target: Path) -> None:
        given = [word.format(run=run, storage=run.parent, target=target) for word in words]
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = run_main(given, [])
        (target / f"{words[0]}.txt").write_text(out.getvalue(), errors="replace")
        assert code in (0, 1, 2)

    return call


SOME = ("ls --json", "show", "show --json", "page", "board", "from_path")
"""The readers that look at every value."""
READERS: dict[str, Callable[[Path, Path], object]] = {
    "ls": _command("ls", "{storage}"),
    "ls --json": _command("ls", "--json", "{storage}"),
    "ls --sort": _command("ls", "--sort", "loss", "{storage}"),
    "resume": _command("resume", "{run}"),
    "show": _command("show", "{run}"),
    "show --json": _command("show", "--json", "{run}"),
    "logs": _command("logs", "{run}", "-n", "5"),
    "logs -f": _command("logs", "{run}", "-f", "-n", "5"),
    "evidence": _evidence,
    "page": _command("page", "{run}", "-o", "{target}/page.html"),
    "page in the run": _command("page", "{run}"),
    "clean": _command("clean", "{storage}"),
    "board": _board,
    "runs": lambda run, target: runs(run.parent),
    "from_path": lambda run, target: Result.from_path(run),
}
EXPECTED = (DistrainError, OSError)


def read_all(run: Path, target: Path, only: Collection[str] = ()) -> None:
    """Have everything, or some of the readers, read a run. Raise what nobody expects."""
    for name in only or READERS:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                READERS[name](run, target)
        except EXPECTED:
            pass
        except BaseException as error:
            error.args = (f"{name}: {error!r}",)
            raise


def apply(damage: Damage, path: Path) -> None:
    """Replace a file or directory by a damaged one."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    damage.do(path)
