"""``distrain run --as-ray``: which options go along with it, and what they do."""

from __future__ import annotations

import os

import pytest

from distrain.cli.run.command import run_command
from distrain.cli.run.driver import _follow, is_for_ray
from distrain.cli.run.options import make_parser


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as raised:
        run_command(arguments, [], prog="distrain run")
    assert raised.value.code == 2
    return capsys.readouterr().err.strip()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--num-workers", "2"], "--num-workers: with --as-ray, the script calls fit() itself; set it in its configs"),
        (["--nproc-per-node", "2"], "set it in its configs instead"),
        (["--hosts", "alpha:0"], "alpha"),
        (["--tracker", "nonsense"], "there is no tracker 'nonsense'"),
        (["--env", "NOT_SET_HERE"], "--env NOT_SET_HERE: is not set here"),
    ],
)
def test_an_option_that_the_script_decides_is_refused(
    options: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert text in error_of(capsys, "--as-ray", *options, __file__)


def test_a_target_must_be_a_script_or_a_module(capsys: pytest.CaptureFixture[str]) -> None:
    assert "train.py:train: is a function; name a script" in error_of(capsys, "--as-ray", "train.py:train")
    assert "nothing to run" in error_of(capsys, "--as-ray")
    assert "there is no file 'missing.py'" in error_of(capsys, "--as-ray", "missing.py")


def test_the_variable_is_the_option_for_scripts_and_modules_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def asks(*arguments: str) -> bool:
        return is_for_ray(make_parser().parse_args(arguments))

    assert [asks("train.py"), asks("--as-ray", "train.py"), asks("--as-ray")] == [False, True, True]
    monkeypatch.setenv("DISTRAIN_AS_RAY", "1")
    assert [asks("train.py"), asks("-m", "train"), asks("train.py:train"), asks("--check")] == [
        True,
        True,
        False,
        False,
    ]
    monkeypatch.setenv("DISTRAIN_AS_RAY", "0")
    assert not asks("train.py")


def test_options_become_the_variables_that_a_fit_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"DISTRAIN_HOSTS": "old:1"})
    given = ["--hostfile", "hosts.txt", "--ssh-args=-v", "--tracker", "tensorboard", "--tracker", "wandb:project=p"]
    _follow(make_parser().parse_args([*given, "--as-ray", "train.py"]))
    assert os.environ == {
        "DISTRAIN_HOSTFILE": "hosts.txt",
        "DISTRAIN_SSH_ARGS": "-v",
        "DISTRAIN_TRACKERS": "tensorboard;wandb:project=p",
    }
