"""The search spaces of Ray Tune, and the configs that grid search and random search take from them. Runs in: anywhere.

With the same seed, the values are those that Ray 2.60 draws, as both ask numpy the same questions in the same order.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from distrain.system.imports import require

Path = tuple[Any, ...]
"""Keys and indices that lead to a value in nested dicts and lists."""


class Domain:
    """Values from which one is drawn.

    text: how a program writes it.
    draw: takes a random generator of numpy, and the config as far as it is drawn.
    """

    def __init__(self, text: str, draw: Callable[[Any, Any], Any]) -> None:
        self._text = text
        self._draw = draw

    def sample(self, config: Any = None, size: int = 1, random_state: Any = None) -> Any:
        """Return one value, or a list of several."""
        generator = generator_of(random_state)
        values = [self._draw(generator, config) for _ in range(size)]
        return values[0] if size == 1 else values

    def __repr__(self) -> str:
        return self._text


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
    numpy = require("numpy")
    return float(numpy.exp(_real(generator, numpy.log(lower), numpy.log(upper))))


def _log_integer(generator: Any, lower: int, upper: int) -> int:
    return math.floor(_log_real(generator, lower, upper))


def _steps(bound: float, q: float, rounded: Callable[[float], int]) -> int:
    """Return the number of steps of size q up to a bound."""
    nearest = round(bound / q)
    return nearest if math.isclose(bound / q, nearest) else rounded(bound / q)


def _stepped_real(draw: Callable[[Any, float, float], float], lower: float, upper: float, q: float) -> Any:
    bounds = _steps(lower, q, math.ceil) * q, _steps(upper, q, math.floor) * q
    return lambda generator, _: float(require("numpy").round(draw(generator, *bounds) / q) * q)


def _stepped_integer(draw: Callable[[Any, int, int], int], lower: int, upper: int, q: int) -> Any:
    low, high = _steps(lower, q, math.ceil), _steps(upper, q, math.floor)
    if high < low:
        raise ValueError(f"there is no multiple of {q} between {lower} and {upper}")
    return lambda generator, _: draw(generator, low, high + (q != 1)) * q


def _check_positive(kind: str, lower: float, upper: float) -> None:
    if not 0 < lower <= upper < math.inf:
        raise ValueError(
            f"{kind}({lower}, {upper}): both bounds must be above 0, and finite; give the values themselves, not their "
            "logarithms"
        )


def _check_steps(kind: str, lower: float, upper: float, q: float) -> None:
    for bound in (lower, upper):
        if not math.isclose(bound / q, round(bound / q)):
            raise ValueError(f"{kind}({lower}, {upper}, {q}): {bound} is not divisible by {q}")


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
    return Domain(f"uniform({lower}, {upper})", lambda generator, _: _real(generator, lower, upper))


def quniform(lower: float, upper: float, q: float) -> Domain:
    """Return a domain of floats that are multiples of q."""
    _check_steps("quniform", lower, upper, q)
    return Domain(f"quniform({lower}, {upper}, {q})", _stepped_real(_real, lower, upper, q))


def loguniform(lower: float, upper: float, base: float = 10) -> Domain:
    """Return a domain of floats whose logarithms are uniform."""
    _check_positive("loguniform", lower, upper)
    return Domain(f"loguniform({lower}, {upper})", lambda generator, _: _log_real(generator, lower, upper))


def qloguniform(lower: float, upper: float, q: float, base: float = 10) -> Domain:
    """Return a domain of multiples of q whose logarithms are uniform."""
    _check_positive("qloguniform", lower, upper)
    _check_steps("qloguniform", lower, upper, q)
    return Domain(f"qloguniform({lower}, {upper}, {q})", _stepped_real(_log_real, lower, upper, q))


def randint(lower: int, upper: int) -> Domain:
    """Return a domain of integers, without the upper bound."""
    return Domain(f"randint({lower}, {upper})", lambda generator, _: _integer(generator, lower, upper))


def qrandint(lower: int, upper: int, q: int = 1) -> Domain:
    """Return a domain of integers that are multiples of q, with the upper bound unless q is 1."""
    return Domain(f"qrandint({lower}, {upper}, {q})", _stepped_integer(_integer, lower, upper, q))


def lograndint(lower: int, upper: int, base: float = 10) -> Domain:
    """Return a domain of integers whose logarithms are uniform, without the upper bound."""
    _check_positive("lograndint", lower, upper)
    return Domain(f"lograndint({lower}, {upper})", lambda generator, _: _log_integer(generator, lower, upper))


def qlograndint(lower: int, upper: int, q: int, base: float = 10) -> Domain:
    """Return a domain of multiples of q whose logarithms are uniform."""
    _check_positive("qlograndint", lower, upper)
    return Domain(f"qlograndint({lower}, {upper}, {q})", _stepped_integer(_log_integer, lower, upper, q))


def randn(mean: float = 0.0, sd: float = 1.0) -> Domain:
    """Return a domain of normally distributed floats."""
    return Domain(f"randn({mean}, {sd})", lambda generator, _: float(generator.normal(mean, sd, size=1)[0]))


def qrandn(mean: float, sd: float, q: float) -> Domain:
    """Return a domain of normally distributed floats that are rounded to multiples of q."""
    return Domain(
        f"qrandn({mean}, {sd}, {q})",
        lambda generator, _: float(require("numpy").round(generator.normal(mean, sd, size=1)[0] / q) * q),
    )


def sample_from(func: Callable[..., Any]) -> Domain:
    """Return a domain of what a function returns. It may take the config, as far as it is drawn."""
    takes_config = bool(inspect.signature(func).parameters)

    def draw(_: Any, config: Any) -> Any:
        if not takes_config:
            return func()
        try:
            return func(config)
        except (AttributeError, KeyError):  # a function of earlier versions: `lambda spec: spec.config.a`
            return func(_Drawn({"config": config}))

    return Domain(f"sample_from({getattr(func, '__name__', func)})", draw)


# -- configs ---------------------------------------------------------------------------------------------------------

_GRID = "grid_search"


class _NotYetError(Exception):
    """A function of :func:`sample_from` needs a value that is not drawn yet."""


class _Drawn(dict[str, Any]):
    """A config that raises :class:`_NotYetError` for values that are not drawn yet. Keys are attributes, too."""

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if _is_open(value):
            raise _NotYetError(key)
        return _Drawn(value) if isinstance(value, dict) else value

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def _is_grid(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {_GRID}


def _is_open(value: Any) -> bool:
    return isinstance(value, Domain) or _is_grid(value)


def _copied(value: Any) -> Any:
    """Copy dicts and lists, but not what is in them. Tuples with domains become lists, and tuples again at the end."""
    if isinstance(value, dict) and not _is_grid(value):
        return {key: _copied(item) for key, item in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value


def _open_values(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the grids and domains below a value, each with its path."""
    if _is_open(value):
        yield path, value
        return
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, item in items:
        yield from _open_values(item, (*path, key))


def _with(config: Any, path: Path, value: Any) -> Any:
    """Return the config with another value at a path."""
    if not path:
        return value
    if isinstance(config, tuple):
        return tuple(_with(item, path[1:], value) if i == path[0] else item for i, item in enumerate(config))
    config[path[0]] = _with(config[path[0]], path[1:], value)
    return config


def configs(space: Mapping[str, Any], seed: Any, *, constant_grid_search: bool = False) -> Iterator[dict[str, Any]]:
    """Yield one sample: a config for every combination of the grids. The first grid by name varies fastest.

    seed: a generator of numpy, see :func:`generator_of`.
    constant_grid_search: draw the domains once for all combinations.
    """
    plain: dict[str, Any] = _copied(dict(space))
    if constant_grid_search:
        plain = _drawn(plain, seed)
    found = [(path, value[_GRID]) for path, value in _open_values(plain) if _is_grid(value)]
    grids = sorted(found, key=lambda pair: tuple(map(str, pair[0])), reverse=True)
    for values in itertools.product(*(values for _, values in grids)):
        config = _copied(plain)
        for (path, _), value in zip(grids, values, strict=True):
            config = _with(config, path, copy.copy(value) if isinstance(value, dict) else value)
        config = _drawn(config, seed)
        if next(_open_values(config), None) is None:
            yield config
        else:  # a value was itself a space
            yield from configs(config, seed)


def _drawn(config: dict[str, Any], generator: Any) -> dict[str, Any]:
    """Draw a value of every domain, those last that depend on others. Raises ValueError if they depend in a circle."""
    waiting = [(path, value) for path, value in _open_values(config) if isinstance(value, Domain)]
    while waiting:
        later: list[tuple[Path, Domain, str]] = []
        for path, domain in waiting:
            try:
                config = _with(config, path, domain.sample(_Drawn(config), random_state=generator))
            except _NotYetError as error:
                later.append((path, domain, str(error)))
        if len(later) == len(waiting):
            if any(_is_grid(value) for _, value in _open_values(config)):
                return config  # they may depend on the grids, whose values come later
            path, domain, missing = later[0]
            raise ValueError(f"{'/'.join(map(str, path))}: {domain} needs {missing}, which is never drawn")
        waiting = [(path, domain) for path, domain, _ in later]
    return config


def updated(space: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the space with some values given, also in nested dicts."""
    new = dict(space)
    for name, value in values.items():
        before = new.get(name)
        both = isinstance(value, Mapping) and isinstance(before, Mapping) and not _is_grid(before)
        new[name] = updated(before, value) if both else value  # type: ignore[arg-type]
    return new


def flat(config: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return the values of nested dicts by names such as ``optimizer/lr``."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        path = f"{above}{name}"
        found |= flat(value, f"{path}/") if isinstance(value, Mapping) and value else {path: value}
    return found
