"""Editors on a rank of a running run, over the Debug Adapter Protocol. The tests play the editor; debugpy is real."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import distrain
from distrain import FailureConfig, Result
from tests.process.conftest import reported, wait_for_reports
from tests.process.test_debugging import Debug

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from tests.process.conftest import Fit

pytest.importorskip("debugpy")


class Editor:
    """A client of ``distrain debug --dap``. It begins as VS Code does, with breakpoints in this file."""

    def __init__(self, command: Debug, *marks: str) -> None:
        command.wait_for("PyCharm")
        port = int(re.findall(r'"port": (\d+)', command.shown)[-1])
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=20.0)
        self._stream = self._socket.makefile("rb")
        self._sent = 0
        self._events: list[dict[str, Any]] = []
        self.ask("initialize", adapterID="debugpy", pathFormat="path", linesStartAt1=True, columnsStartAt1=True)
        self.ask("attach", justMyCode=True)
        lines = [line_of(mark) for mark in marks]
        self.ask("setBreakpoints", source={"path": __file__}, breakpoints=[{"line": line} for line in lines])
        self.ask("configurationDone")

    def ask(self, command: str, **arguments: Any) -> Any:
        """Send a request, and return the body of its response."""
        self._sent += 1
        request = {"seq": self._sent, "type": "request", "command": command, "arguments": arguments}
        text = json.dumps(request).encode()
        self._socket.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(text), text))
        while True:
            message = self._read()
            if message["type"] == "response" and message["request_seq"] == self._sent:
                assert message["success"], message
                return message.get("body")
            self._events.append(message)

    def stopped_at(self) -> tuple[int, list[tuple[str, int]]]:
        """Wait until the rank stops. Return the frame, and the function and line of each frame."""
        while not (stops := [event["body"] for event in self._events if event.get("event") == "stopped"]):
            self._events.append(self._read())
        self._events.clear()
        self.thread = stops[-1]["threadId"]
        frames = self.ask("stackTrace", threadId=self.thread)["stackFrames"]
        return frames[0]["id"], [(frame["name"], frame["line"]) for frame in frames]

    def _read(self) -> dict[str, Any]:
        size = 0
        while (line := self._stream.readline()) != b"\r\n":
            assert line, "the connection has ended"
            size = int(line.partition(b":")[2])
        message: dict[str, Any] = json.loads(self._stream.read(size))
        return message

    def close(self) -> None:
        self._stream.close()
        self._socket.close()


def line_of(mark: str) -> int:
    """Return the line of this file that ends with a comment."""
    ends = [line.endswith(f"# {mark}") for line in Path(__file__).read_text().splitlines()]
    return ends.index(True) + 1


@contextlib.contextmanager
def attached(run: Path, rank: int, *marks: str) -> Iterator[tuple[Editor, Debug]]:
    command = Debug(run, rank, "--dap", "--port", "0")
    try:
        editor = Editor(command, *marks)
        try:
            yield editor, command
        finally:
            editor.close()
    finally:
        command.process.kill()
        command.end()


def test_an_editor_stops_a_running_rank_while_no_timer_runs_and_attaches_again(
    any_fit: Fit, thread: Callable[..., Future[Result]]
) -> None:
    def train() -> str:
        rank = distrain.get_context().get_world_rank()
        number, ends = 0, []
        while rank == 1 and not ends:
            number += 1
            distrain.report({"number": number})  # here
            if not (child := os.fork()):  # as a DataLoader does; it passes the breakpoints
                number = -1  # in a child
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        distrain.collective.barrier()
        return "trained"

    run = any_fit.storage / "run"
    limits = FailureConfig(hang_report_s=2.0, hang_timeout_s=2.0)
    training = thread(any_fit, train, name="run", failure_config=limits)
    wait_for_reports(run)
    with attached(run, 1, "here", "in a child") as (editor, command):
        frame, stack = editor.stopped_at()
        assert stack[0] == ("train", line_of("here"))
        second = Debug(run, 1, "--dap", "--port", "0")
        assert second.end() == 2
        assert "another `distrain debug` has rank 1" in second.shown
        time.sleep(3.0)  # longer than the limits
        scope = editor.ask("scopes", frameId=frame)["scopes"][0]["variablesReference"]
        variables = editor.ask("variables", variablesReference=scope)["variables"]
        assert ("rank", "1") in [(variable["name"], variable["value"]) for variable in variables]
        assert editor.ask("evaluate", expression="rank + 41", frameId=frame, context="repl")["result"] == "42"
        editor.ask("continue", threadId=editor.thread)
        editor.stopped_at()
        editor.ask("disconnect", terminateDebuggee=False)
        editor.close()
        assert command.end() == 0
        assert command.shown.rstrip().endswith("rank 1 continues")
    reports = len(reported(run))
    with attached(run, 1) as (editor, _):
        while len(reported(run)) < reports + 5:
            time.sleep(0.01)
        editor.ask("pause", threadId=1)
        frame, stack = editor.stopped_at()
        assert "train" in dict(stack)
        editor.ask("evaluate", expression="ends.append(True)", frameId=frame, context="repl")
        editor.ask("continue", threadId=editor.thread)
        assert training.result(timeout=60.0).return_value == "trained"


def test_when_the_editor_ends_while_a_rank_is_stopped_training_goes_on(
    fit: Fit, thread: Callable[..., Future[Result]], tmp_path: Path
) -> None:
    def train(config: dict[str, Any]) -> str:
        while not Path(config["ends"]).exists():
            distrain.report({})
            time.sleep(0.01)  # on the way
        return "trained"

    run, config = fit.storage / "run", {"ends": str(tmp_path / "ends")}
    training = thread(fit, train, config, name="run", workers=1)
    wait_for_reports(run)
    with attached(run, 0, "on the way") as (editor, command):
        editor.stopped_at()
        (tmp_path / "ends").touch()
        editor.close()
        assert training.result(timeout=30.0).return_value == "trained"
        command.end()


def test_what_stands_in_the_way_is_said(fit: Fit, thread: Callable[..., Future[Result]], tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> None:
        sys.modules["debugpy"] = None  # type: ignore[assignment]  # as if it were not installed
        while not Path(config["ends"]).exists():
            distrain.report({})
            time.sleep(0.01)

    run = fit.storage / "run"
    training = thread(fit, train, {"ends": str(tmp_path / "ends")}, name="run", workers=1)
    wait_for_reports(run)
    missing = Debug(run, 0, "--dap", "--port", "0")
    assert missing.end() == 2
    assert f"debugpy is needed on {socket.gethostname()}, the host of this rank" in missing.shown
    assert "pip install 'distrain[debug]'" in missing.shown
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        other = Debug(run, 0, "--dap", "--port", str(port))
        assert other.end() == 2
        assert f"port {port} cannot be used" in other.shown
        assert "--port" in other.shown
    (tmp_path / "ends").touch()
    training.result(timeout=30.0)
