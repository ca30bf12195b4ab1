"""``Dataset.filter(expr=...)``: conditions as text, or as expressions of pyarrow. Runs in: anywhere."""

from __future__ import annotations

import ast
import operator
from functools import reduce
from typing import TYPE_CHECKING, Any

from distrain.data.blocks import row_count, to_table
from distrain.system.imports import require

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrain.data.blocks import Block

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
    ast.In: lambda value, values: value.isin(values), ast.NotIn: lambda value, values: ~value.isin(values),
}  # fmt: skip


def kept_by(condition: Any) -> Callable[[Block], Block]:
    """Return a function that keeps the rows of a block for which a condition is true.

    condition: an expression of ``pyarrow.compute``; or text such as ``"x > 1 and (is_valid(y) or not z in [2, 3])"``,
        with names of columns and functions of ``pyarrow.compute``. Raises ValueError for others.
    """
    advice = "write comparisons of columns as in \"x > 1 and y in ['a', 'b']\", or filter(lambda row: row['x'] > 1)"
    try:
        expression = _parsed(ast.parse(condition, mode="eval").body) if isinstance(condition, str) else condition
    except (SyntaxError, ValueError, LookupError, AttributeError) as error:
        raise ValueError(f"filter(expr={condition!r}) cannot be read: {error}; {advice}") from error
    if not isinstance(expression, require("pyarrow.compute").Expression):
        raise ValueError(
            f"filter(expr=...) takes text or an expression of pyarrow.compute, got {condition!r}; {advice}"
        )
    return lambda block: to_table(block).filter(expression) if row_count(block) else block


def _parsed(node: ast.AST) -> Any:
    """Return pyarrow's expression of a part of the text, or a plain value."""
    compute = require("pyarrow.compute")
    match node:
        case ast.Name() | ast.Attribute():  # the name of a column may have dots
            return compute.field(ast.unparse(node))
        case ast.Call(func=ast.Name(id=name), args=args):
            return getattr(compute, name)(*map(_parsed, args))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return ~_parsed(operand)
        case ast.BoolOp(op=op, values=values):
            return reduce(operator.and_ if isinstance(op, ast.And) else operator.or_, map(_parsed, values))
        case ast.Compare(left=left, ops=ops, comparators=others):
            values = [_parsed(side) for side in (left, *others)]
            pairs = zip(ops, values, values[1:], strict=False)
            return reduce(operator.and_, (_COMPARISONS[type(op)](first, second) for op, first, second in pairs))
    return ast.literal_eval(node)
