"""Start a process that lives on when its user logs out, or the machine reboots. Runs in: submit."""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.system import process

if TYPE_CHECKING:
    from collections.abc import Sequence

_UNIT = """\
[Unit]
Description=Continue the jobs of distrain after a reboot

[Service]
Type=oneshot
RemainAfterExit=yes
KillMode=process
ExecStart={command}

[Install]
WantedBy=default.target
"""
_HOOK = "distrain-resume.service"
_LOGIND = ("org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager")


def start_detached(folder: Path) -> str:
    """Start the process of a job, with its output in ``console.log``. Return what its user should know, or empty.

    systemd's user manager starts it if it outlives the user's logins; else it gets a session of its own.
    """
    command, log = [sys.executable, "-m", "distrain", "job", str(folder)], folder / "console.log"
    output = {"StandardOutput": f"append:{log}", "StandardError": "inherit"}
    settings = {"KillMode": "mixed", "TimeoutStopSec": "120", **output}
    if _lingers():
        words = [word for key, value in settings.items() for word in ("-p", f"{key}={value}")]
        passed = [f"--setenv={key}={os.environ[key]}" for key in ("PYTHONPATH", "XDG_STATE_HOME") if key in os.environ]
        unit = ["--user", "--quiet", "--collect", f"--unit=distrain-{folder.name}", *words, *passed]
        if _output(["systemd-run", *unit, "--", *command]) is not None:
            return ""
    with open(log, "ab") as file:
        job = process.spawn_quiet(command, environment=os.environ, directory=str(folder), output=file.fileno())
        job.returncode = 0  # nobody waits for it: it is to outlive this process
    kills = _output(["busctl", "get-property", *_LOGIND, "KillUserProcesses"])
    if kills is not None and kills.strip() == "b true":
        return "systemd ends this job when you log out: allow it to stay, once, with `loginctl enable-linger`"
    return ""


def install_hook() -> str:
    """Have unfinished jobs continue after a reboot. Return what its user should know: how, or what to do for it."""
    command = [sys.executable, "-m", "distrain", "submit", "--resume"]
    if _lingers():
        folder = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "systemd" / "user"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _HOOK).write_text(_UNIT.format(command=shlex.join(command)))
        if _output(["systemctl", "--user", "enable", _HOOK]) is not None:
            return f"after a reboot, it continues: systemd starts {folder / _HOOK}"
    line = f"@reboot {shlex.join(command)}\n"
    if shutil.which("crontab"):
        table = f"{_output(['crontab', '-l']) or ''}\n".lstrip()
        with tempfile.NamedTemporaryFile("w", suffix=".crontab") as file:
            file.write(table if line in table else table + line)
            file.flush()
            if _output(["crontab", file.name]) is not None:
                return "after a reboot, it continues: `crontab -l` shows how"
    return f"to continue it after a reboot, have the machine run: {shlex.join(command)}"


def _lingers() -> bool:
    """Tell if systemd manages services of this user, also while they are not logged in."""
    folder = os.environ.setdefault("XDG_RUNTIME_DIR", f"/run/user/{os.geteuid()}")  # cron, for one, does not set it
    if not Path(folder, "systemd", "private").exists():
        return False
    user = pwd.getpwuid(os.geteuid()).pw_name
    return _output(["loginctl", "show-user", user, "--property=Linger", "--value"]) == "yes"


def _output(argv: Sequence[str]) -> str | None:
    """Return what a program has printed; None if it is not there, or has failed."""
    found = process.output_of(argv, "/")
    return None if found is None else found.decode(errors="replace").strip()
