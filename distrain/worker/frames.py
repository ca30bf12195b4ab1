"""Frames of the user's code among those of distrain. Runs in: worker."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from distrain.system.process import own_package
from distrain.worker.user_code import OWN_FILES, run_user_code

if TYPE_CHECKING:
    from types import FrameType

_SKIPPED_FILES = (str(own_package()) + os.sep, contextlib.__file__)
"""Files of distrain, and of the context managers in it."""


def innermost_users_frame(frame: FrameType) -> FrameType:
    """Return the innermost frame that does not belong to a call of distrain."""
    outer: FrameType | None = frame
    while outer is not None and outer.f_code.co_filename.startswith(_SKIPPED_FILES):
        outer = outer.f_back
    return outer or frame


def outermost_users_frame(frame: FrameType) -> FrameType:
    """Return the outermost frame that does not belong to distrain, or to what it runs scripts with."""
    found, outer = frame, frame.f_back
    while outer is not None and outer.f_code.co_name != run_user_code.__name__:
        if not outer.f_code.co_filename.startswith(OWN_FILES):
            found = outer
        outer = outer.f_back
    return found
