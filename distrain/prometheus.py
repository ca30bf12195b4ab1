"""Metrics of a run for Prometheus, over HTTP or in a file. Runs in: coordinator.

Scrapes come in other threads. Numbers that no fact changes, such as the rate, are those of the last second.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from distrain.api import observer as facts
from distrain.decisions.run_status import RunStatus
from distrain.page.data import parts_of_time
from distrain.page.reports import DAMAGE, Reports, beginnings
from distrain.storage import names
from distrain.storage.lines import MOST_OF_LINES, Tail, read_events, read_metrics
from distrain.storage.runs.listing import run_at
from distrain.system.arguments import check_int
from distrain.system.imports import require
from distrain.system.log import say, warn
from distrain.trackers.logging import numbers_in

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Prometheus"]

METRICS = {
    "run_info": "The run: its id and directory, and the host of the process that called fit().",
    "run_state": "1 for the state of the run, 0 for the others.",
    "progress_ratio": "The share of the steps that is done, from report(progress=...).",
    "eta_seconds": "The time until the last step, at the present rate.",
    "steps_per_second": "Steps of rank 0 in the last minute, or its reports if it gives no progress.",
    "goodput_ratio": "The share of the run's time that was spent training, as on its page.",
    "failures_total": "Attempts that have failed.",
    "restarts_total": "Attempts after the first one.",
    "checkpoints_total": "Checkpoints that were committed.",
    "checkpoint_bytes_total": "Bytes of the checkpoints that were committed.",
    "last_checkpoint_timestamp_seconds": "When the last checkpoint was committed, in seconds since 1970.",
    "hung": "1 while no rank makes progress.",
    "troubles": "What is wrong with a host now: its memory, its GPUs, or parameters that differ.",
    "slowdowns_total": "How often a rank has become slow.",
    "rank_reports_total": "Reports of a rank, including those that a restart repeats.",
    "rank_steps_total": "Steps between the reports of a rank, or its reports if it gives no progress.",
    "rank_step_seconds_total": "The time of these steps. Divided by their number: the time of a step.",
    "metric": "The last value of a metric that rank 0 has reported.",
}
"""The meaning of each metric, by its name without ``distrain_``. All have the label ``run``."""
_OF_RANKS = ("slowdowns_total", "rank_reports_total", "rank_steps_total", "rank_step_seconds_total")
_STATES = ("starting", "restarting", "stopping", *names.STATUSES)
_MOST_NAMES = 50
"""Names of reported metrics that are exported: each is a time series."""
_GOODPUT_S = 15.0
"""Seconds between two looks at the goodput, which read what was added to the files of the run."""


class Prometheus(facts.Observer):
    """Exports a run to Prometheus, either at a port or in a file.

    It needs ``pip install 'distrain[prometheus]'``.

    port: serves ``/metrics`` until ``fit()`` ends; with 0 at a free port. A line on the console has the address.
    textfile: a file ``*.prom`` for the textfile collector of node_exporter. It is replaced about once per second, and
        keeps the final state of the run.
    address: where to listen. By default, only this machine can connect.

    Raises TypeError or ValueError for wrong arguments, ModuleNotFoundError if prometheus_client is not installed.

    ::

        run_config = RunConfig(callbacks=[distrain.Prometheus(port=9400)])
    """

    def __init__(
        self, *, port: int | None = None, textfile: str | os.PathLike[str] | None = None, address: str = "127.0.0.1"
    ) -> None:
        if (port is None) == (textfile is None):
            raise ValueError("Prometheus needs one of port= and textfile=")
        check_int("Prometheus.port", port, minimum=0, optional=True)
        if textfile is not None and not os.fspath(textfile).endswith(".prom"):
            raise ValueError(f"Prometheus.textfile must end in .prom, or node_exporter ignores it; got {textfile!r}")
        require("prometheus_client")
        self._port, self._textfile, self._address = port, textfile, address

    def collect(self) -> Iterator[Any]:
        """Yield the metrics. prometheus_client calls this for each scrape, in another thread."""
        for name, text in METRICS.items():
            kind = {"total": "counter", "info": "info"}.get(name.rpartition("_")[2], "gauge")
            base = f"distrain_{name}".removesuffix("_total").removesuffix("_info")
            family = require("prometheus_client").Metric(base, text, kind)
            for labels, value in self._series[name].copy().items():
                family.add_sample(f"distrain_{name}", {"run": self._run.name, **dict(labels)}, value)
            yield family

    # -- what happens ---------------------------------------------------------------------------------------------

    def _begin(self, run: facts.RunBegan) -> None:
        self._run, self._state, self._status = run, "starting", RunStatus(run.location, time.monotonic())
        self._series: dict[str, dict[tuple[tuple[str, str], ...], float]] = {name: {} for name in METRICS}
        """By name, and by labels."""
        for name in ("failures_total", "checkpoints_total", "checkpoint_bytes_total"):
            self._set(name, 0)
        self._set("run_info", 1, run_id=run.run_id, directory=run.location, host=socket.gethostname())
        self._beginnings, self._measure_at = object(), time.monotonic() + _GOODPUT_S
        client = require("prometheus_client")
        self._registry, self._server = client.CollectorRegistry(), None
        self._registry.register(self)
        if self._port is not None:
            try:
                self._server, _ = client.start_http_server(self._port, self._address, self._registry)
                say(f"Prometheus: http://{self._address}:{self._server.server_port}/metrics")
            except OSError as error:
                warn(f"Prometheus cannot listen on {self._address}:{self._port}: {error}; port=0 takes a free one")

    def hear(self, fact: facts.Fact) -> None:
        if isinstance(fact, facts.RunBegan):
            self._begin(fact)
        self._status.hear(fact)
        match fact:
            case facts.AttemptBegan():
                self._begin_attempt()
            case facts.RankTrains() if all(rank.begun for rank in self._status.ranks):
                self._state = "running"
            case facts.Reported():
                self._report(fact, self._last.get(fact.rank))
            case facts.Committed():
                self._add("checkpoints_total", 1)
                self._add("checkpoint_bytes_total", fact.bytes)
                self._set("last_checkpoint_timestamp_seconds", time.time() - time.monotonic() + fact.now)
            case facts.BecameSlow(rank):
                self._add("slowdowns_total", 1, **self._labels(rank))
            case facts.TroubleBegan(host):
                self._add("troubles", 1, host=host)
            case facts.TroubleEnded(host):
                self._add("troubles", -1, host=host)
            case facts.AttemptEnded() if (fact.failures or fact.why) and self._state != "stopping":
                self._state = "restarting"
                self._add("failures_total", 1)
            case facts.Stopping():
                self._state = "stopping"
            case facts.Ended():
                self._state, self._measure_at = fact.status, 0.0
                self.idle()
                if self._server is not None:
                    self._server.shutdown()
                    self._server.server_close()

    def _begin_attempt(self) -> None:
        self._state = "restarting" if self._status.restarts else "starting"
        self._last: dict[int, facts.Reported] = {}
        """By rank: its last report in this attempt."""
        self._series["troubles"] = dict.fromkeys(self._series["troubles"], 0)
        for rank, status in enumerate(self._status.ranks):
            self._add("troubles", 0, host=status.host)
            for name in _OF_RANKS:
                self._add(name, 0, **self._labels(rank))

    def _report(self, fact: facts.Reported, before: facts.Reported | None) -> None:
        self._last[fact.rank], labels = fact, self._labels(fact.rank)
        self._add("rank_reports_total", fact.index - (before.index if before else 0), **labels)
        if before and (steps := _step(fact) - _step(before)) > 0:
            self._add("rank_steps_total", steps, **labels)
            self._add("rank_step_seconds_total", fact.now - before.now, **labels)
        for name, value in numbers_in(fact.metrics).items() if fact.rank == 0 else ():
            if (("name", name),) in self._series["metric"] or len(self._series["metric"]) < _MOST_NAMES:
                self._set("metric", value, name=name)

    def _labels(self, rank: int) -> dict[str, str]:
        return {"rank": str(rank), "host": self._status.ranks[rank].host}

    # -- what follows ---------------------------------------------------------------------------------------------

    def idle(self) -> None:
        if time.monotonic() >= self._measure_at:
            self._measure_at = time.monotonic() + _GOODPUT_S
            with suppress(OSError):  # the storage may fail
                self._measure_goodput()
        status, progress, is_running = self._status, self._status.progress, self._state == "running"
        for state in _STATES:
            self._set("run_state", state == self._state, state=state)
        self._set("restarts_total", status.restarts)
        self._set("hung", status.hang is not None)
        self._set("progress_ratio", progress[0] / progress[1] if progress else None)
        self._set("eta_seconds", status.left_s() if is_running else None)
        self._set("steps_per_second", status.rate() if is_running else None)
        if self._textfile is not None:
            require("prometheus_client").write_to_textfile(os.fspath(self._textfile), self._registry)

    def _measure_goodput(self) -> None:
        """Read what was added to the files of the run. After a restart, which repeats reports, read them all again."""
        folder, run = self._run.directory, run_at(self._run.directory)
        if self._beginnings != beginnings(run):
            self._beginnings, self._reports, self._tail = beginnings(run), Reports(run.attempts), Tail()
        for record in read_metrics(folder / names.METRICS, rank=None, most=MOST_OF_LINES, tail=self._tail):
            with suppress(*DAMAGE):
                self._reports.add(record)
        parts = parts_of_time(run, self._reports, list(read_events(folder / names.EVENTS)))
        if total := sum(parts.values()):
            self._set("goodput_ratio", parts["training"] / total)

    def _add(self, series: str, more: float, **labels: str) -> None:
        key = tuple(labels.items())
        self._series[series][key] = self._series[series].get(key, 0) + more

    def _set(self, series: str, value: float | None, **labels: str) -> None:
        if value is None:
            self._series[series].clear()
        else:
            self._series[series][tuple(labels.items())] = value


def _step(report: facts.Reported) -> float:
    return report.index if report.progress is None else report.progress[0]
