"""Files of a run on the terminal: whatever is in them, the commands only print it."""

from __future__ import annotations

import json
import math
import socket
from typing import TYPE_CHECKING, Any

import pytest

from distrain import wire
from distrain.cli.debugging import Terminal
from distrain.cli.main import run_main
from distrain.cli.text import coloured, write_json
from distrain.decisions.host_checks import Finding
from distrain.wire.channel import Channel
from tests.unit.storage.made import add_reports, make_run
from tests.unit.system.test_log import assert_harmless

if TYPE_CHECKING:
    from pathlib import Path

BAD = "\x1b[\x002J\x1b[2\x7fJ\x1b[\x1b\x1b2J\x9b2J\x1b]0;title\x07mark"


@pytest.mark.parametrize("command", ["ls", "ls --json", "show", "show --json", "logs"])
def test_no_command_lets_a_file_of_a_run_act_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    attempts = [{"attempt": 0, "started": 1.0, "ended": 2.0, "hosts": {BAD: [0, 1]}, "failure": BAD}]
    facts: dict[str, Any] = {"user": BAD, "host": BAD, "git": {"commit": BAD}, "versions": {BAD: BAD}, "script": BAD}
    facts |= {"attempts": attempts, "train_loop_config": {BAD: BAD}}
    runs = [make_run(tmp_path, f"{n}{BAD}".replace("\0", ""), status="failed", **facts) for n in (1, 2)]
    for run in runs:
        add_reports(run, {"loss": 1.0, BAD: BAD})
        (run / "error.json").write_text(json.dumps({"type": "ValueError", "message": f"{BAD}\n{BAD}"}))
        (run / "logs/attempt_0").mkdir(parents=True)
        (run / "logs/attempt_0/rank_0.log").write_text(f"{BAD}\n")
    name, *options = command.split()
    where = [str(tmp_path)] if name == "ls" else [str(runs[0])]
    assert run_main([name, *where, *options], []) == 0
    out, err = capsys.readouterr()
    assert "mark" in out + err
    assert_harmless(out + err)


def test_colours_can_be_forced_and_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    for variables, shown in (({"FORCE_COLOR": "1"}, "\033[31mfailed\033[0m"), ({"NO_COLOR": "1"}, "failed")):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert coloured("failed") == shown


def test_what_is_not_json_is_its_fields_or_its_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_json(
        "kind", at=tmp_path, reason=Finding("beta", "slow"), metrics={"loss": math.nan, "best": -math.inf, "n": 1}
    )
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {
        "format": 1,
        "kind": "kind",
        "at": str(tmp_path),
        "reason": {"host": "beta", "text": "slow", "is_fatal": True},
        "metrics": {"loss": "NaN", "best": "-Infinity", "n": 1},
    }


def test_a_debugger_lets_no_rank_act_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda prompt: "q")
    end, other = socket.socketpair()
    with end, other:
        far = Channel(other.fileno(), other.fileno())
        far.send(wire.DebuggerSays(attempt=0, rank=0, body=f"{BAD}\n".encode()))
        far.send(wire.DebuggerSays(attempt=0, rank=0, body=b"", closed=BAD))
        terminal = Terminal(Channel(end.fileno(), end.fileno()), 0)
        stopped = f"has stopped in {BAD}"
        terminal.relay([wire.DebuggerSays(attempt=0, rank=0, stopped=stopped, body=f"{BAD}\n".encode())])
    out = capsys.readouterr().out
    assert out.count("mark") == 4
    assert_harmless(out)
