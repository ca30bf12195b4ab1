"""The working directory of a trial, and the fence around the user's own."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from distrain.drilling.fence import mirror

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
import os, shutil, sys, tempfile
from distrain.drilling.fence import fence
os.chdir(sys.argv[2])
fence([os.path.realpath(sys.argv[1])], os.path.realpath(sys.argv[2]))
print(open(sys.argv[1] + "/data.txt").read())
for write in sys.argv[3:]:
    try:
        exec(write)
    except PermissionError as error:
        print("refused", str(error).count("{drill}"))
    else:
        print("written")
"""


def results(user: Path, own: Path, *writes: str) -> list[str]:
    """What a process with a fence could write."""
    command = [sys.executable, "-c", PROGRAM, str(user), str(own), *writes]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, *others = done.stdout.splitlines()
    assert first == "data"
    return others


def test_nothing_is_written_outside_of_the_directory_that_is_allowed(tmp_path: Path) -> None:
    user, own = tmp_path / "user", tmp_path / "own"
    user.mkdir()
    own.mkdir()
    (user / "data.txt").write_text("data")
    (own / "link").symlink_to(user)
    writes = [
        "open(sys.argv[1] + '/out.txt', 'w')",
        "open(sys.argv[1] + '/data.txt', 'a')",
        "open('link/out.txt', 'w')",
        "os.open(sys.argv[1] + '/out.txt', os.O_WRONLY | os.O_CREAT)",
        "os.mkdir(sys.argv[1] + '/new')",
        "os.remove(sys.argv[1] + '/data.txt')",
        "os.replace(sys.argv[2] + '/link', sys.argv[1] + '/data.txt')",
        "shutil.rmtree(sys.argv[1])",
        "os.symlink('/etc', sys.argv[1] + '/new')",
    ]
    assert results(user, own, *writes) == ["refused 2"] * len(writes)
    assert results(user, own, "open('/opt/new', 'w')", "os.mkdir(sys.argv[1] + '/.cache')") == ["refused 2"] * 2
    allowed = [
        "os.makedirs(sys.argv[1], exist_ok=True)",
        "open('out.txt', 'w')",
        "os.mkdir('new')",
        "open('/dev/null', 'w')",
    ]
    assert results(user, own, *allowed) == ["written"] * len(allowed)


def test_a_mirror_has_copies_of_small_files_and_links_to_others(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "package").mkdir(parents=True)
    (source / "package/code.py").write_text("x = 1")
    (source / "large.bin").write_bytes(bytes(1_000_001))
    (source / ".git").mkdir()
    (source / "many").mkdir()
    for number in range(5001):
        (source / f"many/{number}").touch()
    (source / "dead").symlink_to("nowhere")
    mirror(source, target)
    (target / "package/code.py").write_text("x = 2")
    assert (source / "package/code.py").read_text() == "x = 1"
    assert [name for name in ("large.bin", ".git", "many", "dead") if (target / name).is_symlink()] == [
        "large.bin", ".git", "many", "dead",
    ]  # fmt: skip
    assert (target / "large.bin").stat().st_size == 1_000_001
