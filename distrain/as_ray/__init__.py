"""A stand-in for Ray: from this import on, ``import ray`` finds distrain's own names under those of Ray.

``distrain run --as-ray`` and ``DISTRAIN_AS_RAY=1`` import it, too; see docs/migration/ray.md. Runs in: anywhere.
"""

from __future__ import annotations

from distrain.as_ray.importing import activate

activate()
