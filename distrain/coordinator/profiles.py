"""Profiles of ranks, which ``distrain profile`` asks for. Runs in: coordinator.

The command asks for the state of a profile again and again, so that it may end at any time.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distrain import wire
from distrain.coordinator.debuggers import problem_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrain.coordinator.evidence import Evidence
    from distrain.decisions.run_status import RunStatus


@dataclass(slots=True)
class _Profile:
    """The profile of one rank. ``bodies``: the files so far, by suffix. ``files``: their paths at the end."""

    notes: list[str] = field(default_factory=list)
    bodies: dict[str, bytearray] = field(default_factory=lambda: defaultdict(bytearray))
    files: dict[str, str] = field(default_factory=dict)
    has_begun: bool = False
    is_over: bool = False


class Profiles:
    """Begin profiles, keep their files, and tell how far they are. ``send``: sends a message to a rank."""

    def __init__(self, evidence: Evidence, status: RunStatus, *, send: Callable[[wire.TakeProfile], None]) -> None:
        self._evidence = evidence
        self._status = status
        self._send = send
        self._attempt = -1
        self._profiles: dict[int, _Profile] = {}
        """By rank: the last one in this attempt."""

    def begin(self, attempt: int) -> None:
        """Forget the profiles of the last attempt, whose ranks have ended."""
        self._attempt = attempt
        self._profiles = {}

    def answer(self, reply: Callable[[str], None], argument: str) -> None:
        """Begin a profile; or, without seconds, tell how far it is. Reply with JSON.

        argument: the rank, and the seconds or nothing.
        """
        number, _, seconds = argument.partition(" ")
        rank = int(number) if number.isdecimal() else -1
        is_number = seconds.replace(".", "", 1).isdecimal()
        problem = self._begin(rank, float(seconds)) if is_number else ""
        profile = self._profiles.get(rank, _Profile([f"rank {rank} was restarted"], is_over=True))
        state = {"begun": profile.has_begun, "over": profile.is_over, "notes": profile.notes, "files": profile.files}
        reply(json.dumps({"problem": problem, **state}))

    def _begin(self, rank: int, seconds: float) -> str:
        if problem := problem_of(rank, self._status):
            return problem
        if self._status.ranks[rank].begun is None:
            return f"rank {rank} has not entered train_func yet; try again when it trains"
        if rank in self._profiles and not self._profiles[rank].is_over:
            return f"another `distrain profile` of rank {rank} is under way; try again when it has ended"
        self._profiles[rank] = _Profile()
        self._send(wire.TakeProfile(attempt=self._attempt, rank=rank, seconds=seconds))
        return ""

    def handle(self, part: wire.ProfilePart) -> None:
        """Note a part of a profile, and write the files when all parts are there."""
        profile = self._profiles[part.rank]
        profile.has_begun = True
        profile.notes += [part.note] if part.note else []
        if part.suffix:
            profile.bodies[part.suffix] += part.body
        if part.last:
            for suffix, body in profile.bodies.items():
                profile.files[suffix] = str(self._evidence.keep("profile", part.rank, bytes(body), suffix))
            profile.bodies.clear()
            profile.is_over = True

    def rank_ended(self, rank: int) -> None:
        """Note that a rank can send no more."""
        profile = self._profiles.get(rank)
        if profile is not None and not profile.is_over:
            profile.notes.append(f"rank {rank} has ended during its profile")
            profile.bodies.clear()
            profile.is_over = True
