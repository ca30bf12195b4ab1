"""Tensors in nested containers. Runs in: worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from collections.abc import Callable


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of ``value`` with ``change(leaf)`` instead of every leaf.

    It descends into the containers that torch knows: dicts, lists, tuples, named tuples, and classes that were
    registered with ``torch.utils._pytree``. Leaves are tensors, objects with a ``to()``, and everything else.
    """
    return tree_map(change, value, is_leaf=lambda one: callable(getattr(one, "to", None)))
