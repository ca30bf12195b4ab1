"""``llms.txt`` in the site: for programs, a link and a sentence for each page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from docutils import nodes

if TYPE_CHECKING:
    from sphinx.application import Sphinx


def first_sentence(page: nodes.document) -> str:
    """Return what the text of a page, outside of lists and tables, says first."""
    paragraphs = (one for one in page.findall(nodes.paragraph) if isinstance(one.parent, nodes.section))
    texts = (" ".join(one.astext().split()) for one in paragraphs)
    sentences = (text.partition(". ")[0].rstrip(".:") for text in texts if text and not text.startswith("["))
    return next(sentences, "see the page")  # in brackets are notes


def write_llms(app: Sphinx, error: Exception | None) -> None:
    if error is not None or app.builder.format != "html":
        return
    env, root = app.env, app.config.root_doc
    lines = [f"# {app.config.project}", "", f"> {first_sentence(env.get_doctree(root))}", ""]
    for page in sorted(env.found_docs - {root}):
        link = f"[{env.titles[page].astext()}]({app.builder.get_target_uri(page)})"
        lines.append(f"- {link}: {first_sentence(env.get_doctree(page))}")
    Path(app.outdir, "llms.txt").write_text("\n".join([*lines, ""]))


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("build-finished", write_llms)
    return {"parallel_read_safe": True}
