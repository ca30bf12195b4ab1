"""torch's flight recorder: the last collectives of this rank. Runs in: worker.

Source: https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html. With older versions of torch it is
empty: NCCL's records are there from 2.7 on, gloo's a little later.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

_ENTRIES = "100"
"""Collectives that torch remembers. Each takes about 1 KB."""
_RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


def turn_on() -> None:
    """Have torch record collectives, unless the user's environment says how many. Call it before the first group."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _ENTRIES)


def counts() -> str:
    """Return how many collectives of each group this rank has called and completed, as text to compare."""
    with contextlib.suppress(Exception):  # torch does not promise how its records look
        return str([found.get("pg_status") for found in recorded(entries=False)])
    return ""


def dump(*, has_failed: bool = False, most: int | None = None) -> bytes:
    """Return the records as JSON, or nothing if there are none. ``most``: only the last ones, as JSON even if none.

    entries: those of torch's own. groups: the ranks in each group of this rank, by its name. has_failed: the rank has
    raised an exception of torch.distributed, and then torch counts the collective that failed as done.
    """
    with contextlib.suppress(Exception):
        entries = [entry for found in recorded(entries=True) for entry in found.get("entries", ())]
        facts = {"entries": entries[-most:] if most else entries, "groups": _groups(), "has_failed": has_failed}
        return json.dumps(facts).encode() if entries or most else b""
    return b""


def recorded(*, entries: bool) -> list[dict[str, Any]]:
    """Return what each recorder of torch knows: ``pg_config``, the groups; with ``entries``, the last collectives."""
    native = sys.modules.get("torch._C._distributed_c10d")
    recorders = [getattr(native, name) for name in _RECORDERS if hasattr(native, name)]
    return [json.loads(recorder(includeCollectives=entries)) for recorder in recorders]


def _groups() -> dict[str, list[int]]:
    world = sys.modules["torch.distributed.distributed_c10d"]._world
    groups = dict(world.pg_group_ranks)  # a rank also knows groups without it, which have no name
    return {world.pg_names[group]: sorted(ranks) for group, ranks in groups.items() if group in world.pg_names}
