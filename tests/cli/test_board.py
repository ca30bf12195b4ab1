"""``distrain board`` as a user runs it: a server of its own, a run that trains, and a real browser."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from distrain.cli.main import run_main
from tests.browser import CHROMIUM, Browser
from tests.conftest import wait_until
from tests.unit.storage.made import add_reports, make_run

if TYPE_CHECKING:
    from collections.abc import Iterator

TRAIN = """
import time
import distrain

def main():
    step = 0
    while not distrain.should_stop():
        step += 1
        print("this is step", step, flush=True)
        distrain.report({"loss": 1 / step, "accuracy": 0.5}, progress=(step, 1000))
        time.sleep(0.1)
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-u", "-m", "distrain", *arguments]


class Server:
    """A board that runs."""

    def __init__(self, storage: Path, *options: str) -> None:
        self.process = subprocess.Popen(command("board", str(storage), *options), stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = next(match[0] for line in self.process.stdout if (match := re.search(r"http://\S+", line)))
        parts = urlsplit(self.url)
        assert parts.hostname == "127.0.0.1"
        self.port, self.base = int(parts.port or 0), parts.path.rstrip("/")

    def ask(self, path: str, method: str = "GET") -> tuple[int, str]:
        """Return the status and the text of the answer."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)) as connection:
            connection.request(method, path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    for number, status in enumerate(["finished", "failed", "finished"]):
        settings = {"lr": 0.1 / 2**number}
        age_s = 1000.0 * (3 - number)
        run = make_run(tmp_path / "runs", f"old-{number}", status=status, age_s=age_s, train_loop_config=settings)
        add_reports(run, *({"loss": 1 / step} for step in range(1, 30 + number)))
    return tmp_path / "runs"


@pytest.fixture
def server(storage: Path) -> Iterator[Server]:
    server = Server(storage)
    yield server
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(10) == 0
    assert server.process.stdout is not None
    server.process.stdout.close()


# -- who may ask -----------------------------------------------------------------------------------------------------


def test_nobody_gets_in_without_the_path_of_the_url(server: Server, storage: Path) -> None:
    evidence = storage / "old-1/evidence/attempt_0/stacks/rank_0.txt"
    evidence.parent.mkdir(parents=True)
    evidence.write_text("in train.py:3")
    paths = {
        "/": 200,
        "/data?since=0&metric=loss": 200,
        "/data?since=0&metric=loss&run=old-0": 200,
        "/runs/old-1/": 200,
        "/runs/old-1/log": 200,
        "/runs/old-1/evidence/attempt_0/stacks/rank_0.txt": 200,
        "/runs/old-1/evidence/..%2Frun.json": 404,
        "/runs/old-1/evidence/%2Fetc%2Fpasswd": 404,
        "/runs/..%2F/": 404,
        "/runs/old-9/": 404,
    }
    wait_until(lambda: server.ask(f"{server.base}/data")[0] == 200, what="the runs are known")
    for path, status in paths.items():
        for base in ("", "/", f"{server.base}x", server.base[:-1], "/%E4"):
            assert server.ask(base + path)[0] == 403, base + path
        assert server.ask(server.base + path)[0] == status, path


def test_a_name_that_is_not_text_and_a_damaged_run_harm_no_other(server: Server, storage: Path) -> None:
    name = b"caf\xe9"
    (storage / "old-0").rename(storage / os.fsdecode(name))
    (storage / "old-1/run.json").write_text("{")
    wanted = {os.fsdecode(name): "finished", "old-1": "damaged", "old-2": "finished"}

    def states() -> dict[str, str]:
        rows = json.loads(server.ask(f"{server.base}/data?since=0&metric=")[1])["rows"]
        return {row["name"]: row["state"] for row in rows}

    wait_until(lambda: states() == wanted, what="the board has looked again")
    assert server.ask(f"{server.base}/runs/old-1/")[0] == 200


def test_only_a_button_acts_on_a_run(server: Server) -> None:
    wait_until(lambda: server.ask(f"{server.base}/data")[0] == 200, what="the runs are known")
    for path in ("/runs/old-0/stop", "/runs/old-0/stacks"):
        assert server.ask(path, "POST")[0] == 403
        assert server.ask(server.base + path)[0] == 405  # a link, or what the browser loads ahead
        status, text = server.ask(server.base + path, "POST")
        assert status == 409
        assert text.startswith("old-0 is not running: its state is finished; ")
    assert server.ask(f"{server.base}/runs/old-0/debug", "POST")[0] == 404


def test_it_listens_on_this_machine_only(server: Server) -> None:
    tables = [Path(f"/proc/{server.process.pid}/net/{name}") for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    listening = [row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{server.port:04X}")]
    assert listening == [f"0100007F:{server.port:04X}"]


# -- the command -----------------------------------------------------------------------------------------------------


def test_a_wrong_command_line_says_what_to_do(
    storage: Path, server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(*arguments: str) -> str:
        assert run_main(["board", *arguments], []) == 2
        return capsys.readouterr().err

    assert "No such file or directory" in said(str(storage / "missing"))
    assert "choose another one with --port" in said(str(storage), "--port", str(server.port))
    with pytest.raises(SystemExit):
        run_main(["board", "--port", "70000"], [])
    assert "argument --port: must be a port, 0 to 65535, got '70000'" in capsys.readouterr().err
    assert "the board shows local runs only; `distrain ls memory://runs`" in said("memory://runs")
    monkeypatch.delitem(sys.modules, "distrain.board.server", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "pip install 'distrain[board]'" in said(str(storage))


# -- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no chromium")
    browser = Browser(tmp_path / "profile")
    yield browser
    browser.close()


@pytest.fixture
def live(tmp_path: Path, storage: Path) -> Iterator[subprocess.Popen[bytes]]:
    (tmp_path / "train.py").write_text(TRAIN)
    options = ("--storage-path", str(storage), "--name", "live", "--num-workers", "2", "train.py:main")
    with subprocess.Popen(command("run", *options), cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
        wait_until(lambda: (storage / "live/metrics.jsonl").exists(), 60.0, "training")
        yield process
        process.kill()


BODY = "document.querySelector('main > table > tbody')"
CELLS = f"""
[...{BODY}.children].map((row) =>
  [...row.children].map((cell) => (cell.matches("th") ? cell.firstChild : cell).textContent))
"""
PLACES = """
JSON.stringify([...document.querySelectorAll("#filter, #plot, thead th, tbody > tr, #states")].map((one) =>
  one.getBoundingClientRect()))
"""
DETAILS = "document.querySelector('#details').textContent"


def press(browser: Browser, key: str) -> None:
    browser.evaluate(
        f"document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {{key: {key!r}, bubbles: true}}))"
    )


def others(browser: Browser, server: Server) -> list[str]:
    """Return what the browser complained about, and what it asked others for."""
    return [one for one in browser.complaints if not one.startswith(f"http://127.0.0.1:{server.port}/")]


def title_of(browser: Browser) -> str:
    """Return the title of a page; "" while it is replaced by another."""
    try:
        return str(browser.evaluate("document.title"))
    except AssertionError:
        return ""


def cells_of(browser: Browser) -> dict[str, list[str]]:
    return {cells[1]: cells for cells in browser.evaluate(CELLS)}


def test_a_run_that_trains_is_followed_and_stopped(
    browser: Browser, server: Server, storage: Path, live: subprocess.Popen[bytes]
) -> None:
    browser.show(server.url, width=1600)
    wait_until(lambda: "live" in cells_of(browser), what="the run is in the table")
    wait_until(lambda: cells_of(browser)["live"][5].endswith("s"), what="the time left is known")
    assert cells_of(browser)["live"][2] == "running"
    assert cells_of(browser)["old-1"][2] == "failed"
    assert cells_of(browser)["live"][11] == "2 on localhost"
    before, places = cells_of(browser)["live"], browser.evaluate(PLACES)
    wait_until(lambda: cells_of(browser)["live"][6] != before[6], what="the last value changes")
    assert browser.evaluate(PLACES) == places

    browser.evaluate(f"{BODY}.querySelector('tr').focus()")
    press(browser, "ArrowDown")
    press(browser, "ArrowUp")
    press(browser, "Enter")
    assert browser.evaluate("document.querySelector('#details h2').textContent") == "live"
    for _ in range(2):  # more lines come
        step = max(map(int, re.findall(r"this is step (\d+)", browser.evaluate(DETAILS))), default=0)
        wait_until(lambda step=step: f"[rank 1] this is step {step + 1}" in browser.evaluate(DETAILS), what="output")
    stacks, stop = (f"document.querySelectorAll('.actions button')[{n}].click()" for n in (0, 1))
    browser.evaluate(stacks)
    wait_until(lambda: "train.py:" in browser.evaluate("document.querySelector('.answer').textContent"), what="stacks")
    browser.evaluate(stop)
    assert "Really stop" in browser.evaluate(DETAILS)
    assert live.poll() is None
    browser.evaluate(stop)
    wait_until(lambda: cells_of(browser)["live"][2] == "stopped", 30.0, "the run was stopped")
    assert live.wait(10) != 0
    press(browser, "Escape")
    assert browser.evaluate("document.querySelector('#details').hidden")
    assert others(browser, server) == []
    browser.show(f"{server.url}runs/live/", width=1000)
    assert browser.evaluate("document.querySelector('.verdict').textContent").startswith("stopped Stopped after")


def drawn(browser: Browser) -> list[str]:
    """Return the names in the legend of the plot."""
    return list(browser.evaluate("[...document.querySelectorAll('#plot .u-label')].slice(1).map((n) => n.textContent)"))


def type_filter(browser: Browser, text: str) -> None:
    one = "document.querySelector('#filter')"
    browser.evaluate(f"{one}.value = {text!r}; {one}.dispatchEvent(new Event('input'))")


def test_runs_are_sorted_filtered_and_drawn(browser: Browser, server: Server) -> None:
    browser.show(server.url, width=1280)
    wait_until(lambda: [row[1] for row in browser.evaluate(CELLS)] == ["old-2", "old-1", "old-0"], what="the table")
    wait_until(lambda: drawn(browser) == ["old-2", "old-1", "old-0"], what="curves")
    browser.evaluate("document.querySelector('th[data-key=last] button').click()")
    assert [row[6] for row in browser.evaluate(CELLS)] == ["0.03226", "0.03333", "0.03448"]
    browser.evaluate("document.querySelector('th[data-key=last] button').click()")
    assert [row[1] for row in browser.evaluate(CELLS)] == ["old-0", "old-1", "old-2"]
    assert [row[12] for row in browser.evaluate(CELLS)] == ["0.1", "0.05", "0.025"]
    browser.evaluate("document.querySelector('#states [data-state=failed]').click()")
    assert [row[1] for row in browser.evaluate(CELLS)] == ["old-1"]
    wait_until(lambda: drawn(browser) == ["old-1"], what="only what the table shows")
    browser.evaluate("document.querySelector('#all').click()")
    assert "Choose runs" in browser.evaluate("document.querySelector('#plot').textContent")
    browser.evaluate("document.querySelector('#states [data-state=failed]').click()")
    assert drawn(browser) == []
    browser.evaluate("document.querySelector('#all').click()")
    wait_until(lambda: sorted(drawn(browser)) == ["old-0", "old-1", "old-2"], what="all curves")
    type_filter(browser, "OLD-0 finished")
    assert [row[1] for row in browser.evaluate(CELLS)] == drawn(browser) == ["old-0"]
    browser.evaluate(f"{BODY}.querySelector('tr').focus()")
    press(browser, " ")
    assert drawn(browser) == []
    type_filter(browser, "")
    wait_until(lambda: sorted(drawn(browser)) == ["old-1", "old-2"], what="a curve less")
    type_filter(browser, "old-0")  # which hides all that were chosen
    wait_until(lambda: drawn(browser) == ["old-0"], what="what the filter shows")
    type_filter(browser, "old-")
    wait_until(lambda: sorted(drawn(browser)) == ["old-1", "old-2"], what="what was chosen")
    browser.show(server.url, width=1280)
    wait_until(lambda: sorted(drawn(browser)) == ["old-1", "old-2"], what="what was chosen stays")
    assert others(browser, server) == []


def test_it_fits_phones_and_desktops_in_both_schemes(browser: Browser, server: Server) -> None:
    inks: set[Any] = set()
    for width in (360, 1280):
        for scheme in ("light", "dark"):
            browser.show(server.url, width=width, scheme=scheme)
            wait_until(lambda: drawn(browser) == ["old-2", "old-1", "old-0"], what="curves")
            assert [row[1] for row in browser.evaluate(CELLS)] == ["old-2", "old-1", "old-0"]
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            assert browser.evaluate("document.querySelectorAll('#plot .u-series').length") == 4
            inks.add(browser.evaluate("getComputedStyle(document.body).color"))
            assert others(browser, server) == []
    assert len(inks) == 2
    browser.evaluate(f"{BODY}.querySelector('tr').click()")
    browser.evaluate("document.querySelector('#details a').removeAttribute('target')")
    browser.evaluate("setTimeout(() => document.querySelector('#details a').click())")
    wait_until(lambda: title_of(browser).startswith("old-2"), what="the page of the run")
