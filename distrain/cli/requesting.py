"""Requests of commands to a running run, and where commands listen. Runs in: coordinator."""

from __future__ import annotations

import contextlib
import platform
import socket
from typing import TYPE_CHECKING, Any

from distrain.storage.runs.listing import NoSuchRun, Run, WrongArgument

if TYPE_CHECKING:
    from distrain.wire.channel import Channel

HOST = "127.0.0.1"
"""The address at which commands listen: for programs of this machine only."""


def request(run: Run, what: str, **fields: Any) -> str:
    """Send a request to a running run, and return the answer. Raise NoSuchRun that says what to do instead.

    fields: of :class:`~distrain.wire.Ask`.
    """
    from distrain.coordinator.requests import ask

    with contextlib.closing(connect(run)) as channel:
        return ask(channel, what, **fields)


def connect(run: Run) -> Channel:
    """Return a connection to a running run. Raise NoSuchRun that says what to do instead."""
    from distrain.coordinator import requests
    from distrain.coordinator.store.remote_store import local_directory_of
    from distrain.storage.paths import RunPaths

    if not run.is_active:
        raise NoSuchRun(f"{run.name} is not running: its state is {run.state}; `distrain show {run.name}` tells more")
    try:
        return requests.connect(RunPaths(local_directory_of(run.path)))
    except OSError as error:
        raise NoSuchRun(_unreachable(run, error)) from None


def _unreachable(run: Run, error: OSError) -> str:
    """Return why a run cannot be asked here, and what to do instead."""
    host, pid = run.manifest.get("host"), run.manifest.get("pid")
    if host is None:
        return f"{run.name} takes no requests on this machine; ask on the machine of fit()"
    if host != platform.node():
        return f"{run.name} was started on {host} (process {pid}); run this command there"
    if not isinstance(error, FileNotFoundError):
        return f"no run is active in {run.path} on this machine ({error.strerror}); ask where fit() runs"
    return (
        f"{run.name} takes no requests: it has no workers of its own, or has not begun. Its process is {pid}; "
        f"`kill -TERM {pid}` stops it"
    )


def listener_at(port: int) -> socket.socket:
    """Return a socket that listens at a port of :data:`HOST`; 0 for a free one. Raises WrongArgument."""
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        raise WrongArgument(f"port {port} cannot be used ({error}); choose another one with --port") from None
