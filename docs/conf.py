"""The settings of Sphinx, which builds the documentation site; scripts/docs runs it."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "_generate")]

from sphinx.ext.autodoc.mock import MockFinder  # noqa: E402

from distrain.system import __version__  # noqa: E402

project = "distrain"
author = "the authors of distrain"
copyright = author
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "commands",
    "docstrings",
    "links",
    "llms",
    "search",
]
exclude_patterns = ["_generate", "internals"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

# Frameworks are replaced, so that the build takes seconds and needs none of them. autodoc_mock_imports would replace
# them only while a module is imported, and would import them for the signatures.
FRAMEWORKS = "accelerate jax keras lightning pytorch_lightning tensorflow tf_keras torch transformers xgboost"
sys.meta_path.insert(0, MockFinder(FRAMEWORKS.split()))
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
maximum_signature_line_length = 88

highlight_language = "text"
smartquotes_action = "D"  # dashes; quotes stay as they are typed
copybutton_exclude = ".linenos, .gp, .go"
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True

html_theme = "furo"
html_title = f"distrain {version}"
html_copy_source = False
html_static_path = ["_generate/static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {
    "source_repository": "https://github.com/distrain/distrain",
    "source_branch": "main",
    "source_directory": "docs/",
}
