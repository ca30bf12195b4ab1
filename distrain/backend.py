"""The seam for a framework: what it needs before the workers start, and in each of them. Runs in: coordinator, worker.

A framework is a leaf package with a subclass of :class:`BackendConfig`; nothing in the core names one.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distrain.context import TrainContext
    from distrain.hosts.world import RankPlan, WorldPlan

__all__ = ["BackendConfig", "chosen"]


@dataclass(frozen=True, kw_only=True)
class BackendConfig:
    """Hooks of a framework. The base class is the framework-less backend: processes, environment and reports only.

    The object travels to the workers by pickle; the coordinator must be able to import it without the framework.

    ::

        class PrintingConfig(BackendConfig):
            def setup(self, context):
                print(f"rank {context.get_world_rank()} is about to train")

        trainer = DataParallelTrainer(train_func, backend_config=PrintingConfig())
    """

    framework: ClassVar[str] = ""
    """The package that the ranks import and by which they connect to each other, if any: hosts that lack it, or cannot
    connect to each other, cannot train together."""

    preload: ClassVar[tuple[str, ...]] = ()
    """Installed modules that the forkserver imports once for all workers of a host."""

    may_fork: ClassVar[bool] = True
    """False for frameworks that do not survive a fork: every worker is a fresh interpreter then."""

    defaults: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Environment of all ranks, unless the user has set these variables."""

    has_endpoints: ClassVar[bool] = False
    """Whether every rank listens at a TCP port that all others know; it is reserved on the rank's own host."""

    def environment(self, plan: WorldPlan, rank: RankPlan, endpoints: Sequence[str]) -> dict[str, str]:
        """Environment of one rank, beside torchrun's variables. ``endpoints``: address and port of every rank,
        ``10.0.0.1:4711``, if there are any. Pure; runs in the coordinator.
        """
        return {}

    def setup(self, context: TrainContext) -> None:
        """In the worker, before train_func (not before a script)."""

    def at_report(self) -> None:
        """In the worker, at the beginning of every report()."""

    def teardown(self, context: TrainContext) -> object:
        """In the worker, after train_func or the script has come to an end and that was reported.

        Lets go of the peers, so that nobody waits for this rank. What it returns is kept alive until every rank has
        finished; None: nothing has to stay, the process may leave at once.
        """
        return None

    def explain(self, error: BaseException) -> str | None:
        """In the worker: what to do about an exception whose own text does not say it; None for all others."""
        return None

    def portable(self, data: dict[str, Any]) -> dict[str, Any]:
        """In the worker: a dict checkpoint without what only means something among these workers. ``data`` is not to
        be changed.
        """
        return data

    def gather(self, value: Any) -> list[Any]:
        """In the worker, after :meth:`setup`: every rank's ``value``, by rank; a collective. Only needed where another
        launcher started the ranks, so that there is no coordinator.
        """
        return [value]


_Config = TypeVar("_Config", bound=BackendConfig)


def chosen(kind: type[_Config], name: str, given: _Config | None, by_old_name: _Config | None) -> _Config:
    """What a trainer was given as ``{name}_config``, or by its old name, ``{name}_backend``; else the default. Raises
    TypeError. To be called by a constructor that :func:`~distrain.system.ray_names.without` decorates.
    """
    new, old = f"{name}_config", f"{name}_backend"
    if by_old_name is not None:
        if given is not None:
            raise TypeError(f"{old} is another name of {new}; give one of them")
        warnings.warn(f"{old} is an old name; use {new}", DeprecationWarning, stacklevel=4)
        given = by_old_name
    if given is not None and not isinstance(given, kind):
        raise TypeError(f"{new} must be a {kind.__name__}, got {given!r:.80} ({type(given).__name__})")
    return kind() if given is None else given
