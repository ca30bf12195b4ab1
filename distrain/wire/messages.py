"""THE protocol: every message between coordinator, agent and workers, and the frame codec. Runs in: anywhere.

A frame is ``!IQ`` (header length, body length), a JSON header ``{"kind": ..., fields}`` and an opaque body. Nothing
here is ever unpickled by the codec; the body of a message is bytes for whoever the message is meant for.

An agent's first bytes are :data:`MAGIC` and a :class:`Hello`. Whatever comes before the magic (a chatty login shell)
is skipped and kept for the error message in case no HELLO follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distrain.system.version import __version__

WIRE_VERSION = 3
DISTRAIN_VERSION = __version__
MOST_UNACKNOWLEDGED = 1000
"""Reports of one rank that may be on their way; with the next one report() waits for :class:`Acknowledged`. This many
are lost at most if the agent or the coordinator is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Base of all messages. A field named ``body`` travels as raw bytes, every other one as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FromWorker(Message):
    """What a worker says to the coordinator; agents pass it on unopened."""

    attempt: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ToWorker(Message):
    """What the coordinator says to one worker; agents pass it on unopened."""

    attempt: int
    rank: int


# -- agent and coordinator -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Message):
    """Agent, first of all: who speaks here, and what the host has. ``gpus``: the fields of each
    :class:`~distrain.hosts.host.Gpu`, None when nobody asked. ``driver_problem``, ``network``, ``address``: see
    :class:`~distrain.hosts.host.HostInfo`.
    """

    wire: int
    distrain: str
    python: str
    run_id: str
    hostname: str
    pid: int
    cpus: int
    memory_bytes: int
    gpus: list[dict[str, str]] | None
    driver_problem: str = ""
    network: str = ""
    address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare(Message):
    """Coordinator: what all workers of this host have in common. The body is the pickled job. is_local: the host is the
    coordinator's own, without ssh.
    """

    start_method: str
    preload: list[str]
    environment: dict[str, str]
    python_flags: list[str]
    directory: str
    lease_s: float
    is_local: bool
    workers: int
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservePorts(Message):
    """Coordinator: keep this many TCP ports for the attempt. ``peer``: another host's address, if this host is to
    find out its own.
    """

    attempt: int
    ports: int
    peer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PortsReserved(Message):
    """Agent: the ports are bound, and stay so until the attempt is gone. ``address``: this host's own, if asked."""

    attempt: int
    ports: list[int]
    address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start(Message):
    """Coordinator: start these ranks; each entry holds the fields of a :class:`WorkerSpec`. ``rendezvous``: the address
    over whose interface they talk; empty: they need not be told.
    """

    attempt: int
    ranks: list[dict[str, Any]]
    rendezvous: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(Message):
    """Coordinator: end the attempt: SIGTERM, ``grace_s``, stacks, SIGKILL. Grace 0 goes straight to stacks and kill.

    Without ``culprit_known``, the time for taking stacks is used up, so that a rank that is just failing can say so.
    """

    attempt: int
    grace_s: float
    culprit_known: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeStacks(Message):
    """Coordinator: where are the workers of this attempt? Answered by :class:`StackDump` and :class:`StacksDone`."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StacksDone(Message):
    """Agent: all stacks that came within the time are sent; ``silent`` ranks did not answer."""

    attempt: int
    silent: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload(Message):
    """Coordinator: bring ``files`` of ``source`` into ``directory``, hash the ``others``, and answer with
    :class:`FilesCopied`, while the rank trains on. ``delete``: the source is not needed after a :class:`Clear`. If the
    storage is elsewhere, ``directory`` is a name in the run directory. An empty ``source`` means that all is there
    already; then all files that are there count.
    """

    attempt: int
    rank: int
    ordinal: int
    source: str
    files: list[str]
    others: list[str]
    directory: str
    delete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Clear(Message):
    """Coordinator: delete ``source``, whose ``files`` were brought into ``directory`` (empty if that is elsewhere), see
    to it that they have no other name then, and answer with :class:`Discarded`.
    """

    attempt: int
    rank: int
    ordinal: int
    source: str
    directory: str
    files: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenStorage(Message):
    """Coordinator: the run directory is elsewhere, at ``url``; see whether it can be written, and answer with
    :class:`StorageOpened`. ``filesystem``: as :func:`~distrain.system.remote_path.encode_filesystem`
    writes it. ``spool``: the local
    directory whose files are to be kept there too, and ``lock`` the object that says that the run is alive; both empty
    for an uploader that only brings checkpoints. ``again``: it could be written when the run began, so what fails
    may pass.
    """

    url: str
    filesystem: str
    spool: str = ""
    lock: str = ""
    again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageOpened(Message):
    """Uploader: the run directory can be written, or why not."""

    failed: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishCheckpoint(Message):
    """Coordinator: all files of the checkpoint in ``directory`` are there; write its manifest. ``metadata`` is added to
    the checkpoint's own. Answered by :class:`OrderDone`.
    """

    directory: str
    manifest: dict[str, Any]
    metadata: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateManifest(Message):
    """Coordinator: replace these fields of the manifest of the checkpoint in ``directory``. Answered by
    :class:`OrderDone`.
    """

    directory: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteCheckpoints(Message):
    """Coordinator: delete these directories. Answered by :class:`OrderDone`."""

    directories: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorRecords(Message):
    """Coordinator: bring what has changed in the spool to the run directory now. Answered by :class:`OrderDone`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderDone(Message):
    """Uploader: an order is done; ``failed``: why it is not."""

    failed: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunValidation(Message):
    """Coordinator: call the validation function with the checkpoint at this path or URL. ``overrides``: what takes the
    place of its keyword arguments, as :class:`Reported` has them. The body is the pickled work that holds the function.
    Answered by :class:`ValidationResult`.
    """

    checkpoint: str
    filesystem: str
    overrides: str
    directory: str
    sys_path: list[str]
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationResult(Message):
    """Validator: the metrics as JSON; or ``failed``, why there are none."""

    body: bytes
    failed: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Close(Message):
    """Coordinator: the run is over; leave nothing behind and exit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping(Message):
    """Either side: I am alive. Renews the lease, as every other frame does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spawned(Message):
    attempt: int
    rank: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited(Message):
    """Agent: how a worker's process ended: exactly one of ``exit_code``, ``signal`` and ``lost``.

    ``by_us``: the signal was ours. ``max_rss_bytes``: peak memory of the process, 0 if unknown. ``oom_limit_bytes``:
    the kernel killed for lack of memory; the limit of the cgroup, or 0 if it was not one of ours.
    """

    attempt: int
    rank: int
    exit_code: int | None = None
    signal: int | None = None
    lost: str | None = None
    by_us: bool = False
    max_rss_bytes: int = 0
    oom_limit_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Output(Message):
    """Agent: bytes that a worker wrote; ``stream`` is 1 or 2."""

    attempt: int
    rank: int
    stream: int
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StackDump(Message):
    """Agent: the stacks of all threads of a worker, as faulthandler wrote them."""

    attempt: int
    rank: int
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HostIdle(Message):
    """Agent: no process of this attempt is left on this host."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice(Message):
    """Agent: one line that the user should read."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFailed(Message):
    """Agent: this host cannot go on. ``leaves``: not with this agent, which empties it and goes."""

    text: str
    leaves: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectHost(Message):
    """Coordinator: what would the workers of this host find? Answered by :class:`InspectionResult`.

    directory, sys_path: theirs. packages: installed ones, whose versions matter. storage: a directory in which a file
    is to be written and deleted, and in which ``probe_file`` is a file that holds ``nonce``, if it is the one that the
    coordinator's machine has; empty: there is none to look at.
    """

    directory: str
    sys_path: list[str | None]
    packages: list[str]
    storage: str = ""
    probe_file: str = ""
    nonce: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectionResult(Message):
    """Agent: the answer. ``versions``: None for a package that is not there, empty for one that does not say.
    ``received`` and ``sent``: when, in seconds since the epoch by this host's clock. Bytes are 0 where unknown.
    """

    received: float
    sent: float
    versions: dict[str, str | None]
    directory_problem: str | None
    storage_problem: str | None
    disk_free_bytes: int
    memory_free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenProbePort(Message):
    """Coordinator: let the other hosts connect to this one for some seconds, at ``address``, or where that is empty at
    the address that this host has toward ``peer``. Answered by :class:`ProbePortOpened`, with the same ``nonce``.
    """

    address: str
    nonce: str
    peer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePortOpened(Message):
    """Agent: where it listens, or why it cannot (``failed``)."""

    nonce: str
    address: str = ""
    port: int = 0
    interface: str = ""
    failed: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePeers(Message):
    """Coordinator: connect to each of these hosts, ``[address, port]`` by name, and see whether ``nonce`` comes back.
    Answered by :class:`ProbeResult`, with the same one.
    """

    peers: dict[str, tuple[str, int]]
    nonce: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult(Message):
    """Agent: which hosts could not be reached, and why."""

    nonce: str
    failed: dict[str, str]


# -- worker and coordinator ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec(ToWorker):
    """The first frame a worker reads: what it needs to be this rank, beside the job.

    ``filesystem`` is what ``storage_path`` and ``checkpoint``, the path to resume from, are on, if they do not say so
    themselves (see :class:`OpenStorage`); ``validates``: the trainer has a validation function; ``devices`` index the
    host's visible GPUs; ``defaults`` are environment variables that the user's own values override; None in
    ``sys_path`` is what the interpreter has itself.
    """

    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    run_name: str
    storage_path: str
    filesystem: str
    environment: dict[str, str]
    defaults: dict[str, str]
    devices: list[int]
    shares_gpu: bool
    run_id: str
    metadata: dict[str, Any]
    resources: dict[str, float]
    checkpoint: str | None
    validates: bool
    directory: str
    sys_path: list[str | None]
    argv: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyFiles(ToWorker):
    """Answer to an announced checkpoint: copy ``files`` into ``directory``, then :class:`FilesCopied`. An error text in
    ``refused`` ends the report with that error.
    """

    ordinal: int
    directory: str
    files: list[str]
    refused: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledged(ToWorker):
    """The kernel of the coordinator's machine has the rank's reports up to this index. Not sent for every report."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadDone(ToWorker):
    """An :class:`Upload` for this rank is done; ``failed``: why it is not."""

    ordinal: int
    failed: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Discard(ToWorker):
    """Answer to :class:`FilesCopied`, or sent after :class:`UploadDone`: the worker deletes its local files.

    It does so now, or, if not ``at_once``, when this comes again. It answers with :class:`Discarded`, once.
    """

    ordinal: int
    at_once: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCommitted(ToWorker):
    """The checkpoint is safe at ``path``; get_checkpoint() returns it from now on."""

    ordinal: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointList(ToWorker):
    """Answer to :class:`AskCheckpointList` number ``index``. The body is a JSON list of path, metrics and status of
    each, in the order of commit; NaN and infinities are written as Python's json does.
    """

    index: int
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveDone(ToWorker):
    """Every rank has joined the ``index``-th collective; ``body`` is rank 0's data. ``refused``: why that cannot be."""

    index: int
    body: bytes
    refused: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceStop(ToWorker):
    """Coordinator: the run should end. A worker answers the next should_stop() with :class:`StopVote`, and waits for
    :class:`StopAtReport`.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAtReport(ToWorker):
    """should_stop() is true from this call on, on every rank that calls it; not ``final``: it is false until then, and
    the rank is to vote again there.
    """

    call: int
    final: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Release(ToWorker):
    """Every rank has finished: a worker that stayed for the others may leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running(FromWorker):
    """The worker enters train_func."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported(FromWorker):
    """One call of report(). ``body``: the metrics as JSON. With a checkpoint, ``ordinal`` counts this rank's
    checkpoints of the attempt from 1, and ``files`` lists ``[relative path, size in bytes]`` in ``folder``.

    mode: the name of a :class:`~distrain.CheckpointUploadMode`. name: what the checkpoint's directory is to be
    called. waits: whether the rank waits until its files are stored, and deleted, if ``delete`` says so. real:
    ``folder`` without links. validation: None, or ``{"overrides": ..., "timeout_s": ...}``: pickled keyword arguments
    in base64, and seconds or None.
    """

    index: int
    time: float
    ordinal: int | None
    files: list[tuple[str, int]]
    body: bytes
    folder: str = ""
    real: str = ""
    mode: str = "SYNC"
    waits: bool = True
    name: str | None = None
    delete: bool = False
    validation: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesCopied(FromWorker):
    """The granted files are on disk: ``[relative path, size in bytes, crc32]``. ``skipped`` lists the files that a
    lower rank brings, with the CRC of this rank's copy. ``failed``: why this rank's part cannot be had after all.
    """

    ordinal: int
    files: list[tuple[str, int, int]]
    skipped: list[tuple[str, int, int]]
    failed: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Discarded(FromWorker):
    """The granted files are the run's alone by now; ``failed``: why they are not. The local ones are deleted, or will
    be.
    """

    ordinal: int
    failed: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveEntered(FromWorker):
    """The worker waits in its ``index``-th collective (from 1). ``body``: rank 0's data, empty from the others.
    ``timeout_s``: after which it gives up; None: never.
    """

    index: int
    operation: str
    body: bytes
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AskCheckpointList(FromWorker):
    """The worker wants to know which checkpoints there are, once all that it has reported are committed, and, if it
    says ``validated``, once none waits for its validation; or ``at_once``. Answered by :class:`CheckpointList`.
    """

    index: int
    validated: bool
    at_once: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class UsesShouldStop(FromWorker):
    """The worker has called should_stop(), and will again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopVote(FromWorker):
    """The worker waits in its ``call``-th should_stop()."""

    call: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(FromWorker):
    """What train_func came to. ``body``: the pickled return value, or the pickled exception if ``error`` is set.

    ``error`` is one line, ``traceback`` the whole text; ``stage`` says where it happened: import, setup or run.
    ``exit_code`` is what a script asked for (SystemExit), 1 for any other exception. ``stopped``: should_stop() was
    true, so it may not have done all of its work.
    """

    ok: bool
    stage: str
    error: str | None
    traceback: str
    exit_code: int
    body: bytes
    stopped: bool = False


def failed_answer(order: Message, why: str) -> Message:
    """What to say of an order to an uploader that cannot be carried out."""
    match order:
        case Upload(attempt=attempt, rank=rank, ordinal=ordinal):
            return FilesCopied(attempt=attempt, rank=rank, ordinal=ordinal, files=[], skipped=[], failed=why)
        case Clear(attempt=attempt, rank=rank, ordinal=ordinal):
            return Discarded(attempt=attempt, rank=rank, ordinal=ordinal, failed=why)
        case OpenStorage():
            return StorageOpened(failed=why)
        case PublishCheckpoint() | UpdateManifest() | DeleteCheckpoints() | MirrorRecords():
            return OrderDone(failed=why)
    raise AssertionError(f"not an order: {order!r:.200}")


# -- codec -----------------------------------------------------------------------------------------------------------
