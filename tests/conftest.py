"""Fixtures of all tests: storage for runs, a census of processes after each test, and scripts run as users run them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from hypothesis import HealthCheck, settings

from distrain.coordinator.connection import resting_agents
from distrain.coordinator.ranks import stop_signals
from distrain.hosts.gpus import find_gpus
from distrain.system import process
from distrain.system.background import Background
from tests.tables import SEED, left_out

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from distrain.coordinator.store.local_store import LocalStore

NOTHING_LEFT_WITHIN_S = 5.0

# A shell's background job ignores these, and all child processes would inherit that.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# No deadlines: a busy machine is not a bug.
settings.register_profile("distrain", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("distrain")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also slow tests, and every cell of the big tables")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all") and (unwanted := left_out(items)):
        config.hook.pytest_deselected(items=list(unwanted))
        items[:] = [item for item in items if item not in unwanted]


def pytest_report_header() -> str:
    return f"seed of the tables' samples: {SEED} (repeat it with DISTRAIN_TABLE_SEED={SEED})"


def pytest_runtest_setup(item: pytest.Item) -> None:
    mark = item.get_closest_marker("gpu")
    needed = (*mark.args, 1)[0] if mark else 0
    if needed and (there := len(find_gpus(os.environ)[0])) < needed:
        pytest.skip(f"needs {needed} NVIDIA GPU(s), and there are {there}")


def run_members(run_id: str) -> list[psutil.Process]:
    """Return the living processes whose environment names the run, except this process."""
    found = []
    for pid in set(filter(str.isdigit, os.listdir("/proc"))) - {str(os.getpid())}:
        try:
            environment = Path("/proc", pid, "environ").read_bytes()  # psutil takes 20 times as long, after each test
            if run_id.encode() in environment:
                member = psutil.Process(int(pid))
                ids = member.environ().get(process.RUN_IDS, "").split(":")
                found += [member] if run_id in ids and is_alive(member) else []
        except (psutil.Error, OSError):
            continue
    return found


def last_process() -> str:
    """The id of the process or thread that was started last on this machine, "0" if the kernel does not tell."""
    return Path("/proc/loadavg").read_text().split()[-1]


def is_alive(member: psutil.Process) -> bool:
    try:
        return bool(member.is_running() and member.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:  # it ended between the two calls
        return False


def wait_until(condition: Callable[[], object], timeout_s: float = 20.0, what: str = "condition") -> None:
    """Poll until the condition holds: for the state of another process, which sends no event."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {timeout_s:g} s"
        time.sleep(0.01)


def verify_now(store: LocalStore) -> None:
    """Have a store verify its checkpoints, as at the beginning of a run."""
    store.verify(Background(None, "verification"), is_needed=lambda: True, then=store.ledger.set_aside)


def describe_processes(processes: list[psutil.Process]) -> str:
    lines = []
    for member in processes:
        try:
            lines.append(f"{member.pid}: {' '.join(member.cmdline())[:200]}")
        except psutil.Error:
            continue
    return "\n".join(lines)


@pytest.fixture(autouse=True)
def test_run_id(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Mark every process that the test starts with an id, and fail if one of them is left at the end."""
    run_id = f"test-{uuid.uuid4().hex}"
    monkeypatch.setenv(process.RUN_IDS, run_id)
    last = last_process()
    yield run_id
    resting_agents.close()
    if last_process() == last != "0":
        return  # nothing was started: most tests are over before the machine has been searched
    deadline = time.monotonic() + NOTHING_LEFT_WITHIN_S
    while (left := run_members(run_id)) and time.monotonic() < deadline:
        time.sleep(0.02)
    text = describe_processes(left)
    for member in left:
        member.kill()
    assert not left, f"processes are left after the test:\n{text}"


@pytest.fixture(autouse=True)
def _forget_stop() -> Iterator[None]:
    """Keep a test that sends SIGTERM to this process from stopping the fits of later tests."""
    yield
    stop_signals._stopped_by.clear()


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """The directory for the test's runs."""
    return tmp_path / "runs"


@pytest.fixture
def user_script(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run source text as a user would: a script of its own, in a directory of its own, in a new interpreter."""

    def run(
        source: str, *arguments: str, timeout_s: float = 90.0, **options: object
    ) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "script.py"
        script.write_text(source)
        return subprocess.run(  # type: ignore[call-overload, no-any-return]
            [sys.executable, str(script), *arguments],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            **{"cwd": tmp_path, **options},
        )

    return run


def rewrite(path: Path) -> None:
    path.write_bytes(path.read_bytes())


def replace_file(path: Path) -> None:
    path.with_name("new").write_bytes(path.read_bytes())
    path.with_name("new").replace(path)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


CHANGES: dict[str, Callable[[Path], object]] = {
    "rewrite": rewrite, "replace": replace_file, "append": append, "delete": Path.unlink,
    "shorten": lambda path: os.truncate(path, 10), "empty": lambda path: path.write_bytes(b""),
}  # fmt: skip
"""Changes of a file before it is stored."""
REFUSED = r"was written or replaced .*a directory of its own|No such file"
"""The error about such a change."""
