"""Numbers and times as people read them. Runs in: anywhere."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Return a duration in at most two units.

    >>> duration(8.26), duration(166), duration(3780), duration(200_000)
    ('8.3 s', '2 min 46 s', '1 h 03 min', '2 d 07 h')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02} h"


def number(value: float) -> str:
    """Return a metric with six digits.

    >>> number(0.123456789), number(3), number(1e-9)
    ('0.123457', '3', '1e-09')
    """
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def rate(per_second: float) -> str:
    """Return a rate with a fitting unit.

    >>> rate(12.34), rate(0.5), rate(0.001)
    ('12.3/s', '30.0/min', '3.6/h')
    """
    for factor, unit in ((1, "s"), (60, "min")):
        if per_second * factor >= 1:
            return f"{per_second * factor:,.1f}/{unit}"
    return f"{per_second * 3600:.1f}/h"
