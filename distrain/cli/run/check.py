"""``distrain check``: bytes that hosts send to each other, and the output. Runs in: coordinator."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain.api.config import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
from distrain.cli.text import table
from distrain.coordinator.connection.choice import hosts_of
from distrain.coordinator.run.fit import run_work
from distrain.decisions.host_checks import Finding
from distrain.errors import DistrainError
from distrain.storage.lines import read_metrics
from distrain.storage.names import METRICS
from distrain.storage.runs.listing import run_at
from distrain.system.arguments import in_users_words
from distrain.system.text import binary_size, name_hosts, without_controls
from distrain.torch.config import TorchConfig
from distrain.worker.job.job import TargetWork

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

    from distrain.coordinator.host_check import HostFacts
    from distrain.hosts.gpu_health import GpuHealth

_PACKAGES = ("torch", "cloudpickle")
"""Packages whose versions are shown."""
_PATIENCE_S = 60.0
"""Seconds that bytes may take to arrive."""
_CURES = {
    False: "for GPUs, try --env NCCL_P2P_DISABLE=1; boot with iommu=pt, or without an IOMMU, and turn ACS off",
    True: "replace the cable or the network adapter; for GPUs, try --env NCCL_NET_GDR_LEVEL=LOC",
}
"""By whether the bytes travel from one host to another."""


def compare_bytes(
    facts: Mapping[str, HostFacts], scaling: ScalingConfig, run: RunConfig, sys_path: Sequence[str]
) -> list[Finding]:
    """Have all slots, or GPUs, send bytes to each other. Return the pairs of which bytes change, or never arrive."""
    gpus = {name: len(one.info.gpus or ()) for name, one in facts.items() if one.info is not None}
    slots = {host.name: host.slots or gpus[host.name] for host in hosts_of(scaling, os.environ)}
    use_gpu = all(0 < number <= gpus[name] for name, number in slots.items())
    workers = sum(number or max(2, scaling.max_workers) for number in slots.values())
    if workers < 2:
        return [Finding(name, "--deep needs two slots: nothing is sent", is_fatal=False) for name in slots]
    work = TargetWork(target="distrain.torch.byte_check:compare_bytes", backend=TorchConfig(timeout_s=_PATIENCE_S))
    scaling = replace(scaling, num_workers=workers, use_gpu=use_gpu, resources_per_worker=None, grow=None)
    logging, failures = LoggingConfig(log_level="ERROR", ranks=[]), FailureConfig(hang_timeout_s=2 * _PATIENCE_S)
    kind, error = "GPU" if use_gpu else "worker", ""
    with tempfile.TemporaryDirectory() as folder:
        run = replace(run, name="check", storage_path=folder, storage_filesystem=None, log_dir=None, trackers=[])
        run = replace(run, failure_config=failures, logging_config=logging, progress="off", debug_rank=None, on_end="")
        try:
            run_work(work, replace(scaling, accelerator_type=None, numa_binding=None), run, sys_path=sys_path)
        except DistrainError as raised:
            error = str(raised).partition("\nlogs: ")[0]  # they are deleted
        done = run_at(Path(folder, "check"))
        reports = {line["rank"]: line["metrics"] for line in read_metrics(done.location / METRICS, rank=None)}
    waiting = [one["waiting"] for one in reports.values() if one["waiting"]]
    found = [pair for one in reports.values() for pair in one["found"]]
    # Pairs of later turns wait for those of the first one.
    found += [(*pair, "nothing more arrives") for turn, *pair in waiting if turn == min(waiting)[0]]
    ends, findings = dict[int, tuple[str, str]](), dict[Finding, None]()
    for host, ranks in done.hosts.items():
        ends |= {rank: (host, f"{host} {kind} {number}") for number, rank in enumerate(ranks)}
    for source, target, text in found:
        hosts, names = zip(ends[source], ends[target], strict=True)
        for host in hosts:
            findings[Finding(host, f"{' -> '.join(names)}: {text}")] = None
            findings[Finding(host, _CURES[len({*hosts}) > 1], is_fatal=False)] = None
    return [*findings, *(Finding(name, f"not all bytes were compared: {error}") for name in slots if error)]


def show(findings: Sequence[Finding], hosts: Mapping[str, HostFacts], console: Console) -> None:
    """Print a table, broken into several if the console is narrow, then the problems and a verdict."""
    from rich.text import Text

    bad = {finding.host for finding in findings if finding.is_fatal}
    marks = {True: ("x" if console.options.ascii_only else "✗", "bold red"), False: ("!", "yellow")}
    for lines in _tables([_row(name, facts) for name, facts in hosts.items()], console.width):
        console.print(Text("\n".join([*lines, ""])), soft_wrap=True)
    hosts_with: dict[tuple[bool, str], list[str]] = {}
    for finding in sorted(findings, key=lambda finding: not finding.is_fatal):
        hosts_with.setdefault((finding.is_fatal, finding.text), []).append(finding.host)
    for (is_fatal, problem), names in hosts_with.items():
        mark, style = marks[is_fatal]
        text = without_controls(in_users_words(problem)).replace("\n", "\n    ")
        console.print(Text.assemble((f"{mark} {name_hosts(names)}: ", style), text), soft_wrap=not console.is_terminal)
    good = "this host can train" if len(hosts) == 1 else f"{len(hosts)} hosts can train together"
    named = ", ".join(name for name in hosts if name in bad)
    console.print(Text(f"cannot train like this: {named}" if bad else good, style="bold"), soft_wrap=True)


def as_json(findings: Sequence[Finding], hosts: Mapping[str, HostFacts]) -> dict[str, Any]:
    """Return what a check has found."""
    return {
        "ok": not any(finding.is_fatal for finding in findings),
        "problems": [{"host": one.host, "fatal": one.is_fatal, "text": in_users_words(one.text)} for one in findings],
        "hosts": {name: {"reached": facts.hello is not None} for name, facts in hosts.items()},
    }


def _row(name: str, facts: HostFacts) -> dict[str, str]:
    """Return the cells of a host, by column."""
    row = {"host": name, "reached": "no" if facts.hello is None else "yes"}
    if (hello := facts.hello) is not None:
        names = [gpu["name"] for gpu in hello.host["gpus"] or ()]
        row |= {
            "python": hello.python,
            "CPUs": str(hello.host["cpus"]),
            "GPUs": ", ".join(f"{names.count(each)} {each}" for each in dict.fromkeys(names)) or "none",
        }
    if hello is not None and (probed := facts.probed) is not None:
        memory = hello.host["memory_bytes"]
        row |= {
            **{package: _version(probed.versions[package]) for package in _PACKAGES if package in probed.versions},
            "RAM free": f"{binary_size(min(probed.memory_free_bytes, memory))} of {binary_size(memory)}",
            "disk free": _space(probed.disk_free_bytes),
            "shm free": _space(probed.shared_memory_free_bytes),
            "GPU free": _least_free(facts.gpus),
            "address": f"{probed.address} {probed.interface}".strip(),
            "clock": f"{round(facts.ahead_s, 1) or 0.0:+.1f} s",  # not -0.0
            "storage": "ok" if facts.sees_storage else "",
        }
    return row


def _tables(rows: Sequence[Mapping[str, str]], width: int) -> list[list[str]]:
    """Break the columns into tables that fit the console. Each begins with the names of the hosts."""
    columns = [
        [name, *(row.get(name, "") for row in rows)] for name in dict.fromkeys(key for row in rows for key in row)
    ]
    first, *rest = (column for column in columns if any(column[1:]))
    tables = [[first]]
    for column in rest:
        if len(tables[-1]) > 1 and max(map(len, _lines([*tables[-1], column]))) > width:
            tables.append([first])
        tables[-1].append(column)
    return [_lines(columns) for columns in tables]


def _lines(columns: Sequence[Sequence[str]]) -> list[str]:
    return table(list(zip(*columns, strict=True)))


def _version(version: str | None) -> str:
    return "none" if version is None else version or "?"


def _space(free_bytes: int) -> str:
    return "" if free_bytes < 0 else binary_size(free_bytes)


def _least_free(gpus: Sequence[GpuHealth]) -> str:
    """Return the free memory of the GPU that has the least; empty if it is not known."""
    known = [gpu for gpu in gpus if gpu.memory_bytes]
    gpu = min(known, key=lambda gpu: gpu.free_bytes, default=None)
    return "" if gpu is None else f"{binary_size(gpu.free_bytes)} of {binary_size(gpu.memory_bytes)}"
