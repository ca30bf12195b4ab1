"""Work of a user with a probe in it. Runs in: coordinator, worker."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from distrain.drilling.order import ProbeOrder
from distrain.drilling.probe import Probe
from distrain.worker.job.job import FunctionWork, ScriptWork, TargetWork, Work


@dataclass(frozen=True, kw_only=True)
class _Probed(Work):
    """Work that is watched while it runs."""

    probe: ProbeOrder = field(default_factory=ProbeOrder)

    def run(self) -> Any:
        Probe(self.probe).install(uses_torch="torch" in self.backend.preload)
        return super().run()


@dataclass(frozen=True, kw_only=True)
class _ProbedFunction(_Probed, FunctionWork):
    pass


@dataclass(frozen=True, kw_only=True)
class _ProbedScript(_Probed, ScriptWork):
    pass


@dataclass(frozen=True, kw_only=True)
class _ProbedTarget(_Probed, TargetWork):
    pass


_KINDS: dict[type[Work], type[_Probed]] = {
    FunctionWork: _ProbedFunction,
    ScriptWork: _ProbedScript,
    TargetWork: _ProbedTarget,
}


def probed(work: Work, probe: ProbeOrder) -> Work:
    """Return the work with a probe."""
    own = {one.name: getattr(work, one.name) for one in fields(work)}
    kind: Any = _KINDS[type(work)]
    made: Work = kind(**own, probe=probe)
    return made
