"""The output of ``python -m distrain.launch --check``. Runs in: coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distrain.system.naming import name_hosts
from distrain.system.text import without_controls

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from distrain.cli.run.preflight import Preflight

_COLUMNS = (
    *("host", "reached", "python", "distrain", "torch", "cloudpickle", "cwd", "storage", "peers", "address", "clock"),
    *("slots", "CPUs", "RAM free", "disk free", "cache", "GPUs", "GPU free"),
)


def show(preflight: Preflight, console: Console) -> None:
    """Print a table, broken into several if the console is narrow, then the findings and a verdict."""
    from rich.text import Text

    rows = preflight.rows()
    marks = {True: ("x" if console.options.ascii_only else "✗", "bold red"), False: ("!", "yellow")}
    marked: dict[tuple[str, str], bool] = {}
    for finding in preflight.findings:
        marked[finding.host, finding.about] = finding.is_fatal or marked.get((finding.host, finding.about), False)

    def cell(row: Mapping[str, str], column: str) -> Text:
        is_fatal = marked.get((row["host"], column))
        value = row.get(column, "")
        if is_fatal is None:
            return Text(value)
        mark, style = marks[is_fatal]
        return Text(mark if value in ("", "ok") else f"{mark} {value}", style=style)

    cells = {column: [cell(row, column) for row in rows] for column in _COLUMNS}
    for table in _tables(console, {column: texts for column, texts in cells.items() if any(texts)}):
        console.print(table)
        console.print()
    hosts_with: dict[tuple[bool, str], list[str]] = {}
    for finding in preflight.findings:
        hosts_with.setdefault((finding.is_fatal, finding.text), []).append(finding.host)
    for (is_fatal, finding_text), hosts in hosts_with.items():
        mark, style = marks[is_fatal]
        text = without_controls(finding_text).replace("\n", "\n    ")
        console.print(Text.assemble((f"{mark} {name_hosts(hosts)}: ", style), text), soft_wrap=not console.is_terminal)
    console.print(Text(_verdict(preflight, [row["host"] for row in rows]), style="bold"), soft_wrap=True)


def show_emptied(preflight: Preflight) -> bool:
    """Print what was deleted on each host. Return whether all hosts have answered, and none failed."""
    problems = {finding.host: finding.text for finding in preflight.findings}
    is_good = True
    for name, answer in preflight.emptied().items():
        if answer is None or answer.failed is not None:
            print(f"{name}: {problems.get(name, 'no answer') if answer is None else answer.failed}")
            is_good = False
            continue
        used = f"; in use: {', '.join(answer.in_use)}" if answer.in_use else ""
        print(f"{name}: {answer.freed_bytes / 1e6:,.1f} MB freed{used}")
    return is_good


def _tables(console: Console, cells: Mapping[str, Sequence[Text]]) -> list[Table]:
    """Break the columns into tables that fit the console. Each begins with the names of the hosts."""
    unbounded = console.options.update(max_width=10_000)
    first, *rest = cells
    tables, columns = [], [first]
    for column in rest:
        wider = console.measure(_table(cells, [*columns, column]), options=unbounded).maximum
        if len(columns) > 1 and wider > console.width:
            tables.append(_table(cells, columns))
            columns = [first]
        columns.append(column)
    return [*tables, _table(cells, columns)]


def _table(cells: Mapping[str, Sequence[Text]], columns: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True)
    for row in zip(*(cells[column] for column in columns), strict=True):
        table.add_row(*row)
    return table


def _verdict(preflight: Preflight, names: Sequence[str]) -> str:
    """Return the last line. ``names``: this machine, then the hosts."""
    bad = {finding.host for finding in preflight.findings if finding.is_fatal}
    if bad:
        return f"cannot train like this: {', '.join(name for name in names if name in bad)}"
    return "this host can train" if len(names) == 2 else f"{len(names) - 1} hosts can train together"
