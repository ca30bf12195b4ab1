"""The interface to a framework: settings and hooks for the coordinator and the workers. Runs in: coordinator, worker.

Each framework has a package of its own with a subclass of :class:`BackendConfig`. No other module depends on it.
"""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distrain.api.context import TrainContext


@dataclass(frozen=True, kw_only=True)
class BackendConfig:
    """Settings and hooks of a framework. The base class is for training without one.

    The object is pickled for the workers. The coordinator must be able to import its class without the framework.

    ::

        class PrintingConfig(BackendConfig):
            def setup(self, context):
                print(f"rank {context.get_world_rank()} is about to train")

        trainer = DataParallelTrainer(train_func, backend_config=PrintingConfig())
    """

    framework: ClassVar[str] = ""
    """The package by which the ranks connect to each other, if any.

    Before a run on several hosts starts, distrain checks that each host has this package and can reach the others."""

    preload: ClassVar[tuple[str, ...]] = ()
    """Modules that the forkserver of a host imports once for all its workers."""

    may_fork: ClassVar[bool] = True
    """False for frameworks that do not survive a fork: then every worker is a new interpreter."""

    defaults: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Environment variables of all ranks, unless the user has set them."""

    cures: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Advice about exceptions, by regular expressions for their types and texts, such as ``ValueError: .* shape``."""

    def setup(self, context: TrainContext) -> None:
        """Set up the framework, in the worker before train_func (not before a script)."""

    def for_debugging(self) -> BackendConfig:
        """Return the settings for a run in which a person may stop a rank for long, so that others wait for it."""
        return self

    def at_begin(self, context: TrainContext) -> None:
        """Run in the worker just before train_func, or a script."""

    def at_report(self) -> None:
        """Run in the worker at the beginning of every report()."""

    def at_end(self, context: TrainContext) -> None:
        """Run in the worker when train_func, or a script, has returned."""

    def teardown(self, context: TrainContext) -> object:
        """Disconnect from the peers, so that none waits for this rank.

        Runs in the worker after train_func or the script has ended and the outcome was sent. Returns an object that
        rank 0 keeps alive until every rank has finished, or None if the process may exit at once.
        """
        return None

    def explain(self, error: BaseException) -> str | None:
        """Return advice, in the worker, about an exception whose own text gives none; None for all others."""
        text = "".join(traceback.format_exception_only(error))
        return next((cure for signs, cure in self.cures.items() if re.search(signs, text)), None)

    def portable(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return a dict checkpoint that can be used outside of these workers. Runs in the worker.

        Must not change ``data``.
        """
        return data

    def gather(self, value: Any) -> list[Any]:
        """Gather every rank's ``value``, in the order of ranks. A collective; runs in the worker after :meth:`setup`.

        Needed only if another launcher has started the ranks. Rank 0 then tells the others where they reach it.
        """
        return [value]
