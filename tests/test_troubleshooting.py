"""The page of troubleshooting: its entries are about errors that exist, and ``distrain explain`` finds each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from distrain.cli.explaining import entries, explain
from tests.error_texts import covers, texts

OF_OTHERS = {
    "Connection closed by peer", "Connection reset by peer", "trying to initialize the default process group twice",
    "No module named …", "CUDA out of memory", "unable to open shared memory object", "received a bus error",
    "Too many open files", "Watchdog caught collective operation timeout", "AccessDenied",
    "Some NCCL operations have failed or timed out", "Permission denied (publickey)",
    "NCCL error: unhandled system error", "Cannot re-initialize CUDA in forked subprocess",
    "Unable to locate credentials", "The specified bucket does not exist", "Could not connect to the endpoint URL",
    "No space left on device", "Disk quota exceeded", "SIGKILL", "SIGSEGV", "SIGBUS", "SIGABRT",
    "Expected to have finished reduction in the prior iteration",
}  # fmt: skip
"""Keys that are texts of the system, ssh, torch, NCCL and object stores."""

EXAMPLES = [tuple(part.split("\n", 1)) for part in Path(__file__).with_name("errors.txt").read_text().split("## ")[1:]]
"""The beginning of a title, and a text as people see it."""


def test_every_key_is_a_text_that_exists() -> None:
    keys = {key for keys, _ in entries() for key in keys}
    known = [text for place, text in texts() if place != "explaining.py"]
    assert {key for key in keys if not any(covers(key, text) for text in known)} == OF_OTHERS


def test_a_key_means_one_trouble() -> None:
    """A vague one would explain texts that have another cause."""
    counts = {key: sum(covers(key, text) for _, text in texts()) for keys, _ in entries() for key in keys}
    assert {key: count for key, count in counts.items() if count > 6} == {}


def test_every_entry_has_an_example() -> None:
    titles = [keys[0] for keys, _ in entries()]
    assert [title for title in titles if not any(title.startswith(beginning) for beginning, _ in EXAMPLES)] == []
    assert 50 <= len(titles) == len(set(titles)) <= 70


@pytest.mark.parametrize(("title", "text"), EXAMPLES, ids=[text[:30] for _, text in EXAMPLES])
def test_explain_finds_the_entry_of_an_error(title: str, text: str) -> None:
    best = explain(text)[0]
    assert best[1].startswith(title)
    assert best[0] >= 0.7


def explained(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "distrain", "explain", *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)


def test_the_screen_of_a_real_failure_is_explained(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os, signal\ndef main():\n    os.kill(os.getpid(), signal.SIGSEGV)\n")
    run = [sys.executable, "-m", "distrain", "run", "--num-workers", "1", "--storage-path", ".", "train.py:main"]
    screen = subprocess.run(
        run, cwd=tmp_path, capture_output=True, text=True, timeout=100, env={**os.environ, "COLUMNS": "60"}
    )
    done = explained(text=screen.stdout + screen.stderr)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("was killed by … not by distrain\n")
    assert "SIGSEGV: a crash in native code" in done.stdout


def test_links_are_addresses_and_what_fits_nothing_names_the_page() -> None:
    found = explained("it", "was", "killed by the kernel for lack of memory")
    assert found.returncode == 0
    assert "https://distrain.github.io/distrain/failures.html#out-of-memory" in found.stdout
    for text in ("\n", "the checkpoint is on the moon", "finished after 3.6 s at report 3; try again"):
        nothing = explained(text=text)
        assert (nothing.returncode, nothing.stdout) == (1, "")
        assert (
            nothing.stderr == "no entry fits; all of them: https://distrain.github.io/distrain/troubleshooting.html\n"
        )


def test_colours_and_bytes_that_are_not_utf8_do_not_matter() -> None:
    command = [sys.executable, "-m", "distrain", "explain"]
    screen = b"\xff \033[31mCUDA\033[0m out of memory"
    done = subprocess.run(command, input=screen, capture_output=True, timeout=60, check=False)
    assert done.stdout.startswith(b"CUDA out of memory\n")
