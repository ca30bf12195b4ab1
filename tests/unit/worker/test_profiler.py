"""Samples of stacks: the hottest lines, and the file for speedscope."""

from __future__ import annotations

import json
import re
import sys
import threading
from typing import TYPE_CHECKING, Any

from distrain.worker.profiler import StackSamples

if TYPE_CHECKING:
    from types import FrameType


class _Frame:
    """Called by json's decoder; it keeps its frame."""

    frame: FrameType

    def __call__(self, pairs: list[tuple[str, Any]]) -> None:
        self.frame = sys._getframe().f_back  # type: ignore[assignment]


def test_time_in_a_library_counts_for_the_line_that_calls_it() -> None:
    samples, library = StackSamples(), _Frame()
    json.loads("{}", object_pairs_hook=library)
    samples.add(threading.main_thread(), library.frame, 6.0)
    samples.add(threading.main_thread(), sys._getframe(), 2.0)
    samples.add(threading.Thread(name="loader"), sys._getframe(), 30.0)
    first, second = samples.hottest_lines()
    assert re.fullmatch(r" 75%  test_\w+ \(test_profiler\.py:\d+\)", first)
    assert re.fullmatch(r" 25%  test_\w+ \(test_profiler\.py:\d+\)", second)
    *_, loader = lines = samples.collapsed().splitlines()
    assert all(re.fullmatch(r"(MainThread|loader)(;\S+ \([^;]+:\d+\))+ \d+", line) for line in lines)
    assert "json/decoder.py" in lines[0]
    assert loader.startswith("loader;")
    assert loader.endswith(" 30000")
