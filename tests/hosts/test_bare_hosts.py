"""Training on bare hosts: machines with only sshd, a Python and torch. Everything else goes there, and comes back."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.conftest import NOTHING_LEFT_WITHIN_S, run_members, wait_until
from tests.hosts.bare import ALL_PACKAGES, BARE_HOSTS, BareLab, start_bare_lab
from tests.hosts.running import LEASE_S, Running, cut_power
from tests.hosts.test_crash_table import SCRIPT
from tests.hosts.user import User
from tests.wheels import make_wheel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TORCH_VERSION = importlib.metadata.version("torch").partition("+")[0]
THREE = "localhost:1,alpha:1,beta:1"
WITH_TORCH = ("alpha", "beta")


@pytest.fixture(scope="module")
def bare_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareLab]:
    """Bare hosts for the tests of a module; see BARE_HOSTS. A test undoes its changes to them."""
    with start_bare_lab(tmp_path_factory.mktemp("bare") / "lab", BARE_HOSTS) as lab:
        yield lab


@pytest.fixture
def bare_user(bare_lab: BareLab, tmp_path: Path) -> User:
    """The user in ``head``, in a project directory that no other host sees."""
    return User(bare_lab, make_project(tmp_path))


def make_project(folder: Path) -> Path:
    """Make a project: modules that a script beside them imports, and a file that it reads."""
    project = folder / "project"
    (project / "nets").mkdir(parents=True)
    (project / "helper.py").write_text(HELPER)
    (project / "nets" / "__init__.py").write_text("from nets.linear import Net\n")
    (project / "nets" / "linear.py").write_text("import torch\n\nclass Net(torch.nn.Linear):\n    pass\n")
    (project / "target.txt").write_text("1.5\n")
    subprocess.run(["git", "init", "--quiet", str(project)], check=True)
    return project


HELPER = """
from pathlib import Path
from nets import Net

TARGET = float(Path(__file__).with_name("target.txt").read_text())
"""


# -- training --------------------------------------------------------------------------------------------------------

TORCHRUN_SCRIPT = """
import os, socket
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import helper

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)  # other weights on each rank, until DDP gives them rank 0's
model = DistributedDataParallel(helper.Net(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
(model(torch.full((4, 2), rank + 1.0)) - helper.TARGET).square().mean().backward()
optimizer.step()
checksum = float(sum(weights.double().sum() for weights in model.state_dict().values()))
print("trained", rank, socket.gethostname(), dist.get_world_size(), f"{checksum:.9f}", flush=True)
dist.destroy_process_group()
"""


def test_one_command_trains_a_script_and_its_modules_on_bare_hosts(bare_user: User) -> None:
    """Afterwards an edit is seen at once, also if size and name of the file stay the same."""
    (bare_user.folder / "train.py").write_text(TORCHRUN_SCRIPT)
    ran = bare_user.launches("--hosts", THREE, "--storage-path", "runs", "train.py")
    assert ran.code == 0, ran.err
    trained = sorted(re.findall(r"^\[rank (\d) (\S+)\] trained (\d) (\S+) (\d) (\S+)$", ran.out, re.MULTILINE))
    assert [line[:5] for line in trained] == [
        ("0", "localhost", "0", "head", "3"),
        ("1", "alpha", "1", "alpha", "3"),
        ("2", "beta", "2", "beta", "3"),
    ]
    assert len({line[5] for line in trained}) == 1, "the weights"
    assert re.search(r"copying \d files \(.* k?B\) of your code to beta", ran.err), ran.err
    for text in ("1.5", "2.5"):
        (bare_user.folder / "target.txt").write_text(f"{text}\n")
        (bare_user.folder / "train.py").write_text("import helper; print('target', helper.TARGET)")
    ran = bare_user.launches("--hosts", THREE, "--storage-path", "runs", "train.py")
    assert re.findall(r"target (\S+)", ran.out) == ["2.5"] * 3, ran.err


COPIES = """
import hashlib, tempfile

def read(checkpoint):
    with checkpoint.as_directory() as folder:
        return {path.name: len(path.read_bytes()) for path in sorted(Path(folder).iterdir())}

def train():
    rank, start = distrain.get_context().get_world_rank(), distrain.get_checkpoint()
    with start.as_directory() as folder:
        digest = hashlib.sha256(Path(folder, "weights").read_bytes()).hexdigest()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, f"shard-{rank}").write_bytes(bytes(rank))
        checkpoint = distrain.Checkpoint.from_directory(folder)
        checkpoint.set_metadata({"rank": rank})
        distrain.report({"step": 1}, checkpoint=checkpoint)
    [reported] = distrain.get_all_reported_checkpoints()
    distrain.report({
        "digest": digest, "files": read(reported.checkpoint), "again": read(distrain.get_checkpoint()),
        "metadata": reported.checkpoint.get_metadata(), "path": reported.checkpoint.path,
        "seen": os.path.exists(reported.checkpoint.path), "cwd": os.getcwd(),
    }, checkpoint=start)

if __name__ == "__main__":
    DataParallelTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=3, hosts="alpha:1,beta:1,gamma:1"),
        run_config=RunConfig(name="run", storage_path="runs"),
        resume_from_checkpoint=distrain.Checkpoint("pretrained"),
    ).fit()
"""


@pytest.mark.sample(2, of="checkpoints and environments of bare hosts")
def test_hosts_read_a_checkpoint_of_the_head_and_those_of_all_ranks(bare_user: User) -> None:
    weights = os.urandom(20_000_000)
    (bare_user.folder / "pretrained").mkdir()
    (bare_user.folder / "pretrained" / "weights").write_bytes(weights)
    ran = bare_user.runs(COPIES)
    assert ran.code == 0, ran.err
    [folder] = (bare_user.folder / "runs").glob("*/checkpoint_000000")
    assert [(folder / f"shard-{rank}").stat().st_size for rank in range(3)] == [0, 1, 2]
    for report in ran.reports_in_turn()[-1]:
        assert report["digest"] == hashlib.sha256(weights).hexdigest()
        assert report["files"] == report["again"] == {"shard-0": 0, "shard-1": 1, "shard-2": 2, ".metadata.json": 11}
        assert report["metadata"] == {"rank": 0}
        assert report["path"] == str(bare_user.folder / "runs" / "run" / "checkpoint_000000")
        assert not report["seen"]
        assert report["cwd"].endswith(str(bare_user.folder))


ON_REQUEST = """
from distrain import ShippingConfig

def train():
    import tiny
    distrain.report({"tiny": tiny.__file__})

if __name__ == "__main__":
    shipping = ShippingConfig(env_from="needed.txt")
    DataParallelTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=1, hosts="gamma:1"),
        run_config=RunConfig(storage_path="runs", shipping_config=shipping),
    ).fit()
"""


@pytest.mark.sample(2, of="checkpoints and environments of bare hosts")
def test_an_environment_is_made_on_request(bare_user: User) -> None:
    lab = bare_user.lab
    assert isinstance(lab, BareLab)
    make_wheel(lab.home("gamma") / "wheels", "tiny", "1.0")
    (bare_user.folder / "needed.txt").write_text("--no-index\n--find-links /home/gamma/wheels\ntiny==1.0\n")
    ran = bare_user.runs(ON_REQUEST)
    assert ran.code == 0, ran.err
    assert "distrain: gamma: " in ran.err, "progress"
    [report] = ran.reports()
    assert report["tiny"].startswith("/home/gamma/.cache/distrain/environments/")


OTHER_FILES = """
LIMIT = int(sys.argv[1])

def train():
    folder, rank = distrain.get_context().get_trial_dir(), distrain.get_context().get_world_rank()
    if LIMIT == 1_000_000:
        Path(folder, "plots").mkdir(exist_ok=True)
        Path(folder, "plots", f"rank_{rank}.txt").write_text(f"of rank {rank}")
        if rank < 2:
            Path(folder, "notes.txt").write_text(f"of rank {rank}")
        else:
            Path(folder, "large").write_bytes(bytes(2_000_000))
        distrain.collective.barrier()
        raise ValueError("the first run fails")
    distrain.report({"folder": folder})

if __name__ == "__main__":
    shipping = distrain.ShippingConfig(fetch_limit_bytes=LIMIT)
    DataParallelTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=3, hosts="localhost:1,alpha:1,beta:1"),
        run_config=RunConfig(name="run", storage_path="runs", shipping_config=shipping),
    ).fit()
"""


def test_other_files_of_ranks_come_to_the_run_directory_also_those_that_an_earlier_run_has_left(
    bare_lab: BareLab, bare_user: User
) -> None:
    """Those of alpha go to a directory of their own, because rank 0 has written a file of the same name here."""
    first = bare_user.runs(OTHER_FILES, "1000000")
    assert first.code == 1, first.err
    run = bare_user.folder / "runs" / "run"
    assert f"distrain: alpha: 2 files (18 B) came to {run}/alpha\n" in first.err, first.err
    assert f"distrain: beta: 1 file (9 B) came to {run}\n" in first.err
    assert "1 file (2.0 MB), above the limit of 1.0 MB" in " ".join(first.err.split())
    found = {name: (run / name).read_text() for name in ("notes.txt", "alpha/notes.txt", "alpha/plots/rank_1.txt")}
    assert list(found.values()) == ["of rank 0", "of rank 1", "of rank 1"]
    assert [path.name for path in sorted((run / "plots").iterdir())] == ["rank_0.txt", "rank_2.txt"]
    assert not (run / "large").exists()
    second = bare_user.runs(OTHER_FILES, "1000000000")
    assert f"distrain: beta: 1 file (2.0 MB) came to {run}\n" in second.err, second.err
    assert (run / "large").read_bytes() == bytes(2_000_000)
    folders = [report["folder"] for report in second.reports()]
    assert folders[0] == str(run)
    assert folders[1].startswith("/home/alpha/.cache/distrain/runs/")
    for host in WITH_TORCH:
        bare_lab.expect_nothing_left(host)


# -- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.sample(2, of="checkpoints and environments of bare hosts")
@pytest.mark.parametrize("mode", ["SYNC", "MEMORY"])
def test_a_run_continues_on_a_spare_bare_host_from_the_newest_checkpoint(
    tmp_path: Path, test_run_id: str, mode: str
) -> None:
    hosts = {"alpha": ALL_PACKAGES, "beta": ALL_PACKAGES, "delta": ALL_PACKAGES}
    with start_bare_lab(tmp_path / "lab", hosts) as lab:
        place = make_project(tmp_path)
        saved = "checkpoint=Checkpoint(folder)"
        script = SCRIPT.replace(saved, f"{saved}, checkpoint_upload_mode=distrain.CheckpointUploadMode.{mode}")
        running = Running(lab, place, test_run_id, script, hosts=["alpha", "beta"], spare=["delta"], max_failures=1)
        metrics = place / "runs" / "run" / "metrics.jsonl"
        try:
            wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") == 2, 60.0, "both reports")
            time.sleep(1.0)  # a checkpoint in memory is copied to the other host meanwhile
            cut_power(lab, "beta")
            output, _ = running.end()
        finally:
            running.close()
        assert output.splitlines()[-1] == "FINISHED 1", output
        assert f"distrain: rank 1 on beta was lost: it has been silent for {LEASE_S:g} s" in output
        assert "distrain: 2 workers on alpha, delta, without beta\n" in output
        for host in ("alpha", "delta"):
            lab.expect_nothing_left(host)


def test_a_host_without_torch_is_named_with_the_version_that_it_needs(bare_user: User) -> None:
    (bare_user.folder / "train.py").write_text(TORCHRUN_SCRIPT)
    ran = bare_user.launches("--hosts", "alpha:1,gamma:1", "--storage-path", "runs", "train.py")
    assert ran.code != 0
    assert "Traceback" not in ran.err
    assert "gamma: " in ran.err
    assert re.search(rf"\btorch\W+{re.escape(TORCH_VERSION)}", ran.err), ran.err


# -- what is left ----------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("end", ["it fails", "SIGINT", "SIGKILL"])
def test_nothing_of_a_run_is_left_on_any_bare_host(
    bare_lab: BareLab, tmp_path: Path, test_run_id: str, end: str
) -> None:
    """Without ``localhost``: the agent of the head would see the processes of these hosts, and kill them."""
    project = make_project(tmp_path)
    trains = "import time, helper\nprint('trains', flush=True)\ntime.sleep(1000)"
    (project / "train.py").write_text("import helper\nopen('data.csv')" if end == "it fails" else trains)
    argv = [sys.executable, "-m", "distrain.launch", "--hosts", "alpha:1,beta:1", "--storage-path", "runs", "train.py"]
    environment = {**bare_lab.environment(), "OMP_NUM_THREADS": "1"}
    with (tmp_path / "output").open("wb") as output:
        running = subprocess.Popen(
            bare_lab.argv("head", *argv), cwd=project, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        if end.startswith("SIG"):
            output_file = tmp_path / "output"
            wait_until(
                lambda: running.poll() is not None or output_file.read_text().count("trains\n") == 2, 60.0, "both ranks"
            )
            assert running.poll() is None, output_file.read_text()
            running.send_signal(signal.Signals[end])
        code = running.wait(timeout=60.0)
    finally:
        running.kill()
        running.wait()
    codes = {"it fails": 1, "SIGINT": 130, "SIGKILL": -signal.SIGKILL}
    assert code == codes[end], (tmp_path / "output").read_text()
    said = (tmp_path / "output").read_text()
    assert (end == "it fails") == ("copies of your code only; --ship PATH, or" in said)
    assert (end == "it fails") == (f'File "{project}/train.py", line 2' in said)
    assert ".cache/distrain" not in said
    wait_until(lambda: not run_members(test_run_id), NOTHING_LEFT_WITHIN_S, "the end of all processes")
    for host in WITH_TORCH:
        bare_lab.expect_nothing_left(host)
