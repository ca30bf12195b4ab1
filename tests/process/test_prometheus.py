"""Metrics of real runs, scraped and read back by Prometheus's own library, and the dashboard that shows them."""

from __future__ import annotations

import itertools
import json
import re
import socket
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import distrain
from distrain import Checkpoint, FailureConfig, prometheus
from distrain.api.observer import (
    AttemptBegan,
    AttemptEnded,
    BecameSlow,
    Ended,
    HangBegan,
    HangEnded,
    RankTrains,
    Reported,
    RunBegan,
    Stopping,
    TroubleBegan,
    TroubleEnded,
)
from distrain.hosts.troubles import Trouble
from distrain.page.data import page_data
from distrain.prometheus import METRICS
from tests.conftest import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from distrain import Result
    from tests.process.conftest import Fit

DASHBOARD = Path(distrain.__file__).parents[1] / "examples" / "grafana" / "distrain.json"
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(autouse=True)
def _needs_the_library() -> None:
    pytest.importorskip("prometheus_client")


def samples_of(families: Any) -> Samples:
    return {(sample.name, frozenset(sample.labels.items())): sample.value for one in families for sample in one.samples}


def in_text(text: str) -> Samples:
    from prometheus_client.parser import text_string_to_metric_families

    return samples_of(text_string_to_metric_families(text))


def value(samples: Samples, name: str, /, **labels: str) -> float | None:
    return samples.get((f"distrain_{name}", frozenset({"run": "run", **labels}.items())))


# -- real runs -------------------------------------------------------------------------------------------------------


def train(config: dict[str, Any]) -> None:
    """Make 12 steps, with a checkpoint after step 4. Rank 1 fails after step 5, once; both wait after step 10."""
    checkpoint, place = distrain.get_checkpoint(), Path(config["place"])
    for step in range(checkpoint.to_dict()["step"] + 1 if checkpoint else 1, 13):
        stored = Checkpoint.from_dict({"step": step}) if step == 4 else None
        distrain.report({"loss": 1 / step, "eval": {"good": True}, "note": "text"}, stored, progress=(step, 12))
        time.sleep(0.1)  # a rate needs some time
        if step == 5 and checkpoint is None:
            fails = distrain.get_context().get_world_rank() == 1
            while not (fails and Path(place, "fail").exists()):
                time.sleep(0.01)
            raise ValueError("on purpose")
        while step == 10 and not Path(place, "end").exists():
            time.sleep(0.01)


def scrape(address: str) -> Samples:
    """Return what a server of Prometheus gets, which prefers OpenMetrics."""
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    request = urllib.request.Request(address, headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        return samples_of(text_string_to_metric_families(answer.read().decode()))


def test_a_scraped_run_restarts_and_no_counter_goes_down(
    fit: Fit,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    thread: Callable[..., Future[Result]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prometheus, "_GOODPUT_S", 0.5)
    textfile = tmp_path / "run.prom"
    seen: list[Samples] = []
    shown = ""

    def is_at(step: int) -> bool:
        nonlocal shown
        shown += capsys.readouterr().err
        if not (address := re.search(r"Prometheus: (http://127\.0\.0\.1:\d+/metrics)\n", shown)):
            return False
        seen.append(scrape(address[1]))
        return value(seen[-1], "metric", name="loss") == 1 / step and value(seen[-1], "progress_ratio") == step / 12

    future = thread(
        fit,
        train,
        {"place": str(tmp_path)},
        name="run",
        callbacks=[distrain.Prometheus(port=0), distrain.Prometheus(textfile=textfile)],
        failure_config=FailureConfig(max_failures=1),
    )
    try:
        wait_until(lambda: is_at(5), 30.0, "step 5")
        (tmp_path / "fail").touch()
        wait_until(lambda: is_at(10) and value(seen[-1], "steps_per_second") is not None, 30.0, "step 10")
        wait_until(lambda: is_at(10) and value(seen[-1], "goodput_ratio") is not None, 30.0, "the goodput")
    finally:
        (tmp_path / "fail").touch()
        (tmp_path / "end").touch()
    result = future.result(30.0)

    last, rank = seen[-1], {"rank": "0", "host": "localhost"}
    assert value(last, "rank_reports_total", **rank) == 5 + 6  # a restart repeats the fifth
    assert value(last, "rank_steps_total", **rank) == 4 + 5
    assert 0 < (value(last, "rank_step_seconds_total", **rank) or 0) < 60
    assert (value(last, "restarts_total"), value(last, "failures_total"), value(last, "checkpoints_total")) == (1, 1, 1)
    assert (value(last, "checkpoint_bytes_total") or 0) > 0
    assert abs(time.time() - (value(last, "last_checkpoint_timestamp_seconds") or 0)) < 60
    assert (value(last, "run_state", state="running"), value(last, "hung")) == (1, 0)
    assert value(last, "metric", name="eval/good") == 1
    assert value(last, "metric", name="note") is None
    assert (value(last, "eta_seconds") or 0) > 0
    assert [key for key in last if key[0] == "distrain_run_info" and ("directory", result.path) in key[1]]
    for before, after in itertools.pairwise(seen):
        assert [key for key in before if key[0].endswith("_total") and before[key] > after.get(key, -1.0)] == []
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(re.search(r"http://\S+/metrics", shown)[0], timeout=5)  # type: ignore[index]

    final = in_text(textfile.read_text())
    assert (value(final, "run_state", state="finished"), value(final, "run_state", state="running")) == (1, 0)
    assert value(final, "progress_ratio") == 1
    assert value(final, "eta_seconds") is None
    on_page = int(page_data(Path(result.path))["time"]["goodput"].partition("%")[0])
    assert 100 * (value(final, "goodput_ratio") or 0) == pytest.approx(on_page, abs=2)
    assert list(tmp_path.glob("run.prom*")) == [textfile]


def test_a_port_that_is_taken_does_not_stop_the_run(fit: Fit, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        fit(lambda: None, workers=0, callbacks=[distrain.Prometheus(port=port)])
    shown = capsys.readouterr().err
    assert shown.count(f"Prometheus cannot listen on 127.0.0.1:{port}: ") == 1
    assert "Traceback" not in shown


# -- without a run ---------------------------------------------------------------------------------------------------


def test_wrong_arguments_and_a_missing_package_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for settings in ({}, {"port": 1, "textfile": "x.prom"}):
        with pytest.raises(ValueError, match="one of port= and textfile="):
            distrain.Prometheus(**settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"must end in \.prom"):
        distrain.Prometheus(textfile="run.txt")
    with pytest.raises(TypeError, match=r"Prometheus\.port must be an int"):
        distrain.Prometheus(port="80")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'distrain\[prometheus\]'"):
        distrain.Prometheus(port=0)


class Told:
    """An observer that is told facts here, and what it has written by then."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "x.prom"
        self.observer = distrain.Prometheus(textfile=self.file)
        self.tell(RunBegan("id", "run", str(folder), folder, False), AttemptBegan(0, ["alpha", "beta"], 0.0))

    def tell(self, *facts: Any) -> Samples:
        for fact in facts:
            self.observer.hear(fact)
        self.observer.idle()
        return in_text(self.file.read_text())


def state_of(samples: Samples) -> str:
    states = [dict(labels)["state"] for (name, labels), on in samples.items() if name == "distrain_run_state" and on]
    assert len(states) == 1
    return states[0]


def ended(attempt: int, why: str | None = None) -> AttemptEnded:
    return AttemptEnded(attempt, [], why, dict)


def test_states_follow_the_attempts(tmp_path: Path) -> None:
    told = Told(tmp_path)
    facts = [
        (RankTrains(0, 1.0), "starting"),
        (RankTrains(1, 1.0), "running"),
        (ended(0, "alpha was lost"), "restarting"),
        (AttemptBegan(1, ["alpha", "beta"], 2.0), "restarting"),
        (Stopping("SIGTERM"), "stopping"),
        (ended(1, "SIGTERM"), "stopping"),
        (Ended("stopped", "stopped by SIGTERM", 3.0, None, None, [], None, storage_works=True), "stopped"),
    ]
    assert [state_of(told.tell(fact)) for fact, _ in facts] == [state for _, state in facts]
    assert value(told.tell(), "failures_total") == 1  # being stopped is not a failure


def test_what_is_wrong_now_is_a_gauge_that_a_restart_resets(tmp_path: Path) -> None:
    told, trouble = Told(tmp_path), Trouble(rank=1, kind="memory", problem="low", text="nearly full")
    slow, hang = BecameSlow(1, "beta", 2.0, "reports", None, "", 0.0), HangBegan("stuck", 0.0, [1], str)
    found = told.tell(TroubleBegan("beta", trouble), slow, hang)
    assert (value(found, "troubles", host="alpha"), value(found, "troubles", host="beta")) == (0, 1)
    assert (value(found, "hung"), value(found, "slowdowns_total", rank="1", host="beta")) == (1, 1)
    found = told.tell(TroubleEnded("beta", trouble), HangEnded(0.0))
    assert (value(found, "troubles", host="beta"), value(found, "hung")) == (0, 0)
    found = told.tell(TroubleBegan("beta", trouble), AttemptBegan(1, ["alpha", "alpha"], 3.0))
    assert value(found, "troubles", host="beta") == 0
    assert value(found, "slowdowns_total", rank="1", host="beta") == 1


def test_reports_that_were_left_out_count_and_names_of_metrics_are_bounded(tmp_path: Path) -> None:
    told, many = Told(tmp_path), {f"m{number}": number for number in range(60)}
    found = told.tell(Reported(0, 1, 1, many, None, 5.0), Reported(0, 9, 9, {"m1": 0.5, "late": 1}, None, 7.0))
    rank = {"rank": "0", "host": "alpha"}
    assert (value(found, "rank_reports_total", **rank), value(found, "rank_step_seconds_total", **rank)) == (9, 2)
    assert len([key for key in found if key[0] == "distrain_metric"]) == 50
    assert (value(found, "metric", name="m1"), value(found, "metric", name="late")) == (0.5, None)


def test_the_dashboard_shows_exactly_what_is_exported() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    asked = {name for text in expressions(dashboard) for name in re.findall(r"\bdistrain_(\w+)", text)}
    assert asked == set(METRICS)
    assert [one["type"] for one in dashboard["templating"]["list"]] == ["datasource", "query"]
    assert {json.dumps(one["datasource"]) for one in dashboard["panels"]} == {
        json.dumps({"type": "prometheus", "uid": "${datasource}"})
    }


def expressions(dashboard: Any) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
