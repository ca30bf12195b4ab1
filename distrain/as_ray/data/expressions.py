"""``Dataset.filter(expr=...)``: conditions as text, or as expressions of pyarrow. Runs in: anywhere."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Any

from distrain.data.blocks import row_count, to_table
from distrain.errors import DataError
from distrain.system.imports import require

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrain.data.blocks import Block

_ADVICE = "write comparisons of columns as in \"x > 1 and y in ['a', 'b']\", or filter(lambda row: row['x'] > 1)"


def kept_by(condition: Any) -> Callable[[Block], Block]:
    """Return a function that keeps the rows of a block for which a condition is true.

    Missing values meet no comparison.

    condition: an expression of ``pyarrow.compute``; or text for ``DataFrame.eval()`` of pandas, such as
        ``"x > 1 and (`a name`.notna() or z not in [2, 3])"``. Raises ValueError for others.
    """
    if isinstance(condition, str):
        try:
            ast.parse(re.sub("`[^`]*`", "name", condition), mode="eval")
        except SyntaxError as error:
            raise ValueError(f"filter(expr={condition!r}) cannot be read: {error}; {_ADVICE}") from error
    elif not isinstance(condition, require("pyarrow.compute").Expression):
        raise ValueError(f"filter(expr=...) takes text or an expression of pyarrow.compute, got {condition!r}")

    def kept(block: Block) -> Block:
        table, chosen = to_table(block), condition
        try:
            if isinstance(condition, str):
                frame = table.to_pandas(types_mapper=require("pandas").ArrowDtype)  # which has Arrow's missing values
                chosen = require("pyarrow").array(frame.eval(condition, engine="python"))
            return table.filter(chosen)
        except Exception as error:
            raise DataError(f"filter(expr={condition!r}): {error}; {_ADVICE}") from error

    return lambda block: kept(block) if row_count(block) else block
