"""JAX on distrain. JAX itself is imported in the workers only. Runs in: anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distrain.api.ray_names import explain
from distrain.system.imports import lazy_names

if TYPE_CHECKING:
    from distrain.jax.config import JaxConfig as JaxConfig
    from distrain.jax.trainer import JaxTrainer as JaxTrainer

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__, explain=explain)
