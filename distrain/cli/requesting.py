"""Requests of commands to a running run, and where commands listen. Runs in: coordinator."""

from __future__ import annotations

import platform
import socket

from distrain.storage.runs.listing import NoSuchRun, Run, WrongArgument

HOST = "127.0.0.1"
"""The address at which commands listen: for programs of this machine only."""


def request(run: Run, word: str, argument: str = "") -> str:
    """Send a request to a running run, and return the answer. Raise NoSuchRun that says what to do instead."""
    from distrain.coordinator.requests import ask
    from distrain.coordinator.store.remote_store import local_directory_of
    from distrain.errors import StorageError
    from distrain.storage.paths import RunPaths

    if not run.is_active:
        raise NoSuchRun(f"{run.name} is not running: its state is {run.state}; `distrain show {run.name}` tells more")
    paths = RunPaths(local_directory_of(run.path))
    if not paths.requests.exists():
        raise NoSuchRun(_unreachable(run))
    try:
        return ask(paths, word, argument)
    except StorageError as error:
        is_elsewhere = run.manifest.get("host") not in (None, platform.node())
        raise NoSuchRun(_unreachable(run) if is_elsewhere else str(error)) from None


def _unreachable(run: Run) -> str:
    """Return why a run cannot be asked here, and what to do instead."""
    host, pid = run.manifest.get("host"), run.manifest.get("pid")
    if host is None:
        return f"{run.name} takes no requests on this machine; ask on the machine of fit()"
    if host != platform.node():
        return f"{run.name} was started on {host} (process {pid}); run this command there"
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
