"""Jobs as services of systemd's user manager. No such manager runs here: programs of these names note what they get."""

from __future__ import annotations

import socket
import sys
from typing import TYPE_CHECKING

import pytest

from distrain.jobs.detach import install_hook, start_detached
from tests.conftest import wait_until

if TYPE_CHECKING:
    from pathlib import Path

PROGRAMS = {
    "loginctl": 'echo "$LINGERS"',
    "busctl": "echo b true",
    "systemctl": 'echo "$@" >> "$NOTES/systemctl"',
    "systemd-run": 'echo "$@" > "$NOTES/unit"; while [ "$1" != -- ]; do shift; done; shift; env -i "$@" &',
    "crontab": 'if [ "$1" = -l ]; then cat "$NOTES/table" 2>/dev/null; else cp "$1" "$NOTES/table"; fi',
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a job. A user manager listens."""
    (tmp_path / "bin").mkdir()
    for name, script in PROGRAMS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "run" / "systemd").mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as manager:
        manager.bind(str(tmp_path / "run" / "systemd" / "private"))
    for name, value in {"NOTES": tmp_path, "XDG_RUNTIME_DIR": tmp_path / "run", "XDG_CONFIG_HOME": tmp_path}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    (tmp_path / "job-1").mkdir()
    return tmp_path / "job-1"


def test_a_lingering_user_gets_a_service(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINGERS", "yes")
    assert start_detached(folder) == ""
    unit = (tmp_path / "unit").read_text()
    assert f"--unit=distrain-job-1 -p KillMode=mixed -p TimeoutStopSec=120 -p StandardOutput=append:{folder}/" in unit
    assert unit.strip().endswith(f"-- {sys.executable} -m distrain job {folder}")
    assert "systemd starts" in install_hook()
    assert (tmp_path / "systemctl").read_text() == "--user enable distrain-resume.service\n"
    service = (tmp_path / "systemd" / "user" / "distrain-resume.service").read_text()
    assert f"ExecStart={sys.executable} -m distrain submit --resume\n" in service


def test_others_get_a_session_and_are_told_if_it_ends_with_the_login(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINGERS", "no")
    assert "loginctl enable-linger" in start_detached(folder)
    wait_until(lambda: (folder / "console.log").read_bytes() != b"", 30.0, "the process, which finds no job.json")
    (tmp_path / "table").write_text("5 4 * * * backup\n")
    for _ in range(2):
        assert "crontab -l" in install_hook()
    assert (tmp_path / "table").read_text().splitlines() == [
        "5 4 * * * backup",
        f"@reboot {sys.executable} -m distrain submit --resume",
    ]
