"""Files of a run on the terminal: whatever is in them, the commands only print it."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any

import pytest

from distrain import wire
from distrain.cli.debugging import _Conversation
from distrain.cli.main import run_main
from distrain.storage.runs.listing import local_run
from distrain.wire.channel import Channel
from tests.unit.storage.made import add_reports, make_run
from tests.unit.system.test_log import assert_harmless

if TYPE_CHECKING:
    from pathlib import Path

BAD = "\x1b[\x002J\x1b[2\x7fJ\x1b[\x1b\x1b2J\x9b2J\x1b]0;title\x07mark"


@pytest.mark.parametrize("command", ["ls", "ls --json", "show", "logs"])
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


def test_a_debugger_lets_no_rank_act_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda prompt: "q")
    end, other = socket.socketpair()
    with end, other:
        far = Channel(other.fileno(), other.fileno())
        far.send(wire.DebuggerSays(attempt=0, rank=0, body=BAD.encode(), prompt="(Pdb) ", error=BAD))
        far.send(wire.DebuggerSays(attempt=0, rank=0, body=b"", closed=BAD))
        assert _Conversation(Channel(end.fileno(), end.fileno()), 0).hold(local_run(str(tmp_path))) == 0
    out = capsys.readouterr().out
    assert out.count("mark") == 3
    assert_harmless(out)
