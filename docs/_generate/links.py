"""Links of a page to files outside of docs/ lead to the repository."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

REPOSITORY = "https://github.com/distrain/distrain/blob/main/"
_OUTSIDE = re.compile(r"\]\((?:\.\./)+(?=(?:examples|scripts|tests|distrain)/|[A-Z]+\b)")


def lead_to_the_repository(_app: Sphinx, _page: str, source: list[str]) -> None:
    source[0] = _OUTSIDE.sub(f"]({REPOSITORY}", source[0])


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", lead_to_the_repository)
    return {"parallel_read_safe": True}
