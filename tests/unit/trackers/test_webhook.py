"""A webhook, with real HTTP servers: what it posts, and that no server keeps a run."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

import distrain
from distrain import FailureConfig, RunConfig, ScalingConfig, Webhook, WorkerGroupError
from distrain.trackers import webhook as module

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Server:
    """A server that answers with the given codes, then with 200. ``hangs``: it does not answer."""

    def __init__(self) -> None:
        self.posted: list[dict[str, Any]] = []
        self.codes: list[int] = []
        self.hangs = threading.Event()
        self.released = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                server.posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                if server.hangs.is_set():
                    server.released.wait(30)
                self.send_response(server.codes.pop(0) if server.codes else 200)
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                """Say nothing."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/hook?token=secret"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(module, "_PAUSE_S", 0.05)
    running = Server()
    yield running
    running.released.set()
    running.http.shutdown()
    running.http.server_close()


def fit(storage: Path, hook: Webhook, *, fails: int = 0, workers: int = 0, max_failures: int = 1) -> Any:
    def train() -> None:
        attempt = len(list(storage.glob("failed-*")))
        if attempt < fails:
            (storage / f"failed-{attempt}").touch()
            raise ValueError("on purpose")
        distrain.report({"loss": 1.0})

    run = RunConfig(
        name="run",
        storage_path=storage / "runs",
        callbacks=[hook],
        failure_config=FailureConfig(max_failures=max_failures),
    )
    return distrain.DataParallelTrainer(train, scaling_config=ScalingConfig(num_workers=workers), run_config=run).fit()


def test_restarts_and_the_end_are_posted_with_the_culprit(tmp_path: Path, server: Server) -> None:
    result = fit(tmp_path, Webhook(server.url), fails=1)
    restarted, finished = server.posted
    for posted in (restarted, finished):
        assert 0 <= posted.pop("seconds") < 30
        posted.pop("text")
    culprit = {"rank": 0, "host": "localhost", "error": restarted["error"]}
    assert restarted["error"].startswith("ValueError: on purpose")
    assert restarted == {"name": "run", "status": "restarted", "attempt": 1, "directory": str(result.path), **culprit}
    nobody = {"rank": None, "host": None, "error": None}
    assert finished == {"name": "run", "status": "finished", "attempt": 1, "directory": str(result.path), **nobody}


def test_a_failure_is_posted_in_words_too(tmp_path: Path, server: Server) -> None:
    with pytest.raises(WorkerGroupError):
        fit(tmp_path, Webhook(server.url), fails=1, workers=1, max_failures=0)
    [failed] = server.posted
    assert (failed["status"], failed["rank"]) == ("failed", 0)
    assert failed["text"].startswith("run has failed after ")
    assert f": rank 0 on {failed['host']}: ValueError: on purpose" in failed["text"]


@pytest.mark.parametrize(
    ("codes", "posts", "is_shown"), [([500], 2, False), ([500, 502, 503], 3, True), ([404], 1, True)]
)
def test_an_error_of_the_server_is_tried_again_but_not_forever(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str], codes: list[int], posts: int, is_shown: bool
) -> None:
    server.codes = list(codes)
    fit(tmp_path, Webhook(server.url))
    assert len(server.posted) == posts
    shown = capsys.readouterr().err
    assert (f"the webhook at 127.0.0.1 could not be notified: HTTP Error {codes[-1]}" in shown) == is_shown
    assert "secret" not in shown


def test_a_server_that_hangs_neither_slows_the_run_down_nor_keeps_it_for_long(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.hangs.set()
    began = time.monotonic()
    result = fit(tmp_path, Webhook(server.url, timeout_s=0.3), fails=1)
    assert result.metrics == {"loss": 1.0}
    assert time.monotonic() - began < 10
    assert "could not be notified: timed out" in capsys.readouterr().err


def test_a_url_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="must begin with http"):
        Webhook("file:///etc/passwd")
