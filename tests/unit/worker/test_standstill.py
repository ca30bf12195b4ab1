"""The standstill of a thread: where it cannot be watched, in the kernel, and in endless loops."""

from __future__ import annotations

import dis
import math
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from distrain.wire import channel
from distrain.worker import remote_pdb, standstill
from distrain.worker.session import Session
from distrain.worker.standstill import _IN_KERNEL_S, LOOK_S, STANDING_S, Standstill

if TYPE_CHECKING:
    from collections.abc import Callable

COUNTERS = ("cpu_s", *standstill._PROGRESS, "reaped")


@pytest.mark.parametrize(("kernel_state", "limit_s"), [("S", STANDING_S), ("D", _IN_KERNEL_S)])
def test_a_wait_in_the_kernel_may_last_longer(
    monkeypatch: pytest.MonkeyPatch, kernel_state: str, limit_s: float
) -> None:
    """A slow disk or network file system looks like a frozen one, and other disks say nothing about it."""
    counters = dict.fromkeys(COUNTERS, 0.0)
    monkeypatch.setattr(standstill, "_count", lambda _: (kernel_state, counters))
    watched, frame = Standstill(threading.get_native_id()), sys._getframe()
    states = {}
    for second in range(int(limit_s) + 1):
        watched.sample(frame, watched.since + second)
        states[second] = watched.state
    assert states[int(limit_s) - 1] == ""
    assert states[int(limit_s)] == "stuck"
    counters = dict.fromkeys(counters, 1e9)
    kernel_state = "S"
    watched.sample(frame, moved_at := watched._looked + LOOK_S)
    for second in range(1, int(STANDING_S) + 1):
        watched.sample(frame, moved_at + second)
    assert (watched.state, watched.since) == ("stuck", moved_at)


def test_what_a_person_does_in_the_debugger_is_not_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = dict.fromkeys(COUNTERS, 0.0)
    monkeypatch.setattr(standstill, "_count", lambda _: ("S", dict(counters)))
    watched, frame = Standstill(threading.get_native_id()), sys._getframe()
    began = watched.since
    for second in range(5):
        watched.sample(frame, began + second)
    stopped: dict[str, Any] = {"sys": sys}
    exec(compile("frame = sys._getframe()", remote_pdb.__file__, "exec"), stopped)
    for second in range(5, 15):
        counters = dict.fromkeys(counters, 1e9)
        watched.sample(stopped["frame"], began + second)
    for second in range(15, 20):
        watched.sample(frame, began + second)
        assert (watched.state, watched.since) == ("stuck", began)


def test_processes_of_child_processes_count_after_they_have_ended() -> None:
    before = standstill.seconds_of_children()
    burn = f"{sys.executable} -c 'import time\nwhile time.process_time() < 0.3: pass'; echo; read line"
    with subprocess.Popen(["sh", "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as shell:
        assert shell.stdin
        assert shell.stdout
        shell.stdout.readline()
        assert standstill.seconds_of_children() - before > 0.25
        shell.stdin.close()


@pytest.mark.parametrize("is_store", [False, True])
def test_bytes_of_tcp_count_but_not_those_of_torchs_store(monkeypatch: pytest.MonkeyPatch, is_store: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port if is_store else port + 1))
        with socket.create_connection(("127.0.0.1", port)) as sender, server.accept()[0] as receiver:
            before = standstill._network_use()
            sender.sendall(bytes(5000))
            assert len(receiver.recv(5000, socket.MSG_WAITALL)) == 5000
            grown = standstill._network_use() - before
    assert grown == 0 if is_store else grown >= 5000


@pytest.mark.parametrize(
    ("grows", "is_told", "moves"),
    [
        ({"written": 1}, False, True),
        ({"written": 5000}, True, False),  # its own stacks
        ({"read": 1}, True, True),
        ({"reaped": 50, "cpu_s": 0.001}, False, True),
        ({"reaped": 50}, False, False),  # another thread has started a process
    ],
)
def test_what_counts_as_progress(
    monkeypatch: pytest.MonkeyPatch, grows: dict[str, float], is_told: bool, moves: bool
) -> None:
    counters = dict.fromkeys(COUNTERS, 0.0)
    monkeypatch.setattr(standstill, "_count", lambda _: ("S", dict(counters)))
    watched, frame = Standstill(threading.get_native_id()), sys._getframe()
    began = watched.since
    for second in range(5):
        watched.sample(frame, began + second)
    assert watched.state == "stuck"
    counters |= grows
    if is_told:  # the news comes while the thread is being looked at
        watched.listen = lambda: watched.expect_stacks(began + 5)
    watched.sample(frame, began + 5)
    assert watched.state == ("" if moves else "stuck")


def test_a_thread_that_waits_for_distrain_asks_unless_it_meets_other_ranks() -> None:
    """Also where the kernel counts nothing."""
    meets = Session.collective.__name__
    code = f"def wait(): return sys._getframe()\ndef {meets}(): return wait()"
    exec(compile(code, channel.__file__, "exec"), functions := {"sys": sys})
    for function, state in (("wait", "asks"), (meets, "")):
        watched = Standstill(native_id=2**22 + 1)
        began = watched.since
        for second in range(int(STANDING_S) + 2):
            watched.sample(functions[function](), began + second)
        assert watched.state == state
        watched.sample(sys._getframe(), began + 10)
        assert watched.state == ""


def test_datagrams_that_arrive_are_network_use() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        standstill._network_use()
        for _ in range(2):
            before = standstill._network_use()
            receiver.sendto(b"x", receiver.getsockname())
            receiver.recv(1)
            assert standstill._network_use() - before > 2048
            assert standstill._network_use() == standstill._network_use()
            time.sleep(0.003)


def test_a_process_that_sleeps_is_idle_and_one_that_computes_is_not() -> None:
    sleeps, computes = "import time; print(flush=True); time.sleep(60)", "print(flush=True)\nwhile True: pass"
    for code, is_idle in ((sleeps, True), (computes, False)):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
            assert process.stdout
            process.stdout.readline()
            before = standstill.idle_seconds_of(process.pid)
            time.sleep(0.3)
            assert (standstill.idle_seconds_of(process.pid) - before < 0.05) == is_idle
            process.kill()
    assert standstill.idle_seconds_of(process.pid) == math.inf


class Flag:
    is_set = False


def spins() -> None:
    for _ in range(3):
        while not Flag.is_set:
            pass


def counts() -> None:
    number = 0
    while number < 100:
        number += 1


def calls() -> None:
    while not next(iter(())):
        pass


def spinning(function: Callable[[], None]) -> set[str]:
    instructions = dis.get_instructions(function)
    return {one.opname for one in instructions if standstill._spins(function.__code__, one.offset)}


def test_a_loop_that_only_looks_at_variables_is_endless() -> None:
    assert any("JUMP" in name for name in spinning(spins))
    assert "FOR_ITER" not in spinning(spins)
    assert spinning(counts) == set()
    assert spinning(calls) == set()
