"""The page of a run, from its files: what it says, and that neither damage nor hostile texts break it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import pytest

import distrain.page
from distrain.api.observer import Ended
from distrain.errors import StorageError
from distrain.page import write_page
from distrain.page.at_end import PageAtEnd
from distrain.page.reports import MOST_METRICS
from distrain.system.remote_path import locate

if TYPE_CHECKING:
    from tests.unit.page.conftest import Run

OWN = Path(str(distrain.page.__file__)).parent


class Parts(HTMLParser):
    """The scripts and styles of a page, the object in it, and the names of its other elements and attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.data: dict[str, Any] = {}
        self.names: set[str] = set()
        self._kind = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names |= {tag, *(name for name, _ in attrs)}
        self._kind = dict(attrs).get("type") or tag

    def handle_data(self, data: str) -> None:
        if self._kind == "application/json":
            self.data = json.loads(data)
        elif self._kind in ("script", "style"):
            (self.scripts if self._kind == "script" else self.styles).append(data)
        self._kind = ""


def data_of(run: Run) -> dict[str, Any]:
    return Parts(run.page()).data


def rows_of(table: dict[str, Any]) -> list[dict[str, str]]:
    return [dict(zip(table["head"], row, strict=True)) for row in table["rows"]]


# -- what it says ----------------------------------------------------------------------------------------------------


def test_the_verdict_comes_first_and_names_the_culprit(restarted: Run) -> None:
    page = restarted.page()
    wanted = (
        "Failed after 1 min 40 s at report 50: rank 3 on beta: RuntimeError: CUDA out of memory (train.py:88), after 1 "
        "restart."
    )
    assert f'<p class="verdict">{wanted}</p>' in page
    [failure] = Parts(page).data["failures"]
    assert (failure["rank"], failure["role"]) == ("rank 3 on beta", "failed first")
    assert failure["lines"] == ["red </script><b>bold</b>"]
    assert Parts(page).data["where"] == ["rank 0 in wait at train.py:90"]


def test_curves_have_each_step_once(restarted: Run) -> None:
    data = data_of(restarted)
    assert [curve["name"] for curve in data["curves"]] == ["loss", "eval/score", "attempt"]
    assert data["curves"][2]["x"] == list(range(1, 51))
    assert data["curves"][2]["y"] == [0] * 20 + [1] * 30
    assert data["starts"] == [20]


def test_ranks_that_are_behind_come_first(run: Run) -> None:
    run.manifest({"started": 0.0, "training": 0.0, "ended": 100.0})
    reports = [(n * (2.0 if rank == 2 else 1.0), n, rank) for rank in range(4) for n in range(1, 100)]
    for time, index, rank in sorted(reports):
        if time < 100:
            run.report(time, index, rank=rank, waits={"data": 0.5} if rank == 2 else {})
    first, *others = rows_of(data_of(run)["ranks"])
    assert list(first.values()) == ["2", "beta", "49", "1.0 s", "2.0 s", "24 s", "-"]
    assert {other["last report"] for other in others} == {"99"}


def test_attempts_checkpoints_events_and_time_are_tables(restarted: Run) -> None:
    restarted.event("slow", 30.0, rank=2, between="reports")
    data = data_of(restarted)
    second, first = rows_of(data["attempts"])
    assert (first["began"], first["lasted"], first["from"]) == ("+2.0 s", "43 s", "the beginning")
    assert (second["from"], second["hosts (ranks)"]) == ("checkpoint_000000 (report 20)", "alpha (0, 1), beta (2, 3)")
    newer, older = rows_of(data["checkpoints"])
    assert (newer["report"], newer["state"], newer["metrics"]) == ("40", "kept", "loss=0.025")
    assert (older["size"], older["state"]) == ("5.0 MB", "deleted; attempts from it: 1")
    assert rows_of(data["events"]) == [
        {"after": "+30 s", "event": "slow", "details": "attempt: 0, rank: 2, between: reports"}
    ]
    assert data["time"]["goodput"] == "60% of 1 min 40 s"
    assert ["repeated after failures", "15 s"] in [row[:2] for row in data["time"]["table"]["rows"]]
    assert ["command", "python train.py --lr 0.1"] in dict(data["settings"])["run"]["rows"]


def test_a_killed_run_ended_with_its_last_report_and_shows_its_last_output(run: Run) -> None:
    run.manifest({"started": 0.0, "training": 10.0, "ended": None}, status="running", took=10.0)
    run.report(40, 1)
    run.write("logs/attempt_0/rank_0.log", "")
    (run.root / "logs/attempt_0/rank_0.log").write_bytes(b"the last words: caf\xe9\n")
    data = data_of(run)
    assert data["verdict"].startswith("Killed after 40 s at report 1: the process that called fit() was killed")
    assert data["logs"] == [["rank 0, attempt 0", ["the last words: caf\ufffd"]]]
    assert data["time"]["goodput"] == "75% of 40 s"


# -- it needs nothing, and nothing in it runs ------------------------------------------------------------------------


def hash_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_only_our_scripts_and_styles_are_allowed(restarted: Run) -> None:
    page = restarted.page()
    parts = Parts(page)
    match = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert match is not None
    policy = dict(part.split(" ", 1) for part in match[1].split("; "))
    assert policy.pop("script-src").split() == [hash_of(script) for script in parts.scripts]
    assert policy.pop("style-src").split() == [hash_of(style) for style in parts.styles]
    assert set(policy.values()) == {"'none'"}
    assert len(parts.scripts) == len(parts.styles) == 2
    assert parts.names.isdisjoint({"style=", "src", "srcset", "onload", "onclick", "link", "img"})
    assert "Permission is hereby granted" in page  # the licence of uPlot


def test_the_script_makes_no_element_from_a_text() -> None:
    script = (OWN / "page.js").read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(|\.src\b", script)


HOSTILE = [
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "<!--",
    "\x1b[31m\x00\u202e",
    "\x1b[\x1b[0m31m",
    "\ud800",
]


def hostile(run: Run, text: str) -> None:
    """Make a run with this text wherever users and their programs write something."""
    times = {"started": 0.0, "training": 1.0, "ended": 9.0}
    attempt = {**times, "failure": text, "hosts": {text: [0, 1]}, "checkpoint": text}
    run.manifest(attempt, status="failed", name=text, train_loop_config={text: {text: text}}, argv=[text])
    for rank in (0, 1):
        for index in (1, 2, 3):
            run.report(index, index, rank=rank, metrics={text: 1.0, "nested": {text: index}})
    run.event("checkpoint", 3, name=text, step=1, bytes=3)
    run.event(text, 3, name=text)
    run.write("logs/attempt_0/rank_0.log", text.encode("utf-8", "replace").decode())
    failure = {"rank": 0, "host": text, "summary": text, "traceback": text, "last_lines": [text]}
    run.write("error.json", {"message": text, "failures": [failure], "where": [text]})


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_stay_texts(run: Run, text: str) -> None:
    hostile(run, text)
    page = run.page()
    parts = Parts(page)
    assert len(parts.scripts) == 2
    assert "img" not in parts.names
    assert "\x1b" not in json.dumps(parts.data, ensure_ascii=False) + page
    assert len(parts.data["curves"]) == 2


# -- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["run.json", "metrics.jsonl", "events.jsonl", "error.json", "checkpoint_000001/.manifest.json"]
)
@pytest.mark.parametrize(
    "damage", ["", "{", "[1, 2]", "null", '{"attempts": [{"attempt": "x"}, 7], "failures": 3}', "\0\xff\n\n"]
)
def test_a_damaged_file_costs_its_own_part_only(restarted: Run, name: str, damage: str) -> None:
    (restarted.root / name).write_bytes(damage.encode("latin-1"))
    data = data_of(restarted)
    if name != "metrics.jsonl":
        assert len(data["curves"]) == 3
    if name not in ("error.json", "run.json"):
        assert "CUDA out of memory (train.py:88)" in data["verdict"]
    if name == "checkpoint_000001/.manifest.json":
        assert "checkpoint_000001 is damaged" in " ".join(data["notes"])


def test_no_run_and_a_page_that_cannot_be_written_are_errors(restarted: Run, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"is not a run directory: it has no run\.json"):
        write_page(tmp_path)
    with pytest.raises(StorageError, match="cannot write the page of"):
        write_page(restarted.root, restarted.root / "no" / "such" / "page.html")


# -- size and time ---------------------------------------------------------------------------------------------------


def test_pages_stay_small(run: Run) -> None:
    """100,000 reports with more metrics than are drawn, of 1,000 ranks on as many hosts, with 1,000 checkpoints."""
    hosts = {f"host-{n}": [n] for n in range(1000)}
    run.manifest({"started": 0.0, "training": 0.0, "ended": 100.0, "hosts": hosts})
    names = [f"metric {n}" for n in range(2 * MOST_METRICS)]
    lines = []
    for index in range(1, 101):
        for rank in range(1000):
            values = {name: hash((name, index)) / 1e10 for name in names} if rank == 0 else {"loss": 1.0}
            head = f'{{"time":{1_790_000_000.0 + index},"attempt":0,"rank":{rank},"index":{index},"metrics":'
            lines.append(f"{head}{json.dumps(values)}}}\n")
    (run.root / "metrics.jsonl").write_text("".join(lines))
    for n in range(1000):
        run.event("checkpoint", n / 10, name=f"checkpoint_{n:06d}", step=n, bytes=1, seconds=1)
    data = Parts(page := run.page()).data
    assert len(page) < 1_000_000
    assert len(data["curves"]) == data["more_metrics"] == MOST_METRICS


# -- automatic pages -------------------------------------------------------------------------------------------------


def test_a_run_on_remote_storage_has_a_page_on_request(restarted: Run, tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(f"{restarted.root}/", "/bucket/my-run/", recursive=True)
    remote = locate("/bucket/my-run", memory)
    with pytest.raises(StorageError, match=r"is on remote storage: name the file for its page \(output=, -o\)"):
        write_page(remote)
    data = Parts(write_page(remote, tmp_path / "page.html").read_text()).data
    assert data["verdict"].startswith("Failed after 1 min 40 s at report 50: rank 3 on beta: ")
    assert len(data["curves"]) == 3
    assert rows_of(data["checkpoints"])[0]["metrics"] == "loss=0.025"


def test_the_end_of_a_run_neither_fails_nor_waits_for_its_page(restarted: Run, tmp_path: Path) -> None:
    result: Any = object()
    ended = Ended("failed", "failed", 10.0, result, ValueError(), checkpoints=(), advice=None, storage_works=True)
    PageAtEnd(tmp_path / "gone").hear(ended)
    PageAtEnd(restarted.root).hear(ended)
    (restarted.root / "page.html").unlink()
    with (restarted.root / "metrics.jsonl").open("ab") as file:
        file.truncate(100 << 20)
    PageAtEnd(restarted.root).hear(ended)
    assert not (restarted.root / "page.html").exists()
