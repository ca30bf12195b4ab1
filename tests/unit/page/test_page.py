"""The page of a run, from its files: what it says, and that neither damage nor hostile texts break it."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import pytest

import distrain.page
from distrain.errors import StorageError
from distrain.page import watch_page, write_page
from distrain.page.reports import MOST_METRICS
from distrain.page.writer import write_page_at_end
from distrain.system.remote_path import locate

if TYPE_CHECKING:
    from tests.unit.page.conftest import Run


class Outline(HTMLParser):
    """The texts for a screen reader, and the code that would run."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sections: list[str] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.data = ""
        self.texts: list[str] = []
        self.attributes: set[str] = set()
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes |= {name for name, _ in attrs}
        fields = dict(attrs)
        self.open.append(f"{tag}:{fields.get('type', '')}")
        if tag == "section":
            self.sections.append(str(fields["id"]))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().partition(":")[0] == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        kind = self.open[-1] if self.open else ""
        if kind == "script:application/json":
            self.data += data
        elif kind.startswith("script"):
            self.scripts.append(data)
        elif kind.startswith("style"):
            self.styles.append(data)
        else:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    @property
    def plots(self) -> list[dict[str, Any]]:
        return list(json.loads(self.data))


def hash_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# -- what it says ----------------------------------------------------------------------------------------------------


def test_the_first_sentence_says_who_failed_where_and_why(restarted: Run) -> None:
    assert (
        "Failed after 1 min 40 s: rank 3 on beta failed at train.py:88 with RuntimeError: CUDA out of memory, after 1 "
        "restart; the last checkpoint is checkpoint_000001 (step 40)."
    ) in Outline(restarted.page()).text


def test_the_time_is_divided_by_the_records_of_the_run(restarted: Run) -> None:
    """Attempt 0 trained from 10 to 45; its work after report 20, at 30, was repeated. Rank 2 waited most."""
    text = Outline(restarted.page()).text
    assert "Goodput 60% of 1 min 40 s" in text  # 20 + 45 s in train_func without 2 + 3 s of waits
    for line in ("waiting for data 5.0 s 5.0%", "repeated after failures 15 s 15.0%", "starting and ending 15 s 15.0%"):
        assert line in text
    assert "between attempts 5.0 s 5.0%" in text


def test_repeated_reports_are_a_part_of_their_own(restarted: Run) -> None:
    plots = {plot["name"]: plot for plot in Outline(restarted.page()).plots}
    assert set(plots) == {"loss", "eval/score", "attempt"}
    repeated, kept = plots["attempt"]["parts"]
    assert (repeated["kept"], kept["kept"]) == (False, True)
    assert (repeated["x"], set(repeated["y"])) == (list(range(21, 31)), {0})
    assert kept["x"] == list(range(1, 51))
    assert kept["y"] == [0] * 20 + [1] * 30
    assert plots["loss"]["starts"] == [20]


def test_every_part_has_a_section_and_the_failure_comes_first(restarted: Run) -> None:
    outline = Outline(restarted.page())
    assert outline.sections == ["failure", "time", "attempts", "metrics", "pace", "checkpoints", "settings"]
    assert "rank 0 in wait at train.py:90" in outline.text
    assert "checkpoint_000000 20 30 s 5.0 MB 0.5 s deleted; attempt 1 began from it" in outline.text
    assert "checkpoint_000001 40 1 min 16 s 5.0 MB 0.5 s kept loss=0.025" in outline.text
    assert "train.py --lr 0.1" in outline.text


def test_values_that_are_no_numbers_are_marked(run: Run) -> None:
    run.manifest({"started": 0.0, "training": 1.0, "ended": 99.0})
    for index, (loss, special) in enumerate(((1.0, None), (None, "nan"), (2.0, None), (None, "inf")), start=1):
        more = {"nonfinite": {"/loss": special}} if special else {}
        run.report(index, index, metrics={"loss": loss}, **more)
    outline = Outline(run.page())
    [plot] = outline.plots
    assert plot["marks"] == [[2, "nan"], [4, "inf"]]
    assert (plot["parts"][0]["x"], plot["parts"][0]["y"]) == ([1, 2, 3, 4], [1, None, 2, None])
    assert "2 not finite, the first (nan) at step 2" in outline.text


def test_a_slow_rank_is_named(run: Run) -> None:
    run.manifest({"started": 0.0, "training": 0.0, "ended": 100.0})
    reports = [(n * (1.0 if rank == 2 else 0.5), n, rank) for rank in range(4) for n in range(1, 100)]
    for time, index, rank in sorted(reports):
        run.report(time, index, rank=rank)
    assert "Slower than the median of the ranks, on average: rank 2 (2 times)." in Outline(run.page()).text


@pytest.mark.parametrize(("status", "sentence"), [("finished", "Finished after"), ("aborted", "Stopped after")])
def test_other_ends(run: Run, status: str, sentence: str) -> None:
    run.manifest({"started": 0.0, "training": 1.0, "ended": 99.0}, status=status)
    assert sentence in Outline(run.page()).text


def test_a_killed_run_shows_the_last_output(run: Run) -> None:
    run.manifest({"started": 0.0, "training": 10.0, "ended": None}, status="running", took=10.0)
    run.report(40, 1)
    run.write("logs/attempt_0/rank_0.log", "the last words\n")
    text = Outline(run.page()).text
    assert "Ended without a word after 40 s: the process that called fit() was killed" in text
    assert "the last words" in text
    assert "Goodput 75%" in text


def test_an_earlier_process_that_died_ended_with_its_last_report(run: Run) -> None:
    run.manifest(
        {"started": 0.0, "training": 10.0, "ended": None, "failure": "the process that called fit() died"},
        {"started": 1000.0, "training": 1010.0, "ended": 1050.0, "first_step": 3},
        took=1050.0,
    )
    for index in range(1, 4):
        run.report(10 + 10 * index, index)
    run.report(1040, 1, attempt=1)
    text = Outline(run.page()).text
    assert "between attempts 16 min" in text  # from the last report, at 40, until 1000
    assert "A pause of 16 min is drawn shorter." in text


def test_a_run_of_an_early_version_lacks_only_what_it_did_not_record(run: Run) -> None:
    run.write(
        "run.json",
        {
            "run_id": "id",
            "status": "finished",
            "started": 1.0,
            "updated": 9.0,
            "attempts": [{"attempt": 0, "started": 1.0, "ended": 9}],
        },
    )
    run.report(0, 1, metrics={"loss": 1.0})
    text = Outline(run.page()).text
    assert "The files of this run do not say when its attempts trained." in text
    assert "1 value; first 1, last 1" in text


# -- it needs nothing, and nothing in it runs ------------------------------------------------------------------------


def test_only_our_scripts_and_styles_are_allowed(restarted: Run) -> None:
    page = restarted.page()
    outline = Outline(page)
    match = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert match is not None
    policy = dict(part.split(" ", 1) for part in match[1].replace("&#x27;", "'").split("; "))
    assert policy.pop("script-src").split() == [hash_of(script) for script in outline.scripts]
    assert policy.pop("style-src").split() == [hash_of(style) for style in outline.styles]
    assert set(policy.values()) == {"'none'"}
    assert len(outline.scripts) == len(outline.styles) == 2
    assert outline.attributes.isdisjoint({"style", "src", "srcset", "onload", "onclick"})
    assert "Permission is hereby granted" in page  # the licence of uPlot


HOSTILE = [
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "<!--",
    "\x1b[31m\x00\u202e",
    "\x1b[\x1b[0m31m",
    "\ud800",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_stay_texts(run: Run, text: str) -> None:
    attempt = {
        "started": 0.0,
        "training": 1.0,
        "ended": 9.0,
        "failure": text,
        "hosts": {text: [0, 1]},
        "checkpoint": text,
    }
    run.manifest(attempt, status="failed", name=text, train_loop_config={text: {text: text}}, argv=[text])
    for rank in (0, 1):
        for index in (1, 2, 3):
            run.report(index, index, rank=rank, metrics={text: 1.0, "nested": {text: index}})
    run.event("checkpoint", 3, name=text, step=1, bytes=3)
    failure = {"rank": 0, "host": text, "summary": text, "traceback": text, "last_lines": [text]}
    run.write("error.json", {"message": text, "failures": [failure], "where": [text]})
    outline = Outline(run.page())
    assert len(outline.scripts) == 2
    assert "img" not in outline.open
    assert "\x1b" not in outline.text
    assert len(outline.plots) == 2


def test_logs_may_be_no_utf_8(run: Run) -> None:
    run.manifest({"started": 0.0, "training": 1.0, "ended": None}, status="running")
    run.write("logs/attempt_0/rank_0.log", "")
    (run.root / "logs/attempt_0/rank_0.log").write_bytes(b"caf\xe9 \xff\n")
    assert "caf\ufffd" in Outline(run.page()).text


# -- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["run.json", "metrics.jsonl", "events.jsonl", "error.json", "checkpoint_000001/.manifest.json"]
)
@pytest.mark.parametrize(
    "damage", ["", "{", "[1, 2]", "null", '{"attempts": [{"attempt": "x"}, 7], "failures": 3}', "\0\xff\n\n"]
)
def test_a_damaged_file_costs_its_own_part_only(restarted: Run, name: str, damage: str) -> None:
    (restarted.root / name).write_bytes(damage.encode("latin-1"))
    outline = Outline(restarted.page())
    assert "my-run" in outline.text
    if name != "metrics.jsonl":
        assert len(outline.plots) == 3
    if name != "error.json":
        assert "failed at train.py:88" in outline.text or "missing or damaged" in outline.text


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "events.jsonl", "error.json"])
def test_every_half_written_file_is_shown(restarted: Run, name: str) -> None:
    whole = (restarted.root / name).read_bytes()
    for part in range(0, len(whole), max(1, len(whole) // 12)):
        (restarted.root / name).write_bytes(whole[:part])
        assert "my-run" in Outline(restarted.page()).text


def test_damaged_and_foreign_lines_are_passed_over(run: Run) -> None:
    run.manifest({"started": 0.0, "training": 1.0, "ended": 9.0})
    run.report(1, 1, metrics={"loss": 1.0})
    foreign = {"attempt": 0, "index": 2, "rank": 0, "metrics": {"loss": 2.0}, "time": 1_790_000_002.0, "new": 1}
    with (run.root / "metrics.jsonl").open("a") as file:
        file.write(f'{json.dumps(foreign)}\n{{"time":1,"attempt":0,"rank":0\nnonsense\n')
    run.report(3, 3, metrics={"loss": 3.0})
    with (run.root / "metrics.jsonl").open("a") as file:
        file.write('{"time":1790000004.0,"attempt":0,"rank":0,"index":4,"metrics":{"loss":4')  # torn
    outline = Outline(run.page())
    assert outline.plots[0]["parts"][0]["y"] == [1, 2, 3]
    assert "2 damaged lines of metrics.jsonl were passed over" in outline.text


def test_no_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"is not a run directory: it has no run\.json"):
        write_page(tmp_path)


def test_a_page_that_cannot_be_written_is_an_error(restarted: Run) -> None:
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
            time = 1_790_000_000.0 + index + (hash((index, rank)) % 1000) / 1000
            values = {name: hash((name, index)) / 1e10 for name in names} if rank == 0 else {"loss": 1.0}
            head = f'{{"time":{time},"attempt":0,"rank":{rank},"index":{index},"metrics":'
            lines.append(f"{head}{json.dumps(values)}}}\n")
    (run.root / "metrics.jsonl").write_text("".join(lines))
    for n in range(1000):
        run.event("checkpoint", n / 10, name=f"checkpoint_{n:06d}", step=n, bytes=1, seconds=1)
    outline = Outline(page := run.page())
    assert len(page) < 1_000_000
    assert len(outline.plots) == MOST_METRICS
    assert f"Only {MOST_METRICS} metrics are drawn" in outline.text


# -- automatic pages -------------------------------------------------------------------------------------------------


def test_a_run_that_has_ended_is_written_once_and_does_not_reload(restarted: Run) -> None:
    assert watch_page(restarted.root) == restarted.root / "page.html"
    assert 'http-equiv="refresh"' not in (restarted.root / "page.html").read_text()


def test_the_page_of_a_run_that_trains_reloads_itself(run: Run) -> None:
    run.manifest({"started": 0.0, "training": 10.0, "ended": None}, status="running")
    run.report(40, 1, progress=[250, 1000])
    with (run.root / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        page = write_page(run.root, refresh_s=5).read_text()
    assert '<meta http-equiv="refresh" content="5"/>' in page
    assert re.search(r"Running for \d+ d( \d+ h)?, at step 250 of 1,000 \(25%\)", Outline(page).text)


def test_a_run_on_remote_storage_has_a_page_on_request(restarted: Run, tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(f"{restarted.root}/", "/bucket/my-run/", recursive=True)
    remote = locate("/bucket/my-run", memory)
    with pytest.raises(StorageError, match=r"is on remote storage: name the file for its page \(output=, -o\)"):
        write_page(remote)
    outline = Outline(write_page(remote, tmp_path / "page.html").read_text())
    assert "Failed after 1 min 40 s: rank 3 on beta failed at train.py:88" in outline.text
    assert len(outline.plots) == 3
    assert "kept loss=0.025" in outline.text


def test_the_end_of_a_run_never_fails_for_its_page(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_page_at_end(tmp_path / "gone", 1.0)
    assert not (tmp_path / "gone").exists()


def test_a_short_run_with_many_reports_waits_for_no_page(restarted: Run) -> None:
    with (restarted.root / "metrics.jsonl").open("ab") as file:
        file.truncate(100 << 20)
    write_page_at_end(restarted.root, 10.0)
    assert not (restarted.root / "page.html").exists()


# -- looks -----------------------------------------------------------------------------------------------------------

CSS = Path(str(distrain.page.__file__)).with_name("page.css").read_text()


def luminance(colour: str) -> float:
    parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_texts_have_enough_contrast(scheme: int) -> None:
    """WCAG AA: 4.5 to 1."""
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", re.findall(r":root \{([^}]*)\}", CSS)[scheme]))
    pairs = [(ink, ground) for ink in ("ink", "soft", "link") for ground in ("ground", "raised")]
    pairs += [(look, f"{look}-ground") for look in ("good", "bad", "warn", "live")] + [("ground", "link")]
    for ink, ground in pairs:
        dark, light = sorted((luminance(colours[ink]), luminance(colours[ground])))
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (ink, ground)
