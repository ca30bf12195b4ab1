"""The jobs of an order: parts of files that come from a host, or go there. Runs in: mover."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from distrain.transfer.host_side.arrivals import ArrivingPart, as_crc32, crc32_of, receive_parts
from distrain.transfer.streams import stream_pool
from distrain.transfer.streams.stream_pool import Job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from distrain.transfer.streams.stream_pool import Stream
    from distrain.transfer.streams.streams import Item, Reader

_BATCH_BYTES, _BATCH_ITEMS = 4 << 20, 64
"""Parts of files that make one job, at most; one part may be larger."""


def parts_of(sizes: dict[str, int], *, whole: bool = False) -> list[Item]:
    """Cut files into parts, unless they are to stay ``whole``. An empty file is one part."""
    return [
        (name, start, min(step, size - start))
        for name, size in sizes.items()
        for step in (max(1, size) if whole else stream_pool.PART_BYTES,)
        for start in range(0, max(1, size), step)
    ]


def batches(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Put small parts together, as each batch is one request."""
    batch: list[Item] = []
    size = 0
    for item in items:
        if batch and (size + item[2] > _BATCH_BYTES or len(batch) == _BATCH_ITEMS):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += item[2]
    if batch:
        yield batch


class Fetch(Job):
    """Parts of files that come from ``source`` on the host, and go to ``target`` here. ``sizes``: of the files."""

    def __init__(self, source: str, target: str, items: Sequence[Item], sizes: dict[str, int]) -> None:
        super().__init__({"do": "read", "folder": source, "items": items}, items)
        self.owes = sum(count for _, _, count in items)
        self._target = target
        self._sizes = sizes

    def receive(self, reader: Reader, received: Callable[[int], None]) -> None:
        self.digests = receive_parts(reader, self.items, self._open, received)

    def _open(self, number: int) -> ArrivingPart:
        name, start, _ = self.items[number]
        return ArrivingPart(os.path.join(self._target, name), start, size=self._sizes[name])


class Put(Job):
    """Parts of files that go from ``paths`` here to the host."""

    def __init__(self, fields: dict[str, Any], items: Sequence[Item], paths: Sequence[str]) -> None:
        super().__init__({"do": "write", **fields}, items)
        self._paths = paths

    def send(self, stream: Stream, is_needed: Callable[[], bool]) -> None:
        super().send(stream, is_needed)
        for (_, start, count), path in zip(self.items, self._paths, strict=True):
            stream.sender.send(path, start, count, is_needed)
        stream.sender.flush()

    def receive(self, reader: Reader, received: Callable[[int], None]) -> None:
        self.digests = reader.answer()["digests"]


class Pull(Job):
    """Parts of files that the host copies from another one."""

    def __init__(self, fields: dict[str, Any], items: Sequence[Item], peer: Sequence[object]) -> None:
        super().__init__({"do": "pull", **fields, "peer": peer}, items)
        self.owes = sum(count for _, _, count in items)

    def receive(self, reader: Reader, received: Callable[[int], None]) -> None:
        self.digests = reader.answer()["digests"]
        received(self.owes)


def combined_digests(jobs: Iterable[Job]) -> dict[str, str]:
    """Return the digest of each file from those of its parts, which are in order."""
    found: dict[str, str] = {}
    for job in jobs:
        for (name, start, count), digest in zip(job.items, job.digests, strict=True):
            found[name] = _combined(found[name], digest, count) if start else digest
    return found


def _combined(first: str, second: str, count: int) -> str:
    from distrain.storage.file_transfer import combined_crc32  # not on top: the first order waits for the imports there

    crcs = crc32_of(first), crc32_of(second)
    assert crcs[0] is not None
    assert crcs[1] is not None
    return as_crc32(combined_crc32(crcs[0], crcs[1], count))
