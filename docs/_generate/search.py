"""The search shows excerpts where there is no server, too.

Sphinx's search fetches each page that it has found, which browsers forbid in pages that were opened as files. So the
texts of all pages are in a script, and ``fetch()`` of the search page answers from there.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

SCRIPT = "page_texts.js"
_UNSHOWN = re.compile(r'<a class="headerlink".*?</a>|<(?!/?(?:section|dt)\b)[^>]*>', re.DOTALL)
_FETCH = """
const online = window.fetch;
window.fetch = (url, ...rest) => {
  const text = texts[String(url).replace(/^\\.\\//, "").replace(/#.*/, "")];
  return text && location.protocol === "file:" ? Promise.resolve(new Response(text)) : online(url, ...rest);
};
"""


def collect(app: Sphinx, page: str, _template: str, context: dict[str, Any], doctree: object) -> None:
    """Keep the text of a page with the sections to which the search leads, and give the search page the script."""
    if doctree:
        text = _UNSHOWN.sub("", context["body"])
        app.env.temp_data.setdefault(SCRIPT, {})[f"{page}.html"] = f'<div role="main">{text}</div>'
    elif page == "search":
        app.add_js_file(SCRIPT)


def write(app: Sphinx, error: Exception | None) -> None:
    if not error:
        texts = json.dumps(app.env.temp_data.get(SCRIPT, {}))
        Path(app.outdir, "_static", SCRIPT).write_text(f"{{\nconst texts = {texts};{_FETCH}}}\n")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("html-page-context", collect)
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": False}
