"""The texts of the checks of arguments: the argument, what it must be, and what was given."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from distrain.system.arguments import check_choice, check_int, check_seconds, check_type

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass
class Config:
    steps: int = 3
    name: object = None


@pytest.mark.parametrize(
    ("check", "value", "options", "text"),
    [
        (check_type, 3, {"kind": str}, "x must be a str, got 3 (int)"),
        (check_type, [], {"kind": Mapping, "optional": True}, "x must be a dict or None, got [] (list)"),
        (check_type, 3, {"kind": (str, os.PathLike), "allowed": "a path"}, "x must be a path, got 3 (int)"),
        (check_type, "x" * 99, {"kind": int, "allowed": "an int"}, f"x must be an int, got '{'x' * 79} (str)"),
        (check_int, 0, {"minimum": 1, "optional": True}, "x must be an int of at least 1 or None, got 0 (int)"),
        (check_seconds, math.nan, {}, "x must be 0 or more seconds, got nan (float)"),
        (check_seconds, 0.5, {"minimum": 1.0}, "x must be 1 or more seconds, got 0.5 (float)"),
        (check_seconds, math.inf, {"above_zero": True}, "x must be finite and more than 0 seconds, got inf (float)"),
        (check_choice, "mid", {"choices": ("min", "max")}, "x must be one of 'min', 'max', got 'mid' (str)"),
    ],
)
def test_the_text_names_the_argument_the_rule_and_the_value(
    check: Callable[..., None], value: object, options: dict[str, Any], text: str
) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        check("x", value, **options)
    assert str(raised.value) == text
