"""``distrain hosts``: hosts that were slow or have failed in the last days. Runs in: coordinator."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

from distrain.cli import parsers
from distrain.cli.text import age, echo, table
from distrain.decisions.fitness.rates import RULES, shown
from distrain.storage.host_records import HostRecords

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence


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


def _forgive(records: HostRecords, found: Sequence[str] | Mapping[str, Any], host: str) -> int:
    chosen = list(found) if host == "all" else [name for name in found if name == host]
    for name in chosen:
        records.add(name, "forgiven")
    print(f"forgot the troubles of {', '.join(chosen)}" if chosen else f"nothing is known against {host}")
    return 0 if chosen or host == "all" else 1


def _cells(row: Mapping[str, Any]) -> list[str]:
    text = str(row["text"]).partition("\n")[0]
    return [row["host"], row["what"], age(time.time() - row["time"]), row["run"] or "", row["check"], text]


def _check(records: HostRecords, host: str) -> str:
    """Return the result of the last deep check that is worst, compared with the median of the host's checks."""
    checks = [one for one in records.of(host) if one["what"] == "check"]
    if not checks:
        return ""
    last = checks[-1]
    shares = []
    for name, value in last["results"].items():
        past = sorted(one[name] for one in records.checks(host, last["kind"]) if name in one)
        reference = past[len(past) // 2]
        better = reference / value if RULES[name].is_latency else value / reference
        shares.append((better, f"{RULES[name].name} {shown(value)} {RULES[name].unit} (median {shown(reference)})"))
    return min(shares)[1] if shares else ""
