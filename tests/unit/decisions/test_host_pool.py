"""Which hosts are connected when: several at once, spare ones in place of slow ones, lost ones again."""

from __future__ import annotations

from distrain.api.config import ScalingConfig
from distrain.decisions.run.host_pool import (
    HOST_ANSWER_TIMEOUT_S,
    RECONNECT_INTERVAL_S,
    HostPool,
    Readiness,
)
from distrain.hosts.host import HostInfo

START = 100.0


def pool_of(hosts: int, workers: int | tuple[int, int], slots: int | None = 1) -> HostPool:
    pool = HostPool({f"h{number}": slots for number in range(hosts)}, ScalingConfig(num_workers=workers))
    pool.begin_search(START, reconnect_s=0.0, wait_s=HOST_ANSWER_TIMEOUT_S)
    return pool


def answer(pool: HostPool, *hosts: str) -> None:
    for host in hosts:
        pool.mark_connected(host, HostInfo(name=host, cpus=1, memory_bytes=0, slots=1))


def test_a_host_that_sshd_turns_away_is_tried_later_with_fewer_at_once() -> None:
    pool = pool_of(10, 10)
    first = pool.hosts_to_connect(START)
    for host in first[4:]:
        assert pool.may_try_later(host, START)
    assert pool.hosts_to_connect(START) == []
    answer(pool, *first[:4])
    assert pool.readiness(START) is Readiness.WAITING
    later = START + RECONNECT_INTERVAL_S
    assert pool.deadline() == later
    assert pool.hosts_to_connect(later) == first[4:]  # one more at once for each that has answered
    assert not pool.losses


def test_a_host_that_is_always_turned_away_is_lost_in_every_attempt() -> None:
    pool, now = pool_of(1, 1), START
    for reconnect_s in (0.0, 3 * RECONNECT_INTERVAL_S):
        pool.begin_search(now, reconnect_s=reconnect_s, wait_s=0.0)
        until, tries = now + reconnect_s, 0
        while now <= until or tries < 6:
            tries += 1
            assert pool.hosts_to_connect(now) == ["h0"]
            if not pool.may_try_later("h0", now):
                pool.mark_lost("h0", "exit code 255", now)
            if pool.readiness(now) is Readiness.HOPELESS:
                break
            now = pool.deadline()
        assert tries == 6
        assert pool.readiness(now) is Readiness.HOPELESS
