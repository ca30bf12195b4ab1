"""Profiles of ranks, which ``distrain profile`` asks for. Runs in: coordinator.

The command asks for the state of a profile again and again, so that it may end at any time.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.coordinator.debuggers import problem_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrain.coordinator.evidence import Evidence
    from distrain.decisions.run_status import RunStatus


class Profiles:
    """Begin profiles, keep their files, and tell how far they are. ``send``: sends a message to a rank."""

    def __init__(self, evidence: Evidence, status: RunStatus, *, send: Callable[[wire.TakeProfile], None]) -> None:
        self._evidence = evidence
        self._status = status
        self._send = send
        self.begin(-1)

    def begin(self, attempt: int) -> None:
        """Forget the profiles of the last attempt, whose ranks have ended."""
        self._attempt = attempt
        self._states: dict[int, dict[str, Any]] = {}
        """By rank: its last profile. It has files once it is over."""

    def answer(self, reply: Callable[[str], None], argument: str) -> None:
        """Begin a profile; or, without seconds, tell how far it is. Reply with JSON: the state, or a problem.

        argument: the rank, and the seconds or nothing.
        """
        number, _, seconds = argument.partition(" ")
        rank = int(number) if number.isdecimal() else -1
        problem = "" if rank in self._states else f"rank {rank} has ended during its profile"
        if seconds.replace(".", "", 1).isdecimal() and not (problem := self._problem(rank)):
            self._states[rank] = {"problem": "", "begun": False, "files": {}}
            self._send(wire.TakeProfile(attempt=self._attempt, rank=rank, seconds=float(seconds)))
        reply(json.dumps({"problem": problem} if problem else self._states[rank]))

    def _problem(self, rank: int) -> str:
        if problem := problem_of(rank, self._status):
            return problem
        if self._status.ranks[rank].begun is None:
            return f"rank {rank} has not entered train_func yet; try again when it trains"
        if self._is_under_way(rank):
            return f"another `distrain profile` of rank {rank} is under way; try again when it has ended"
        return ""

    def handle(self, profile: wire.RankProfile) -> None:
        """Write the files of a profile, unless it has only begun."""
        stacks, trace = profile.body[: profile.stacks_bytes], profile.body[profile.stacks_bytes :]
        bodies = {suffix: body for suffix, body in ((".speedscope.json", stacks), (".json.gz", trace)) if body}
        files = {suffix: str(self._evidence.keep("profile", profile.rank, bodies[suffix], suffix)) for suffix in bodies}
        problem = profile.note if not files else ""
        self._states[profile.rank] = {"problem": problem, "begun": True, "files": files, "note": profile.note}

    def rank_ended(self, rank: int) -> None:
        """Forget the profile of a rank that can send no more of it."""
        if self._is_under_way(rank):
            del self._states[rank]

    def _is_under_way(self, rank: int) -> bool:
        return rank in self._states and not (self._states[rank]["files"] or self._states[rank]["problem"])
