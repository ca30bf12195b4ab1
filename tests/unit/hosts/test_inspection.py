"""Inspection of this host: versions of packages, directory, storage."""

from __future__ import annotations

import importlib.metadata
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from distrain import wire
from distrain.hosts.inspection import inspect, package_versions

if TYPE_CHECKING:
    from pathlib import Path

NONCE = "f00d"


@pytest.fixture
def asked(tmp_path: Path) -> wire.InspectHost:
    storage = tmp_path / "storage"
    storage.mkdir()
    (storage / "probe_file").write_text(f"some text, {NONCE}, and more")
    return wire.InspectHost(
        directory=str(tmp_path),
        sys_path=[None],
        packages=["cloudpickle"],
        storage=str(storage),
        probe_file=str(storage / "probe_file"),
        nonce=NONCE,
    )


def install(folder: Path, name: str, version: str) -> str:
    (folder / f"{name}-{version}.dist-info").mkdir(parents=True)
    (folder / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    return str(folder)


def test_what_is_well_has_no_problem_and_leaves_nothing(asked: wire.InspectHost, tmp_path: Path) -> None:
    answer = inspect(asked)
    assert (answer.directory_problem, answer.storage_problem) == (None, None)
    assert answer.versions == {"cloudpickle": importlib.metadata.version("cloudpickle")}
    assert answer.sent >= answer.received > 1.7e9
    assert answer.disk_free_bytes > 0
    assert answer.memory_free_bytes > 0
    assert [path.name for path in (tmp_path / "storage").iterdir()] == ["probe_file"]


@pytest.mark.parametrize("probe_file", [None, "another nonce", ""])
def test_a_storage_without_the_witness_is_another_one(
    asked: wire.InspectHost, tmp_path: Path, probe_file: str | None
) -> None:
    file = tmp_path / "storage" / "probe_file"
    if probe_file is None:
        file.unlink()
    else:
        file.write_text(probe_file)
    assert inspect(asked).storage_problem == "is another one than the launching machine's"


def test_a_storage_that_is_not_there_is_not_made(asked: wire.InspectHost, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    problem = inspect(replace(asked, storage=str(missing))).storage_problem
    assert problem == "cannot be opened: No such file or directory"
    assert not missing.exists()


def test_a_storage_that_cannot_be_written_says_why(asked: wire.InspectHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """No user can create files in /proc/self."""
    problem = inspect(replace(asked, storage="/proc/self")).storage_problem
    assert problem is not None
    assert problem.startswith("cannot be written: ")


def test_without_a_storage_none_is_looked_at(asked: wire.InspectHost) -> None:
    answer = inspect(replace(asked, storage=""))
    assert answer.storage_problem is None
    assert answer.disk_free_bytes > 0


def test_a_directory_that_is_not_there_is_a_problem(asked: wire.InspectHost, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert inspect(replace(asked, directory="/nowhere")).directory_problem == "No such file or directory"
    assert inspect(replace(asked, directory=str(tmp_path / "file"))).directory_problem == "Not a directory"


def test_versions_are_those_of_the_path_and_nothing_is_imported(tmp_path: Path) -> None:
    path = [install(tmp_path / "one", "made_up", "1.2+cu3"), install(tmp_path / "two", "made_up", "4.5"), None]
    assert package_versions(["made_up", "torch"], path) == {
        "made_up": "1.2+cu3",
        "torch": importlib.metadata.version("torch"),
    }
    assert "made_up" not in sys.modules


def test_a_package_that_was_removed_by_half_does_not_say_its_version(tmp_path: Path) -> None:
    (tmp_path / "half-1.0.dist-info").mkdir()
    assert package_versions(["half"], [str(tmp_path)]) == {"half": ""}


def test_a_package_may_be_missing_or_without_a_version(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("raise RuntimeError('imported')")
    assert package_versions(["plain", "missing"], [str(tmp_path)]) == {"plain": "", "missing": None}
