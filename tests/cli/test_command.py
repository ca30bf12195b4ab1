"""The distrain command, run as a user runs it, on runs that are real."""

from __future__ import annotations

import gc
import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distrain import DataParallelTrainer, RunConfig, ScalingConfig, runs
from distrain.cli import listing, showing
from distrain.cli.main import COMMANDS, run_main
from tests.conftest import wait_until
from tests.unit.storage.made import add_reports, make_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Command = Callable[..., subprocess.CompletedProcess[str]]

TRAIN = """
import time
from pathlib import Path
from types import ModuleType
import distrain

def main(config):
    again = distrain.get_checkpoint() is not None
    for step in range(1, config["steps"] + 1):
        print("attempt", int(again), "step", step, flush=True)
        checkpoint = distrain.Checkpoint.from_dict({"step": step}) if step == 2 else None
        distrain.report({"loss": 1 / step}, checkpoint=checkpoint)
        if distrain.should_stop():
            return
        if step == 3 and not again and config.get("fails"):
            raise ValueError("on purpose")
        if config.get("waits"):
            Path(f"waits-{int(again)}").touch()
            while not Path("go").exists() and not distrain.should_stop():
                time.sleep(0.01)
"""


def argv(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "distrain", *arguments]


@pytest.fixture
def distrain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run the command in this process, in ``tmp_path``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gc, "disable", lambda: None)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        try:
            code: Any = run_main(list(arguments), [])
        except SystemExit as end:
            code = end.code or 0
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    return run


def start(tmp_path: Path, *arguments: str, name: str = "live") -> subprocess.Popen[str]:
    (tmp_path / "train.py").write_text(TRAIN)
    own = ("run", "--storage-path", "runs", "--name", name, "--num-workers", "1", *arguments, "train.py:main")
    return subprocess.Popen(argv(*own), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture
def live(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run with one worker that waits in train_func until it is asked to stop."""
    with start(tmp_path, "--set", "steps=1000", "--set", "waits=true") as process:
        wait_until(lambda: (tmp_path / "waits-0").exists(), 60.0, "training")
        yield process
        process.kill()


# -- help ------------------------------------------------------------------------------------------------------------


def test_the_help_fits_on_a_screen_and_each_command_has_its_own_with_an_example(distrain: Command) -> None:
    shown = distrain()
    assert shown.returncode == 0
    assert len(shown.stdout.splitlines()) <= 40
    assert max(map(len, shown.stdout.splitlines())) <= 80
    for name in ("submit", "drill", *COMMANDS):
        text = distrain(name, "--help").stdout
        assert f"usage: distrain {name}" in text
        assert "examples:" in text
        assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plot", "A", "B"), "distrain: error: there is no command 'plot'; did you mean board?"),
        (("run", "--num-wokers", "2"), "distrain run: error: there is no option --num-wokers"),
        (("show",), "distrain show: error: the following arguments are required: RUN"),
        (("ls", "x", "--storage-path", "y"), "distrain ls: error: argument --storage-path: not allowed with argument"),
        (("logs", "x/y"), "distrain logs: error: there is no directory"),
        (("logs", "x/y", "-r", "a"), "distrain logs: error: argument -r/--ranks: 'a': must be ranks such as 0,2-5"),
    ],
)
def test_a_wrong_command_line_is_one_line(distrain: Command, arguments: tuple[str, ...], said: str) -> None:
    done = distrain(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(said)
    assert len(done.stderr.splitlines()) == 1


def test_commands_look_for_runs_where_the_variable_says(
    distrain: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "own", "run")
    make_run(tmp_path / "lab", "other")
    monkeypatch.setattr("distrain.storage.names.DEFAULT_STORAGE", "own")  # as DISTRAIN_STORAGE_PATH sets it
    for place, name in (((), "run"), (("--storage-path", "lab"), "other")):
        assert [one["name"] for one in json.loads(distrain("ls", "--json", *place).stdout)["runs"]] == [name]
        assert distrain("show", "last", *place).stdout.startswith(f"{name}: finished")
        assert f"\n{name}" in f"\n{distrain('clean', '--finished', *place).stdout}"


def test_a_list_of_runs_loads_nothing_large(tmp_path: Path) -> None:
    make_run(tmp_path, "run")
    add_reports(tmp_path / "run", {"loss": 0.5})
    code = (
        "import sys\nfrom distrain.cli.main import run_main\n"
        f"run_main(['ls', {str(tmp_path)!r}], [])\nprint(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stderr.split()}
    assert "finished" in done.stdout
    assert not loaded & {"torch", "numpy", "rich", "cloudpickle", "fsspec", "psutil", "dataclasses", "logging"}


@pytest.mark.parametrize("columns", [80, 120])
def test_a_list_fits_the_terminal(
    distrain: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    for number in range(30):
        run = make_run(tmp_path, f"train-2026-11-24_01-02-03-{number:06}", age_s=number, script="train.py")
        add_reports(run, {"loss": 0.5, **{f"metric_{i}": i / 7 for i in range(20)}})
    for module in (listing, showing):
        monkeypatch.setattr(module, "screen", lambda: (columns, 24))
    shown = distrain("ls", str(tmp_path)).stdout.splitlines()
    assert len(shown) == 23
    assert max(map(len, shown)) == columns
    assert shown[1].startswith("train-2026-11-24_01-02-03-000000  finished")
    assert ("SCRIPT" in shown[0]) == (columns == 120)
    assert shown[-1] == "... and 9 more; --all lists them"
    words = distrain("show", "last", "--storage-path", str(tmp_path)).stdout.splitlines()
    assert max(len(line) for line in words if str(tmp_path) not in line) <= columns  # a path stays whole


# -- a finished run --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs with num_workers=0, in one storage path."""
    storage = tmp_path_factory.mktemp("runs")

    def train(config: dict[str, Any]) -> None:
        import distrain

        for step in (1, 2):
            distrain.report({"loss": config["lr"] / step}, checkpoint=distrain.Checkpoint.from_dict({"step": step}))

    for name, lr in (("slow", 0.1), ("fast", 1.0)):
        run = RunConfig(name=name, storage_path=storage)
        scaling = ScalingConfig(num_workers=0)
        config = {"lr": lr, "api_key": "S3CRET"}
        DataParallelTrainer(train, train_loop_config=config, scaling_config=scaling, run_config=run).fit()
    return storage


def test_a_real_run_is_listed_shown_and_packed(distrain: Command, finished: Path) -> None:
    listed = json.loads(distrain("ls", str(finished), "--json").stdout)
    assert (listed["format"], listed["kind"]) == (1, "ls")
    [newest, other] = listed["runs"]
    assert [newest["name"], other["name"]] == ["fast", "slow"]
    assert (newest["state"], newest["step"], newest["metrics"]) == ("finished", 2, {"loss": 0.5})

    place = ("--storage-path", str(finished))
    assert json.loads(distrain("ls", *place, "--json").stdout) == listed
    [run, slow] = runs(finished)
    assert (run.name, run.state, run.metrics, run.ended) == ("fast", "finished", {"loss": 0.5}, newest["ended"])
    assert slow.result().metrics == slow.metrics == {"loss": 0.05}
    details = json.loads(distrain("show", "last", *place, "--json").stdout)
    assert (details["format"], details["kind"], details["run"], details["error"]) == (1, "show", newest, None)
    assert details["extremes"]["loss"] == {"least": 0.5, "least_step": 2, "largest": 1.0, "largest_step": 1}
    assert [saved["step"] for saved in details["checkpoints"]] == [1, 2]
    shown = " ".join(distrain("show", "last", *place).stdout.split())
    assert shown.startswith(f"fast: {details['verdict']} run {details['run']['path']} ")
    for expected in (
        " at report 2",
        "lr=1 api_key=***",
        "localhost: rank 0",
        "2 checkpoints",
        "torch ",
    ):
        assert expected in shown
    assert not any("S3CRET" in path.read_text(errors="replace") for path in finished.glob("*/run.json"))

    assert distrain("page", "fast", "-o", "page.html", *place).stdout == "wrote page.html\n"
    assert "Finished after" in Path("page.html").read_text()
    assert distrain("page", "fast", *place).returncode == 0
    assert (finished / "fast" / "page.html").exists()

    assert "num_workers=0" in distrain("logs", "fast", *place).stderr
    assert "fast is not running: its state is finished" in distrain("stop", "fast", *place).stderr


def test_what_a_pipe_reads_no_further_is_no_error(finished: Path) -> None:
    command = f"{sys.executable} -m distrain ls {finished} --json | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "{\n", "")


# -- a live run ------------------------------------------------------------------------------------------------------


def test_logs_are_followed_through_a_restart_until_the_end(distrain: Command, tmp_path: Path) -> None:
    options = ("--set", "steps=4", "--set", "fails=true", "--max-failures", "1")
    with start(tmp_path, *options) as process:
        wait_until(lambda: (tmp_path / "runs" / "live" / "run.json").exists(), 60.0, "the run")
        follow = argv("logs", "live", "-f", "--storage-path", "runs")
        with subprocess.Popen(follow, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as following:
            out, _ = following.communicate(timeout=60)
        assert process.wait(60) == 0
    steps = [f"[rank 0] attempt 0 step {step}" for step in (1, 2, 3)]
    later = [f"[rank 0] attempt 1 step {step}" for step in (1, 2, 3, 4)]
    lines = out.splitlines()
    assert [line for line in lines if " step " in line] == steps + later
    assert "[rank 0] ValueError: on purpose" in lines
    assert lines.index("-- attempt 1 --") == lines.index(later[0]) - 1
    assert following.returncode == 0

    place = ("--storage-path", "runs")
    assert distrain("logs", "live", *place).stdout.splitlines() == later
    assert distrain("logs", "live", "--attempt", "0", "-n", "1", *place).stdout == "[rank 0] ValueError: on purpose\n"
    assert "only of 0, 1" in distrain("logs", "live", "--attempt", "7", *place).stderr
    assert "no log of rank 5" in distrain("logs", "live", "-r", "5", *place).stderr
    shown = distrain("show", "live", *place).stdout
    assert re.search(r"\n *1 +\+\S.* checkpoint_000000 \(report \d+\) ", shown)
    assert "rank 0 on localhost: ValueError: on purpose" in shown


def test_a_live_run_shows_its_stacks_stops_when_it_is_asked_and_is_resumed(
    distrain: Command, tmp_path: Path, live: subprocess.Popen[str]
) -> None:
    place = ("--storage-path", "runs")
    assert " at train.py:" in distrain("stacks", "live", *place).stdout
    stacks = json.loads(distrain("stacks", "live", *place, "--json").stdout)
    assert [place["ranks"] for place in stacks["places"]] == [[0]]
    assert stacks["places"][0]["where"].startswith("in main at train.py:")
    assert "running" in distrain("ls", "runs").stdout
    assert distrain("clean", "runs", "--older-than", "0s", "--yes").returncode == 0
    assert (tmp_path / "runs" / "live" / "run.json").exists()
    stopped = distrain("stop", "live", *place)
    assert stopped.returncode == 0, stopped.stderr
    first, last = stopped.stdout.splitlines()
    assert first == "live: the run is stopping; waiting for its end"
    assert last.startswith("stopped after ")
    again = distrain("stop", "live", *place, "--json")
    assert (again.returncode, again.stdout) == (2, "")
    out, _ = live.communicate(timeout=60)
    assert live.returncode == 143
    assert "`distrain stop`: the run stops; the workers have 10 s" in out
    assert "Ctrl-C kills the workers now" in out
    assert "stopped by `distrain stop` after" in out
    assert "\nthe run was stopped by `distrain stop`\n" in out
    assert "SIGTERM" not in out
    assert json.loads(distrain("ls", "runs", "--json").stdout)["runs"][0]["state"] == "stopped"
    assert "live: stopped after" in distrain("show", "live", *place).stdout

    (tmp_path / "go").touch()
    resumed = argv("resume", "live", "--storage-path", str(tmp_path / "runs"))
    done = subprocess.run(resumed, cwd="/", capture_output=True, text=True, timeout=60, check=True)
    assert f"in {tmp_path}: distrain run --name=live " in done.stderr
    assert (tmp_path / "waits-1").exists()  # it has gone on from its checkpoint
    assert distrain("resume", "live", *place).stderr.startswith("distrain resume: error: live is finished; only a run ")


def test_at_the_end_stdout_has_one_object_and_nothing_else(distrain: Command, tmp_path: Path) -> None:
    """Also if the run was stopped, by a command whose stdout has one, too."""
    (tmp_path / "train.py").write_text(
        TRAIN.replace("        print(", "        import os; os.write(1, b'native')\n        print(")
    )
    options = ("run", "--json", "--storage-path", "runs", "--name", "live", "--num-workers", "0")
    given = ("--set", "steps=9", "--set", "waits=true", "train.py:main")
    with subprocess.Popen(argv(*options, *given), cwd=tmp_path, stdout=-1, stderr=-1, text=True) as process:
        wait_until(lambda: (tmp_path / "waits-0").exists(), 60.0, "training")
        stopped = distrain("stop", "live", "--storage-path", "runs", "--json")
        out, err = process.communicate(timeout=60)
    ended, seen = json.loads(out), json.loads(stopped.stdout)
    assert (ended.pop("kind"), ended.pop("exit_code"), seen.pop("kind")) == ("run", process.returncode, "stop")
    assert ended["run"]["state"] == "stopped"
    assert "stopped by" in ended["error"]
    assert seen["checkpoints"] == ended["checkpoints"] != []
    assert "attempt 0 step 1" in err
    assert "native" in err
    assert "stopped after" in stopped.stderr


def test_a_run_whose_process_is_elsewhere_or_takes_no_requests_says_where(distrain: Command, tmp_path: Path) -> None:
    from distrain.storage.run_lock import LocalLock

    run = make_run(tmp_path / "runs", "run", status="running", host="far-away", pid=7)
    lock = LocalLock(run / ".lock", run)
    place = ("--storage-path", "runs")
    assert "was started on far-away (process 7); run this command there" in distrain("stop", "run", *place).stderr
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(run / ".requests"))  # as that of another host looks here
    assert "was started on far-away (process 7)" in distrain("stacks", "run", *place).stderr
    lock.release()
