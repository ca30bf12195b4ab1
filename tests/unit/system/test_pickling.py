"""Pickling by value, with every version of cloudpickle."""

from __future__ import annotations

import pickle
import types
from typing import TYPE_CHECKING

import torch

from distrain.system.pickling import pickled

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = """
class Model:
    def forward(self):
        return [(lambda: 1)() for _ in range(2)]

def train():
    def inner():
        return Model().forward()
    return inner()
"""


def codes_within(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_within(constant)


def test_functions_keep_the_names_of_their_files() -> None:
    """Also functions within functions, and methods. cloudpickle 3.1.3 and later would replace them."""
    space: dict[str, types.FunctionType] = {"__name__": "__main__"}  # type: ignore[dict-item]
    exec(compile(SOURCE, "/home/me/train.py", "exec"), space)
    train = pickle.loads(pickled(space["train"]))
    assert train() == [1, 1]
    method = train.__globals__["Model"].forward
    codes = [*codes_within(train.__code__), *codes_within(method.__code__)]
    assert len(codes) >= 4
    assert {code.co_filename for code in codes} == {"/home/me/train.py"}


def test_by_name_go_functions_and_classes_and_tensors_of_all_dtypes() -> None:
    value = [codes_within, torch.ones(3).to(torch.float8_e5m2)]
    body = pickled(value, by_value=False)
    function, tensor = pickle.loads(body)
    assert function is codes_within
    assert b"co_consts" not in body
    assert tensor.dtype is torch.float8_e5m2
