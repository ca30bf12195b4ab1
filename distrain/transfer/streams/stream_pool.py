"""The streams of a mover, and the requests that travel over them. Runs in: mover.

An order is cut into jobs, which the streams take one by one. A stream is sent further jobs before the first one is
answered. Further streams, up to four in all, are opened for a large order only, while the first one already works.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections import deque
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING, Any

from distrain.system import process
from distrain.transfer.streams.streams import PartSender, Reader, RefusedError, StreamEndedError, send_header

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from distrain.transfer.streams.streams import Item

PART_BYTES = 64 << 20
"""Size of the parts of a large file, and of what an order has to hold for each stream."""
_FURTHER_S = 1.0
"""Seconds that an order takes before each further stream is opened. Connections take time, too, which on a fast network
is better spent on the files."""
_MOST_STREAMS = 4
_OWED_BYTES = 16 << 20
"""A stream is asked for more while so many bytes or fewer have yet to arrive. This covers the way there and back."""
_CATCH_UP_S = 2.0
"""Seconds that the streams have to end what they do after an error, before they are closed."""
_PATIENCE_S = 120.0
"""Seconds that a host may be silent while it owes an answer. During long work it shows signs of life."""
_LAST_WORDS_BYTES = 2 << 10
_LAST_WORDS_S = 2.0


class Stream:
    """The near end of a stream: a process, such as ssh, with a stream server at its far end.

    Raises OSError or StreamEndedError if it cannot be opened.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self._process = process.spawn(argv, stderr=subprocess.PIPE)
        stdin, stdout, stderr = self._process.stdin, self._process.stdout, self._process.stderr
        assert stdin is not None
        assert stdout is not None
        assert stderr is not None
        self._pipes = (stdin, stdout)
        self._said = b""
        self._listener = threading.Thread(target=self._listen, args=(stderr,), daemon=True)
        self._listener.start()
        self.write_fd = stdin.fileno()
        self.sender = PartSender(self.write_fd)
        self.reader = Reader(stdout.fileno(), patience_s=_PATIENCE_S)
        try:
            self.reader.skip_chatter()
        except StreamEndedError as error:
            why = self.end(str(error))
            self.close()
            raise StreamEndedError(why) from None

    def _listen(self, stderr: IO[bytes]) -> None:
        with stderr:
            while data := os.read(stderr.fileno(), _LAST_WORDS_BYTES):
                self._said = (self._said + data)[-_LAST_WORDS_BYTES:]

    @property
    def has_ended(self) -> bool:
        """True if the process is gone."""
        return self._process.poll() is not None

    def end(self, found: str) -> str:
        """End the process, and return why it has ended, as far as that is known: ``found``, and its last words."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_WORDS_S)
        has_ended = self.has_ended
        code = self.kill()
        self._listener.join(_LAST_WORDS_S)  # a grandchild may keep the pipe open
        said = self._said.decode(errors="replace").strip()
        if has_ended:
            return f"the connection for files has ended (exit code {code}): {said or found}"
        return f"the connection for files was given up: {found}" + (f" (its output: {said})" if said else "")

    def kill(self) -> int:
        """End the process at once, and return its exit code."""
        process.kill_group(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def close(self) -> None:
        """End the process, and close the stream, which no thread may use any more."""
        self.kill()
        for pipe in self._pipes:
            pipe.close()


class Job:
    """One request and its answer. ``digests`` are those of its parts."""

    owes = 0
    """Bytes that are on their way from the host."""

    def __init__(self, request: dict[str, Any], items: Sequence[Item] = ()) -> None:
        self.request = request
        self.items = items
        self.digests: list[str] = []

    def send(self, stream: Stream, is_needed: Callable[[], bool]) -> None:
        """Send the request. Raise StreamEndedError."""
        send_header(stream.write_fd, self.request)

    def receive(self, reader: Reader, received: Callable[[int], None]) -> None:
        """Read the answer. ``received`` is told of the bytes that were owed. Raise what :meth:`Reader.part` raises."""
        raise NotImplementedError


class Ask(Job):
    """A request whose answer is a header."""

    answer: dict[str, Any]

    def receive(self, reader: Reader, received: Callable[[int], None]) -> None:
        self.answer = reader.answer()


class StreamPool:
    """Up to four streams, each with a thread that opens it when it is needed, and then keeps it.

    argv: the command line that opens a stream.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = argv
        self._streams: dict[int, Stream] = {}
        self._threads = 0
        self._changed = threading.Condition()
        self._work = Work([], 0, self._changed)

    def do(self, jobs: Sequence[Job], size: int = 0) -> None:
        """Do all jobs. Raise OSError, RefusedError or StreamEndedError if one of them fails; the others are dropped.

        size: of the files, in bytes; they decide on the number of streams.
        """
        streams = min(_MOST_STREAMS, 1 + size // PART_BYTES, len(jobs))
        work = Work(jobs, streams, self._changed)
        self._begin(work)
        work.wait()

    def open(self) -> None:
        """Begin to open the first stream, before there are jobs. If that fails, the first jobs try again."""
        self._begin(Work([], 1, self._changed))

    def _begin(self, work: Work) -> None:
        with self._changed:
            self._work = work
            self._changed.notify_all()
        while self._threads < work.streams:
            threading.Thread(target=self._run, args=(self._threads,), daemon=True).start()
            self._threads += 1

    def close(self) -> None:
        """End all streams. Others are opened when they are needed."""
        for stream in list(self._streams.values()):
            stream.kill()

    def _run(self, number: int) -> None:
        """Do jobs of one order after the other. The first stream must be there; the others only make it faster."""
        work: Work | None = None
        while True:
            work = self._next_work(number, work)
            try:
                if number in self._streams and self._streams[number].has_ended:
                    self._streams.pop(number).close()
                if number not in self._streams and work.lasts(number * _FURTHER_S):
                    self._streams[number] = Stream(self._argv)
            except Exception as error:  # such as too many threads; the order waits for an answer
                if not number:
                    work.fail(error)
            else:
                if number in self._streams:
                    Carrier(self._streams[number], work).run()

    def _next_work(self, number: int, last: Work | None) -> Work:
        with self._changed:
            self._changed.wait_for(lambda: self._work is not last and number < self._work.streams)
            return self._work


class Work:
    """The jobs of one order, and what has become of them. ``changed`` is notified of every change."""

    def __init__(self, jobs: Iterable[Job], streams: int, changed: threading.Condition) -> None:
        self.streams = streams
        self._jobs = deque(jobs)
        self._left = len(self._jobs)
        self._busy: set[Carrier] = set()
        self._problem: Exception | None = None
        self._began = time.monotonic()
        self.changed = changed

    def is_needed(self) -> bool:
        """Return False once a job has failed."""
        return self._problem is None

    def lasts(self, seconds: float) -> bool:
        """Return True if there still are jobs for a stream so many seconds after the beginning. Wait until then."""
        with self.changed:
            self.changed.wait_for(lambda: not self._jobs, self._began + seconds - time.monotonic())
            return not seconds or bool(self._jobs)

    def next_for(self, carrier: Carrier) -> Job | None:
        """Wait until a stream can have another job, and return that; None if there is none any more."""
        with self.changed:
            self.changed.wait_for(lambda: not self._jobs or carrier.owed <= _OWED_BYTES)
            if not self._jobs:
                return None
            self._busy.add(carrier)
            job = self._jobs.popleft()
            carrier.owed += job.owes
            return job

    def done(self) -> None:
        """Note that a job is done."""
        with self.changed:
            self._left -= 1
            self.changed.notify_all()

    def fail(self, problem: Exception) -> None:
        """Drop the jobs that no stream has begun."""
        with self.changed:
            self._problem = self._problem or problem
            self._jobs.clear()
            self.changed.notify_all()

    def leave(self, carrier: Carrier) -> None:
        """Note that a stream does nothing for this order any more."""
        with self.changed:
            self._busy.discard(carrier)
            self.changed.notify_all()

    def wait(self) -> None:
        """Wait until all is done. Raise the first error, once no stream does anything for this order any more."""
        with self.changed:
            self.changed.wait_for(lambda: not self._left or self._problem is not None)
            self.changed.wait_for(lambda: not self._busy, None if self._problem is None else _CATCH_UP_S)
            for carrier in self._busy:
                carrier.stream.kill()
            self.changed.wait_for(lambda: not self._busy)
        if self._problem is not None:
            raise self._problem


class Carrier:
    """Does jobs of an order over one stream: sends them in the caller's thread, and reads the answers in another."""

    def __init__(self, stream: Stream, work: Work) -> None:
        self.stream = stream
        self.owed = 0
        """Bytes that the stream was asked for, and that have not arrived."""
        self._work = work
        self._sent: SimpleQueue[Job | None] = SimpleQueue()

    def run(self) -> None:
        """Do jobs until there are none any more."""
        job = self._work.next_for(self)
        if job is None:
            return
        receiver = threading.Thread(target=self._receive, daemon=True)
        receiver.start()
        try:
            while job is not None:
                self._sent.put(job)
                job.send(self.stream, self._work.is_needed)
                job = self._work.next_for(self)
        except Exception as error:
            self._fail(error)
        self._sent.put(None)
        receiver.join()
        self._work.leave(self)

    def _receive(self) -> None:
        while (job := self._sent.get()) is not None:
            try:
                job.receive(self.stream.reader, self._received)
                self._work.done()
            except (OSError, RefusedError) as error:
                self._work.fail(error)
            except Exception as error:
                self._fail(error)
                return

    def _received(self, size: int) -> None:
        with self._work.changed:
            self.owed -= size
            if self.owed <= _OWED_BYTES:
                self._work.changed.notify_all()

    def _fail(self, error: Exception) -> None:
        """Give up the stream, which nobody knows how far it is."""
        text = self.stream.end(str(error))
        self._work.fail(StreamEndedError(text) if isinstance(error, StreamEndedError) else error)
