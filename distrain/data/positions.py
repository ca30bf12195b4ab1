"""Parts of positions in data: the loop of train_func, and states of other libraries. Runs in: worker."""

from __future__ import annotations

import base64
import contextlib
import json
import pickle
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distrain.system.pickling import pickled

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(slots=True, kw_only=True)
class DataLoop:
    """A loop of train_func over its data. Most loops are an epoch.

    is_stopping: tells if train_func knows that the run is being stopped.
    is_first: no loop over the same data came before.
    batches: the number that train_func has got.
    began, newest, ended: when it began, when train_func got the last batch, and when it came to the end or left it;
        nanoseconds.
    is_ended: train_func has got all batches.
    """

    is_stopping: Callable[[], bool]
    is_first: bool
    batches: int = 0
    began: int = field(default_factory=time.monotonic_ns)
    newest: int = 0
    ended: int = 0
    is_ended: bool = False
    _is_left: bool = False
    _is_reported: bool = False
    _is_interrupted: bool | None = None  # None if there was no Rollback

    def take(self) -> None:
        """Count a batch that train_func gets."""
        self.batches += 1
        self.newest = time.monotonic_ns()

    def end(self) -> None:
        """Note that train_func has got all batches."""
        self.is_ended = True
        self.ended = time.monotonic_ns()

    def leave(self) -> None:
        """Note that train_func has left the loop before its end."""
        self._is_left = True
        self.ended = time.monotonic_ns()

    def report(self) -> None:
        """Note that train_func has reported a checkpoint."""
        self._is_reported = self._is_reported or not self._is_left

    def interrupt(self, newest: int) -> bool:
        """Note that train_func has raised a Rollback. Return whether that has ended this loop.

        newest: when it got its last batch of any loop. A loop that it left before then was over, or only a look.
        """
        self._is_interrupted = not self.is_ended and (self.is_open or self.ended >= newest)
        return self._is_interrupted

    @property
    def is_open(self) -> bool:
        """True if train_func has neither left it nor come to the end."""
        return not self.is_ended and not self._is_left

    @property
    def is_look(self) -> bool:
        """True if train_func has only looked at the first batch, as scripts do that need its shape."""
        has_more = self.batches > 1 or self.is_ended or self._is_reported or self._is_interrupted
        return self.is_first and not has_more and not self.is_stopping()

    @property
    def is_over(self) -> bool:
        """True if a position that is asked for now is the beginning of the next epoch.

        This is so after ``break``, but not if train_func has left the loop because the run is being stopped, because of
        an exception that it handles now, or because of a Rollback.
        """
        if self.is_ended:
            return True
        is_cut = self._is_interrupted if self._is_interrupted is not None else sys.exc_info()[1] is not None
        return self._is_left and not self.is_look and not self.is_stopping() and not is_cut


def encode_state(state: Any) -> dict[str, Any]:
    """Return a state as JSON: as it is, or pickled."""
    with contextlib.suppress(TypeError, ValueError):
        if json.loads(json.dumps(state)) == state:
            return {"json": state}
    return {"pickle": base64.b64encode(pickled(state)).decode()}


def decode_state(encoded: dict[str, Any]) -> Any:
    """Return the state that :func:`encode_state` was given. Unpickles: it trusts the checkpoint."""
    if "json" in encoded:
        return encoded["json"]
    return pickle.loads(base64.b64decode(encoded["pickle"]))  # noqa: S301 - documented
