"""The outcome of the user's code: does an exception blame another rank?"""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from distrain.api.context import TrainContext
from distrain.errors import CheckpointError
from distrain.worker.session import Session
from distrain.worker.user_code import run_rank

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LEAVES = """
import atexit, os, signal, sys, threading, time
from distrain.worker import user_code

def wait_at_exit():
    print("interrupts", flush=True)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)

user_code.NOTICE_S = 0.1
threading.Thread(target=time.sleep, args=[0.25], name="late").start()
atexit.register(wait_at_exit)
user_code.exit_process(0)
"""
C10D = "torch.distributed.distributed_c10d"
GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:34020."


class DistStoreError(RuntimeError):
    """As that of torch, without torch."""

    __module__ = "torch.distributed"


def raised_in(module: str, error: BaseException) -> BaseException:
    """Return the exception with a traceback whose innermost frame is in this module."""
    namespace: dict[str, Any] = {"__name__": module}
    exec("def fail(error):\n    raise error", namespace)
    return caught(lambda: namespace["fail"](error))


def caught(function: Callable[[], object]) -> BaseException:
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError


def wrapped() -> None:
    try:
        raise raised_in("torch.autograd.graph", RuntimeError(GLOO))
    except RuntimeError as error:
        raise KeyError("step 7") from error


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError


@pytest.fixture
def session() -> Session:
    context = TrainContext(
        world_rank=1, world_size=4, local_rank=1, local_world_size=2, node_rank=0, run_name="run",
        storage_path="/runs", attempt=2, devices=(),
    )  # fmt: skip
    return Session(None, context, None)  # type: ignore[arg-type]


def test_a_process_that_waits_before_it_exits_says_for_what_and_ctrl_c_ends_the_wait(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text(LEAVES)
    done = subprocess.run([sys.executable, tmp_path / "leaves.py"], capture_output=True, text=True, timeout=20)
    assert "waiting for the thread 'late', at run (threading.py:" in done.stderr
    assert "waiting for an exit handler, at wait_at_exit (leaves.py:7); Ctrl-C ends it" in done.stderr
    assert done.returncode == 128 + signal.SIGINT


def blames_peer(session: Session, error: BaseException) -> bool:
    def load() -> NoReturn:
        raise error

    return run_rank(load, session, observed=nullcontext(), ended=lambda error: None).outcome.blames_peer


@pytest.mark.parametrize(
    "error",
    [
        raised_in("torch.autograd.graph", RuntimeError(GLOO)),
        raised_in("torch._ops", RuntimeError("ncclRemoteError: A call failed possibly due to a network error")),
        raised_in(C10D, RuntimeError("Connection reset by peer")),
        raised_in("__main__", DistStoreError("wait timeout after 3000ms, keys: /default_pg/0//nokey")),
        raised_in("train", RuntimeError("Collective ops is aborted by: Socket closed")),
        caught(wrapped),
    ],
    ids=str,
)
def test_an_exception_of_the_communication_between_ranks_blames_a_peer(session: Session, error: BaseException) -> None:
    assert blames_peer(session, error)


@pytest.mark.parametrize(
    "error",
    [
        raised_in("urllib3.connection", ConnectionResetError(104, "Connection reset by peer")),
        raised_in("__main__", RuntimeError("the feature store timed out: connection was closed")),
        raised_in("torch.distributed.checkpoint.filesystem", BrokenPipeError(32, "Broken pipe")),
        raised_in("__main__", DistStoreError("The server socket has failed to listen: address already in use")),
        raised_in(C10D, ValueError("Default process group has not been initialized")),
        CheckpointError("rank 0 cannot store checkpoint_000000: the connection for files has ended: Broken pipe"),
        Unspeakable(),
    ],
    ids=repr,
)
def test_other_exceptions_do_not(session: Session, error: BaseException) -> None:
    assert not blames_peer(session, error)
