"""The published files: the sdist, the wheel and their metadata."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from importlib.metadata import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

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


def test_the_conda_recipe_needs_what_the_package_needs() -> None:
    tracked_files()  # an sdist has no .github
    text = (ROOT / ".github" / "conda" / "recipe.yaml").read_text()
    recipe = yaml.safe_load(text.replace("${{ python_min }}", "3.10"))
    about = metadata("distrain")
    needed = [Requirement(line) for line in about.get_all("Requires-Dist") or [] if "extra ==" not in line]
    run = {f"{one.name} {one.specifier}" for one in needed} | {f"python {about['Requires-Python']}", "__linux"}
    assert set(recipe["requirements"]["run"]) == run
    assert recipe["context"] == {"version": __version__, "python_min": "3.10"}
    assert recipe["build"]["python"]["entry_points"] == ["distrain = distrain.__main__:main"]


def test_linters_accept_the_dockerfile_and_the_issue_forms() -> None:
    tracked_files()
    lint = Path(sys.executable).parent
    forms = ROOT / ".github" / "ISSUE_TEMPLATE"
    check = [str(lint / "check-jsonschema"), "--builtin-schema"]
    for command in (
        [str(lint / "hadolint"), str(ROOT / "Dockerfile")],
        [*check, "vendor.github-issue-forms", str(forms / "bug.yml"), str(forms / "feature.yml")],
        [*check, "vendor.github-issue-config", str(forms / "config.yml")],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_dockerfile_copies_all_that_its_build_needs_and_the_devcontainer_builds_a_stage_of_it() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = {name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]}
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == sent
    assert {"pyproject.toml", "README.md", "LICENSE", "distrain"} <= copied
    container = (ROOT / ".devcontainer" / "devcontainer.json").read_text()
    target = re.search(r'"target": "(\w+)"', container)
    assert target
    assert any(line.endswith(f" AS {target[1]}") for line in lines)
