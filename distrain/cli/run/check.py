"""The output of ``distrain check``: a table of the hosts, and their problems. Runs in: coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distrain.cli.text import table
from distrain.system.arguments import in_users_words
from distrain.system.text import binary_size, name_hosts, without_controls

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

    from distrain.coordinator.host_check import HostFacts
    from distrain.decisions.host_checks import Finding
    from distrain.hosts.gpu_health import GpuHealth

_PACKAGES = ("torch", "cloudpickle")
"""Packages whose versions are shown."""


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
