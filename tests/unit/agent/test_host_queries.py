"""Questions of the coordinator about a host, answered on this one."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from distrain import wire
from distrain.agent.host_queries import HostQueries
from distrain.system.loop import Loop

if TYPE_CHECKING:
    from pathlib import Path


def test_a_storage_that_hangs_does_not_block_another_inspection(tmp_path: Path) -> None:
    """A read from a named pipe waits for a writer."""
    hanging, probe_file = tmp_path / "hangs", tmp_path / "probe_file"
    os.mkfifo(hanging)
    probe_file.write_text("nonce")
    asked = wire.InspectHost(
        directory=str(tmp_path),
        sys_path=[None],
        packages=[],
        storage=str(tmp_path),
        probe_file=str(probe_file),
        nonce="nonce",
    )
    answers: list[wire.Message] = []
    loop = Loop()
    queries = HostQueries(loop, answers.append)
    queries.answer(replace(asked, probe_file=str(hanging)))
    queries.answer(asked)
    while not answers:
        loop.step()
    [answer] = answers
    assert isinstance(answer, wire.InspectionResult)
    assert answer.storage_problem is None
    hanging.write_text("now")
    while len(answers) < 2:
        loop.step()
    loop.close()
