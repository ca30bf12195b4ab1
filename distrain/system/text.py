"""Numbers, times and sizes as people read them, and the names of ranks, hosts and signals. Pure. Runs in: anywhere."""

from __future__ import annotations

import errno
import math
import os
import re
import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

LIBRARY_FILE = re.compile(r"/(site|dist)-packages/|/lib(64)?/python\d|^<")
"""It matches paths of files that are not the user's own."""
OWN_FILES = os.path.dirname(os.path.dirname(__file__)) + os.sep
"""The beginning of the paths of distrain's files."""
_FULL_DISK = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
_LONGEST_VALUE = 60
_UNITS = (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1))


def is_users_file(path: str) -> bool:
    """Return whether the code of a file is the user's own: neither of distrain nor of a library."""
    return not path.startswith(OWN_FILES) and not LIBRARY_FILE.search(path)


def is_full_disk(text: str) -> bool:
    """Return whether an error with this text means that a disk is full or a quota is used up."""
    return any(message in text for message in _FULL_DISK)


def advice_on(text: str) -> str:
    """Return advice to append to an error of the storage with this text, or an empty string."""
    if is_full_disk(text):
        return "; free some space there, or choose another storage_path"
    if "Permission denied" in text:
        return "; ask for access to that place, or choose another storage_path"
    is_unusable = re.search("No such file|Not a directory|Read-only file system", text)
    return "; choose another storage_path" if is_unusable else ""


def without_errno(error: Exception) -> str:
    """Return the text of an error without the number that Python puts in front of it.

    >>> without_errno(FileNotFoundError(2, "No such file or directory", "x"))
    "No such file or directory: 'x'"
    """
    return re.sub(r"^\[Errno \d+\] ", "", str(error))


def printable(text: str) -> str:
    """Return the text in one line, without characters that a terminal would act on."""
    return "".join(char if char.isprintable() else " " for char in text)


def without_controls(text: str) -> str:
    """Return a text of any number of lines with nothing that acts on a terminal, except tabulators and colours."""
    return _CONTROLS.sub("", text)


_CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f]"  # a set in front, which is found fast; what follows decides about an escape (\x1b)
    r"(?<!\x1b(?=\[[0-9;:]*m))"  # colours stay, and nothing else that begins with an escape
    r"(?:(?<=\x1b)(?:"
    r"\[[\x00-\x09\x0b-\x17\x19\x1c-?\x7f]*[@-~]?"  # terminals ignore other controls within a sequence
    r"|[\]PX^_][^\x07\x1b\n\x9c]*(?:\x07|\x1b\\|\x9c)?"  # titles, links
    r"|[ -/]*[0-~]?))?"
)
"""Controls, each with the rest of its sequence (ECMA-48). Nothing that is left belongs to a sequence: so removing one
does not make another."""


def duration(seconds: float) -> str:
    """Return a duration with the precision that people need: at most two units.

    >>> [duration(seconds) for seconds in (0.0123, 8.26, 166, 3600, 3780, 200_000)]
    ['12 ms', '8.3 s', '2 min 46 s', '1 h', '1 h 03 min', '2 d 07 h']
    """
    if seconds < 0.0005:
        return "0 s"
    if seconds < 0.1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, large, smaller, small in _UNITS:
        if whole >= large:
            rest = whole % large // small
            return f"{whole // large} {unit} {rest:02} {smaller}" if rest else f"{whole // large} {unit}"
    return f"{whole} s"


def size(count: int) -> str:
    """Return a number of bytes.

    >>> [size(count) for count in (0, 999, 1000, 12_345_678, 5_000_000_000_000)]
    ['0 B', '999 B', '1.0 kB', '12 MB', '5.0 TB']
    """
    if count < 1000:
        return f"{count} B"
    amount, unit = count / 1000, "kB"
    for larger in ("MB", "GB", "TB"):
        if amount >= 999.5:
            amount, unit = amount / 1000, larger
    return f"{amount:.1f} {unit}" if amount < 9.95 else f"{amount:.0f} {unit}"


def binary_size(count: int) -> str:
    """Return a number of bytes in the units in which limits of memory are given.

    >>> [binary_size(count) for count in (0, 160 << 20, 6_549_825_126)]
    ['0 MiB', '160 MiB', '6.1 GiB']
    """
    return f"{count / 2**30:.1f} GiB" if count >= 1 << 30 else f"{count / 2**20:.0f} MiB"


def number(value: object) -> str:
    """Return a metric with six digits. One that is no number is shortened.

    >>> number(0.123456789), number(3), number(1e-9), number("text")
    ('0.123457', '3', '1e-09', 'text')
    """
    return f"{value:.6g}" if isinstance(value, float) else printable(str(value))[:_LONGEST_VALUE]


def amount(value: float) -> str:
    """Return a number with about four digits, so that it is quickly read.

    >>> [amount(value) for value in (0.0187153, 1e-9, 3, 0.5, 123.456, 12_345.6, 999_999, 12_345_678, 2.5e12)]
    ['0.01872', '1e-09', '3', '0.5', '123.5', '12,346', '999,999', '12.35M', '2.5T']
    """
    if not 1000 <= abs(value) < 1e15:
        return f"{value:.4g}" if isinstance(value, float) else str(value)
    if abs(value) < 1e6:
        return f"{value:,.0f}"
    for unit in "MG":
        value /= 1e6 if unit == "M" else 1e3
        if abs(value) < 999.95:
            return f"{value:.4g}{unit}"
    return f"{value / 1000:.4g}T"


def rate(per_second: float) -> str:
    """Return a rate with a fitting unit.

    >>> rate(12.34), rate(0.5), rate(0.001), rate(1234.5), rate(1_999_435.5)
    ('12.3/s', '30.0/min', '3.6/h', '1,234/s', '2.0M/s')
    """
    if per_second >= 1e6:
        return f"{per_second / 1e6:,.1f}M/s"
    for factor, unit in ((1, "s"), (60, "min")):
        if per_second * factor >= 1:
            return f"{per_second * factor:,.{0 if per_second >= 1000 else 1}f}/{unit}"
    return f"{per_second * 3600:.1f}/h"


def count(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> count(1, "run"), count(2, "run")
    ('1 run', '2 runs')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def flatten(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested metrics as one dict, with ``/`` between the names, as a CheckpointConfig writes them.

    >>> flatten({"loss": 0.5, "eval": {"accuracy": 1}})
    {'loss': 0.5, 'eval/accuracy': 1}
    """
    return dict(leaves(metrics))


def leaves(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the names, joined with ``/``, and the values of nested metrics. A name may come twice."""
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def broken(metrics: Mapping[str, Any]) -> str:
    """Say which metrics are NaN, for the end of a sentence; empty if none is.

    >>> broken({"loss": float("nan"), "eval": {"loss": float("nan"), "accuracy": 0.5}})
    ', but loss and eval/loss are nan'
    """
    names = [printable(name) for name, value in flatten(metrics).items() if value != value]
    return f", but {' and '.join(names[:3])} {'is' if len(names) == 1 else 'are'} nan" if names else ""


def did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Return a suggestion for a misspelt word, for the end of an error message; empty if no known word is similar.

    prefix: what the suggested word begins with in addition, such as dashes, which would make all words similar.
    """
    import difflib

    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


# -- ranks, hosts and signals ----------------------------------------------------------------------------------------

_MOST_HOSTS_NAMED = 8
_KNOWN_SIGNALS = {int(number) for number in signal.Signals}


def signal_in_words(number: int) -> str:
    """Return ``SIGKILL (9)``; real-time signals have no name."""
    return f"{signal.Signals(number).name} ({number})" if number in _KNOWN_SIGNALS else f"signal {number}"


BY_COMMAND = "`distrain stop`"
"""The reason of a stop by that command. The other reasons are names of signals."""


def stopped_by(reason: str) -> str:
    """Return the reason of a stop as users know it: most send SIGINT by Ctrl-C."""
    return "Ctrl-C" if reason == "SIGINT" else reason


def signal_of(reason: str) -> str:
    """Return the name of the signal that stops the ranks for a reason. `distrain stop` acts as SIGTERM does."""
    return "SIGTERM" if reason == BY_COMMAND else reason


def name_ranks(ranks: Collection[int]) -> str:
    """Return ``rank 3`` or ``ranks 0, 2-5``."""
    return ("rank " if len(ranks) == 1 else "ranks ") + rank_list(ranks)


def count_ranks(ranks: Collection[int]) -> str:
    """Return ``rank 3`` or ``5 ranks (0, 2-5)``."""
    return f"rank {rank_list(ranks)}" if len(ranks) == 1 else f"{len(ranks)} ranks ({rank_list(ranks)})"


def ranks_have(ranks: Collection[int]) -> str:
    """Return ``rank 3 has`` or ``ranks 0, 2-5 have``."""
    return f"{name_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'}"


def name_hosts(hosts: Collection[str]) -> str:
    """Return the names of the hosts, or of the first ones and the number of the others."""
    shown = ", ".join(islice(hosts, _MOST_HOSTS_NAMED))
    others = len(hosts) - _MOST_HOSTS_NAMED
    return f"{shown} and {others:,} others" if others > 0 else shown


def on_host(host: str) -> str:
    """Return `` on beta``, or nothing for this machine."""
    return "" if host == "localhost" else f" on {host}"


def rank_list(ranks: Iterable[int]) -> str:
    """Return ``0, 2-5``."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


# -- JSON has no NaN -------------------------------------------------------------------------------------------------


def without_nonfinite(metrics: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the metrics with None for each non-finite number, and those numbers by JSON pointer (RFC 6901)."""
    nonfinite: dict[str, str] = {}

    def clean(value: Any, pointer: str) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            nonfinite[pointer] = str(value)
            return None
        return _each(clean, value, pointer)

    return clean(dict(metrics), ""), nonfinite


def with_nonfinite(metrics: dict[str, Any], nonfinite: Mapping[str, str]) -> dict[str, Any]:
    """Return the metrics as they were reported, with NaN and infinities."""

    def restore(value: Any, pointer: str) -> Any:
        return float(str(nonfinite[pointer])) if pointer in nonfinite else _each(restore, value, pointer)

    restored: dict[str, Any] = restore(metrics, "") if nonfinite else metrics
    return restored


def _each(function: Callable[[Any, str], Any], value: Any, pointer: str) -> Any:
    """Apply the function to each item of a dict or list. Return any other value unchanged."""
    if isinstance(value, dict):
        return {k: function(v, f"{pointer}/{k.replace('~', '~0').replace('/', '~1')}") for k, v in value.items()}
    if isinstance(value, list):
        return [function(item, f"{pointer}/{index}") for index, item in enumerate(value)]
    return value
