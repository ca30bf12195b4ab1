"""What is published: the sdist, the wheel, their metadata, and an editable install."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from distrain import __version__

ROOT = Path(__file__).parent.parent
LARGEST_WHEEL = 1_000_000
"""Bytes. 743,000 were measured with 48,000 lines of source."""


def tracked_files() -> set[str]:
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("a copy without its history")
    return {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}


def build(what: str, source: Path, target: Path) -> Path:
    """Build an "sdist" or a "wheel" by setuptools, as pip does in its own environment."""
    code = f"from setuptools import build_meta; build_meta.build_{what}({str(target)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True, timeout=60)
    (built,) = target.glob("*.tar.gz" if what == "sdist" else "*.whl")
    return built


def test_the_sdist_has_every_file_and_its_wheel_the_package(tmp_path: Path) -> None:
    tracked = tracked_files()
    for name in tracked:
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "tree" / name)
    with tarfile.open(build("sdist", tmp_path / "tree", tmp_path)) as sdist:
        names = {member.name.partition("/")[2] for member in sdist if member.isfile()}
        sdist.extractall(tmp_path, filter="data")
    not_for_users = {name for name in tracked if name.startswith(".git")}
    assert tracked - not_for_users <= names, "see MANIFEST.in"
    wheel = build("wheel", tmp_path / f"distrain-{__version__}", tmp_path)
    assert wheel.stat().st_size < LARGEST_WHEEL
    with zipfile.ZipFile(wheel) as files:
        installed = {name for name in files.namelist() if ".dist-info/" not in name}
        metadata = message_from_bytes(files.read(f"distrain-{__version__}.dist-info/METADATA"))
    assert installed == {name for name in tracked if name.startswith("distrain/")}
    assert "distrain/py.typed" in installed
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert not [line for line in needed if line.startswith(("torch", "tensorflow", "jax"))]
    assert {line.partition(",")[0] for line in metadata.get_all("Project-URL", [])} >= {"Documentation", "Changelog"}


def test_the_changelog_begins_with_the_version() -> None:
    first = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first
    assert re.fullmatch(rf"{re.escape(__version__)} \((unreleased|20\d\d-\d\d-\d\d)\)", first[1])


def test_an_editable_install_is_a_path_which_type_checkers_follow(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print(*sys.path, sep='\\n')"]
    paths = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.splitlines()
    assert str(ROOT) in paths or not (ROOT / "distrain.egg-info").exists()
