"""One run in processes that another launcher has started, on rank 0. Runs in: coordinator."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING, Any

from distrain.api.observer import AttemptEnded
from distrain.coordinator.launched.rank_channel import Entrance, RankChannel
from distrain.coordinator.launched.rank_group import Offer
from distrain.coordinator.launched.rank_server import RankServer
from distrain.decisions.blame import RunSummary, culprit_first
from distrain.decisions.states import RunState
from distrain.worker.job.job import original

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distrain.api.config import CheckpointConfig
    from distrain.coordinator.launched.rank_group import RankGroup
    from distrain.coordinator.manifest import RunManifest
    from distrain.coordinator.observers import Observers
    from distrain.coordinator.store.run_store import RunStore
    from distrain.decisions.events import RunRequest


class LaunchedRun:
    """One run in processes of another launcher, on rank 0. After :meth:`run`, ``end`` is its summary."""

    def __init__(
        self,
        request: RunRequest,
        store: RunStore,
        checkpoint_config: CheckpointConfig,
        observers: Observers,
        *,
        manifest: RunManifest,
        group: RankGroup,
    ) -> None:
        self.end = RunSummary(state=RunState.CONNECTING, attempt=request.first_attempt - 1)
        self.metrics: dict[str, Any] | None = None
        """The metrics of rank 0's last report."""
        self._request = request
        self._store = store
        self._checkpoint_config = checkpoint_config
        self._manifest = manifest
        self._observers = observers
        self._group = group

    def last_lines(self) -> dict[int, Sequence[str]]:
        """Return nothing: the output is on the consoles of the ranks."""
        return {}

    def where(self) -> Sequence[str]:
        """Return nothing: distrain stops no rank."""
        return ()

    def run(self) -> None:
        """Train once: restarts are the business of the launcher.

        Raises LaunchError if a rank does not see the run directory, or cannot connect to this process.
        """
        offer, connections = self._meet()
        own, servers = socket.socketpair()
        channel = RankChannel(own, self._store.location)
        server = self._group.server = RankServer(
            self._request,
            self._store,
            self._checkpoint_config,
            self._observers,
            hosts=self._group.hosts,
            connections={0: servers, **connections},
        )
        self._manifest.attempt_begins(self._request.first_attempt, self._group.plan)
        self._manifest.attempt_trains()
        error: BaseException | None = None
        server.start()
        try:
            with self._group.signals(channel):
                error = self._group.train(self._group.session(channel, offer), channel).error
                server.join()
        except KeyboardInterrupt as interrupt:  # a second signal
            error = error or interrupt
        except SystemExit as terminated:
            error = error or terminated
        finally:
            server.close()
            channel.close()
        self.metrics = server.metrics
        self._conclude(server.summary(error))

    def _meet(self) -> tuple[Offer, Mapping[int, socket.socket]]:
        request, store = self._request, self._store
        launcher = self._group.launcher
        entrance = Entrance(launcher.world_size, only_here=launcher.is_one_host)
        with contextlib.closing(entrance):
            offer = Offer(
                port=entrance.port,
                secret=entrance.secret,
                run_id=request.run_id,
                run_name=request.run_name,
                storage_path=request.storage_path,
                filesystem=request.filesystem,
                attempt=request.first_attempt,
                checkpoint=request.checkpoint,
                storage="" if store.is_remote else str(store.paths.root),
                probe_file=str(store.paths.manifest),
            )
            self._group.meet(offer)
            self._group.agree(None)
            return offer, entrance.connections()

    def _conclude(self, end: RunSummary) -> None:
        self.end = end
        failures = list(end.failures)
        told, own = culprit_first(failures) if end.stop_reason is None else [], end.errors
        self._observers.tell(
            AttemptEnded(end.attempt, told, end.problem, lambda: {f.rank: own.get(f.rank) or original(f) for f in told})
        )
        self._manifest.attempt_ended(failures, end.problem or (end.stop_reason and f"stopped by {end.stop_reason}"))
