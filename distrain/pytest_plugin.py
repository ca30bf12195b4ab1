"""The ``drill`` fixture for pytest: write ``pytest_plugins = ["distrain.pytest_plugin"]`` into conftest.py.

An entry point would do without, but pytest then rewrites the modules of distrain. Runs in: the user's process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrain.drilling.drill import DrillReport

__all__ = ["drill"]


@pytest.fixture
def drill() -> Callable[..., DrillReport]:
    """Return a function that takes what :func:`distrain.drill` takes.

    It fails the test unless all is well. ::

        def test_it_resumes_exactly(drill):
            drill("torchrun --nproc-per-node {workers} train.py", workers=2, only=["kill", "ranks"])
    """

    def drill(target: Any, **options: Any) -> DrillReport:
        import distrain

        report = distrain.drill(target, **options)
        if not report.ok:
            bad = [one for one in report.verdicts if not one.is_good]
            pytest.fail("\n".join("\n  ".join([one.text, *map(str, one.causes)]) for one in bad), pytrace=False)
        return report

    return drill
