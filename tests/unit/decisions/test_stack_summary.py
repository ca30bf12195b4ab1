"""Stacks of faulthandler become one line per place."""

from __future__ import annotations

import pytest

from distrain.api.backend import BackendConfig
from distrain.system.stacks import PHASES, last_words, location, native_reason, summarize_stacks, suspects
from distrain.worker import main, user_code

OURS = "/opt/venv/lib/python3.11/site-packages/distrain"
BOTTOM = [
    (f"{OURS}/work/job.py", 90, "run"),
    (f"{OURS}/worker/user_code.py", 50, "run_user_code"),
    (f"{OURS}/worker/main.py", 80, "run_worker"),
]
TORCH = "/opt/venv/lib/python3.11/site-packages/torch/distributed"

ALL_REDUCE = [
    (f"{TORCH}/distributed_c10d.py", 2810, "all_reduce"),
    (f"{TORCH}/c10d_logger.py", 81, "wrapper"),
    ("/home/me/train.py", 88, "train_func"),
    ("/home/me/train.py", 120, "main"),
]
TOKENIZE = [("/home/me/tokenizer.py", 12, "split"), ("/home/me/train.py", 80, "train_func")]

Frames = list[tuple[str, int, str]]


def thread(frames: Frames, title: str = "Current thread 0x00007f12 (most recent call first):") -> str:
    return (
        "\n".join([title, *(f'  File "{file}", line {line} in {function}' for file, line, function in frames)]) + "\n"
    )


def stack(frames: Frames) -> str:
    """Of a worker whose main thread is there."""
    return thread([*frames, *BOTTOM])


# -- one rank --------------------------------------------------------------------------------------------------------


def test_the_users_innermost_line_and_what_it_has_called() -> None:
    assert location(stack(ALL_REDUCE)) == "in all_reduce at train.py:88"


@pytest.mark.parametrize(
    ("function", "phase"),
    [
        ("_disconnect_peers", "at the end of train_func"),
        ("_failure", "handling an exception of its own"),
        ("_load", "loading train_func"),
        ("setup", "setting up the process group"),
        ("send", "in read at linecache.py:137"),
    ],
)
def test_without_a_frame_of_the_user(function: str, phase: str) -> None:
    frames = [("/usr/lib/python3.11/linecache.py", 137, "read"), (f"{OURS}/x.py", 9, function), BOTTOM[-1]]
    assert location(thread(frames)) == phase


def test_the_phases_are_named_after_functions_of_a_worker() -> None:
    functions = {**vars(main), **vars(user_code), **vars(BackendConfig)}
    assert {name for name in PHASES if callable(functions.get(name))} == PHASES.keys()


# -- last words ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", ["Fatal Python error: Segmentation fault", "Timeout (0:00:01)!"])
def test_of_a_crash_the_users_frames_are_quoted(head: str) -> None:
    frames = [("/usr/lib/python3.11/ctypes/__init__.py", 517, "string_at"), ("/home/me/train.py", 25, "train")]
    bottom = [*BOTTOM, (f"{OURS}/agent/forkserver.py", 9, "main"), ("<frozen runpy>", 88, "_run_code")]
    dump = thread([*frames, *bottom], "Current thread 0x00007f12 (most recent call first):")
    printed = f"epoch 1\n{head}\n\n{dump}\nExtension modules: numpy, torch (total: 99)"
    assert last_words(printed.splitlines()) == [
        head,
        '  File "/usr/lib/python3.11/ctypes/__init__.py", line 517 in string_at',
        '  File "/home/me/train.py", line 25 in train',
    ]


CAUGHT = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE) ran for 600044 ms"
WATCHDOG = f"""\
epoch 1
[rank0]:[E1122 10:00:00.1 ProcessGroupNCCL.cpp:632] [Rank 0] {CAUGHT}
[rank0]:[E1122 10:00:00.1 ProcessGroupNCCL.cpp:684] To avoid data inconsistency, we are taking the entire process down.
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 Rank 0] Process group watchdog thread terminated with exception: [Rank 0] {CAUGHT}
Exception raised from checkTimeout at ProcessGroupNCCL.cpp:632 (most recent call first):
""" + "\n".join(f"frame #{n}: c10d::Work::wait() + 0x{n:x} (0x7f00 in libtorch_cuda.so)" for n in range(12))
"""As torch 2.15 says it."""


def test_what_nccls_watchdog_said_is_quoted_before_the_crash() -> None:
    dump = thread([("/home/me/train.py", 25, "train"), *BOTTOM], "Current thread 0x00007f12 (most recent call first):")
    lines = f"{WATCHDOG}\nFatal Python error: Aborted\n\n{dump}".splitlines()
    assert native_reason(lines) == CAUGHT
    assert last_words(lines) == [
        *(WATCHDOG.splitlines()[n] for n in (1, 3, 4)),
        "Fatal Python error: Aborted",
        '  File "/home/me/train.py", line 25 in train',
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("  what():  std::bad_alloc", "std::bad_alloc"),
        ("RuntimeError: NCCL error: unhandled cuda error, NCCL version 2.27.3", None),
        ("what() happened", ""),
        (
            "[PG ID 0 Rank 1] Terminating the process after attempting to dump debug info, due to Observed a signal.",
            "Observed a signal.",
        ),
        (
            "F1125 client.h:80] Terminating process because the JAX distributed service detected fatal errors. This",
            "the JAX distributed service detected fatal errors",
        ),
        ("epoch 1", ""),
    ],
)
def test_why_native_code_gave_up(line: str, reason: str | None) -> None:
    assert native_reason(["epoch 0", line]) == (
        "NCCL error" + line.partition("NCCL error")[2] if reason is None else reason
    )


def test_what_libraries_print_in_any_run_is_not_quoted() -> None:
    """But a warning of the user's own code is."""
    noise = """\
/opt/site-packages/torch/_subclasses/functional_tensor.py:368: UserWarning: Failed to initialize NumPy
  cpu = _conversion_method_template(device=torch.device("cpu"))
[Gloo] Rank 1 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3
2026-11-28 08:00:00.1: I tensorflow/core/util/port.cc:153] oneDNN custom operations are on. You may see"""
    own = ["/home/me/train.py:7: UserWarning: the loss is nan", "  warn('the loss is nan')", "  indented", "bye"]
    assert last_words([*noise.splitlines(), *own]) == own
    assert last_words(noise.splitlines()) == []


# -- all ranks -------------------------------------------------------------------------------------------------------


def test_ranks_at_the_same_place_are_one_line_most_ranks_first() -> None:
    stacks = {rank: stack(TOKENIZE if rank == 3 else ALL_REDUCE) for rank in range(8)}
    assert summarize_stacks(stacks) == [
        "7 ranks (0-2, 4-7) in all_reduce at train.py:88",
        "rank 3 in split at tokenizer.py:12",
    ]


# -- whom the others wait for ----------------------------------------------------------------------------------------


def test_who_is_not_where_most_are_and_who_did_not_answer() -> None:
    stacks = {rank: stack(TOKENIZE if rank == 3 else ALL_REDUCE) for rank in range(5)}
    assert suspects(stacks, silent=[5]) == [3, 5]
    assert suspects(stacks) == [3]
