"""Links of a page to files outside of the site lead to the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sphinx.util import logging

if TYPE_CHECKING:
    from sphinx.application import Sphinx

REPOSITORY = "https://github.com/distrain/distrain/blob/main/"
ROOT = Path(__file__).resolve().parent.parent.parent
INTERNALS = ROOT / "docs" / "internals"
_LINK = re.compile(r"\]\(((?:\.\./|internals/)[^)#\s]+)")

logger = logging.getLogger(__name__)


def lead_to_the_repository(app: Sphinx, page: str, source: list[str]) -> None:
    folder = Path(app.env.doc2path(page)).parent

    def link(match: re.Match[str]) -> str:
        target = Path(folder, match[1]).resolve()
        if target.is_relative_to(ROOT / "docs") and not target.is_relative_to(INTERNALS):
            return match[0]
        if not target.exists():
            logger.warning("there is no file %s", match[1], location=page)
        return f"]({REPOSITORY}{target.relative_to(ROOT)}"

    source[0] = _LINK.sub(link, source[0])


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", lead_to_the_repository)
    return {"parallel_read_safe": True}
