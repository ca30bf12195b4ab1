"""The records of a run that people look at: run.json's attempts, the steps of reports, waiting times, events."""

from __future__ import annotations

import itertools
import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import distrain
from distrain import Checkpoint, FailureConfig, WorkerGroupError
from distrain.page import write_page
from distrain.storage.lines import read_events, read_metrics
from distrain.storage.records import committed_at
from distrain.torch import prepare_data_loader

if TYPE_CHECKING:
    from tests.process.conftest import Fit

sampled = pytest.mark.sample(2, of="records of runs")


class _SlowData(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.005)
        return super().__getitem__(index)


def no_json(constant: str) -> None:
    """Fail: other programs cannot read Infinity and NaN."""
    raise AssertionError(constant)


@sampled
def test_a_restarted_run_says_when_it_trained_where_it_went_on_and_what_it_waited_for(
    fit: Fit, capsys: pytest.CaptureFixture[str]
) -> None:
    def train() -> None:
        checkpoint = distrain.get_checkpoint()
        first = checkpoint.to_dict()["step"] if checkpoint else 0
        loader = prepare_data_loader(DataLoader(_SlowData(torch.zeros(32)), batch_size=4), resume=False)
        for step, _ in zip(range(first + 1, 7), itertools.cycle(loader)):
            stored = Checkpoint.from_dict({"step": step}) if step % 2 == 0 else None
            distrain.report({"step": step}, checkpoint=stored, progress=(step / 2, 3))
            if step == 3 and not checkpoint:
                distrain.collective.barrier()  # the other rank has its part of the checkpoint, too
                raise ValueError("on purpose")

    run = Path(fit(train, name="run", failure_config=FailureConfig(max_failures=1)).path)
    before, after = json.loads((run / "run.json").read_text(), parse_constant=no_json)["attempts"]
    assert before["started"] < before["training"] < before["ended"] <= after["started"] < after["training"]
    assert [before["checkpoint"], after["checkpoint"]] == [None, "checkpoint_000000"]
    assert [before["first_step"], after["first_step"]] == [0, 2]
    said = capsys.readouterr().err
    assert re.search(
        r"distrain: rank \d failed: ValueError: on purpose \(test_run_records\.py:\d+\); "
        r"its log: attempt_0/rank_\d\.log\ndistrain: restart 1 of 1, from checkpoint_000000\n",
        said,
    )
    assert re.search(r"\n    restarts:    1, which cost .*\n    reports:     6 of rank 0", said)
    assert "\n    checkpoints: checkpoint_000002, 3 kept\n" in said

    first_steps = {0: 0, 1: 2}
    records = [record for rank in (0, 1) for record in read_metrics(run / "metrics.jsonl", rank=rank)]
    for record in records:
        assert record["metrics"]["step"] == first_steps[record["attempt"]] + record["index"]
        assert record["progress"] == [record["metrics"]["step"] / 2, 3]
        assert record["waits"]["data"] >= 0.02  # 4 samples

    events = list(read_events(run / "events.jsonl"))
    assert [(event["event"], event["attempt"], event["name"], event["step"]) for event in events] == [
        ("checkpoint", 0, "checkpoint_000000", 2),
        ("checkpoint", 1, "checkpoint_000001", 4),
        ("checkpoint", 1, "checkpoint_000002", 6),
    ]
    for event in events:
        manifest = json.loads((run / event["name"] / ".manifest.json").read_text())
        assert manifest["step"] == event["step"]
        assert committed_at(run / event["name"]).place == f"step {event['step'] / 2} of 3"
        assert 0 < event["seconds"] < 10
        assert event["ranks"] == [0, 1]
        assert event["bytes"] == sum(file["size"] for file in manifest["files"].values())


def test_bad_progress_is_refused(fit: Fit) -> None:
    def train() -> list[str]:
        said = []
        for progress in (5, (1,), (1, 2, 3), "12", (2, 1), (-1, 3), (1, float("inf")), (float("nan"), 2)):
            with pytest.raises((TypeError, ValueError), match=r"progress must be the step and the number") as info:
                distrain.report({}, progress=progress)  # type: ignore[arg-type]
            said.append(f"{progress!r}: {info.value}")
        return said

    for said in fit(train, workers=0).return_value:
        progress, _, text = said.partition(": ")
        assert progress in text


@sampled
def test_a_failed_run_has_a_page_until_it_is_continued(fit: Fit) -> None:
    def fail_once() -> None:
        checkpoint = distrain.get_checkpoint()
        distrain.report({"loss": 0.5}, checkpoint=Checkpoint.from_dict({}))
        if checkpoint is None:
            raise ValueError("</script> on purpose")

    # One worker: if one of two fails before the other has reported, there is no checkpoint.
    with pytest.raises(WorkerGroupError) as caught:
        fit(fail_once, workers=1, name="paged")
    page = Path(caught.value.result.path) / "page.html"
    wanted = r"Failed after .*: rank 0 on \w+: ValueError: &lt;/script&gt; on purpose \(test_run_records\.py:\d+\)\."
    assert re.search(wanted, page.read_text())
    fit(fail_once, workers=1, name="paged")
    assert not page.exists()  # it was out of date, and a short run that has finished needs none
    text = write_page(page.parent).read_text()
    assert "Finished after" in text
    assert "checkpoint_000001" in text
