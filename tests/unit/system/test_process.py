"""Killing processes, and sparing the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from distrain.system import process
from tests.conftest import wait_until

HAS_TRACKER = """
import subprocess, sys, time
from multiprocessing import shared_memory
block = shared_memory.SharedMemory(create=True, size=1000, name=sys.argv[1])
sleeper = subprocess.Popen(["sleep", "1000"])
print(sleeper.pid, flush=True)
time.sleep(1000)
"""


def start_with_tracker(name: str) -> tuple[subprocess.Popen[bytes], psutil.Process, psutil.Process]:
    """Start a leader with shared memory. Return it, its sleeping child and its resource tracker."""
    leader = subprocess.Popen([sys.executable, "-c", HAS_TRACKER, name], stdout=subprocess.PIPE, start_new_session=True)
    assert leader.stdout is not None
    with leader.stdout:
        sleeper = psutil.Process(int(leader.stdout.readline()))
    (tracker,) = (child for child in psutil.Process(leader.pid).children() if child != sleeper)
    return leader, sleeper, tracker


def test_a_resource_tracker_that_is_stopped_gets_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "TRACKERS_S", 0.1)
    name = f"distrain-test-{os.getpid()}"
    leader, _, tracker = start_with_tracker(name)
    try:
        tracker.suspend()
        tracked = process.find_process(tracker.pid)
        assert tracked is not None
        monkeypatch.setattr(process, "kill_descendants", lambda: process.Remains({leader.pid}, [], [tracked]))
        process.end_descendants()
        wait_until(lambda: not process.is_alive(tracked), what="the end of the tracker")
    finally:
        os.killpg(leader.pid, signal.SIGKILL)
        leader.wait()
        Path("/dev/shm", name).unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["python", "-s", "-c", "from multiprocessing.resource_tracker import main;main(7)"], True),
        (["python", "-c", "from joblib.externals.loky.backend.resource_tracker import main; main(7, False)"], True),
        (["/site-packages/torch/bin/torch_shm_manager"], True),
        (["python", "-c", "import multiprocessing.resource_tracker"], False),
        (["sh", "from multiprocessing.resource_tracker import main;main(7)"], False),
        ([], False),
    ],
)
def test_resource_trackers_are_known_by_their_command(
    words: list[str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "command_line", lambda pid: [word.encode() for word in words])
    assert process.is_resource_tracker(1) is expected


IN_A_NAMESPACE = """
import os, signal, subprocess
from distrain.system import process
child = subprocess.Popen(["sleep", "1000"])
print(process.sees_pids(), *process.kill_descendants(), process.sweep("test"), child.poll())
process.kill(child.pid, signal.SIGKILL)
print(child.wait(), process.began_at(os.getpid()))
"""
UNSHARE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")


@pytest.mark.skipif(
    subprocess.run([*UNSHARE, "true"], capture_output=True).returncode != 0, reason="needs a namespace of its own"
)
def test_nothing_is_killed_by_the_numbers_of_another_pid_namespace() -> None:
    done = subprocess.run([*UNSHARE, sys.executable, "-c", IN_A_NAMESPACE], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False () [] [] [] None", "-9 None"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_signals_that_a_process_handles_are_known() -> None:
    source = """
import signal
signal.signal(signal.SIGTERM, print)
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
print(flush=True)
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        handled = process.handled_signals(child.pid)
        child.kill()
    assert handled is not None
    caught, ignored = handled
    assert signal.SIGTERM in caught
    assert signal.SIGUSR1 in ignored
    assert signal.SIGUSR2 not in {*caught, *ignored}
    assert process.handled_signals(child.pid) is None
