"""Errors as users meet them: the first line on the screen leads to its entry in docs/troubleshooting.md."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import distrain
from distrain import Checkpoint, DataParallelTrainer, RunConfig, ScalingConfig
from distrain.errors import DistrainError
from tests.error_texts import headings_for

if TYPE_CHECKING:
    from collections.abc import Callable


def kill_a_rank(config: dict[str, str]) -> None:
    if distrain.get_context().get_world_rank() == 1:
        os.kill(os.getpid(), signal.Signals[config["signal"]])
    time.sleep(60)


def exit_without_a_word() -> None:
    os._exit(3)


def report_a_checkpoint_that_is_not_there() -> None:
    distrain.report({"loss": 1.0}, checkpoint=Checkpoint.from_directory("/nowhere"))


def meet_nobody() -> None:
    if distrain.get_context().get_world_rank() == 0:
        distrain.collective.barrier()


def ask_the_user() -> None:
    input("Go on? ")


def read_rows_that_are_not_there() -> None:
    distrain.data.read_csv("/nowhere/*.csv").count()


def with_a_lock() -> Callable[[], object]:
    lock = threading.Lock()
    return lambda: lock.acquire()


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("function", "name", "heading"),
    [
        (kill_a_rank, "SIGKILL", "was killed by … not by distrain"),
        (kill_a_rank, "SIGTERM", "was ended by … not sent by distrain"),
        (exit_without_a_word, "", "exited with code … without an exception"),
        (report_a_checkpoint_that_is_not_there, "", "report(): the checkpoint directory … does not exist"),
        (meet_nobody, "", "waited in … not called it"),
        (ask_the_user, "", "breakpoint() in a worker needs a debugger"),
        (read_rows_that_are_not_there, "", "there is no file or directory …"),
        (with_a_lock(), "", "cannot pickle …"),
    ],
)
def test_a_failure_of_train_func_has_its_entry(tmp_path: Path, function: Any, name: str, heading: str) -> None:
    text = failure(tmp_path, function, name)
    assert [title for title in headings_for(text.splitlines()[0]) if heading in title], text


@pytest.mark.parametrize(
    ("hostfile", "heading"),
    [
        ("localhost", "num_workers is …, but the hosts have only … slots"),
        ("nobody.invalid slots=2", "this must work without a question"),
        ("me@127.0.0.1:1 slots=2", "this must work without a question"),
        ('h slots=2 python=/nowhere/python transport="env HOST={host}"', "there is no such program: python="),
        ("alpha slots=2\n=", "names no host; …"),
    ],
)
def test_hosts_that_cannot_be_used_have_their_entry(tmp_path: Path, hostfile: str, heading: str) -> None:
    (tmp_path / "hosts").write_text(f"{hostfile}\n")
    text = failure(tmp_path, ask_the_user, hostfile=tmp_path / "hosts")
    assert [title for title in headings_for(text.splitlines()[0]) if heading in title], text


def test_storage_that_cannot_be_used_has_its_entry(tmp_path: Path) -> None:
    assert "### `cannot use the storage: …`" in headings_for(failure(Path("/proc"), ask_the_user))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{")
    assert "### `is damaged, or another program's`" in headings_for(failure(tmp_path, ask_the_user))


def failure(storage: Path, function: Any, name: str = "", **scaling: Any) -> str:
    trainer = DataParallelTrainer(
        function,
        train_loop_config={"signal": name},
        scaling_config=ScalingConfig(num_workers=2, **scaling),
        run_config=RunConfig(name="run", storage_path=storage),
    )
    with pytest.raises(DistrainError) as raised:
        trainer.fit()
    return str(raised.value)
