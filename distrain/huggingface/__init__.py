"""Hugging Face libraries on distrain; see :mod:`distrain.huggingface.transformers`. Runs in: worker."""

from __future__ import annotations

from distrain.system.ray_names import explain_absent_names

__all__ = ()

explain_absent_names(__name__)
