"""How python -m distrain.launch ends when something goes wrong: exit codes, and what is on the screen."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.terminal import Terminal

AGAIN = "os.execve(sys.executable, sys.orig_argv, {**os.environ, 'AGAIN': ''})"
Launch = Callable[..., "subprocess.CompletedProcess[str]"]


def command(storage: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "distrain.launch", "--storage-path", str(storage), *arguments]


@pytest.fixture
def launch(tmp_path: Path, storage: Path) -> Launch:
    """Run the command line with ``tmp_path`` as working directory."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command(storage, *arguments), cwd=tmp_path, capture_output=True, text=True, timeout=60)

    return run


# -- exit codes ------------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("source", "exit_code", "said"),
    [
        ("raise ValueError('no such data')", 1, "ValueError: no such data"),
        ("import sys; sys.exit(7)", 7, "rank 1"),
        ("import sys; sys.exit('some words')", 1, "some words"),
        ("import os; os.kill(os.getpid(), 9)", 137, "SIGKILL"),
        ("import os; os._exit(5)", 5, "code 5"),
        ("import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'raise SystemExit(6)'])", 6, "code 6"),
        (f"import os, sys; 'AGAIN' in os.environ or {AGAIN}", 0, "finished"),
        ("import atexit, os; atexit.register(os._exit, 4)", 4, "code 4 in its exit handlers"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed(
    launch: Launch, tmp_path: Path, source: str, exit_code: int, said: str
) -> None:
    """Rank 0 waits meanwhile, for nothing if all is well."""
    wait_s = 60 if exit_code else 0
    (tmp_path / "train.py").write_text(
        f"import os, time\nif os.environ['RANK'] == '0':\n    time.sleep({wait_s})\nelse:\n    {source}"
    )
    started = time.monotonic()
    run = launch("--num-workers", "2", "train.py")
    assert run.returncode == exit_code, run.stderr
    assert said in run.stderr
    assert time.monotonic() - started < 30


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["broken.py"], 'broken.py", line 2'),
        (["nowhere:train"], "No module named 'nowhere'"),
        (["-m", "nowhere"], "No module named nowhere"),
        (["train.py:two"], "two requires: a, b"),
        (["train.py:tow"], "train.py has no function 'tow'"),
    ],
)
def test_what_only_the_workers_can_find_out_is_one_clear_failure(
    launch: Launch, tmp_path: Path, arguments: list[str], said: str
) -> None:
    (tmp_path / "train.py").write_text("def two(a, b): pass\n")
    (tmp_path / "broken.py").write_text("print('fine')\nif True\n    pass\n")
    run = launch(*arguments)
    assert run.returncode in (1, 2)
    assert said in run.stderr
    assert run.stderr.count("has no function") <= 1
    assert "runpy" not in run.stderr
    assert run.stderr.count("Traceback (most recent call last)") <= 1


# -- signals ---------------------------------------------------------------------------------------------------------

WAITING_SCRIPT = """
import os, time
try:
    print("ready", flush=True)
    time.sleep(60)
finally:
    open("cleaned-" + os.environ["RANK"], "w").close()
"""


@contextmanager
def running(
    tmp_path: Path, storage: Path, *arguments: str, source: str = WAITING_SCRIPT, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """A launch of two ranks that both sleep, leader of a process group as in a shell."""
    (tmp_path / "train.py").write_text(source)
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)  # a child inherits it where tests run with `&`
    with subprocess.Popen(
        command(storage, "--num-workers", "2", *arguments, "train.py"),
        cwd=tmp_path,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as popen:
        signal.signal(signal.SIGINT, ours)
        assert popen.stdout is not None
        try:
            for _ in range(2):
                assert "ready" in popen.stdout.readline()
            yield popen
        finally:
            popen.kill()


SAVING_SCRIPT = """
import os, signal, time

def save(name):
    with open(f"saved-{name}-" + os.environ["RANK"], "w"):
        time.sleep(float(os.environ.get("NEEDS_S", "0")))
    raise SystemExit

for one in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(one, lambda number, frame: save(signal.Signals(number).name))
try:
    print("ready", os.environ["RANK"], flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    save("SIGINT")
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("number", "arguments"),
    [
        (signal.SIGINT, []),
        (signal.SIGTERM, []),
        (signal.SIGHUP, []),
        (signal.SIGUSR1, ["--signals-to-handle", "SIGTERM,SIGUSR1"]),
    ],
)
def test_a_script_gets_the_signal_that_came_and_can_save(
    tmp_path: Path, storage: Path, number: signal.Signals, arguments: list[str]
) -> None:
    """The signal goes to the process group, as Ctrl-C does. The script exits with 0; the run is unfinished."""
    (tmp_path / "train.py").write_text(SAVING_SCRIPT)
    argv = command(storage, "--num-workers", "2", "--name", "saved", *arguments, "train.py")
    with closing(Terminal(argv, 150, 40, tmp_path)) as terminal:
        terminal.wait_for(lambda lines: sum("ready" in line for line in lines) == 2)
        if number == signal.SIGINT:
            terminal.press_ctrl_c()
        else:
            os.killpg(terminal.process.pid, number)
        text = "\n".join(terminal.wait_for_end())
    assert terminal.process.returncode == 128 + number, text
    assert {path.name for path in tmp_path.glob("saved-*")} == {f"saved-{number.name}-{rank}" for rank in (0, 1)}
    assert "failure" not in text
    assert json.loads((storage / "saved" / "run.json").read_text())["status"] == "stopped"


def test_a_script_that_needs_longer_than_the_limit_is_killed_and_the_option_is_named(
    tmp_path: Path, storage: Path
) -> None:
    with running(tmp_path, storage, "--shutdown-timeout", "0.3", source=SAVING_SCRIPT, NEEDS_S="60") as popen:
        popen.terminate()
        _, errors = popen.communicate(timeout=20)
    assert popen.returncode == 143, errors
    assert "passed on to the workers, which have 0.3 s to end" in errors
    assert "ranks that had not stopped were killed; --stop-grace gives them more time:" in errors
    assert "in save at train.py:" in errors


# -- the screen ------------------------------------------------------------------------------------------------------

FAILING_SCRIPT = """
import os

def deeper(rank):
    if rank == 2:
        raise RuntimeError("the data of rank 2 is broken")

def main():
    import torch.distributed as dist
    dist.init_process_group("gloo")
    dist.barrier()
    deeper(dist.get_rank())
    dist.barrier()

main()
"""


def test_a_failure_is_one_screen_that_starts_in_the_users_code(launch: Launch, tmp_path: Path, storage: Path) -> None:
    (tmp_path / "train.py").write_text(FAILING_SCRIPT)
    run = launch("--num-workers", "3", "--name", "broken", "train.py")
    assert run.returncode == 1
    assert run.stdout == ""
    assert len(run.stderr.splitlines()) < 40
    assert run.stderr.count("RuntimeError: the data of rank 2 is broken") <= 2
    frames = re.findall(r'File "(.*?)", line \d+, in (\S+)', run.stderr)
    culprits = [(Path(file).name, function) for file, function in frames[:3]]
    assert culprits == [("train.py", "<module>"), ("train.py", "main"), ("train.py", "deeper")]
    assert [file for file, _ in frames if "/distrain/" in file or "runpy" in file] == []
    titles = [line for line in run.stderr.splitlines() if line.startswith("rank")]
    assert titles[0].startswith("rank 2 ")
    assert str(storage / "broken" / "logs") in run.stderr
    log = next((storage / "broken" / "logs").rglob("rank_2.log")).read_text()
    assert "RuntimeError: the data of rank 2 is broken" in log


@pytest.mark.parametrize(
    "code",
    [
        "import runpy, sys; sys.argv = ['distrain', 'ls']; runpy.run_module('distrain', run_name='__main__')",
        "from distrain.launch import main; main([])",
        "import distrain; distrain.DataParallelTrainer(print).fit()",
    ],
)
def test_a_working_directory_that_was_deleted_is_named(tmp_path: Path, code: str) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    argv = [sys.executable, "-c", f"import os; os.rmdir({str(gone)!r}); {code}"]
    run = subprocess.run(argv, cwd=gone, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1
    assert (
        run.stderr.splitlines()[-1]
        .rpartition("rror: ")[2]
        .startswith("the working directory was deleted: change to another one with cd")
    )
