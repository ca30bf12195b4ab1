"""Hugging Face libraries on distrain; see :mod:`distrain.huggingface.transformers`. Runs in: worker."""

from __future__ import annotations

__all__ = ()
