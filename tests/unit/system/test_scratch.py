"""The temporary directory of a host: who may use it, and when it goes."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from distrain.system import scratch


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(scratch, "_SHARED_MEMORY", str(tmp_path_factory.mktemp("shm")))
    monkeypatch.delenv("DISTRAIN_SCRATCH", raising=False)


def claim_in_a_child() -> str:
    """Claim in a process that is dead when this returns."""
    read_fd, write_fd = os.pipe()
    if (child := os.fork()) == 0:
        os.write(write_fd, (scratch.claim() or "").encode())
        os._exit(0)
    os.waitpid(child, 0)
    path = os.read(read_fd, 4096).decode()
    os.close(read_fd)
    os.close(write_fd)
    return path


def test_what_nobody_holds_is_removed_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTRAIN_SCRATCH", "")  # restored afterwards
    (tmp_path / "of-the-user").mkdir()
    held, abandoned = scratch.claim(), claim_in_a_child()
    assert held is not None
    Path(abandoned, "checkpoint").mkdir()
    scratch.remove_abandoned()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([Path(held).name, "of-the-user"])


def test_a_process_inside_a_killed_run_is_not_among_its_own_victims(tmp_path: Path) -> None:
    code = "from distrain.system import scratch; path = scratch.claim(); scratch.remove_abandoned(); print('alive')"
    code += "; scratch.remove(path)"
    environment = {**os.environ, "TMPDIR": str(tmp_path), "DISTRAIN_SCRATCH": claim_in_a_child()}
    code = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {code!r}]))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "alive\n"


USES_DIRECTORIES = """
import os, signal, sys
from distrain.system import scratch
class Owner:
    def __init__(self, path): self.path = path
owner = scratch.directory_of(Owner, "owned-")
with scratch.temporary_directory("block-") as folder:
    open(os.path.join(folder, "file"), "w").close()
    open(os.path.join(owner.path, "file"), "w").close()
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("is_worker", [True, False])
@pytest.mark.parametrize("end", ["killed", "finished"])
def test_temporary_directories_are_removed_also_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, is_worker: bool
) -> None:
    monkeypatch.setenv("DISTRAIN_SCRATCH", "")
    agents = scratch.claim() if is_worker else None
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", USES_DIRECTORIES, end], env=environment)
    assert done.returncode == (-9 if end == "killed" else 0)
    left = sorted(path.name.partition("-")[0] for path in Path(agents or tmp_path).iterdir())
    assert left == ([] if end == "finished" else ["block", "owned"] if agents else ["distrain", "distrain"])
    scratch.clear(agents)
    scratch.remove_abandoned()
    assert [str(path) for path in tmp_path.iterdir()] == ([agents] if agents else [])


def test_a_directory_that_another_host_named_is_kept_while_it_is_used(tmp_path: Path) -> None:
    folder = tmp_path / "distrain-run-of-another-host" / "distrain-lightning-1"
    with scratch.kept_for_peer(str(folder)):
        scratch.remove_abandoned()
        assert folder.is_dir()
    assert not list(tmp_path.iterdir())


def test_shared_memory_of_dead_processes_is_removed_unless_somebody_uses_it() -> None:
    with subprocess.Popen(["true"]) as child:
        dead = child.pid
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        names = [f"torch_{dead}_1_0", f"torch_{dead}_2_0", f"pym-{dead}-x", f"torch_{os.getpid()}_1_0", f"psm_{dead}_x"]
        for name in names:
            Path(folder, name).write_bytes(b"x")
        with open(Path(folder, names[1]), "r+b") as file:
            mapped = mmap.mmap(file.fileno(), 1)
        scratch.remove_shared_memory({dead, os.getpid()}, folder)
        assert sorted(os.listdir(folder)) == sorted([names[1], names[3], names[4]])
        mapped.close()
        scratch.remove_shared_memory({dead + 1}, folder)
        assert names[1] in os.listdir(folder)
        scratch.remove_shared_memory({dead}, folder)
        assert names[1] not in os.listdir(folder)


UNSHARE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")
SWEEPS = (
    "import sys; from distrain.system import scratch; scratch.remove_shared_memory({int(sys.argv[1])}, sys.argv[2])"
)


@pytest.mark.skipif(
    subprocess.run([*UNSHARE, "true"], capture_output=True).returncode != 0, reason="needs a namespace of its own"
)
def test_a_container_leaves_the_shared_memory_of_its_host_alone() -> None:
    """A process of the host, or of another container, may have the pid of a dead one of this container."""
    with subprocess.Popen(["true"]) as child:
        dead = str(child.pid)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        Path(folder, f"torch_{dead}_1_0").write_bytes(b"x")
        subprocess.run([*UNSHARE, sys.executable, "-c", SWEEPS, dead, folder], check=True)
        assert os.listdir(folder)
        subprocess.run([*UNSHARE, "--ipc", sys.executable, "-c", SWEEPS, dead, folder], check=True)
        assert not os.listdir(folder)


def test_memory_is_not_shared_with_a_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user may see the name in the temporary directory, and make the twin first."""
    monkeypatch.setenv("DISTRAIN_SCRATCH", "")
    made: list[Path] = []
    make = scratch._make_twin

    def race(path: str) -> str:
        if not made:
            made.append(Path(scratch._SHARED_MEMORY, os.path.basename(path)))
            made[0].mkdir()
        return make(path)

    monkeypatch.setattr(scratch, "_make_twin", race)
    held = scratch.claim()
    assert held is not None
    assert scratch.memory_directory() not in made
    scratch.remove(held)
    assert not made[0].exists()
