"""The page of a run: one HTML file, made from the files of the run directory, that needs nothing else.

``facts`` reads the files, ``data`` makes one object of what they say, ``page.js`` draws it in the template
``page.html``; ``shared.js`` has what the board's script uses, too. ``distrain show`` writes the same facts as text.

Names are loaded when they are first used. Runs in: anywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distrain.system.imports import lazy_names

if TYPE_CHECKING:
    from distrain.page.writer import write_page as write_page

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
