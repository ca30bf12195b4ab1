"""Huge pages in this process: which memory they take."""

from __future__ import annotations

import mmap
import re
import subprocess
import sys

import pytest

SCRIPT = """
import mmap
from pathlib import Path
from distrain.agent.huge_pages import use_huge_pages

used, sparse = (mmap.mmap(-1, 16 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(2))
used.write(bytes(range(1, 256)) * (len(used) // 255))
sparse[len(sparse) // 2] = 1
before = used[:]

def memory():
    fields = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return [int(fields[name].split()[0]) >> 10 for name in ("AnonHugePages", "Rss")]

huge, resident = memory()
use_huge_pages()
now_huge, now_resident = memory()
assert used[:] == before
print(now_huge - huge, now_resident - resident)
"""


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(mmap, "MAP_PRIVATE"), reason="needs Linux")
def test_used_memory_is_in_huge_pages_and_unused_memory_is_not_allocated() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    match = re.fullmatch(r"(-?\d+) (-?\d+)\n", done.stdout)
    assert match is not None
    huge, more = map(int, match.groups())
    if huge == 0:
        pytest.skip("this kernel has no huge pages, or none on request")
    assert huge >= 12
    assert more <= 6
