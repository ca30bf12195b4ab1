"""Which files of the user's project are shipped to hosts that share none, and what the user is told of the others."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

import distrain
from distrain.errors import LaunchError
from distrain.transfer.project import left_out
from distrain.transfer.project.project import Project, find_project

if TYPE_CHECKING:
    from collections.abc import Callable

SECRETS = (
    *(".env", ".env.local", "sub/.env", ".netrc", ".pgpass", ".git-credentials", ".pypirc", ".htpasswd", "credentials"),
    *("tls/server.pem", "server.KEY", "a.p12", "a.pfx", "a.kdbx", "id_rsa", "id_rsa.pub", "id_dsa", "id_ecdsa_work"),
    *("id_ed25519", "credentials.json", "service-account-7.json", "kubeconfig", ".ssh/config", "sub/.aws/config"),
    *(".gnupg/ring", ".kube/config", ".docker/config.json"),
)
HARMLESS = (
    *(".env.example", ".env.sample", ".env.template", ".env.prod.example", "id_rsa.py", "credentials.py", "keys.yaml"),
    *("environment", "x.env", "kubeconfig.md", "monkey", "my_credentials", "aws/config", "service.json", ".envs"),
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
    return folder


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A directory that is in no repository."""
    folder = tmp_path / "plain"
    folder.mkdir()
    return folder


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    return folder


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=60)


def write(folder: Path, *names: str, text: str = "text") -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def find(folder: Path, **options: Any) -> Project:
    given = {"sys_path": [str(folder)], "directory": str(folder), "modules": {}, "limit_bytes": 100_000_000}
    return find_project(**{**given, **options})


def names(project: Project, folder: Path) -> list[str]:
    return [os.path.relpath(file.path, folder) for file in project.files]


def found(folder: Path, **options: Any) -> list[str]:
    return names(find(folder, **options), folder)


def module(name: str, file: Path | None, **contents: Any) -> dict[str, ModuleType]:
    made = ModuleType(name)
    if file is not None:
        made.__file__ = str(file)
    vars(made).update(contents)
    return {name: made}


# -- files -----------------------------------------------------------------------------------------------------------


def test_strange_names(repository: Path) -> None:
    strange = ["line\nbreak.py", "mit Leerzeichen.yaml", "tab\t.py", "ünïcode.py", "数据.json", '"quoted".py']
    write(repository, *strange, "tracked\n.py")
    undecodable = os.fsdecode(b"\xff.py")
    write(repository, undecodable)
    git(repository, "add", "tracked\n.py", "ünïcode.py")
    assert sorted(found(repository)) == sorted([*strange, "tracked\n.py", undecodable])


# -- own directories -------------------------------------------------------------------------------------------------


def test_own_directories_are_those_of_sys_path_and_scripts(tmp_path: Path) -> None:
    write(tmp_path, "work/not_on_path.py", "lib/a.py", "script/train", "script/b.py", "work/nested/c.py")
    project = find(tmp_path / "work", sys_path=["../lib", "nested", "gone"], targets=["../script/train"])
    assert names(project, tmp_path) == ["lib/a.py", "script/b.py", "script/train", "work/nested/c.py"]
    assert project.folders == tuple(str(tmp_path / name) for name in ("lib", "script", "work", "work/nested"))


@pytest.mark.parametrize("place", ["home", "above home", "temporary files"])
def test_only_modules_directly_in_a_place_that_holds_more_than_a_project(
    place: str, home: Path, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = {"home": home, "above home": home.parent, "temporary files": plain}[place]
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(plain))
    git(folder, "init", "--quiet", "--initial-branch=main")
    write(folder, "train.py", "large.csv", "package/__init__.py", "package/deep.py")
    (folder / "linked").symlink_to("package")
    project = find(folder)
    assert names(project, folder) == ["train.py"]
    [note] = project.notes
    assert note.startswith(f"only modules directly in {folder} are shipped")
    assert "--ship PATH" in note
    imported = module("package", folder / "package" / "__init__.py")
    assert found(folder, modules=imported) == ["package/__init__.py", "train.py"]
    assert found(folder / "package") == ["__init__.py", "deep.py"]


def test_the_package_distrain_is_never_shipped(plain: Path) -> None:
    own = Path(distrain.__file__).parent
    modules = module("distrain", own / "__init__.py") | module("distrain.errors", own / "errors.py")
    finder = module("__editable___distrain_1_finder", None, MAPPING={"distrain": str(own)})
    project = find(own.parent, modules=modules | finder)
    assert project.folders == (str(own.parent),)
    shipped = names(project, own.parent)
    assert "tests/unit/transfer/test_project.py" in shipped
    assert not [name for name in shipped if name.startswith("distrain/")]
    project = find(plain, modules=modules | finder)
    assert (project.files, project.folders) == ((), (str(plain),))


# -- with git --------------------------------------------------------------------------------------------------------


def test_git_tells_what_belongs_to_the_project(repository: Path) -> None:
    write(repository, "tracked.py", "deleted.py", "staged.yaml", "a-b/tracked.py", "ignored_but_tracked.log")
    git(repository, "add", ".")
    (repository / ".gitignore").write_text("*.log\nbuild/\n")
    (repository / "deleted.py").unlink()
    write(repository, "untracked.py", "a-b/untracked.json", ".hidden/settings", "x.log", "build/made.py")
    expected = [".gitignore", ".hidden/settings", "a-b/tracked.py", "a-b/untracked.json", "ignored_but_tracked.log"]
    assert found(repository) == [*expected, "staged.yaml", "tracked.py", "untracked.py"]
    assert set(names(find(repository / "a-b"), repository)) == {*expected, "staged.yaml", "tracked.py", "untracked.py"}


def test_only_the_directory_is_shipped_of_a_repository_that_is_too_large(repository: Path) -> None:
    write(repository, "a.py", "b/c.py", "b/d.json", text="12345")
    project = find(repository / "b", limit_bytes=10)
    assert names(project, repository) == ["b/c.py", "b/d.json"]
    [note] = project.notes
    assert note.startswith(f"only {repository}/b is shipped, not the whole repository: the project has 15 B to ship")


def test_large_files_are_left_out_unless_they_are_code(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(left_out, "_SMALL_BYTES", 10)
    write(repository, *(f"{n}.csv" for n in range(5)), "large.py", "large.so", text="12345678901")
    write(repository, "small.csv", text="1234567890")
    project = find(repository)
    assert names(project, repository) == ["large.py", "large.so", "small.csv"]
    [note] = project.notes
    shown = ", ".join(str(repository / f"{n}.csv") for n in range(3))
    assert note.startswith(f"not shipped because they are larger than 10 B: {shown} and 2 more; ")
    assert note.endswith("--ship PATH")
    project = find(repository, named=[f"{n}.csv" for n in range(5)])
    assert len(project.files) == 8
    assert project.notes == ()


def test_what_tools_have_left_in_a_repository_is_no_part_of_it(repository: Path) -> None:
    write(repository, "a.py", "environment.yaml", "__pycache__/a.pyc")
    write(repository, "web/node_modules/x.js", "lib/site-packages/x.py", "kept/node_modules/y.js")
    git(repository, "add", "kept")
    assert found(repository) == ["a.py", "environment.yaml", "kept/node_modules/y.js"]


def test_submodules_and_nested_repositories(repository: Path, plain: Path) -> None:
    git(plain, "init", "--quiet", "--initial-branch=main")
    write(plain, "lib.py", "ignored.py")
    (plain / ".gitignore").write_text("ignored.py")
    git(plain, "add", ".gitignore", "lib.py")
    git(plain, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first")
    git(repository, "-c", "protocol.file.allow=always", "submodule", "add", "--quiet", str(plain), "sub")
    shutil.copytree(plain, repository / "nested")
    expected = [".gitmodules", "nested/.gitignore", "nested/lib.py", "sub/.gitignore", "sub/lib.py"]
    assert found(repository) == expected
    shutil.rmtree(repository / "sub")
    (repository / "sub").mkdir()  # as after a clone without the submodule
    assert found(repository) == expected[:3]
    write(repository, "sub/own.py")
    assert "own.py" in found(repository / "sub")


def test_a_repository_that_git_cannot_read_is_named(plain: Path) -> None:
    write(plain, "a.py", "b.yaml")
    (plain / ".git").write_text("gitdir: /nowhere")
    project = find(plain)
    assert names(project, plain) == ["a.py"]
    [note] = project.notes
    assert note.startswith(f"git could not list the files of {plain}")


# -- without git -----------------------------------------------------------------------------------------------------


def test_without_git_what_can_be_imported_is_shipped(plain: Path) -> None:
    write(plain, "a.py", "fast.cpython-311-x86_64-linux-gnu.so", "deep/er/b.py", "not-a-module.py")
    write(plain, "data.csv", "no-package/c.py", ".hidden/d.py", "__pycache__/e.py", "site-packages/f.py")
    write(plain, "node_modules/g.py", "env/pyvenv.cfg", "env/h.py")
    assert found(plain) == ["a.py", "deep/er/b.py", "fast.cpython-311-x86_64-linux-gnu.so", "not-a-module.py"]


# -- secrets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tracked", [True, False])
def test_secrets_are_never_shipped(repository: Path, tracked: bool) -> None:
    write(repository, *SECRETS, *HARMLESS)
    if tracked:
        git(repository, "add", "--force", ".")
    project = find(repository)
    assert names(project, repository) == sorted(HARMLESS)
    [note] = project.notes
    first = str(repository / sorted(SECRETS)[0])
    assert note.startswith(f"not shipped because they may hold secrets: {first}, ")
    assert note.endswith(f" and {len(SECRETS) - 3} more; name what workers need: --ship PATH")


def test_named_secrets_are_shipped(repository: Path) -> None:
    write(repository, ".env", ".aws/config", "other.pem")
    git(repository, "add", ".")
    project = find(repository, named=[".env", ".aws"])
    assert names(project, repository) == [".aws/config", ".env"]
    assert [note.count("other.pem") for note in project.notes] == [1]
    assert ".env" not in project.notes[0]


def test_a_link_to_a_secret_is_a_secret(repository: Path) -> None:
    write(repository, ".env")
    (repository / "settings").symlink_to(".env")
    git(repository, "add", "settings")
    project = find(repository)
    assert project.files == ()
    assert [note.count(f"{repository}/settings") for note in project.notes] == [1]


# -- links -----------------------------------------------------------------------------------------------------------


def links(folder: Path, **targets: str | Path) -> None:
    for name, target in targets.items():
        (folder / name.replace("_py", ".py")).symlink_to(target)


@pytest.mark.parametrize("kind", ["repository", "plain"])
def test_links_in_the_project_are_followed(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder: Path = request.getfixturevalue(kind)
    write(folder, "package/a.py", text="content")
    write(tmp_path, "other/b.py")
    links(folder, a_py="package/a.py", linked="package", b_py=tmp_path / "other" / "b.py", other=tmp_path / "other")
    project = find(folder, sys_path=["", "../other"])
    assert names(project, folder) == [
        *("../other/b.py", "a.py", "b.py", "linked/a.py", "other/b.py", "package/a.py"),
    ]
    by_name = dict(zip(names(project, folder), project.files, strict=True))
    assert by_name["a.py"].size == 7
    assert project.notes == ()


@pytest.mark.parametrize("kind", ["repository", "plain"])
def test_circles_of_links_end(kind: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(kind)
    write(folder, "one/a.py", "two/b.py")
    links(folder / "one", two="../two", self=".", up="..")
    links(folder / "two", one="../one")
    links(folder, loop_py="loop.py")
    expected = ["one/a.py", "one/two/b.py", "two/b.py", "two/one/a.py"]
    assert found(folder) == expected
    named = find(folder, sys_path=[], named=["."])
    assert {"one/a.py", "one/two/b.py"} <= set(names(named, folder))


@pytest.mark.parametrize("kind", ["repository", "plain"])
def test_links_out_of_the_project_are_named(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder: Path = request.getfixturevalue(kind)
    write(tmp_path, "outside/a.py", "repository_2/a.py")
    links(folder, a_py=tmp_path / "outside" / "a.py", data=tmp_path / "outside", gone_py="nowhere", gone="nowhere")
    project = find(folder)
    assert project.files == ()
    [out] = project.notes
    assert f"{folder}/a.py (to {tmp_path}/outside/a.py), {folder}/data (to {tmp_path}/outside); " in out
    assert "--ship PATH" in out
    for named in (["data", "a.py"], ["."]):
        project = find(folder, named=named)
        assert [name for name in names(project, folder) if name[0] != "."] == ["a.py", "data/a.py"]
        assert project.notes == ()


# -- imported modules ------------------------------------------------------------------------------------------------


def test_modules_of_the_interpreter_and_those_without_a_file_stay(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "_ops.py")
    monkeypatch.chdir(tmp_path)  # torch has modules with such a name for their file
    modules = module("gone", plain.parent / "gone.py") | module("relative", Path("_ops.py")) | module("no", None)
    project = find(plain, modules={**modules, "json": sys.modules["json"], "pytest": pytest, "sys": sys})
    assert project.files == ()
    assert project.folders == (str(plain),)


def test_editable_installs_are_shipped(plain: Path, repository: Path) -> None:
    write(repository, "src/package/__init__.py", "src/package/a.py", "src/single.py", "src/beside.py")
    write(repository, "spaces/space/part/b.py")
    mapping = {
        "package": str(repository / "src/package"),
        "renamed": str(repository / "src/package"),
        "single": str(repository / "src/single"),
        "space.part": str(repository / "spaces/space/part"),
        "gone": str(repository / "gone"),
    }
    modules = module("__editable___package_0_1_finder", None, MAPPING=mapping) | module("a_finder", None, MAPPING=1)
    project = find(plain, modules=modules)
    expected = ["spaces/space/part/b.py", "src/package/__init__.py", "src/package/a.py", "src/single.py"]
    assert names(project, repository) == expected
    assert project.folders == (str(plain), str(repository / "spaces"), str(repository / "src"))


# -- named paths -----------------------------------------------------------------------------------------------------


def test_everything_in_a_named_directory_is_shipped(repository: Path, home: Path, tmp_path: Path) -> None:
    (repository / ".gitignore").write_text("data")
    everything = ["data/.env", "data/.git/HEAD", "data/__pycache__/x.pyc", "data/a b/c.bin", "data/site-packages/d"]
    write(repository, *everything)
    write(home, "e.txt")
    write(tmp_path, "outside/f.txt")
    (repository / "data" / "out").symlink_to(tmp_path / "outside")
    project = find(repository, sys_path=[], named=["data/", "~/e.txt", str(repository / "data/.env")])
    expected = ["../home/e.txt", ".gitignore", *everything[:4], "data/out/f.txt", everything[4]]
    assert names(project, repository) == expected
    assert project.notes == ()
    assert project.folders == (str(repository),)


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.symlink_to("nowhere"), os.mkfifo])
def test_a_named_path_has_to_be_a_file_or_a_directory(plain: Path, make: Callable[[Path], None]) -> None:
    make(plain / "named")
    with pytest.raises(LaunchError, match=rf"^--ship {plain}/named: no such file or directory"):
        find(plain, named=["named"])


# -- limits ----------------------------------------------------------------------------------------------------------


def test_a_project_that_is_too_large_is_an_error_with_its_largest_directories(plain: Path, tmp_path: Path) -> None:
    write(plain, "a.py", "model/b.py", "model/c.py", text="x" * 90)
    write(plain, "z/d.py", "small.py", text="x" * 20)
    write(tmp_path, "data/sub/e.bin", text="x" * 300_000)
    assert sum(file.size for file in find(plain, limit_bytes=310).files) == 310
    with pytest.raises(LaunchError) as caught:
        find(plain, limit_bytes=309)
    folders = f"{plain}/model (180 B), {plain} (110 B), {plain}/z (20 B)"
    assert f"has 310 B to ship, and the limit is 309 B. The largest directories are {folders}. " in str(caught.value)
    for cure in ("--ship-limit SIZE", "ShippingConfig(limit_bytes=...)", ".gitignore", "--no-ship"):
        assert cure in str(caught.value)
    with pytest.raises(LaunchError, match=rf"has 300 kB to ship.* are {tmp_path}/data/sub \(300 kB\), {plain}/model"):
        find(plain, limit_bytes=309, named=["../data"])
