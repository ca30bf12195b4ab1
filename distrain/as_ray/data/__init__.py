"""``ray.data``, on top of :mod:`distrain.data`. Runs in: anywhere."""
