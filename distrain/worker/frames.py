"""Frames of the user's code among those of distrain. Runs in: worker."""

from __future__ import annotations

from itertools import dropwhile, takewhile
from typing import TYPE_CHECKING

from distrain.worker.user_code import OWN_FILES, run_rank

if TYPE_CHECKING:
    from types import FrameType


def users_frame(frame: FrameType) -> FrameType:
    """Return the innermost frame that is not within a call of distrain; the given one if none is the user's."""
    return _users_frames(frame)[-1]


def outermost_users_frame(frame: FrameType) -> FrameType:
    """Return the frame of train_func or of the script; the given one if none is the user's."""
    return _users_frames(frame)[0]


def _users_frames(frame: FrameType) -> list[FrameType]:
    """Return the frames from train_func inwards, up to the first call of distrain or to an import."""
    frames: list[FrameType] = []
    outer: FrameType | None = frame
    while outer is not None and outer.f_code.co_name != run_rank.__name__:
        frames.insert(0, outer)
        outer = outer.f_back
    return list(takewhile(_is_users, dropwhile(lambda one: not _is_users(one), frames))) or [frame]


def _is_users(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith(OWN_FILES)
