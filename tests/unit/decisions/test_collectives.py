"""Flight recorders show collectives that ranks lack, or that do not match."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from distrain.decisions.health import collectives

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distrain.decisions.health.collectives import Comparison


def compare(records: dict[int, Any], finished: Sequence[int] = ()) -> list[str]:
    return list(collectives.compare(records, finished=finished).sentences)


def record(*calls: str, group: str = "0", name: str = "default_pg", pending: bool = True) -> list[dict[str, Any]]:
    """The records of a group: each call is such as ``all_reduce 512x512 Float``. The last one is not over."""
    return [
        {
            "process_group": [group, name],
            "collective_seq_id": number,
            "profiling_name": f"gloo:{call.split()[0]}",
            "input_sizes": [[int(size) for size in call.split()[1].split("x")]],
            "input_dtypes": [call.split()[2]],
            "retired": not pending or number < len(calls),
            "is_p2p": False,
        }
        for number, call in enumerate(calls, 1)
    ]


def of(entries: list[dict[str, Any]], **groups: list[int]) -> dict[str, Any]:
    return {
        "has_failed": False,
        "entries": entries,
        "groups": {"0": [0, 1, 2], **{name[1:]: ranks for name, ranks in groups.items()}},
    }


STEP = "all_reduce 512x512 Float"


def test_a_rank_without_records_is_not_blamed() -> None:
    assert compare({0: of(record(STEP)), 2: of(record(STEP))}) == [
        (
            "ranks 0, 2 called all_reduce #1 (512 × 512, float32) of the default group; the other "
            "ranks must call the same, usually with the same shape"
        )
    ]
    assert compare({}) == []


def test_each_group_has_its_own_sentence() -> None:
    entries = [*record(STEP, pending=False), *record("all_reduce 4 Long", group="1", name="undefined")]
    found = compare({0: of(record(STEP, STEP)), 1: of(entries, _1=[0, 1]), 2: of(record(STEP, STEP))})
    default, other = found
    assert default == ("rank 1 never reached all_reduce #2 (512 × 512, float32) of the default group; its last was #1")
    assert other == ("rank 0 never reached all_reduce #1 (4, int64) of the group of ranks 0, 1; it has called none")


def test_records_that_a_small_buffer_has_lost_are_not_missing() -> None:
    first, second = record(STEP, STEP, STEP), record(STEP, STEP, STEP)[1:]
    assert compare({0: of(first), 1: of(second), 2: of(first)}) == []


BARRIER = "barrier 1 Byte"


def known(records: dict[int, Any], finished: Sequence[int] = ()) -> Comparison:
    return collectives.compare(records, finished=finished)


@pytest.mark.parametrize(
    ("records", "finished", "culprits", "cure"),
    [
        ([record(STEP, STEP), record(STEP, pending=False), record(STEP, STEP)], [1], [1], "number of batches"),
        ([record(STEP, BARRIER), record(STEP, pending=False), record(STEP, BARRIER)], [1], [1], "only some call"),
        ([record(BARRIER), [], record(BARRIER)], [1], [1], "only some call"),
        ([record(BARRIER, BARRIER), record(BARRIER, pending=False)], [1], [1], "loops of different lengths"),
        ([record(STEP, STEP), record(STEP, pending=False), record(STEP, STEP)], [], [1], "loops of different lengths"),
        ([record(STEP), record("all_reduce 3 Float"), record(STEP)], [], [1], "same shape and type"),
        ([record(STEP), record("all_reduce 3 Float", pending=False), record(STEP)], [1], [1], "same shape and type"),
        ([record(STEP), record("broadcast 512x512 Float")], [], [], "loops of different lengths"),
        ([record(STEP), record(STEP), record(STEP)], [], [], "distrain check"),
        ([record("broadcast 3 Float")] * 3, [], [], "loops of different lengths"),
    ],
)
def test_the_advice_fits(
    records: list[list[dict[str, Any]]], finished: list[int], culprits: list[int], cure: str
) -> None:
    everyone = {"0": list(range(len(records)))}
    found = known({rank: {**of(one), "groups": everyone} for rank, one in enumerate(records)}, finished)
    assert list(found.culprits) == culprits
    assert cure in found.cure


def test_a_rank_is_stranded_in_a_collective_that_a_finished_one_cannot_call() -> None:
    waits, gone = of(record(STEP, STEP)), of(record(STEP, pending=False))
    assert known({0: waits, 1: gone, 2: waits}, [1]).stranded == {(0, "0", 2), (2, "0", 2)}
    assert known({0: waits, 2: waits}, [1]).stranded == {(0, "0", 2), (2, "0", 2)}


def test_nothing_else_is_proof_of_a_deadlock() -> None:
    waits, gone = record(STEP, STEP), of(record(STEP, pending=False))
    has_called = of(record(STEP, STEP))  # it has done its part, and data may be on its way
    far_ahead = of(record(STEP, STEP, STEP, STEP, pending=False)[3:])  # it tells its last ones only
    over = of(record(STEP, STEP, pending=False))
    later = {"time_created_ns": 9}
    in_subgroup = of([*waits, record(STEP, group="1", name="")[0] | later], _1=[0, 2])
    between_two = of([*waits, {**waits[-1], **later, "is_p2p": True}])
    failed = {**of(waits), "has_failed": True}
    for rank, other, finished in (
        (of(waits), gone, []),
        (of(waits), has_called, [1]),
        (of(waits), far_ahead, [1]),
        (over, gone, [1]),
        (in_subgroup, gone, [1]),
        (between_two, gone, [1]),
        (failed, gone, [1]),
    ):
        assert known({0: rank, 1: other}, finished).stranded == set()
