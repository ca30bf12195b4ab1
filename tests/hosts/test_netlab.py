"""The lab itself: its hosts are hosts, and nothing of it stays, however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.hosts.lab import NETLAB, end_lab, members, start_lab


def interfaces() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}


def test_nothing_stays_when_the_tests_crash(tmp_path: Path) -> None:
    """The holder is killed, and cannot clean up."""
    before = interfaces()
    holder = start_lab(tmp_path / "lab", "one:1:bare")
    assert len(members(tmp_path / "lab")) == 3
    assert interfaces() == before
    holder.kill()
    end_lab(holder, tmp_path / "lab")
    assert interfaces() == before


def test_what_is_wrong_or_missing_is_named(tmp_path: Path) -> None:
    everything = {"PATH": os.environ["PATH"]}
    for arguments, environment, code, words in (
        (["one:1:bear"], everything, 2, "one:1:bear: the only kind of hosts is bare"),
        (["--mount=/tmp"], everything, 2, "'/tmp'"),
        ([], {"PATH": str(tmp_path)}, 3, "netlab: missing here: "),
        ([], {"PATH": str(tmp_path)}, 3, "unshare (package util-linux)"),
    ):
        argv = [sys.executable, str(NETLAB), "--dir", str(tmp_path / "lab"), "up", *arguments]
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60)
        assert (done.returncode, words in done.stderr) == (code, True), done.stderr
