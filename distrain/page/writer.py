"""Write the page of a run. Runs in: anywhere."""

from __future__ import annotations

import base64
import hashlib
import json
from contextlib import nullcontext
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from distrain.errors import StorageError
from distrain.page.data import page_data
from distrain.storage.files import write_atomically, write_output
from distrain.storage.ownership import pinned
from distrain.storage.paths import RunPaths
from distrain.system.remote_path import RemotePath, locate

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping


def write_page(run: str | os.PathLike[str] | RemotePath, output: str | os.PathLike[str] | None = None) -> Path:
    """Write the page of a run, finished or not, and return its path. It is one HTML file that needs no network.

    run: the run directory, a path or URL. output: ``page.html`` in the run directory by default. A run on remote
    storage needs it.

    Raises StorageError if there is no run, or the page cannot be written.

    ::

        path = distrain.page.write_page(result.path)
    """
    try:
        root = run if isinstance(run, RemotePath) else locate(run)
        if output is None and isinstance(root, RemotePath):
            raise StorageError(f"{root} is on remote storage: name the file for its page (output=, -o)")
        page = RunPaths(Path(str(root))).page if output is None else Path(output).expanduser()
        with pinned(root) if isinstance(root, Path) else nullcontext(root) as folder:  # a swap has no effect
            text = document(page_data(folder, root)).encode("utf-8", "replace")
            if output is None:
                write_atomically(Path(str(folder), page.name), text, sync=False)
            else:
                write_output(page, text)
    except OSError as error:
        raise StorageError(f"cannot write the page of {run}: {error}") from error
    return page


def document(data: dict[str, Any]) -> str:
    """Return the HTML of the page that shows this data (:func:`~distrain.page.data.page_data`)."""
    return fill("page", data, title=escape(data["name"]), verdict=escape(data["verdict"]))


def fill(name: str, data: Mapping[str, Any], **texts: str) -> str:
    """Return the HTML of a template with its style, scripts and data, and uPlot. It may load nothing else.

    name: of the package, and of the template, style and script in it. texts: HTML for the template.
    """
    own, shared = files(f"distrain.{name}"), files("distrain.page")
    uplot = shared / "uplot"
    parts = {
        "library_style": (uplot / "uPlot.min.css").read_text(),
        "style": (own / f"{name}.css").read_text(),
        "library": (uplot / "uPlot.iife.min.js").read_text(),
        "script": (shared / "shared.js").read_text() + (own / f"{name}.js").read_text(),
    }
    return Template((own / f"{name}.html").read_text()).substitute(
        parts,
        styles=" ".join(_hash(parts[name]) for name in ("library_style", "style")),
        scripts=" ".join(_hash(parts[name]) for name in ("library", "script")),
        licence=(uplot / "LICENSE").read_text(),
        data=json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        **texts,
    )


def _hash(text: str) -> str:
    """Return the source of a Content-Security-Policy that allows exactly this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
