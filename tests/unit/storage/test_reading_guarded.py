"""No reader of a run directory follows a stranger to a file that only the user may read."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING

import pytest

from distrain.page import data, write_page, writer
from distrain.storage.lines import last_record, read_file
from distrain.storage.runs.listing import run_at
from distrain.storage.runs.logs import log_files, read_lines
from tests.unit.storage.hostile import make_whole_run, read_all

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STRANGER = 54321
SECRET = "VICTIMS-SECRET"
FILES = (
    "run.json",
    "metrics.jsonl",
    "events.jsonl",
    "error.json",
    "logs/attempt_1/rank_0.log",
    "checkpoint_000000/.manifest.json",
    "evidence/attempt_1/stacks/rank_0.txt",
)
WHO_COPY = ("show", "logs", "evidence", "page", "page in the run", "board")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def with_secret(name: str, text: str) -> str:
    """Return the text of a file of a run, with the secret in a place that is shown."""
    if name == "run.json":
        return json.dumps({**json.loads(text), "train_loop_config": {"secret": 1, "note": SECRET}})
    for shown in ('"loss": null', '"loss": 1.0', "rank 0 is stuck", "boom", "a line", "a stack"):
        text = text.replace(shown, f'"note": "{SECRET}"' if '"' in shown else SECRET)
    assert SECRET in text
    return text


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run in a storage path like /tmp, which belongs to root as long as nobody gives it away."""
    made = make_whole_run(tmp_path / "runs")
    made.parent.chmod(0o1777)
    (tmp_path / "private").mkdir(mode=0o700)
    return made


def give(top: Path, uid: int = STRANGER) -> None:
    for path in [top, *top.rglob("*")]:
        os.lchown(path, uid, uid)


def shown(run: Path) -> list[str]:
    """Return the files in which a reader of the run has shown the secret."""
    target = run.parent.parent / "out"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    (run / "page.html").unlink(missing_ok=True)
    read_all(run, target, WHO_COPY)
    files = [path for path in [*target.rglob("*"), run / "page.html"] if path.is_file()]
    return [path.name for path in files if SECRET.encode() in path.read_bytes()]


@pytest.fixture(params=FILES)
def trap(request: pytest.FixtureRequest, run: Path) -> tuple[str, Path]:
    """A file of the run, and the private file with the same content and the secret."""
    private = run.parent.parent / "private" / request.param
    private.parent.mkdir(parents=True, exist_ok=True)
    private.write_text(with_secret(request.param, (run / request.param).read_text()))
    (run / request.param).unlink()
    return request.param, private


def link(place: Path, private: Path) -> None:
    place.symlink_to(private)


def relative_link(place: Path, private: Path) -> None:
    place.symlink_to(os.path.relpath(private, place.parent))


def link_to_a_link(place: Path, private: Path) -> None:
    place.with_name("step").symlink_to(private)
    place.symlink_to("step")


def link_of_the_directory(place: Path, private: Path) -> None:
    if place.name.endswith((".json", ".jsonl")) and not place.name.startswith("."):
        place.symlink_to(private)  # its directory is the run
        return
    shutil.rmtree(place.parent)
    place.parent.symlink_to(private.parent)


def link_of_the_directory_above(place: Path, private: Path) -> None:
    if place.parent.name not in ("attempt_1", "stacks"):
        place.symlink_to(private)
        return
    shutil.rmtree(place.parents[1])
    place.parents[1].symlink_to(private.parents[1])


TRAPS = [link, relative_link, link_to_a_link, link_of_the_directory, link_of_the_directory_above, os.link]


@pytest.mark.parametrize("make", [link, link_of_the_directory])
def test_the_links_of_the_user_are_followed(trap: tuple[str, Path], run: Path, make: Callable[..., object]) -> None:
    """Without guards, the tests below would see the secret, too."""
    name, private = trap
    make(run / name, private)
    assert shown(run)


@as_root
@pytest.mark.parametrize("make", TRAPS)
def test_a_stranger_gets_no_private_file_shown(trap: tuple[str, Path], run: Path, make: Callable[..., object]) -> None:
    name, private = trap
    make(private, run / name) if make is os.link else make(run / name, private)
    before = private.stat()
    give(run)
    os.chown(private, before.st_uid, before.st_gid)  # of a hard link
    assert shown(run) == []


@as_root
def test_a_stranger_names_no_private_directory_of_logs(run: Path) -> None:
    private = run.parent.parent / "private"
    (private / "run" / "attempt_1").mkdir(parents=True)
    (private / "run" / "attempt_1" / "rank_0.log").write_text(SECRET)
    manifest = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**manifest, "run_config": {"log_dir": str(private)}}))
    assert shown(run)
    give(run)
    assert shown(run) == []
    give(private / "run")
    assert shown(run)


@as_root
def test_a_run_that_is_a_strangers_link_is_not_read(run: Path) -> None:
    private = run.parent.parent / "private" / "run"
    run.rename(private)
    (private / "metrics.jsonl").write_text(with_secret("metrics.jsonl", (private / "metrics.jsonl").read_text()))
    run.symlink_to(private)
    assert shown(run)
    os.lchown(run, STRANGER, STRANGER)
    assert shown(run) == []
    give(private)
    assert shown(run), "a stranger's link to their own run shows nothing else"


@as_root
def test_what_a_stranger_puts_into_a_run_of_the_user_is_not_read(run: Path) -> None:
    run.chmod(0o777)
    os.chown(run / "metrics.jsonl", STRANGER, STRANGER)
    (run / "logs/attempt_1/rank_0.log").unlink()
    (run / "logs/attempt_1/rank_0.log").symlink_to(run / "error.json")
    os.lchown(run / "logs/attempt_1/rank_0.log", STRANGER, STRANGER)
    log = log_files(run_at(run), 1)[0]
    with pytest.raises(PermissionError, match="another user has put or linked it there"):
        last_record(run / "metrics.jsonl")
    with pytest.raises(PermissionError, match="another user has put or linked it there"):
        list(read_lines(run_at(run), log, 1))


@as_root
def test_a_page_is_written_into_the_directory_that_was_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a stranger replaces the run directory meanwhile."""
    mine, other = run.parent.parent / "private" / "mine", run.parent.parent / "other"
    run.rename(mine)
    run.symlink_to(mine)
    other.mkdir()

    def swapped(*arguments: Path) -> dict[str, object]:
        run.unlink()
        run.symlink_to(other)
        return data.page_data(*arguments)

    monkeypatch.setattr(writer, "page_data", swapped)
    assert write_page(run) == run / "page.html"
    assert (mine / "page.html").exists()
    assert os.listdir(other) == []
    found = data.page_data(mine)
    assert (found["name"], found["location"]) == ("run", str(mine))


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_only_regular_files_are_read(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "file")
    with pytest.raises((FileNotFoundError, IsADirectoryError)):
        read_file(tmp_path / "file")
