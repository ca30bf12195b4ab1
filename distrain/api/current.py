"""The session of this process while it is a rank; the public functions reach the rank through it. Runs in: worker."""

from __future__ import annotations

from typing import Any

session: Any = None
"""A :class:`distrain.worker.session.Session` while train_func runs in this process, else None."""


def session_of(caller: str) -> Any:
    """Return the session of this rank. Raise RuntimeError outside of a rank."""
    if session is None:
        raise RuntimeError(
            f"distrain.{caller}() only works inside a worker: call it from the function that you pass to the trainer, "
            "or start the script with `distrain run`, such as `distrain run --num-workers 2 train.py:main`"
        )
    return session
