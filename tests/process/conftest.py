"""Fixtures of the tests with real processes: fits over each way to start, a fake ssh, and an object store."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import tempfile
import uuid
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import cloudpickle
import fsspec
import pytest

from distrain import BackendConfig, Checkpoint, Result, RunConfig, ScalingConfig
from distrain.coordinator.connection.transport import Transport, this_machine
from distrain.coordinator.requests import STOP, ask, connect
from distrain.coordinator.run.fit import run_work
from distrain.hosts.hostfile import HostSpec
from distrain.storage.paths import RunPaths
from distrain.worker.job.job import FunctionWork
from tests.conftest import wait_until
from tests.process.object_storage.bucket import BUCKET, Bucket, Door, forget_connections, moto_server
from tests.tables import choose

Function = Callable[..., Any]

WAYS = ("forkserver-local", "spawn-local", "forkserver-ssh", "spawn-ssh")
"""Start methods and transports."""

OPPOSITE_WAYS = ("forkserver-local", "spawn-ssh")
"""Two that have nothing in common."""

SSH_THAT_EXECUTES = 'for command; do :; done; cd /; exec sh -c "$command"'
"""Body of a fake ssh. It runs its last argument through a shell, in another directory, as the real ssh would."""

SSH_THAT_CLEARS_THE_ENVIRONMENT = 'for command; do :; done; cd /; exec env -i PATH=/usr/bin:/bin sh -c "$command"'
"""Run the command without the environment of this machine, which the real ssh would not pass on either."""


GROUP_BYTES = 160 << 20
_CGROUPS = Path("/sys/fs/cgroup/memory")


@dataclass(frozen=True, kw_only=True)
class Fit:
    """``fit(function, config)`` in this process. Other keyword arguments go into the RunConfig."""

    storage: Path
    start_method: Any = "forkserver"
    transport: Transport = field(default_factory=this_machine)
    backend: BackendConfig = field(default_factory=BackendConfig)

    def __call__(
        self,
        function: Function,
        config: dict[str, Any] | None = None,
        *,
        workers: int = 2,
        resume_from: Checkpoint | None = None,
        **run: Any,
    ) -> Result:
        return run_work(
            FunctionWork(function=function, config=config or {}, backend=self.backend),
            ScalingConfig(num_workers=workers, start_method=self.start_method),
            RunConfig(**{"storage_path": self.storage, **run}),
            resume_from=resume_from,
            transports=(self.transport,),
        )


@pytest.fixture
def thread(tmp_path: Path) -> Iterator[Callable[..., Future[Result]]]:
    """``thread(fit, ...)`` trains meanwhile."""
    with ThreadPoolExecutor(1) as threads:
        try:
            yield threads.submit
        finally:
            for socket in tmp_path.glob("*/run/.requests"):  # the test has failed
                ask_run(RunPaths(socket.parent), STOP)


def ask_run(run: RunPaths, what: str) -> str:
    """Send a request to a run, and return its answer."""
    with contextlib.closing(connect(run)) as channel:
        return ask(channel, what)


def wait_for_reports(run: Path) -> None:
    """Wait until a rank of the run has reported."""
    metrics = run / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and bool(metrics.read_bytes()), what="a rank has reported")


def make_fake_ssh(folder: Path, body: str = SSH_THAT_EXECUTES) -> Transport:
    """Return a host behind a shell script that plays ssh."""
    script = folder / "ssh"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    host = HostSpec(name="otherhost", address="otherhost")
    return Transport(host=host, template=(str(script), "-T", "otherhost", "{command}"), ships=False)


def make_fit(way: str, folder: Path) -> Fit:
    start_method, _, transport = way.partition("-")
    over = make_fake_ssh(folder) if transport == "ssh" else this_machine()
    return Fit(storage=folder / "runs", start_method=start_method, transport=over)


@pytest.fixture(autouse=True)
def _train_functions_travel_by_value(request: pytest.FixtureRequest) -> Iterator[None]:
    """Pickle train functions by value, as workers cannot import a test module."""
    module = sys.modules[request.module.__name__]
    cloudpickle.register_pickle_by_value(module)
    yield
    cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture
def fit(storage: Path) -> Fit:
    """A fit in the default way: on this machine, with forked workers."""
    return Fit(storage=storage)


@pytest.fixture
def any_fit(request: pytest.FixtureRequest, tmp_path: Path) -> Fit:
    """A fit in one of two opposite ways, chosen by the seed; with ``--all`` in both."""
    return make_fit(request.param, tmp_path)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "any_fit" in metafunc.fixturenames:
        ways = OPPOSITE_WAYS if metafunc.config.getoption("--all") else [choose(OPPOSITE_WAYS, metafunc.definition)]
        metafunc.parametrize("any_fit", ways, indirect=True)


@contextlib.contextmanager
def when_shown(phrase: str, act: Callable[[], object]) -> Iterator[None]:
    """Call ``act`` each time the coordinator in this process shows a line with this phrase."""

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if phrase in record.getMessage():
                act()

    logger, listener = logging.getLogger("distrain"), Listener()
    logger.addHandler(listener)
    try:
        yield
    finally:
        logger.removeHandler(listener)


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A cgroup with little memory. Skips where none can be made."""
    group = _CGROUPS / f"distrain-{uuid.uuid4().hex}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup (v1) can be made here: {error}")
    try:
        try:
            (group / "memory.limit_in_bytes").write_text(str(GROUP_BYTES))
        except OSError as error:
            pytest.skip(f"no memory cgroup (v1) can be limited here: {error}")
        with contextlib.suppress(OSError):  # swap, where it is counted
            (group / "memory.memsw.limit_in_bytes").write_text(str(GROUP_BYTES))
        yield group
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text(), what="the cgroup is empty")
        group.rmdir()


# -- an object store -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    with moto_server() as port:
        fsspec.filesystem("s3", key="test", secret="test", endpoint_url=f"http://127.0.0.1:{port}").mkdir(BUCKET)
        yield port


@pytest.fixture
def bucket(server: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Bucket]:
    """An own directory in the bucket. The environment leads the processes of the test there."""
    forget_connections()
    door = Door(server)
    found = Bucket(server, door, f"{BUCKET}/{uuid.uuid4().hex[:8]}")
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield found
    forget_connections()
    door.close()


@pytest.fixture
def s3_fit(any_fit: Fit, bucket: Bucket) -> Fit:
    return replace(any_fit, storage=bucket.url)  # type: ignore[arg-type]


@pytest.fixture
def one_fit(fit: Fit, bucket: Bucket) -> Fit:
    return replace(fit, storage=bucket.url)  # type: ignore[arg-type]


# -- reading a run directory without distrain ------------------------------------------------------------------------


def records(run: str | Path, rank: int | None = None) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl, of one rank or of all."""
    lines = (json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if rank is None or line["rank"] == rank]


def reported(run: str | Path, rank: int | None = None) -> list[dict[str, Any]]:
    """Return the metrics in metrics.jsonl, of one rank or of all."""
    return [record["metrics"] for record in records(run, rank)]


def log_of(run: str | Path, rank: int, attempt: int = 0) -> str:
    return Path(run, "logs", f"attempt_{attempt}", f"rank_{rank}.log").read_text()


def files_of(checkpoint: Checkpoint | None) -> dict[str, str]:
    """Return the text of every file that the user put into a checkpoint, by relative path."""
    assert checkpoint is not None
    root = Path(checkpoint.path)
    files = [path for path in root.rglob("*") if path.is_file() and path.name != ".manifest.json"]
    return {str(path.relative_to(root)): path.read_text() for path in files}


def assert_no_half_checkpoint(storage: Path) -> None:
    """Check that every directory named ``checkpoint_...`` is complete, to the byte."""
    for folder in storage.glob("*/checkpoint_*"):
        manifest = json.loads((folder / ".manifest.json").read_text())
        for name, entry in manifest["files"].items():
            data = (folder / name).read_bytes()
            assert (len(data), f"{zlib.crc32(data):08x}") == (entry["size"], entry["crc32"]), folder / name
