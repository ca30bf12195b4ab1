"""``distrain hosts``: hosts that were slow or have failed in the last days. Runs in: coordinator."""

from __future__ import annotations

import json
import sys
import time
from statistics import median
from typing import TYPE_CHECKING, Any

from distrain.cli import parsers
from distrain.cli.text import age, echo, table
from distrain.decisions.fitness.rates import RULES, shown
from distrain.storage.host_records import HostRecords

if TYPE_CHECKING:
    import argparse
    from collections.abc import Collection, Mapping


def hosts_parser() -> argparse.ArgumentParser:
    """Make the parser of ``distrain hosts``."""
    parser = parsers.make_parser(
        "hosts",
        "List the hosts that were lost, slow or at fault in your runs and deep checks of the last 7 days. New runs use "
        "such a host only if they have no spare one.",
        "  distrain hosts\n  distrain hosts --forgive beta\n  distrain hosts --forgive all",
    )
    parser.add_argument("--forgive", metavar="HOST", help="forget the troubles of this host, or of `all`")
    parser.add_argument("--json", action="store_true", help="write a list of JSON objects")
    return parser


def run_hosts(options: argparse.Namespace) -> int:
    """List hosts, or forget their troubles."""
    records = HostRecords()
    found = {host: troubles for host in records.hosts() if (troubles := records.troubles(host))}
    if options.forgive is not None:
        return _forgive(records, found, options.forgive)
    rows = [
        {
            "host": host,
            **{name: one.get(name) for name in ("time", "what", "text", "run")},
            "check": _check(records, host),
        }
        for host, troubles in found.items()
        for one in troubles
    ]
    if options.json:
        print(json.dumps(rows, indent=1))
    elif not rows:
        print("no host was slow or has failed in the last 7 days", file=sys.stderr)
    else:
        heads = ["HOST", "WHAT", "AGE", "RUN", "LAST DEEP CHECK", "TEXT"]
        echo("\n".join(table([heads, *map(_cells, rows)], right=(2,))))
    return 0


def _forgive(records: HostRecords, found: Collection[str], host: str) -> int:
    chosen = [name for name in found if host in (name, "all")]
    for name in chosen:
        records.add(name, "forgiven")
    print(f"forgot the troubles of {', '.join(chosen)}" if chosen else f"nothing is known against {host}")
    return 0 if chosen or host == "all" else 1


def _cells(row: Mapping[str, Any]) -> list[str]:
    text = str(row["text"]).partition("\n")[0]
    return [row["host"], row["what"], age(time.time() - row["time"]), row["run"] or "", row["check"], text]


def _check(records: HostRecords, host: str) -> str:
    """Return the result of the last deep check that is worst, compared with the median of the host's checks."""
    last = next((one for one in reversed(records.of(host)) if one["what"] == "check"), None)
    past = [] if last is None else records.checks(host, last["kind"])
    ranked = []
    for name, value in last["results"].items() if last is not None else ():
        rule, usual = RULES[name], median(one[name] for one in past if name in one)
        share = usual / value if rule.is_latency else value / usual
        ranked.append((share, f"{rule.name} {shown(value)} {rule.unit} (median {shown(usual)})"))
    return min(ranked)[1] if ranked else ""
