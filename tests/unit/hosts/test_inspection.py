"""Inspection of this host: versions of packages, directory, storage."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from distrain.hosts.inspection import disk_free_bytes, memory_free_bytes, package_versions, storage_problem

NONCE = "f00d"


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    (tmp_path / "probe_file").write_text(f"some text, {NONCE}, and more")
    return tmp_path


def install(folder: Path, name: str, version: str) -> str:
    (folder / f"{name}-{version}.dist-info").mkdir(parents=True)
    (folder / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    return str(folder)


def problem_of(storage: str | Path) -> str | None:
    return storage_problem(str(storage), str(Path(storage) / "probe_file"), NONCE)


def test_a_storage_that_is_well_has_no_problem_and_keeps_no_file(storage: Path) -> None:
    assert problem_of(storage) is None
    assert [path.name for path in storage.iterdir()] == ["probe_file"]


@pytest.mark.parametrize("probe_file", [None, "another nonce", ""])
def test_a_storage_without_the_witness_is_another_one(storage: Path, probe_file: str | None) -> None:
    file = storage / "probe_file"
    if probe_file is None:
        file.unlink()
    else:
        file.write_text(probe_file)
    assert problem_of(storage) == "is not the launching machine's"


def test_a_storage_that_cannot_be_written_says_why(storage: Path) -> None:
    """No user can create files in /proc/self."""
    problem = storage_problem("/proc/self", str(storage / "probe_file"), NONCE)
    assert problem is not None
    assert problem.startswith("cannot be written: ")


def test_free_memory_and_disk_space_are_0_if_unknown(tmp_path: Path) -> None:
    assert memory_free_bytes() > 0
    assert disk_free_bytes(str(tmp_path)) > 0
    assert disk_free_bytes(str(tmp_path / "missing")) == -1


def test_versions_are_those_of_the_path_and_nothing_is_imported(tmp_path: Path) -> None:
    path = [install(tmp_path / "one", "made_up", "1.2+cu3"), install(tmp_path / "two", "made_up", "4.5"), None]
    assert package_versions(["made_up", "torch"], path) == {
        "made_up": "1.2+cu3",
        "torch": importlib.metadata.version("torch"),
    }
    assert "made_up" not in sys.modules


def test_a_package_may_be_missing_or_without_a_version(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("raise RuntimeError('imported')")
    assert package_versions(["plain", "missing"], [str(tmp_path)]) == {"plain": "", "missing": None}
