"""Checks of the arguments that users give, and the names that texts have for these. Runs in: anywhere.

Each check raises TypeError or ValueError. The text names the argument, what it must be, and what was given.
"""

from __future__ import annotations

import contextlib
import math
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

_NAMES_OF_TYPES = {bool: "True or False", dict: "a dict", Mapping: "a dict", str: "a str", Callable: "a function"}


def check_fields(config: object, check: Callable[..., None], *names: str, **options: Any) -> None:
    """Apply a check to attributes of a config, labelled ``ClassName.attribute``."""
    for name in names:
        check(f"{type(config).__name__}.{name}", getattr(config, name), **options)


def check_type(label: str, value: object, kind: Any, allowed: str = "", *, optional: bool = False) -> None:
    """Raise TypeError unless the value is an instance of ``kind``.

    allowed: what the text calls ``kind``; by default it follows from its name.
    optional: None is allowed, too.
    """
    if not (isinstance(value, kind) or (optional and value is None)):
        allowed = allowed or _NAMES_OF_TYPES.get(kind) or _public_name(kind)
        raise TypeError(_text(label, allowed, value, optional=optional))


def _public_name(kind: type) -> str:
    """Return the name under which users import a class: Ray has classes of the same names."""
    package = re.sub(r"(\.api|\.storage)?\.\w+$", "", kind.__module__)
    return f"a {package}.{kind.__name__}" if package.startswith("distrain") else f"a {kind.__name__}"


def check_int(label: str, value: object, *, minimum: int, optional: bool = False) -> None:
    """Raise TypeError or ValueError unless the value is an int of at least ``minimum``."""
    if optional and value is None:
        return
    allowed = f"an int of at least {minimum}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(_text(label, allowed, value, optional=optional))
    if value < minimum:
        raise ValueError(_text(label, allowed, value, optional=optional))


def check_seconds(
    label: str, value: object, *, minimum: float = 0.0, above_zero: bool = False, optional: bool = False
) -> None:
    """Raise TypeError or ValueError unless the value is a number of seconds.

    above_zero: neither zero nor infinity is allowed.
    """
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(_text(label, "a number of seconds", value, optional=optional))
    if above_zero and not 0 < value < math.inf:
        raise ValueError(_text(label, "finite and more than 0 seconds", value, optional=optional))
    if not value >= minimum:
        raise ValueError(_text(label, f"{minimum:g} or more seconds", value, optional=optional))


def check_choice(label: str, value: object, choices: Sequence[str]) -> None:
    """Raise ValueError unless the value is one of ``choices``."""
    if value not in choices:
        raise ValueError(_text(label, f"one of {', '.join(map(repr, choices))}", value))


def check_ranks(label: str, value: object, allowed: str) -> None:
    """Raise TypeError or ValueError unless the value is a collection of ranks. ``allowed``: what the text calls it."""
    if isinstance(value, str) or not isinstance(value, Collection):
        raise TypeError(_text(label, allowed, value, optional=True))
    for rank in value:
        check_int(label, rank, minimum=0)


def _text(label: str, allowed: str, value: object, *, optional: bool = False) -> str:
    return f"{label} must be {allowed}{' or None' * optional}, got {value!r:.80} ({type(value).__name__})"


# -- names in texts --------------------------------------------------------------------------------------------------

_VALUE = r"""(\.\.\.|\w+|'[^']*'|"[^"]*"|\(\w+, \w+\))"""
_OF_CONFIG = rf"\b(\w+Config)(?:: |\.(\w+)|\((\w+)={_VALUE}\))"
"""A field of a config, with or without a value: ``FailureConfig.max_failures``, ``FailureConfig(max_failures=1)``."""
_BARE = rf"(?<![\w./'\"\-])(?<!\w\()(\w+_\w+)(?:={_VALUE})?(?![\w/'\"])"
"""A field without its config. It has an underscore: other names are words, too. It is not an argument of a call."""
_SETTING = re.compile(f"{_OF_CONFIG}|{_BARE}")
_options: dict[str, str] = {}


@contextlib.contextmanager
def options_named(options: Mapping[str, str]) -> Iterator[None]:
    """Have :func:`in_users_words` name options of the command line within the block.

    options: the option of each field, such as ``--hosts-wait`` for ``FailureConfig.host_wait_s``.
    """
    _options.update(options)
    try:
        yield
    finally:
        _options.clear()


def in_users_words(text: str, *, bare_names: bool = True) -> str:
    """Return a text of distrain that names settings as the user gives them: as fields, or as options.

    bare_names: also replace fields without their config. False: the text may quote a rank, whose words stay.

    >>> with options_named({"FailureConfig.host_wait_s": "--hosts-wait"}):
    ...     in_users_words("raise FailureConfig.host_wait_s, such as FailureConfig(host_wait_s=90)")
    'raise --hosts-wait, such as --hosts-wait 90'
    """
    if not _options:
        return text
    configs = {field.partition(".")[0] for field in _options}
    bare = {field.partition(".")[2]: option for field, option in _options.items() if bare_names}

    def named(match: re.Match[str]) -> str:
        config, attribute, keyword, value, name, its_value = match.groups()
        field = attribute or keyword
        if config in configs and not field and bare_names:
            return ""
        option = _options.get(f"{config}.{field}") if config else bare.get(name)
        return match[0] if option is None else _with_value(option, value or its_value)

    return _SETTING.sub(named, text)


def _with_value(option: str, value: str | None) -> str:
    """Return an option with a value of Python as a shell takes it: ``(2, 8)`` is ``2:8``, and ``True`` is left out."""
    if value is None or value in ("True", "False"):
        return option
    if value[0] in "'\"":
        value = shlex.quote(value[1:-1])
    return f"{option} {value.strip('()').replace(', ', ':')}"
