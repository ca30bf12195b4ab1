"""Hugging Face libraries on distrain; see :mod:`distrain.huggingface.transformers`. Runs in: worker."""

__all__ = ()
