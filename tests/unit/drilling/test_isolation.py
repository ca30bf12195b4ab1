"""The isolation of a trial: whatever a program does, and whenever it is killed, the user's files stay as they are."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from distrain.drilling import isolation
from distrain.errors import JobError
from tests.drill.cases import content

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

START = """
import ctypes, mmap, os, shutil, sqlite3, subprocess, sys, time
from pathlib import Path
from distrain.drilling.isolation import confine, enter, mirror
mode, user, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
os.chdir(user + "/project")
if mode == "overlay":
    enter(folder, [os.getcwd()])
else:
    mirror(os.getcwd(), folder / "work", "no namespaces")
    os.chdir(folder / "work")
    assert confine([str(folder)], [user + "/project"])
"""
CHANGES = """
def overwrite(path): Path(path, "data.bin").write_bytes(b"mine")
def in_place(path):
    with open(path + "/data.bin", "r+b") as file:
        mmap.mmap(file.fileno(), 0)[:4] = b"mine"
def native(path): ctypes.CDLL(None).truncate((path + "/data.bin").encode(), 1)
def database(path):
    with sqlite3.connect(path + "/study.db") as rows:
        rows.execute("delete from trials")
def child(path): subprocess.run(["sh", "-c", f"rm -rf '{path}/package'; echo x >> '{path}/hard'"])
def new(path): Path(path, "new/deep").mkdir(parents=True)
def moved(path): os.rename(path + "/small", path + "/data.bin")
def linked(path): Path(path, "absolute").write_text("through a link")
def mode_and_time(path):
    os.chmod(path + "/small", 0o777)
    os.utime(path + "/data.bin", (1, 1))
def gone(path): os.unlink(path + "/link_out")
for change in (overwrite, in_place, native, database, child, new, moved, linked, gone, mode_and_time):
    for path in (".", user + "/project", user + "/project/itself", "itself", "link_out", user + "/project/link_out"):
        if change is mode_and_time and mode == "copy" and os.path.realpath(path) != os.getcwd():
            continue  # Landlock does not know these
        try:
            change(path)
        except (OSError, ValueError, sqlite3.Error):
            pass
"""


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a user who has a project, a home, and something else."""
    user = tmp_path / "user, with: odd=name"
    project, other = user / "project", user / "elsewhere"
    (project / "package").mkdir(parents=True)
    (user / "home/.cache").mkdir(parents=True)
    other.mkdir()
    for folder in (project, other):
        (folder / "data.bin").write_bytes(bytes(2_000_000))
        (folder / "small").write_text("small")
        (folder / "hard").hardlink_to(folder / "small")
        with contextlib.closing(sqlite3.connect(folder / "study.db")) as rows, rows:
            rows.execute("create table trials(x)")
            rows.executemany("insert into trials values (?)", [("x" * 1000,)] * 1500)
    (project / "package/code.py").write_text("x = 1")
    (project / "link_out").symlink_to(other)
    (project / "itself").symlink_to(project)
    (project / "absolute").symlink_to(project / "small")
    (project / "dead").symlink_to("nowhere")
    os.mkfifo(project / "pipe")
    monkeypatch.setenv("HOME", str(user / "home"))
    return user


@pytest.fixture
def folder(user: Path) -> Iterator[Path]:
    """The directory of a trial."""
    made = isolation.scratch([str(user / "project")])
    (made / "trial").mkdir()
    yield made / "trial"
    isolation.remove(made)
    assert not made.exists()


def start(program: str, mode: str, user: Path, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", START + program, mode, str(user), str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def outcome(program: str, mode: str, user: Path, folder: Path) -> tuple[int, str]:
    """The exit code of a program, and what it has printed."""
    with start(program, mode, user, folder) as process:
        said, _ = process.communicate()
    return process.returncode, said


@pytest.fixture
def overlays(user: Path, folder: Path) -> None:
    code, said = outcome("", "overlay", user, folder)
    if code:
        pytest.skip(f"needs namespaces: {said}")


@pytest.fixture(params=["overlay", "copy"])
def mode(request: pytest.FixtureRequest) -> str:
    if request.param == "overlay":
        request.getfixturevalue("overlays")
    elif not isolation.landlock_version():
        pytest.skip("needs Landlock")
    return str(request.param)


def test_no_program_changes_the_users_files(mode: str, user: Path, folder: Path) -> None:
    before = content(user)
    code, said = outcome(CHANGES + "print(sorted(os.listdir('.')))", mode, user, folder)
    assert code == 0, said
    assert content(user) == before
    seen = said.splitlines()[-1]  # the trial sees what it has done
    assert "'new'" in seen
    assert "package" not in seen


def test_a_process_that_is_killed_has_changed_nothing(mode: str, user: Path, folder: Path) -> None:
    before = content(user)
    program = "while True:\n" + "".join(f"    {line}\n" for line in f"{CHANGES}print(flush=True)".splitlines())
    with start(program, mode, user, folder) as process:
        assert process.stdout is not None
        for _ in range(3):
            process.stdout.readline()
        process.kill()
    assert content(user) == before


@pytest.mark.usefixtures("overlays")
def test_changes_last_until_the_next_start_of_the_trial(user: Path, folder: Path) -> None:
    outcome("Path('small').write_text('new'); Path('data.bin').unlink()", "overlay", user, folder)
    program = "print(Path('small').read_text(), Path('data.bin').exists())"
    assert outcome(program, "overlay", user, folder) == (0, "new False\n")


@pytest.mark.usefixtures("overlays")
def test_caches_of_the_home_are_shared_and_all_else_of_it_is_not(user: Path, folder: Path) -> None:
    program = "for name in ('.cache/model', 'notes'): Path.home().joinpath(name).write_text('x')"
    assert outcome(program, "overlay", user, folder) == (0, "")
    assert os.listdir(user / "home/.cache") == ["model"]
    assert os.listdir(user / "home") == [".cache"]


def test_a_copy_leads_nowhere_into_the_original(user: Path, tmp_path: Path) -> None:
    project, copy = user / "project", tmp_path / "copy"
    (project / "env").mkdir()
    (project / "env/pyvenv.cfg").touch()
    isolation.mirror(str(project), copy, "no namespaces", fresh=["small", "package"])
    assert not any((copy / name).exists() for name in ("small", "package", "env", "pipe"))
    assert (copy / "itself").resolve() == copy
    assert os.readlink(copy / "absolute") == str(copy / "small")
    assert (copy / "link_out").resolve() == user / "elsewhere"
    assert (copy / "data.bin").stat().st_mtime_ns == (project / "data.bin").stat().st_mtime_ns
    assert copy.stat().st_mtime_ns == project.stat().st_mtime_ns
    assert not any(path.samefile(project / path.name) for path in copy.iterdir() if path.is_file())


def test_a_directory_that_is_too_large_is_refused_with_what_would_be_copied(
    user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "_MOST_COPIED", 3_000_000)
    with pytest.raises(JobError, match=re.escape(f"{user / 'project/data.bin'} (2.0 MB)")) as raised:
        isolation.mirror(str(user / "project"), tmp_path / "copy", "unshare: Operation not permitted")
    assert "3.5 MB" in str(raised.value)
    assert "Operation not permitted" in str(raised.value)
    isolation.mirror(str(user / "project"), tmp_path / "other", "", fresh=["data.bin"])
