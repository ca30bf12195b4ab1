"""``llms.txt`` in the site: for programs, a link and a sentence for each page, in reading order."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from docutils import nodes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment


def first_sentence(page: nodes.document) -> str:
    """Return what the text of a page, outside of lists and tables, says first."""
    paragraphs = (one for one in page.findall(nodes.paragraph) if isinstance(one.parent, nodes.section))
    texts = (" ".join(one.astext().split()) for one in paragraphs)
    sentences = (text.partition(". ")[0].rstrip(".:") for text in texts if text and not text.startswith("["))
    return next(sentences, "see the page")  # in brackets are notes


def in_order(env: BuildEnvironment, page: str) -> Iterator[str]:
    """Yield a page, and then those below it, as the navigation lists them."""
    yield page
    for below in env.toctree_includes.get(page, ()):
        yield from in_order(env, below)


def write_llms(app: Sphinx, error: Exception | None) -> None:
    if error is not None or app.builder.format != "html":
        return
    env, root = app.env, app.config.root_doc
    lines = [f"# {app.config.project}", "", f"> {first_sentence(env.get_doctree(root))}", ""]
    for page in dict.fromkeys([*in_order(env, root), *sorted(env.found_docs)]):
        if page == root:
            continue
        link = f"[{env.titles[page].astext()}]({app.builder.get_target_uri(page)})"
        lines.append(f"- {link}: {first_sentence(env.get_doctree(page))}")
    Path(app.outdir, "llms.txt").write_text("\n".join([*lines, ""]))


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("build-finished", write_llms)
    return {"parallel_read_safe": True}
