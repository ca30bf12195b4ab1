"""The packages of a run as one requirements file: from a file, from uv.lock, or from this interpreter."""

from __future__ import annotations

import json
import sys
import sysconfig
from typing import TYPE_CHECKING, Any

import pytest

from distrain.errors import LaunchError
from distrain.transfer.host_side.environments import find_uv
from distrain.transfer.project import requirements
from distrain.transfer.project.requirements import requirements_of

if TYPE_CHECKING:
    from pathlib import Path

PROJECT = """\
[project]
name = "project"
version = "0.1"
requires-python = ">=3.10"
dependencies = ["alpha", "beta", "member"]
"""
LOCK = """\
version = 1
revision = 1
requires-python = ">=3.10"

[[package]]
name = "alpha"
version = "1.0"
source = { registry = "https://usual/simple" }
wheels = [{ url = "https://usual/files/alpha-1.0-py3-none-any.whl", hash = "sha256:DIGEST" }]

[[package]]
name = "beta"
version = "2.0+cu130"
source = { registry = "INDEX" }
wheels = [{ url = "https://somewhere/beta-2.0+cu130-py3-none-any.whl", hash = "sha256:DIGEST" }]

[[package]]
name = "member"
version = "0.1"
source = { editable = "member" }

[[package]]
name = "project"
version = "0.1"
source = { virtual = "." }
dependencies = [{ name = "alpha" }, { name = "beta" }, { name = "member" }]

[package.metadata]
requires-dist = [{ name = "alpha" }, { name = "beta" }, { name = "member", editable = "member" }]
"""


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.txt").write_text(text)


# -- requirements files ----------------------------------------------------------------------------------------------


def test_a_file_is_read_without_its_comments(tmp_path: Path) -> None:
    write(tmp_path, all="\ufeff# of ours\ntorch==2.9 # newest\n\nnumpy \\\n  >=2\n--index-url https://mirror/simple\n")
    text = requirements_of("all.txt", directory=str(tmp_path))
    assert [" ".join(line.split()) for line in text.splitlines()] == [
        "torch==2.9",
        "numpy >=2",
        "--index-url https://mirror/simple",
    ]
    assert requirements_of(str(tmp_path / "all.txt"), directory="/") == text


def test_included_files_are_part_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path, all="-r sub/more.txt\n-r sub/less.txt\nc\n-r https://somewhere/r.txt\n")
    write(tmp_path / "sub", more="a\n--requirement=less.txt\n", less="b\n")
    text = requirements_of("all.txt", directory=str(tmp_path))
    assert text.splitlines() == ["a", "b", "b", "c", "-r https://somewhere/r.txt"]
    write(tmp_path, one="-r two.txt\n", two="-r one.txt\n")
    with pytest.raises(LaunchError, match=r"in a circle: \S+/one.txt -> \S+/two.txt -> \S+/one.txt"):
        requirements_of("one.txt", directory=str(tmp_path))


@pytest.mark.parametrize(
    "line",
    [
        *("-e .", "-e.", "--editable=../lib", "-e /home/me/lib", "./lib", "wheels/a.whl", "a.whl", "file:lib"),
        *("a @ ../a", "a[x]@./a ; python_version > '3'", "../a --hash=sha256:00", "-c bounds.txt"),
        *("-f wheels", "--find-links=./wheels"),
    ],
)
def test_a_line_that_needs_a_file_of_this_machine_is_an_error(tmp_path: Path, line: str) -> None:
    write(tmp_path, all=f"torch\n{line}  # ours\n")
    with pytest.raises(LaunchError) as caught:
        requirements_of("all.txt", directory=str(tmp_path))
    assert str(caught.value).startswith(f"{tmp_path / 'all.txt'}: {line!r} needs a file of this machine")


@pytest.mark.parametrize(
    "line",
    [
        *(
            "torch",
            "torch[opt]>=2,<3;python_version<'3.12/x'",
            "a @ https://somewhere/a.whl",
            "https://somewhere/a.zip",
        ),
        *("-e git+https://somewhere/a#egg=a", "git+ssh://git@somewhere/a", "/opt/a.whl", "-f /opt/wheels", "--pre"),
        *("a==1 --hash=sha256:0/0", "${WHEELS}/a.whl", "a @ file:///opt/a.whl", "--find-links https://somewhere"),
    ],
)
def test_what_a_host_can_find_is_passed_on(tmp_path: Path, line: str) -> None:
    write(tmp_path, all=f"{line}\n")
    assert requirements_of("all.txt", directory=str(tmp_path)) == f"{line}\n"


@pytest.mark.parametrize("name", ["pyproject.toml", "poetry.lock", "environment.yml"])
def test_other_kinds_of_files_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(LaunchError, match=rf"{name} is not a requirements file: export one from it"):
        requirements_of(name, directory=str(tmp_path))


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"the requirements file \S+/none.txt cannot be read .*correct its name"):
        requirements_of("none.txt", directory=str(tmp_path))
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xff")
    with pytest.raises(LaunchError, match=r"the requirements file \S+/bytes.txt cannot be read"):
        requirements_of("bytes.txt", directory=str(tmp_path))


# -- uv.lock ---------------------------------------------------------------------------------------------------------

needs_uv = pytest.mark.skipif(not find_uv(), reason="uv is not installed")


def write_project(folder: Path, index: str = "https://somewhere/whl/cu130", lock: str = LOCK) -> None:
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "uv.lock").write_text(lock.replace("INDEX", index).replace("DIGEST", "0" * 64))


@needs_uv
@pytest.mark.parametrize("source", ["uv.lock", "."])
def test_a_lock_file_gives_its_versions_and_indexes(tmp_path: Path, source: str) -> None:
    write_project(tmp_path)
    assert requirements_of(source, directory=str(tmp_path)).splitlines() == [
        "--index-url https://usual/simple",
        "--extra-index-url https://somewhere/whl/cu130",
        "# left out, as it is on the user's machine only: -e ./member",
        "alpha==1.0",
        "beta==2.0+cu130",
    ]


@needs_uv
def test_the_only_index_of_a_lock_file_is_the_one_that_hosts_use(tmp_path: Path) -> None:
    write_project(tmp_path, "https://usual/simple")
    lines = requirements_of(".", directory=str(tmp_path)).splitlines()
    assert [line for line in lines if "index-url" in line] == ["--index-url https://usual/simple"]


@needs_uv
def test_what_uv_says_is_in_the_error(tmp_path: Path) -> None:
    write_project(tmp_path, lock="version = [")
    with pytest.raises(LaunchError, match=r"uv.lock cannot be exported; uv export, .* ended with 2:\n(?s:.*)pars"):
        requirements_of("uv.lock", directory=str(tmp_path))


def test_without_a_lock_file_or_without_uv_there_is_a_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match=r"there is no \S+/uv.lock: make it with `uv lock`"):
        requirements_of(".", directory=str(tmp_path))
    write_project(tmp_path)
    monkeypatch.setattr(requirements, "find_uv", lambda: "")
    with pytest.raises(
        LaunchError, match=r"uv is not installed on this machine, .*: install it \(pip install uv\), or"
    ):
        requirements_of("uv.lock", directory=str(tmp_path))


# -- freeze ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory with distributions, besides the standard library."""
    folder = tmp_path / "site"
    folder.mkdir()
    library = sysconfig.get_path("stdlib")
    monkeypatch.setattr(sys, "path", [str(folder), library, f"{library}/lib-dynload"])
    return folder


def install(site: Path, name: str, version: str, *requires: str, direct: Any = None) -> None:
    about = site / f"{name}-{version}.dist-info"
    about.mkdir()
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {text}" for text in requires)]
    (about / "METADATA").write_text("".join(f"{line}\n" for line in ("Metadata-Version: 2.1", *lines)))
    if direct:
        (about / "direct_url.json").write_text(json.dumps(direct))


def test_freeze_names_what_is_installed_from_an_index(site: Path) -> None:
    for name in ("Zope_Interface", "alpha", "pip", "setuptools", "wheel", "distrain"):
        install(site, name, "1.0")
    (site / "broken-1.0.dist-info").mkdir()
    (site / "nameless-1.0.dist-info").mkdir()
    (site / "nameless-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\n")
    assert requirements_of("freeze", directory="/") == "alpha==1.0\nzope-interface==1.0\n"


def test_of_two_with_one_name_freeze_takes_the_one_that_is_imported(site: Path, tmp_path: Path) -> None:
    sys.path.append(str(tmp_path))
    install(site, "alpha", "2.0")
    install(tmp_path, "Alpha", "1.0")
    assert requirements_of("freeze", directory="/") == "alpha==2.0\n"


def test_freeze_leaves_out_what_is_on_this_machine_only(site: Path, tmp_path: Path) -> None:
    project = tmp_path / "developed"
    (project / "developed.egg-info").mkdir(parents=True)
    (project / "developed.egg-info" / "PKG-INFO").write_text("Name: developed\nVersion: 4\n")
    (project / "setup.py").touch()
    sys.path.append(str(project))
    install(site, "editable", "1", direct={"url": "file:///home/me/a", "dir_info": {"editable": True}})
    install(site, "wheel-file", "2", direct={"url": "file:///home/me/b.whl", "archive_info": {}})
    install(site, "vcs", "3", direct={"url": "https://somewhere/c", "vcs_info": {"vcs": "git", "commit_id": "0"}})
    install(site, "web", "5", direct={"url": "https://somewhere/d.whl", "archive_info": {}})
    assert requirements_of("freeze", directory="/").splitlines() == [
        f"# left out, as it comes from {project}: developed 4",
        "# left out, as it comes from file:///home/me/a: editable 1",
        "# left out, as it comes from https://somewhere/c: vcs 3",
        "web @ https://somewhere/d.whl",
        "# left out, as it comes from file:///home/me/b.whl: wheel-file 2",
    ]


def test_freeze_takes_the_usual_build_and_leaves_its_libraries_to_it(site: Path) -> None:
    install(
        site, "torch", "2.9.0+cu130", "numpy; extra == 'all'", "sympy>=1.13", "optree<1; extra == 'optree'",
        "cuda-toolkit[cublas]==13.0.2; platform_system == 'Linux'", "triton~=3.5.0",
    )  # fmt: skip
    install(site, "torchvision", "0.24+cu130", "torch==2.9.0", "pillow!=8.3.*,>=5.3")
    install(site, "cuda-toolkit", "13.0.2", "nvidia-cublas==13.0.*; extra == 'cublas'", "idle<3; extra == 'idle'")
    for name in ("numpy", "sympy", "optree", "triton", "pillow", "nvidia_cublas", "idle"):
        install(site, name, "1")
    lines = requirements_of("freeze", directory="/").splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        *("numpy==1", "pillow==1", "sympy==1", "torch==2.9.0", "torchvision==0.24")
    ]
    assert [line for line in lines if line.startswith("#")] == [
        "# left out, as another package decides on its version: cuda-toolkit==13.0.2",
        "# left out, as another package decides on its version: idle==1",
        "# left out, as another package decides on its version: nvidia-cublas==1",
        "# left out, as another package decides on its version: optree==1",
        "# left out, as another package decides on its version: triton==1",
    ]


def test_freeze_of_this_interpreter() -> None:
    lines = requirements_of("freeze", directory="/").splitlines()
    names = [line.split("==")[0] for line in lines if not line.startswith("#")]
    assert "pytest" in names
    assert names == sorted(names)
    assert not {"distrain", "pip", "setuptools", "wheel"} & set(names)
