"""The config file: where it is found, what its values mean, and which layer wins."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from distrain.cli.run.command import run_command
from distrain.cli.run.config_file import layers
from distrain.cli.run.options import make_parser
from distrain.cli.run.settings import parse_with_file
from distrain.storage.runs.listing import WrongArgument

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from pathlib import Path

FILE = """
[tool.distrain]
hosts = ["alpha:4", "beta:4"]
storage-path = "runs"
ship = ["data/words.txt", "s3://bucket/x"]
env = { WANDB_MODE = "offline", LEVEL = 3 }
hang-report = "none"
hang-timeout = 1800
use-gpu = true

[tool.distrain.on.lab]
hostfile = "lab.txt"
use-gpu = false
env = { NCCL_DEBUG = "INFO", LEVEL = 4 }
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a config file; the working directory is below it."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "pyproject.toml").write_text(FILE)
    (tmp_path / "src").mkdir()
    monkeypatch.chdir(tmp_path / "src")
    for name in ("DISTRAIN_HOSTS", "DISTRAIN_HOSTFILE", "DISTRAIN_TRANSPORT", "DISTRAIN_TRACKERS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def options_of(*arguments: str) -> argparse.Namespace:
    return parse_with_file(make_parser("distrain run"), [*arguments, "train.py"])


# -- where it is -----------------------------------------------------------------------------------------------------


def test_the_nearest_file_counts_and_distrain_toml_comes_first(project: Path) -> None:
    assert options_of().storage_path == str(project / "runs")
    (project / "src" / "pyproject.toml").write_text("[tool.other]\n")
    assert options_of().storage_path == str(project / "runs")
    (project / "distrain.toml").write_text("storage-path = '~/here'\n")
    assert options_of().storage_path.endswith("/here")
    (project / "src" / "distrain.toml").write_text("name = 'nearest'\n")
    assert (options_of().storage_path, options_of().name) == (None, "nearest")
    assert options_of("--no-config").name is None


def test_no_file_above_the_repository_or_the_home_directory_counts(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "src" / ".git").touch()
    assert layers(None) == []
    (project / "src" / ".git").unlink()
    (project / ".git").rmdir()
    assert layers(None) == []
    monkeypatch.setenv("HOME", str(project))
    assert len(layers(None)) == 1
    monkeypatch.setenv("HOME", str(project / "src"))
    assert layers(None) == []


# -- what it means ---------------------------------------------------------------------------------------------------


def test_values_are_those_of_the_same_options_on_the_command_line(project: Path) -> None:
    typed = ["--no-config", "--hosts", "alpha:4,beta:4", "--storage-path", str(project / "runs"), "--use-gpu"]
    typed += ["--ship", str(project / "data/words.txt"), "--ship", "s3://bucket/x", "--hang-report", "none"]
    typed += ["--env", "WANDB_MODE=offline", "--env", "LEVEL=3", "--hang-timeout", "1800"]
    expected = vars(options_of(*typed)) | {"no_config": False}
    assert vars(options_of()) == expected


def test_the_command_line_wins_over_the_target_and_that_over_the_file(project: Path) -> None:
    lab = options_of("--on", "lab")
    assert (lab.hosts, lab.hostfile, lab.use_gpu) == (None, str(project / "lab.txt"), False)
    assert lab.env == ["WANDB_MODE=offline", "LEVEL=3", "NCCL_DEBUG=INFO", "LEVEL=4"]
    typed = options_of("--on", "lab", "--hosts", "gamma:1", "--hang-timeout", "60", "--env", "LEVEL=5")
    assert (typed.hosts, typed.hostfile, typed.hang_timeout_s) == ("gamma:1", None, 60.0)
    assert typed.env[-1] == "LEVEL=5"
    assert options_of("--hang-timeout", "none").hang_timeout_s is None
    both = options_of("--hosts", "gamma:1", "--hostfile", "x")
    assert (both.hosts, both.hostfile) == ("gamma:1", "x")


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("num-wokers = 2", "distrain.toml: num-wokers: config files have no option num-wokers; did you mean num-wor"),
        ("hang-timeout = 'x'", "argument --hang-timeout: invalid float value: 'x' (distrain.toml: hang-timeout)"),
        ("use-gpu = 'yes'", "--use-gpu: must be true or false, got 'yes' (distrain.toml: use-gpu)"),
        ("hosts = 'alpha:0'", "alpha:2222 slots=4 (distrain.toml: hosts)"),
        ("set = {lr = 1}", "distrain.toml: set: config files have no option set"),
        ("hosts = 'a:1'\nhostfile = 'b'", "drop one of the two (distrain.toml: hosts, distrain.toml: hostfile)"),
        ("on.lab = 'x'", "distrain.toml: on: must be tables of options, each under [on.NAME], got {'lab': 'x'}"),
    ],
)
def test_an_error_names_the_file_and_the_key(
    project: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    (project / "src" / "distrain.toml").write_text(text)
    with pytest.raises(SystemExit, match="2"):
        run_command([__file__], [], prog="distrain run")
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("distrain run: error: ")
    assert said in line


def test_a_script_that_calls_fit_takes_what_it_can_from_the_file(project: Path) -> None:
    (project / "src" / "ray_train.py").write_text(
        "import os\nprint(os.environ['DISTRAIN_HOSTS'], os.environ['LEVEL'], os.environ.get('DISTRAIN_TRACKERS'))\n"
    )
    command = [sys.executable, "-m", "distrain", "run", "--as-ray", "ray_train.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "alpha:4,beta:4 3 None\n", done.stderr
    places = [
        f"../pyproject.toml: tool.distrain.{name}"
        for name in ("storage-path", "ship", "hang-report", "hang-timeout", "use-gpu")
    ]
    assert done.stderr == f"distrain: {', '.join(places)}: no effect, because the script calls fit() itself\n"


# -- files of others -------------------------------------------------------------------------------------------------

STRANGER = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@as_root
@pytest.mark.parametrize("name", ["distrain.toml", "pyproject.toml"])
@pytest.mark.parametrize(
    "option", ["transport = 'sh -c id'", "hosts = ['a']", "env = {LD_PRELOAD = 'x'}", "on.x.hosts = 'a'"]
)
def test_a_strangers_file_names_no_commands(project: Path, name: str, option: str) -> None:
    file = project / "src" / name
    table = "[tool.distrain]\n" if name == "pyproject.toml" else ""
    file.write_text(f"{table}storage-path = 'theirs'\n{option}\n")
    assert layers(None)[0].options["storage-path"] == "theirs"
    for path in (file.parent, file):
        os.chown(path, STRANGER, STRANGER)
    with pytest.raises(
        WrongArgument, match=r"belongs to another user \(uid 54321\), and (transport|hosts|env|on) could"
    ):
        layers(None)
    file.write_text(f"{table}storage-path = 'theirs'\n")
    assert layers(None)[0].options == {"storage-path": "theirs"}, "reading a stranger's runs is safe"


@as_root
@pytest.mark.parametrize("make", [os.link, os.symlink])
def test_a_stranger_puts_no_other_file_of_the_user_in_its_place(
    project: Path, make: Callable[[Path, Path], object]
) -> None:
    """Its paths would be relative to the stranger's directory."""
    own = project / "own.toml"
    own.write_text("hostfile = 'hosts.txt'\n")
    make(own, project / "src" / "distrain.toml")
    os.lchown(project / "src", STRANGER, STRANGER)
    if make is os.symlink:
        os.lchown(project / "src" / "distrain.toml", STRANGER, STRANGER)
    with pytest.raises(WrongArgument, match="another user has put or linked it there"):
        layers(None)
