"""The search spaces of Ray Tune, and the configs that grid search and random search take from them. Runs in: anywhere.

The values have the distributions that they have in Ray, but the same seed draws others.
"""

from __future__ import annotations

import inspect
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Iterator, Sequence

_GRID = "grid_search"


@dataclass(frozen=True)
class Domain:
    """Values of which ``draw`` returns one."""

    draw: Callable[[random.Random], Any]


@dataclass(frozen=True)
class sample_from:
    """The return value of a function, which may take the config with all other values."""

    func: Callable[..., Any]

    def draw(self, config: dict[str, Any]) -> Any:
        """Return a value."""
        return self.func(*[_Attributes(config)] * len(inspect.signature(self.func).parameters))


class _Attributes(dict[str, Any]):
    """A config whose keys are attributes, too. It is its own ``config``, for ``lambda spec: spec.config.a``."""

    def __getattr__(self, name: str) -> Any:
        value = self.get(name, self) if name == "config" else self[name]
        return _Attributes(value) if isinstance(value, dict) else value


def grid_search(values: Iterable[Any]) -> dict[str, Any]:
    """Return a grid: every value gets trials of its own."""
    return {_GRID: list(values)}


def choice(categories: Sequence[Any]) -> Domain:
    """Return a domain of these values."""
    return Domain(lambda generator: generator.choice(categories))


def uniform(lower: float, upper: float) -> Domain:
    """Return a domain of floats."""
    return Domain(lambda generator: generator.uniform(lower, upper))


def quniform(lower: float, upper: float, q: float) -> Domain:
    """Return a domain of floats that are multiples of q."""
    return Domain(lambda generator: q * generator.randint(math.ceil(lower / q), math.floor(upper / q)))


def loguniform(lower: float, upper: float, base: float = 10) -> Domain:
    """Return a domain of floats whose logarithms are uniform."""
    if not 0 < lower <= upper:
        raise ValueError(f"loguniform({lower}, {upper}): both bounds must be above 0; they are not logarithms")
    return Domain(lambda generator: math.exp(generator.uniform(math.log(lower), math.log(upper))))


def randint(lower: int, upper: int) -> Domain:
    """Return a domain of integers, without the upper bound."""
    return Domain(lambda generator: generator.randrange(lower, upper))


def qrandint(lower: int, upper: int, q: int = 1) -> Domain:
    """Return a domain of integers that are multiples of q, with the upper bound unless q is 1."""
    return Domain(lambda generator: q * generator.randrange(math.ceil(lower / q), upper // q + (q != 1)))


def lograndint(lower: int, upper: int, base: float = 10) -> Domain:
    """Return a domain of integers whose logarithms are uniform, without the upper bound."""
    domain = loguniform(lower, upper)
    return Domain(lambda generator: math.floor(domain.draw(generator)))


def randn(mean: float = 0.0, sd: float = 1.0) -> Domain:
    """Return a domain of normally distributed floats."""
    return Domain(lambda generator: generator.gauss(mean, sd))


# -- configs ---------------------------------------------------------------------------------------------------------


def configs(space: dict[str, Any], generator: random.Random) -> Iterator[dict[str, Any]]:
    """Yield one sample: a config for every combination of the grids. The last grid varies fastest."""
    for variant in _without_grids(space):
        config = _replaced(variant, Domain, lambda domain: domain.draw(generator))
        yield _replaced(config, sample_from, lambda domain: domain.draw(config))  # noqa: B023 - it is called at once


def _without_grids(value: Any) -> list[Any]:
    """Return the value once for every combination of the grids in it."""
    if isinstance(value, dict) and value.keys() == {_GRID}:
        return list(value[_GRID])
    if isinstance(value, dict):
        return [
            dict(zip(value, items, strict=True)) for items in itertools.product(*map(_without_grids, value.values()))
        ]
    return [list(items) for items in itertools.product(*map(_without_grids, value))] if type(value) is list else [value]


def _replaced(value: Any, kind: type, draw: Callable[[Any], Any]) -> Any:
    """Return a copy of the value with what is drawn from the objects of a class in it."""
    if isinstance(value, kind):
        return draw(value)
    if isinstance(value, dict):
        return {key: _replaced(item, kind, draw) for key, item in value.items()}
    return [_replaced(item, kind, draw) for item in value] if type(value) is list else value
