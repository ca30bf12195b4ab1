"""The code and the settings of a run in run.json, without secrets."""

from __future__ import annotations

import argparse
import doctest
import json
import subprocess
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from distrain.coordinator.run.facts import RunFacts, plain
from distrain.worker.job.origin import stem_of


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit, the working directory of this process."""
    git(tmp_path, "init", "-q")
    (tmp_path / "train.py").write_text("1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("distrain.coordinator.run.facts._PATIENCE_S", 30)
    return tmp_path


def known_code() -> Any:
    """The facts about the code, once git has answered."""
    facts = RunFacts("train.py", {})
    facts.begin()
    facts.end()
    return facts.known().get("git")


def test_the_commit_and_changed_files_are_noted(repository: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    (repository / "untracked.txt").write_text("")
    assert known_code() == {"commit": commit, "dirty": False}
    (repository / "train.py").write_text("2\n")
    assert known_code() == {"commit": commit, "dirty": True}
    git(repository, "tag", "a-tag")
    assert known_code()["commit"] == commit
    git(repository, "checkout", "-q", "--detach")
    assert known_code()["commit"] == commit


@dataclass
class Model:
    depth: int
    api_key: str


class Broken:
    def __repr__(self) -> str:
        raise ValueError("no")


class Leaky:
    def __repr__(self) -> str:
        return "Leaky(password='S')"


def test_the_config_is_kept_as_json_without_secrets_and_never_fails() -> None:
    config = {
        "lr": 0.1,
        "nan": float("nan"),
        "hub": {"token": "S", "url": "https://me:S@host/x"},
        "model": Model(3, "S"),
        "options": argparse.Namespace(epochs=2, secret="S"),
        "headers": {"Authorization": "Bearer S", "X-Api-Key": "S"},
        "keys": {"secretKey": "S", "tokens": ["S"], "max_tokens": 512},
        "sizes": {"max_tokens": 512, "num_key_value_heads": 8, "pad_token_id": 0, "token": None, "use_auth": True},
        "command": ["train.py", "--api-key", "S", "--set=token=S"],
        "text": "x" * 5000,
        "many": list(range(1000)),
        "broken": Broken(),
        "leaky": Leaky(),
        "path": Path("data/train.csv"),
        3: object,
    }
    config["itself"] = config
    kept = plain(config)
    assert "'S'" not in repr(kept)
    assert ":S@" not in repr(kept)
    assert "Bearer" not in repr(kept)
    assert kept["command"] == ["train.py", "--api-key", "***", "--set=token=***"]
    assert kept["sizes"] == config["sizes"]
    assert kept["headers"] == {"Authorization": "***", "X-Api-Key": "***"}
    assert len(json.dumps(kept, allow_nan=False)) < 20_000
    assert (kept["lr"], kept["nan"], kept["path"], kept["3"]) == (0.1, "nan", "data/train.csv", "<class 'object'>")
    assert kept["model"] == {"depth": 3, "api_key": "***"}
    assert kept["options"] == {"epochs": 2, "secret": "***"}
    assert (kept["broken"], kept["leaky"]) == ("<Broken>", "<Leaky>")
    assert kept["many"][-1] == "... 900 more"


@pytest.mark.parametrize(
    ("script", "stem"),
    [
        ("/home/me/my train (2).py", "my-train-2"),
        ("pkg/__main__.py", "pkg"),
        ("package.train", "train"),
        ("ä.py", "distrain"),
        ("x" * 300 + ".py", "x" * 60),
    ],
)
def test_the_name_of_a_run_begins_with_that_of_its_script(script: str, stem: str) -> None:
    assert stem_of(script) == stem


@pytest.mark.parametrize(
    "module",
    ["system.text", "cli.text", "cli.showing", "coordinator.run.facts", "storage.runs.listing", "worker.job.origin"],
)
def test_the_examples_of_these_modules_are_right(module: str) -> None:
    assert doctest.testmod(import_module(f"distrain.{module}")).failed == 0
