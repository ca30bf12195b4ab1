"""Two rounds of pairs of hosts, which tell a slow host from a slow connection. Runs in: coordinator.

In the first round, each host is measured with one other. Both hosts of a slow pair are suspects. In the second round,
each suspect is measured with a host that is known to be good, and the others with a host that they have not met. A host
that is slow with all its partners is to blame. If each of the two is good with another host, their connection is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

Pair: TypeAlias = tuple[str, str]


class Verdict(NamedTuple):
    """A verdict. hosts: one host; the two of a connection; two of which one is slow, or their connection; or all.

    kind: ``host``, ``link``, ``either`` (another host would tell), or ``all`` (no pair is good).
    """

    kind: str
    hosts: tuple[str, ...]


def first_round(hosts: Sequence[str]) -> list[Pair]:
    """Return pairs with all hosts. If their number is odd, the first host is in two pairs.

    >>> first_round(["a", "b", "c"])
    [('a', 'b'), ('a', 'c')]
    """
    pairs = list(zip(hosts[::2], hosts[1::2], strict=False))
    return [*pairs, (hosts[0], hosts[-1])] if len(hosts) % 2 and pairs else pairs


def second_round(first: Sequence[Pair], slow: Collection[Pair]) -> list[Pair]:
    """Return new pairs: suspects with good hosts, the others among themselves. ``slow``: pairs of the first round.

    Without any good host, the suspects are paired among themselves.

    >>> second_round([("a", "b"), ("c", "d"), ("e", "f")], slow=[("a", "b")])
    [('a', 'c'), ('b', 'd')]
    """
    hosts = list(dict.fromkeys(host for pair in first for host in pair))
    good = {host for pair in first if pair not in slow for host in pair}
    suspects = [host for host in hosts if host not in good]
    others = [host for host in hosts if host in good]
    met = {frozenset(pair) for pair in first}
    pairs: list[Pair] = []
    for suspect in suspects if good else ():
        partner = next((host for host in others if frozenset((suspect, host)) not in met), None)
        if partner is not None:
            pairs.append((suspect, partner))
            others = [*(host for host in others if host != partner), partner]  # the others' turn comes first
    rest = others[: len(good) - len(pairs)] if good else suspects
    shifted = [*rest[1:], *rest[:1]]
    return [*pairs, *(pair for pair in zip(shifted[::2], shifted[1::2], strict=False) if frozenset(pair) not in met)]


def verdicts(pairs: Sequence[Pair], slow: Collection[Pair]) -> list[Verdict]:
    """Return what the pairs of both rounds say.

    >>> verdicts([("a", "b"), ("c", "d"), ("a", "c"), ("b", "d")], slow=[("a", "b"), ("a", "c")])
    [Verdict(kind='host', hosts=('a',))]
    >>> verdicts([("a", "b"), ("c", "d"), ("a", "c"), ("b", "d")], slow=[("a", "b")])
    [Verdict(kind='link', hosts=('a', 'b'))]
    """
    partners: dict[str, set[str]] = {}
    for first, second in pairs:
        partners.setdefault(first, set()).add(second)
        partners.setdefault(second, set()).add(first)
    good = {host for pair in pairs if pair not in slow for host in pair}
    if len(partners) > 2 and not good:
        return [Verdict("all", tuple(partners))]
    bad = [host for host in partners if host not in good and len(partners[host]) > 1 and partners[host] & good]
    found = [Verdict("host", (host,)) for host in bad]
    rest = [pair for pair in slow if not set(pair) & set(bad)]
    return [*found, *(Verdict("link" if good.issuperset(pair) else "either", pair) for pair in rest)]
