"""THE protocol: every message between coordinator, agents, workers and uploaders. Runs in: anywhere.

The processes and their conversations:

- coordinator and agent: over the agent's stdin and stdout, or over ssh;
- coordinator and worker: through the agent of the worker's host, which passes these messages on unopened
  (:class:`ToWorker`, :class:`FromWorker`);
- uploader and its parent, which is an agent or the coordinator; agents pass its messages on, too;
- coordinator and mover, which carries files to and from a host that does not share them;
- mover and stream server, which reads and writes the files on that host;
- coordinator and validator;
- coordinator and commands such as ``distrain stop``: over a socket in the run directory.

Each docstring ends with the direction and, where there is one, the answer. How messages become bytes is in
:mod:`distrain.wire.codec`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from distrain.errors import DistrainError
from distrain.system import __version__

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform

    _T = TypeVar("_T")

WIRE_VERSION = 33
DISTRAIN_VERSION = __version__
MOST_UNACKNOWLEDGED = 1000
"""Reports of one rank that may be on their way before report() waits for :class:`Acknowledged`. At most this many are
lost if the agent or the coordinator is killed."""


if TYPE_CHECKING:

    @dataclass_transform(kw_only_default=True, frozen_default=True)
    def message(cls: type[_T]) -> type[_T]:
        """Make a message of a class, as ``dataclass(frozen=True, slots=True, kw_only=True)`` does.

        The methods of :class:`Message` serve all classes, and only mypy knows that messages are frozen. So the classes
        are made in a quarter of the time, which each process of a run spends before it can start.
        """
        return cls
else:
    message = partial(dataclass, slots=True, kw_only=True, eq=False, repr=False)


@message
class Message:
    """Base of all messages. A field named ``body`` travels as raw bytes, every other one as JSON."""

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Any]]

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.__dataclass_fields__)

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__dataclass_fields__)
        return f"{type(self).__name__}({fields})"


@message
class OfAttempt(Message):
    """Base of what is about one attempt: it comes too late in the next one."""

    attempt: int


@message
class FromWorker(OfAttempt):
    """Base of what a worker sends to the coordinator, or its agent says about it."""

    rank: int


@message
class ToWorker(OfAttempt):
    """Base of what the coordinator sends to one worker."""

    rank: int


@message
class ToMemory(Message):
    """Base of what the coordinator sends to an agent about checkpoints in memory."""


# -- the life of an agent --------------------------------------------------------------------------------------------


@message
class AskForProgram(Message):
    """The host does not have this distrain. The bootstrap blocks until it arrives.

    Host -> coordinator; answered by the bytes of :func:`distrain.transfer.program.parcel`.
    """


@message
class Hello(Message):
    """The first message of an agent: its versions, and what its host has.

    host: the fields of a :class:`~distrain.hosts.host.HostInfo`. interfaces: the address of each interface that is up.
    executable: its interpreter. package: the directory of its distrain.

    Agent -> coordinator; may be answered by :class:`Prepare`.
    """

    wire: int
    distrain: str
    python: str
    pid: int
    host: dict[str, Any]
    interfaces: dict[str, str] = field(default_factory=dict)
    executable: str = ""
    package: str = ""


@message
class Prepare(Message):
    """Start the forkserver. The message holds what all workers of the host have in common.

    body: the pickled job. lease_s: seconds of silence after which agent and coordinator count each other as lost.
    is_local: the host is the coordinator's own, reached without ssh. workers: how many there will be. python: their
    interpreter; empty for the agent's own. binds_to_cpus: each worker may only use the CPUs near its GPU.

    Coordinator -> agent.
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
    python: str = ""
    binds_to_cpus: bool = False


@message
class Ping(Message):
    """A sign of life. It renews the lease, as every other frame does, and wakes an agent that rests.

    Agent -> coordinator, coordinator -> agent; answered by :class:`Hello` if the agent rests.
    """


@message
class Notice(Message):
    """One line that the user should read.

    Agent or uploader -> coordinator.
    """

    text: str


@message
class HostFailed(Message):
    """The run cannot continue with this host; from an uploader: with this run directory.

    leaves: the agent ends all processes of its host and exits.

    Agent or uploader -> coordinator.
    """

    text: str
    leaves: bool = False


@message
class HostSignalled(Message):
    """A signal asks the run to stop, such as SIGUSR1 of a scheduler: the job will end soon.

    Agent, or a rank that distrain has not started -> coordinator. is_own: the rank is in the process of the
    coordinator, which gets this signal in no other way.
    """

    signal: str
    is_own: bool = False


@message
class Close(Message):
    """End the run on this host: end all its processes, and exit.

    rests_s: instead, the agent rests if it can: it keeps its forkserver for a later run of the same process, for so
    many seconds at most. If it cannot, it exits all the same.

    Coordinator -> agent; answered by the same message if the agent rests.
    """

    rests_s: float = 0.0


# -- an attempt on a host --------------------------------------------------------------------------------------------


@message
class ReservePort(OfAttempt):
    """Keep a TCP port for the rendezvous of the attempt.

    peer: the address of another host, if this host has to find out its own address; else empty.

    Coordinator -> agent; answered by :class:`RendezvousPort`.
    """

    peer: str = ""


@message
class RendezvousPort(OfAttempt):
    """The port is bound, and stays bound until the attempt has ended.

    address: the address by which ``peer`` can reach this host; empty if there was no peer.

    Agent -> coordinator.
    """

    port: int
    address: str = ""


@message
class Start(OfAttempt):
    """Start these ranks.

    ranks: the fields of a :class:`WorkerSpec` for each. rendezvous: the address whose network interface the ranks have
    to use; empty if they may choose.

    Coordinator -> agent; answered by :class:`HostIdle` when all have ended.
    """

    ranks: list[dict[str, Any]]
    rendezvous: str = ""


@message
class Troubles(OfAttempt):
    """All that is wrong with the memory and the GPUs of a host now, if that has changed.

    troubles: the fields of a :class:`~distrain.hosts.troubles.Trouble` for each.

    Agent -> coordinator.
    """

    troubles: list[dict[str, Any]]


@message
class TroublesSeen(FromWorker):
    """All that ranks have found wrong with each other by now, if that has changed.

    troubles: as in :class:`Troubles`.

    Worker -> coordinator.
    """

    troubles: list[dict[str, Any]]


@message
class Output(FromWorker):
    """Bytes that a worker wrote to stdout (``stream`` 1) or stderr (2).

    Agent -> coordinator.
    """

    stream: int
    body: bytes


@message
class Exited(FromWorker):
    """The process of a rank has ended, by exactly one of ``exit_code``, ``signal`` and ``lost``.

    lost: why the process is gone although its end was not seen. by_us: the agent sent the signal. max_rss_bytes: peak
    memory of the process; 0 if unknown. oom: the kernel has killed for lack of memory: in the control group of this
    process (True), elsewhere on the host (False), or nowhere (None). memory: what the agent knows about the memory that
    was short, in words.

    Agent -> coordinator.
    """

    exit_code: int | None = None
    signal: int | None = None
    lost: str | None = None
    by_us: bool = False
    max_rss_bytes: int = 0
    oom: bool | None = None
    memory: str = ""


@message
class Stop(OfAttempt):
    """End the attempt: a signal, a grace, stacks, SIGTERM, a last grace, SIGKILL.

    problem, reason: why the run cannot continue, and the signal by which the user asked it to stop; empty if neither.

    With a grace of 0, the agent begins with the stacks; with a last grace of 0, SIGKILL follows the stacks. Ranks
    that do not handle ``signal`` get SIGTERM instead of it. Without ``culprit_known``, the agent uses up the whole time
    for taking stacks, so that a rank that is failing at that moment can still report its exception. Ranks that have
    sent their outcome get no SIGTERM, and ``exit_grace_s`` for their exit handlers, if that is longer.

    Coordinator -> agent; answered by :class:`HostIdle`.
    """

    grace_s: float
    signal: str = ""
    last_grace_s: float = 0.0
    exit_grace_s: float = 0.0
    culprit_known: bool = True
    problem: str = ""
    reason: str = ""


@message
class HostIdle(OfAttempt):
    """No process of the attempt is left on this host.

    Agent -> coordinator.
    """


@message
class TakeStacks(OfAttempt):
    """Find out where the workers of the attempt are in their code.

    watches: also find out which of them make no progress for a second.

    Coordinator -> agent; answered by :class:`Dump` for each rank, then by :class:`StacksDone`.
    """

    watches: bool = False


@message
class StacksDone(OfAttempt):
    """All stacks that arrived in time were sent; ``silent`` ranks sent none; ``idle`` ones made no progress.

    Agent -> coordinator.
    """

    silent: list[int]
    idle: list[int] = field(default_factory=list)


# -- checks of hosts -------------------------------------------------------------------------------------------------


@message
class ProbeHost(Message):
    """Look at the host as its workers would find it, and try its network.

    nonce: names the question in its answer; hosts that connect to this one get it. packages: those whose versions are
    compared, as an import with ``sys_path`` finds them. executable: the interpreter of the workers; empty for the
    agent's own. is_thorough: look also at memory, at the disk of ``folder`` and at GPUs.

    is_reached: let other hosts connect to this one for some seconds, at ``address``; if that is empty, at the one by
    which this host reaches ``peer``. peers: ``[address, port]`` of each host to connect to, by name.

    Coordinator -> agent; answered by :class:`HostProbed` with the same ``nonce``.
    """

    nonce: str
    packages: list[str] = field(default_factory=list)
    sys_path: list[str | None] = field(default_factory=list)
    executable: str = ""
    is_thorough: bool = False
    folder: str = ""
    is_reached: bool = False
    address: str = ""
    peer: str = ""
    peers: dict[str, tuple[str, int]] = field(default_factory=dict)


@message
class HostProbed(Message):
    """The facts that the host has found. Memory is 0 if unknown, disk space -1.

    versions: None for a package that is not installed, empty for one without a version. executable: the interpreter
    that has these packages. received, sent: seconds since the epoch by the host's clock. gpus: the fields of each
    :class:`~distrain.hosts.gpu_health.GpuHealth`.

    address, port, interface: where other hosts can connect, or (``failed``) why they cannot. failed_peers: why this
    host could not connect to others, by name.

    Agent -> coordinator.
    """

    nonce: str
    versions: dict[str, str | None] = field(default_factory=dict)
    executable: str = ""
    received: float = 0.0
    sent: float = 0.0
    memory_free_bytes: int = 0
    disk_free_bytes: int = -1
    shared_memory_free_bytes: int = -1
    gpus: list[dict[str, Any]] = field(default_factory=list)
    address: str = ""
    port: int = 0
    interface: str = ""
    failed: str | None = None
    failed_peers: dict[str, str] = field(default_factory=dict)


# -- storage ---------------------------------------------------------------------------------------------------------


@message
class OpenStorage(Message):
    """Use the remote run directory at ``url``, and check that files can be written to it.

    filesystem: as :func:`~distrain.system.remote_path.encode_filesystem` writes it. spool: the local directory whose
    files are mirrored to it. lock: the object that shows that the run is alive. Both are empty for an uploader that
    only stores the files of checkpoints. again: files could be written when the run began, so that an error now may
    be temporary.

    Coordinator -> uploader; answered by :class:`OrderDone`, again by an uploader that takes the place of one that has
    died.
    """

    url: str
    filesystem: str
    spool: str = ""
    lock: str = ""
    again: bool = False


@message
class Upload(OfAttempt):
    """Store ``files`` of ``source`` in ``directory``, and hash the ``others``, while the rank keeps training.

    source: empty if the ranks have written the files into ``directory`` themselves; then all its files are hashed.
    others: files that a lower rank reports. directory: a path, or a name in a remote run directory; empty if the files
    stay in the memory of the host, and only have to be hashed. ordinal: the number of the report. storing: instead, the
    files are those of a checkpoint in memory; the number of the try to store it, from 1. facts: as in
    :class:`Reported`; files that have changed are refused.

    Coordinator -> uploader; answered by :class:`FilesCopied`.
    """

    rank: int
    source: str
    files: list[str]
    others: list[str]
    directory: str
    ordinal: int = 0
    storing: int = 0
    facts: dict[str, list[int]] = field(default_factory=dict)


@message
class PublishCheckpoint(Message):
    """Write the manifest of the checkpoint in ``directory``, whose files are all stored.

    metadata: is added to the checkpoint's own. positions: those in the data, see :func:`merged_positions`.

    Coordinator -> uploader; answered by :class:`OrderDone`.
    """

    directory: str
    manifest: dict[str, Any]
    metadata: dict[str, Any]
    positions: dict[str, Any]


@message
class UpdateManifest(Message):
    """Replace these fields of the manifest of the checkpoint in ``directory``.

    Coordinator -> uploader; answered by :class:`OrderDone`.
    """

    directory: str
    fields: dict[str, Any]


@message
class DeleteCheckpoints(Message):
    """Delete these directories. An agent deletes those that were copied to its host, and that no process reads.

    Coordinator -> uploader; answered by :class:`OrderDone`. Coordinator -> agent; not answered.
    """

    directories: list[str]


@message
class MirrorRecords(Message):
    """Copy what has changed in the spool to the run directory now.

    Coordinator -> uploader; answered by :class:`OrderDone`.
    """


@message
class OrderDone(Message):
    """The oldest unanswered order is carried out, or (``failed``) why it could not be.

    text: what the user should know. body: the metrics of :class:`RunValidation` as JSON; for ``distrain attach``, see
    :mod:`distrain.coordinator.attached`.

    Uploader, mover or validator -> its parent; an agent passes on the answer to :class:`OpenStorage`. Coordinator ->
    command, as the answer to :class:`Ask`.
    """

    failed: str | None = None
    text: str = ""
    body: bytes = b""


# -- checkpoints in memory -------------------------------------------------------------------------------------------


@message
class KeepRound(ToMemory):
    """Keep these checkpoints in memory, and free what all others take.

    host: the name by which the coordinator knows this host. keep: the names of all that stay. body: a new
    :class:`~distrain.storage.commit.MemoryRound`, encoded once for all hosts; empty if there is none.

    token: what other hosts send to get files from this one, and it from them; empty if there are none. peer: the
    address of another host, if this host has to find out its own address.

    Coordinator -> agent; with a token, answered by :class:`MemoryServed`.
    """

    attempt: int
    host: str
    keep: list[str]
    token: str = ""
    peer: str = ""
    body: bytes = b""


@message
class MemoryServed(OfAttempt):
    """The agent knows what it keeps. Other hosts get it at a TCP port; 0 if none could be opened.

    address: the address by which ``peer`` can reach this host; empty if there was no peer, or it cannot.

    Agent -> coordinator.
    """

    port: int
    address: str = ""


@message
class FetchRound(ToMemory):
    """Provide ``files`` of a checkpoint in memory in a directory, after every byte was compared with its manifest.

    files: None for all. What this host lacks, or has with other bytes, it gets from the other copy. peers: address and
    port of the hosts that may have it. is_copy: instead, copy the parts whose ``copy`` is this host.

    Coordinator -> agent; answered by :class:`RoundDone`.
    """

    attempt: int
    name: str
    files: list[str] | None = None
    is_copy: bool = False
    peers: dict[str, tuple[str, int]] = field(default_factory=dict)


@message
class RoundDone(OfAttempt):
    """The files of a checkpoint in memory are in ``folder``, or (``failed``) no intact copy of one was found.

    is_copy: instead, the parts whose copy is on this host are: ``folder`` has a directory ``rank_3`` for each. notes: a
    sentence for each copy that was damaged or missing, and what was used instead.

    Agent -> coordinator.
    """

    name: str
    folder: str = ""
    is_copy: bool = False
    notes: list[str] = field(default_factory=list)
    failed: str | None = None


# -- hosts that share no files ---------------------------------------------------------------------------------------


@message
class SetUpHost(Message):
    """Give the workers of the host the files that they need, before :class:`Prepare`.

    files: the fields of a :class:`~distrain.wire.shipped_file.ShippedFile` for each file of the project.
    folders: directories of the coordinator's machine that workers may use, also without files.
    place: name of the directory for the files in the host's cache. storage: the run directory; probe_file: a file in it
    that holds ``nonce``. All three are empty if only uploaders use the storage. requirements: text of a requirements
    file for which a virtual environment is made; empty if the workers use the agent's interpreter. python: its version,
    such as 3.11. executable: the interpreter of the user's process. interpreter_path, interpreter_variables: entries of
    ``sys.path`` and variables that belong to it, and do not apply if the workers have another one. more_path:
    directories with packages that the user's process finds by other means than ``sys.path``.

    Coordinator -> agent; answered by :class:`HostSetUp`.
    """

    files: list[tuple[str, int, int, int, int]]
    folders: list[str]
    place: str
    storage: str = ""
    probe_file: str = ""
    nonce: str = ""
    requirements: str = ""
    python: str = ""
    executable: str = ""
    interpreter_path: list[str] = field(default_factory=list)
    interpreter_variables: list[str] = field(default_factory=list)
    more_path: list[str] = field(default_factory=list)


@message
class HostSetUp(Message):
    """The host is set up, or it lacks the project.

    wanted: the directory that has to get the files of the project before the host is asked again; empty if nothing is
    missing. storage_problem: why the host does not see the storage; None if it does. checkpoints: the directory for
    checkpoints that are copied to this host, and for files until all have arrived. trial_dir: the directory that stands
    for the run directory, if the host does not see the storage. failed: why no worker can run here.

    Agent -> coordinator.
    """

    wanted: str = ""
    checkpoints: str = ""
    trial_dir: str = ""
    storage_problem: str | None = None
    failed: str | None = None


@message
class Deliver(Message):
    """Copy files into the new directory ``folder`` of the host.

    root: the directory of this machine that ``folder`` stands for. files: the fields of a
    :class:`~distrain.wire.shipped_file.ShippedFile` for each file below ``root``. staging: a directory of the run on
    the host, for files until all have arrived. folders: directories to make below ``folder``, also if no file is in
    them. is_checkpoint: copy all of ``root`` instead, which is kept from being deleted meanwhile.

    Coordinator -> mover; answered by :class:`OrderDone`.
    """

    folder: str
    root: str
    staging: str
    files: list[tuple[str, int, int, int, int]] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    is_checkpoint: bool = False


@message
class BringBack(Message):
    """Copy the files in ``folder`` of the host to ``run``, the run directory: the small ones first, up to a limit.

    Files that have come already are left out, and nothing is overwritten: if a name is taken, all files go to a
    directory in ``run`` that is named after the ``host``. When all have come, the folder is deleted.

    Coordinator -> mover; answered by :class:`OrderDone`.
    """

    folder: str
    run: str
    host: str
    limit_bytes: int


@message
class AskForFiles(Message):
    """Do something with files of a host, on a stream of its own (:mod:`distrain.transfer.stream`).

    do: put, get, list or delete. folder: the directory of the host. names: paths below it, of the files to get or to
    delete. others: of files to hash. facts: as in :class:`Upload`. files: the fields of a
    :class:`~distrain.wire.shipped_file.ShippedFile` for each file to put, with its path below ``folder``. folders:
    directories to make there, also if no file is in them. staging: a new directory for files until all have arrived.

    Mover -> stream server; answered by :class:`FileData`.
    """

    do: str
    folder: str
    names: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    facts: dict[str, list[int]] = field(default_factory=dict)
    files: list[tuple[str, int, int, int, int]] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    staging: str = ""


@message
class FileData(Message):
    """On a stream: the next bytes of a file (``body``), an answer, or the end of contents.

    failed: why something could not be done.
    """

    body: bytes = b""
    failed: str | None = None
    sizes: list[int] = field(default_factory=list)
    crcs: list[int] = field(default_factory=list)
    others: list[tuple[str, int, int]] = field(default_factory=list)
    files: list[tuple[str, int, int, int, int]] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)


# -- validation ------------------------------------------------------------------------------------------------------


@message
class RunValidation(Message):
    """Call the validation function with a checkpoint.

    checkpoint: its path or URL. overrides: replace its usual keyword arguments, encoded as in :class:`Reported`. body:
    the pickled work that holds the function.

    Coordinator -> validator; answered by :class:`OrderDone`.
    """

    directory: str
    sys_path: list[str]
    body: bytes
    checkpoint: str = ""
    filesystem: str = ""
    overrides: str = ""


# -- the life of a worker --------------------------------------------------------------------------------------------


@message
class WorkerSpec(ToWorker):
    """The first frame that a worker reads: everything it needs to become its rank, except the job.

    context: the fields of :class:`~distrain.hosts.world.WorkerFacts`.
    environment: variables that the worker sets.
    defaults: variables that the worker sets unless its environment has them already.
    checkpoint: path or URL of the checkpoint to resume from, on the filesystem that ``context`` names.
    directory: the working directory.
    sys_path: the module search path; None stands for the interpreter's own entries.
    vitals_s: seconds between two :class:`Vitals`, and between two looks at memory and GPUs; see :class:`Troubles`.
    debug_rank: the rank on which breakpoint() opens the debugger.
    memory_every: see :class:`~distrain.api.config.CheckpointConfig`.
    nan_metric: the metric that must be finite, or else report() raises :class:`~distrain.Rollback`.
    divergence: what to do if replicas differ, and the reports from one comparison to the next; None: nothing.
    skip_to: by dataset or loader: the position up to which its rows are left out, whatever the checkpoint says.
    """

    context: dict[str, Any]
    environment: dict[str, str]
    defaults: dict[str, str]
    checkpoint: str | None
    directory: str
    sys_path: list[str | None]
    argv: list[str]
    vitals_s: float
    debug_rank: int | None = None
    memory_every: int | None = None
    nan_metric: str | None = None
    divergence: tuple[str, int] | None = None
    skip_to: dict[str, Any] = field(default_factory=dict)


@message
class Running(FromWorker):
    """The worker enters train_func.

    Worker -> coordinator.
    """


@message
class DebuggerSays(FromWorker):
    """Output of the pdb of a rank for the terminal of its user.

    stopped: why the rank waits for the user, such as ``has stopped in load_batch (train.py:31)``; empty if it does not
    wait. Then ``body`` ends with the prompt of pdb. closed: the rank continues without the debugger, and, if it is not
    empty, for this reason.

    Worker -> coordinator -> ``distrain debug``.
    """

    body: bytes = b""
    stopped: str = ""
    closed: str | None = None


@message
class Vitals(FromWorker):
    """The time that a rank has spent in each place since the last of these messages, from samples of its main thread.

    own_s: seconds in which it did not wait. waiting_s: seconds in which it waited for other ranks. place: the line of
    the user's code with most of ``own_s``, such as ``load_batch (train.py:31)``, and its ``place_s``.

    Worker -> coordinator.
    """

    own_s: float
    waiting_s: float
    place: str
    place_s: float


@message
class Standstill(FromWorker):
    """The main thread of a rank stands still, or (``state`` is empty) moves again.

    state, place: see :class:`~distrain.worker.standstill.Standstill`. seconds: for how long it has stood still so far.

    Worker -> coordinator.
    """

    state: str
    place: str
    seconds: float


@message
class Ask(ToWorker):
    """Ask a rank for something while it trains.

    what: ``standstill``, which is answered by :class:`Standstill` unless native code holds the GIL: stacks may be taken
    next, which makes the main thread write. ``flight_recorder``, that of torch: by :class:`Dump`, if there is anything.
    ``profile``, of so many ``seconds``: by some :class:`Dump`, the last one a ``profile``. ``debug``: open pdb at the
    line where the main thread is; answered by :class:`DebuggerSays`. ``typed``: ``body`` is what the user of pdb has
    typed, empty if they are gone.

    From a command, which knows no attempt, the coordinator passes on ``profile``, ``debug`` and ``typed``. It carries
    out ``stop``, and ``stacks``, as JSON if the body is ``json``; and ``attach``, with the versions of the command as
    the body. These are for all ranks.

    Coordinator -> worker; command -> coordinator, answered by :class:`OrderDone`, but ``debug`` and ``typed`` only if
    they are refused; ``attach`` by one after the other, until the run ends.
    """

    what: str
    seconds: float = 0.0
    body: bytes = b""


@message
class Dump(FromWorker):
    """Evidence of what a rank was doing, for the attempt's evidence folder.

    what: see :data:`~distrain.storage.names.EVIDENCE_SUFFIXES`; or ``last_collectives`` of a rank that has finished,
    which are not kept as a file. ``stacks`` are those of all threads, as faulthandler wrote
    them; only the main thread's of a rank that did not answer in time.

    Worker -> coordinator; stacks: agent -> coordinator.
    """

    what: str
    body: bytes


@message
class Outcome(FromWorker):
    """The result of train_func, or the exception that ended it.

    stage: where it ended: import, setup or run. error, traceback: one line, and the whole text. exit_code: the argument
    of SystemExit, 1 for any other exception. body: the pickled return value, or the pickled exception if ``error`` is
    set. stopped: should_stop() was true, so that train_func may not have done all its work. exits: the exception only
    ends the process, as SystemExit and KeyboardInterrupt do. blames_peer: it means that another rank is gone. rollback:
    the exception is a :class:`~distrain.Rollback`; its ``why`` and ``skip_to``.

    Worker -> coordinator; answered by :class:`Release` if ``ok``.
    """

    ok: bool
    stage: str
    body: bytes
    error: str | None = None
    traceback: str = ""
    exit_code: int = 0
    stopped: bool = False
    blames_peer: bool = False
    exits: bool = False
    rollback: dict[str, Any] | None = None


@message
class Release(ToWorker):
    """Every rank has finished: a worker that waited for the others may exit.

    Coordinator -> worker.
    """


# -- report() --------------------------------------------------------------------------------------------------------


@message
class Reported(FromWorker):
    """One call of report().

    index: counts the rank's calls in the attempt from 1. body: the metrics as JSON. progress: None, or the step and the
    number of steps that the user has given. waited: seconds since the rank's last report in which it waited for
    ``data``, or in report() for a ``checkpoint``; None if it did not wait. With a checkpoint (``has_checkpoint``):

    folder: the directory with its files. files: the relative path of each. in_place: ``folder`` is in the run
    directory, and all ranks write into it; ``files`` is empty. in_memory: ``folder`` is in the memory of the host, see
    :func:`~distrain.system.scratch.memory_directory`; without ``is_written``, it is still being written, and
    :class:`PartWritten` follows. waits: report() waits until the files are stored. name: the name to give to the
    checkpoint's directory. validation: None, or ``{"overrides": ..., "timeout_s": ...}``: pickled keyword arguments in
    base64, and seconds or None. positions: the rank's positions in its data, by the name of a loader; None if there are
    none. facts: by file, what is compared before it is committed: size and crc32 of one in memory; inode, size and time
    in ns of any other one.

    failed: the exception that report() has raised, so that nothing is reported. The call counts all the same.

    Worker -> coordinator. With a checkpoint, answered by :class:`CopyFiles` or by :class:`FilesStored`, and at last by
    :class:`CommitDone`.
    """

    index: int
    has_checkpoint: bool = False
    time: float = 0.0
    files: list[str] = field(default_factory=list)
    facts: dict[str, list[int]] | None = None
    body: bytes = b""
    folder: str = ""
    in_place: bool = False
    in_memory: bool = False
    is_written: bool = True
    waits: bool = True
    name: str | None = None
    validation: dict[str, Any] | None = None
    positions: dict[str, Any] | None = None
    progress: list[float] | None = None
    waited: dict[str, float] | None = None
    failed: str | None = None


@message
class PartWritten(FromWorker):
    """All bytes of a part are in memory, or (``failed``) why not. facts: as in :class:`Reported`.

    ordinal: 0 if there was no room, so that the checkpoint is stored instead.

    Worker -> coordinator.
    """

    ordinal: int
    failed: str | None = None
    facts: dict[str, list[int]] = field(default_factory=dict)


@message
class StoreInstead(ToWorker):
    """The memory of a host is short: store every further checkpoint as with ASYNC.

    Coordinator -> worker.
    """


@message
class Acknowledged(ToWorker):
    """The kernel of the coordinator's machine has the rank's reports up to ``index``. Not sent for every report.

    Coordinator -> worker.
    """

    index: int


@message
class CopyFiles(ToWorker):
    """Copy these files of the checkpoint into ``directory``; hash the others, which a lower rank reports.

    Coordinator -> worker; answered by :class:`FilesCopied`.
    """

    ordinal: int
    directory: str
    files: list[str]


@message
class FilesCopied(FromWorker):
    """The files of a rank are stored: relative path, size in bytes and crc32 of each. Or (``failed``) why they are not.

    skipped: the same of this rank's copies of files that a lower rank reports. storing: as in :class:`Upload`.

    Worker -> coordinator, as the answer to :class:`CopyFiles`; uploader -> coordinator, as the answer to
    :class:`Upload`.
    """

    ordinal: int = 0
    storing: int = 0
    files: list[tuple[str, int, int]] = field(default_factory=list)
    skipped: list[tuple[str, int, int]] = field(default_factory=list)
    failed: str | None = None


@message
class FilesStored(ToWorker):
    """An uploader has stored the rank's files, or (``failed``) why that is impossible.

    ordinal: the number of the report that they came with. For files in memory, the message means that the rank may
    write its next checkpoint there, though this one is not committed yet.

    Coordinator -> worker.
    """

    ordinal: int
    failed: str | None = None


@message
class CommitDone(ToWorker):
    """A checkpoint is complete and safe; get_checkpoint() returns it from now on.

    path: its directory or URL; empty if it was dropped because a rank could not store its part. has_files: it contains
    the files that this rank reported with ``ordinal``, so that the rank may delete its local ones.

    Coordinator -> worker, to every rank; if it was dropped, to those that have saved files.
    """

    ordinal: int
    path: str
    has_files: bool


# -- what a worker waits for -----------------------------------------------------------------------------------------


@message
class Question(FromWorker):
    """Base of what a worker asks, and waits for. question: its number among those of the rank, counted from 1."""

    question: int


@message
class Answer(ToWorker):
    """The answer to a :class:`Question` with this number. body: what was asked for. Or (``failed``) why not.

    Coordinator -> worker.
    """

    question: int
    body: bytes = b""
    failed: str | None = None


@message
class FetchCheckpoint(Question):
    """The worker waits for files of a checkpoint that its host does not see.

    files: those that it reads, if the checkpoint is in memory. None: all.

    Worker -> coordinator; answered by their directory on the worker's host.
    """

    path: str
    files: list[str] | None = None


@message
class AskCheckpointList(Question):
    """Ask which checkpoints there are, once all that this rank has reported are committed or dropped.

    validated: and once no checkpoint waits for its validation. at_once: without waiting for anything. synced: wait only
    for ranks that report checkpoints, not for what ASYNC stores, and at most for ``missing_rank_s``.

    Worker -> coordinator; answered by a JSON list of the path, metrics and status of each, in the order of commit.
    NaN and infinities are written as Python's json does.
    """

    validated: bool = False
    at_once: bool = False
    synced: bool = False


@message
class CollectiveEntered(Question):
    """The worker waits in its ``index``-th collective, counted from 1.

    body: rank 0's data, empty from the other ranks. gathers: instead, every rank has data, without line breaks.
    timeout_s: seconds until it gives up; None: never.

    Worker -> coordinator; answered, once every rank is in it, by rank 0's data; or, if it gathers, by a line for each
    rank.
    """

    index: int
    operation: str
    body: bytes
    gathers: bool = False
    timeout_s: float | None = None


# -- should_stop() ---------------------------------------------------------------------------------------------------


@message
class StopVote(FromWorker):
    """The worker waits in its ``call``-th should_stop(). With 0 it does not wait: it tells that it uses should_stop().

    Worker -> coordinator; answered by :class:`StopDecision`, if it waits.
    """

    call: int = 0


@message
class StopDecision(ToWorker):
    """should_stop() is true from this call on, on every rank that calls it.

    Unless ``final``, should_stop() is false before this call, in which the rank sends a :class:`StopVote`. With 0, the
    ranks begin to vote: that is their next call.

    Coordinator -> worker.
    """

    call: int = 0
    final: bool = False


# -- ranks that another launcher has started -------------------------------------------------------------------------


@message
class RunEnded(ToWorker):
    """The end of the run, as rank 0 knows it.

    text: why it cannot continue. The next call of distrain on the rank, or the one in which it waits, raises this.
    culprit: the rank that has failed; None if the run directory cannot be written. body: at the end of fit() on rank 0:
    a pickled pair of its Result, or None, and its exception, or None.

    Rank 0 -> rank.
    """

    text: str = ""
    culprit: int | None = None
    body: bytes = b""


# -- answers to orders -----------------------------------------------------------------------------------------------


def files_copied(order: Upload, **found: Any) -> FilesCopied:
    """Return the answer to an order to store files."""
    return FilesCopied(attempt=order.attempt, rank=order.rank, ordinal=order.ordinal, storing=order.storing, **found)


def failed_answer(order: Message, why: Exception | str) -> Message:
    """Return the answer to an order that could not be carried out."""
    is_bug = isinstance(why, Exception) and not isinstance(why, (OSError, DistrainError))
    text = f"{type(order).__name__}: {type(why).__name__}: {why}" if is_bug else str(why)
    if not isinstance(order, Upload):
        return OrderDone(failed=text)
    return files_copied(order, failed=f"{text}; its files may still be in {order.source}" if order.source else text)
