"""The page in a real browser, if this machine has Chromium."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from distrain.page import write_page
from tests.browser import CHROMIUM, Browser

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.page.conftest import Run

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")

HIDDEN = """
[...document.querySelectorAll("section, section h2, .bar, table, figure, canvas")].filter((one) => {
  const { width, height } = one.getBoundingClientRect();
  return (width < 20 || height < 2) && !one.closest("details:not([open])");
}).map((one) => one.outerHTML.slice(0, 100))
"""
UNNAMED = """
[...document.querySelectorAll(".plot, nav, section, figure, button, .scroll")].filter((one) =>
  !(one.getAttribute("aria-label") || one.getAttribute("aria-labelledby") || one.textContent.trim())
).length
"""
INK = "getComputedStyle(document.querySelector('h1')).color"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def test_everything_is_visible_on_phones_and_desktops_in_both_schemes(browser: Browser, restarted: Run) -> None:
    page = write_page(restarted.root)
    inks = set()
    for width in (360, 1280):
        for scheme in ("light", "dark"):
            browser.show(page, width=width, scheme=scheme)
            assert browser.evaluate(HIDDEN) == []
            assert browser.evaluate(UNNAMED) == 0
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            assert browser.evaluate("document.querySelectorAll('section').length") == 7
            assert browser.evaluate("document.querySelectorAll('canvas').length") == 3
            inks.add(browser.evaluate(INK))
            assert browser.complaints == []
    assert len(inks) == 2


def test_the_policy_of_the_page_stops_what_is_not_ours(browser: Browser, restarted: Run) -> None:
    """Were a text not escaped, it could still neither run nor reach the network."""
    page = write_page(restarted.root)
    text = page.read_text()
    evil = "<script>window.evil = 1</script><img src='http://127.0.0.1:9/x' onerror='window.evil = 2'>"
    page.write_text(text.replace("<main>", f"<main>{evil}"))
    browser.show(page, width=800)
    assert browser.evaluate("window.evil === undefined")
    assert any("Content Security Policy" in complaint for complaint in browser.complaints)
