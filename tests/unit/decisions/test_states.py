"""The tables of moves: complete, every state reachable, no way out of an end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distrain.decisions.states import RANK_MOVES, RUN_MOVES, RankState, RunState

if TYPE_CHECKING:
    import enum
    from collections.abc import Mapping

RUN_ENDS = {RunState.FINISHED, RunState.FAILED, RunState.STOPPED}


def reachable(moves: Mapping[enum.Enum, frozenset[enum.Enum]], start: enum.Enum) -> set[enum.Enum]:
    seen, waiting = {start}, [start]
    while waiting:
        new = moves[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen


def test_the_ends_of_a_run_have_no_exits_and_everything_else_has() -> None:
    """But that of a run whose last checkpoint turns out not to be stored."""
    assert {state for state, moves in RUN_MOVES.items() if not moves} == RUN_ENDS - {RunState.FINISHED}
    assert RUN_MOVES[RunState.FINISHED] == {RunState.FAILED}


def test_every_state_of_a_run_leads_to_an_end() -> None:
    for state in RunState:
        assert reachable(RUN_MOVES, state) & RUN_ENDS


def test_exited_is_the_only_end_of_a_rank_and_always_possible() -> None:
    assert RANK_MOVES[RankState.EXITED] == frozenset()
    assert all(RankState.EXITED in moves for state, moves in RANK_MOVES.items() if state is not RankState.EXITED)
