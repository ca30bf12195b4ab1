"""``distrain hosts``: hosts that were slow or have failed in the last days. Runs in: coordinator."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from distrain.cli import parsers
from distrain.cli.text import age, echo, table, write_json
from distrain.storage.host_records import change_records, read_records

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping


def hosts_parser() -> argparse.ArgumentParser:
    """Make the parser of ``distrain hosts``."""
    parser = parsers.make_parser("hosts")
    parser.add_argument("--forgive", metavar="HOST", help="clear the record of this host (`all`: of every host)")
    parsers.add_json(parser)
    return parser


def run_hosts(options: argparse.Namespace) -> int:
    """List hosts, or forget their troubles."""
    troubles = read_records().troubles
    if options.forgive is not None:
        return _forgive(options.forgive)
    if options.json:
        write_json("hosts", troubles=troubles)
    elif not troubles:
        print("no host was slow or has failed in the last 7 days", file=sys.stderr)
    else:
        echo("\n".join(table([["HOST", "WHAT", "AGE", "RUN", "TEXT"], *map(_cells, troubles)], right=(2,))))
    return 0


def _forgive(host: str) -> int:
    names = sorted({one["host"] for one in read_records().troubles if host in (one["host"], "all")})
    change_records(lambda known: known.forgive(names))
    print(f"cleared the record of {', '.join(names)}" if names else f"nothing is known against {host}")
    return 0 if names or host == "all" else 1


def _cells(row: Mapping[str, Any]) -> list[str]:
    text = str(row["text"]).partition("\n")[0]
    return [row["host"], row["what"], age(time.time() - row["time"]), row["run"], text]
