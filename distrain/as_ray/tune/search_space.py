"""The search spaces of Ray Tune, and the configs that grid search and random search take from them. Runs in: anywhere.

With the same seed, the values are those that Ray 2.60 draws, as both ask numpy the same questions in the same order.
"""

from __future__ import annotations

import inspect
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distrain.system.imports import require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

Path = tuple[Any, ...]
"""Keys and indices that lead to a value in nested dicts and lists."""
_GRID = "grid_search"


@dataclass(frozen=True, repr=False)
class Domain:
    """Values from which one is drawn.

    text: how a program writes it.
    draw: takes a random generator of numpy, and the config as far as it is drawn.
    comes_last: it is drawn after all others, because it may use their values.
    """

    text: str
    draw: Callable[[Any, Any], Any]
    comes_last: bool = False

    def sample(self, config: Any = None, size: int = 1, random_state: Any = None) -> Any:
        """Return one value, or a list of several."""
        generator = generator_of(random_state)
        values = [self.draw(generator, config) for _ in range(size)]
        return values[0] if size == 1 else values

    def __repr__(self) -> str:
        return self.text


def generator_of(seed: Any) -> Any:
    """Return numpy's generator for a seed or a generator; for None, numpy's global one."""
    numpy = require("numpy")
    if seed is None:
        return numpy.random
    return seed if hasattr(seed, "uniform") else numpy.random.default_rng(seed)


# -- drawing ---------------------------------------------------------------------------------------------------------


def _real(generator: Any, lower: float, upper: float) -> float:
    return float(generator.uniform(lower, upper, size=1)[0])


def _integer(generator: Any, lower: int, upper: int) -> int:
    draw = getattr(generator, "integers", None) or generator.randint
    return int(draw(lower, upper, size=1)[0])


def _log_real(generator: Any, lower: float, upper: float) -> float:
    if not 0 < lower <= upper < math.inf:
        raise ValueError(
            f"loguniform({lower}, {upper}): both bounds must be above 0, and finite; give the values themselves, not "
            "their logarithms"
        )
    numpy = require("numpy")
    return float(numpy.exp(_real(generator, numpy.log(lower), numpy.log(upper))))


def _log_integer(generator: Any, lower: int, upper: int) -> int:
    return math.floor(_log_real(generator, lower, upper))


def _normal(generator: Any, mean: float, sd: float) -> float:
    return float(generator.normal(mean, sd, size=1)[0])


def _between(name: str, draw: Callable[[Any, Any, Any], Any], first: float, second: float) -> Domain:
    return Domain(f"{name}({first}, {second})", lambda generator, _: draw(generator, first, second))


# -- what a search space is made of ----------------------------------------------------------------------------------


def grid_search(values: Iterable[Any]) -> dict[str, Any]:
    """Return a grid: every value gets trials of its own."""
    return {_GRID: list(values)}


def choice(categories: Sequence[Any]) -> Domain:
    """Return a domain of these values."""
    values = list(categories)
    return Domain(
        f"choice({values})",
        lambda generator, _: values[int(generator.choice(require("numpy").arange(len(values)), size=1)[0])],
    )


def uniform(lower: float, upper: float) -> Domain:
    """Return a domain of floats."""
    return _between("uniform", _real, lower, upper)


def quniform(lower: float, upper: float, q: float) -> Domain:
    """Return a domain of floats that are multiples of q."""
    return Domain(
        f"quniform({lower}, {upper}, {q})",
        lambda generator, _: float(require("numpy").round(_real(generator, lower, upper) / q) * q),
    )


def loguniform(lower: float, upper: float, base: float = 10) -> Domain:
    """Return a domain of floats whose logarithms are uniform."""
    return _between("loguniform", _log_real, lower, upper)


def randint(lower: int, upper: int) -> Domain:
    """Return a domain of integers, without the upper bound."""
    return _between("randint", _integer, lower, upper)


def qrandint(lower: int, upper: int, q: int = 1) -> Domain:
    """Return a domain of integers that are multiples of q, with the upper bound unless q is 1."""
    low, high = math.ceil(lower / q), upper // q + (q != 1)
    return Domain(f"qrandint({lower}, {upper}, {q})", lambda generator, _: _integer(generator, low, high) * q)


def lograndint(lower: int, upper: int, base: float = 10) -> Domain:
    """Return a domain of integers whose logarithms are uniform, without the upper bound."""
    return _between("lograndint", _log_integer, lower, upper)


def randn(mean: float = 0.0, sd: float = 1.0) -> Domain:
    """Return a domain of normally distributed floats."""
    return _between("randn", _normal, mean, sd)


def sample_from(func: Callable[..., Any]) -> Domain:
    """Return a domain of what a function returns. It may take the config, which has all other values."""
    takes_config = bool(inspect.signature(func).parameters)

    def draw(_: Any, config: Any) -> Any:
        return func(_Attributes(config)) if takes_config else func()

    return Domain(f"sample_from({getattr(func, '__name__', func)})", draw, comes_last=True)


class _Attributes(dict[str, Any]):
    """A config whose keys are attributes, too. It is its own ``config``, for ``lambda spec: spec.config.a``."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            if name == "config":
                return self
            raise AttributeError(f"the config has no {name!r}; it has {', '.join(map(str, self))}")
        value = self[name]
        return _Attributes(value) if isinstance(value, dict) else value


# -- configs ---------------------------------------------------------------------------------------------------------


def _is_grid(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {_GRID}


def _copied(value: Any) -> Any:
    """Copy dicts and lists, but not what is in them."""
    if isinstance(value, dict) and not _is_grid(value):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if type(value) is list else value


def _open_values(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the grids and domains below a value, each with its path."""
    if isinstance(value, Domain) or _is_grid(value):
        yield path, value
        return
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _open_values(item, (*path, key))


def _set(config: Any, path: Path, value: Any) -> None:
    for key in path[:-1]:
        config = config[key]
    config[path[-1]] = value


def configs(space: Mapping[str, Any], seed: Any) -> Iterator[dict[str, Any]]:
    """Yield one sample: a config for every combination of the grids. The first grid by name varies fastest.

    seed: a generator of numpy, see :func:`generator_of`.
    """
    found = [(path, value[_GRID]) for path, value in _open_values(dict(space)) if _is_grid(value)]
    grids = sorted(found, key=lambda pair: tuple(map(str, pair[0])), reverse=True)
    for values in itertools.product(*(values for _, values in grids)):
        config: dict[str, Any] = _copied(dict(space))
        for (path, _), value in zip(grids, values, strict=True):
            _set(config, path, _copied(value))
        drawn = [(path, domain) for path, domain in _open_values(config) if isinstance(domain, Domain)]
        for path, domain in sorted(drawn, key=lambda pair: pair[1].comes_last):
            _set(config, path, domain.sample(config, random_state=seed))
        yield config
