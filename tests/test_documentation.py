"""The documentation site builds without warnings, has every public name, and its code runs."""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import distrain
from tests.browser import CHROMIUM, Browser
from tests.conftest import wait_until
from tests.docstring_names import public_names
from tests.documentation import ROOT, Block, Reader, blocks_of, pages, words

BLOCKS = {str(page.relative_to(ROOT)): blocks_of(page) for page in pages()}
WITH_CODE = [name for name, blocks in BLOCKS.items() if any(block.runs or block.key == "cell" for block in blocks)]
FROM_THE_NETWORK = re.compile(
    r"<(?:script|img|iframe)[^>]* src=\"(?:https?:)?//|<link [^>]*href=\"(?:https?:)?//|@import|url\((?:https?:)?//"
)
MOST_WORDS = 27_500
"""On the site. Nobody reads more."""
EXCERPT = "(document.querySelector('#search-results .context')?.textContent ?? '').toLowerCase()"


def test_the_site_is_short() -> None:
    counts = words()
    assert sum(counts.values()) - counts["README.md"] <= MOST_WORDS, "scripts/count_words shows the pages"


@pytest.mark.parametrize("folder", [".", "docs/internals"])
def test_links_of_pages_outside_of_the_site_lead_to_files(folder: str) -> None:
    for page in (ROOT / folder).glob("*.md"):
        links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
        assert [link for link in links if not (page.parent / link).exists()] == [], page


@pytest.mark.sample(1, of="the whole documentation")
def test_the_site_builds_without_warnings_and_needs_no_network(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "sphinx", "-qW", "--keep-going", "-d", str(tmp_path / "cache")]
    done = subprocess.run([*build, str(ROOT / "docs"), str(tmp_path / "site")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    files = [*(tmp_path / "site").rglob("*.html"), *(tmp_path / "site").rglob("*.css")]
    assert len(files) > len(BLOCKS)
    assert not [file for file in files if FROM_THE_NETWORK.search(file.read_text())]
    title, *listed = filter(None, (tmp_path / "site" / "llms.txt").read_text().splitlines())
    linked = [re.search(r"\((.*?)\): \w", line)[1] for line in listed if line.startswith("- ")]  # type: ignore[index]
    assert linked[:3] == ["start.html", "your_script.html", "tutorials/plain_loop.html"]  # in reading order
    assert title == "# distrain"
    names = {
        str(page.relative_to(ROOT / "docs").with_suffix(".html")) for page in pages() if "internals" not in page.parts
    }
    assert sorted(linked) == sorted(names - {"index.html"})
    if CHROMIUM:
        search(tmp_path)


def search(folder: Path) -> None:
    """Search the site without a server: the results have excerpts."""
    browser = Browser(folder / "profile")
    try:
        browser.show(folder / "site" / "search.html", width=1000)
        browser.evaluate("location.search = '?q=checkpoint'")
        wait_until(lambda: "checkpoint" in browser.evaluate(EXCERPT), 30.0, "an excerpt")
    finally:
        browser.close()


def test_every_public_name_is_in_the_reference() -> None:
    """An older name for the same thing need not be there."""
    text = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    there = set(re.findall(r"^\.\. auto\w+:: (\S+)", text, re.MULTILINE))
    described = [value for name, value in public_names().items() if name in there]
    missing = {name for name, value in public_names().items() if value not in described}
    assert missing == {"distrain.__version__", "distrain.lightning.RayLightningEnvironment"}


@pytest.mark.parametrize("name", [name for name in distrain.__all__ if name.endswith("Config")])
def test_every_field_of_a_config_is_described(name: str) -> None:
    config = getattr(distrain, name)
    described = re.findall(r"^(\w+(?:, \w+)*): ", inspect.getdoc(config) or "", re.MULTILINE)
    fields = {field.name for field in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else set()
    assert fields <= set(", ".join(described).split(", "))


def test_a_block_that_does_not_run_says_why() -> None:
    blocks = [block for page in BLOCKS.values() for block in page]
    assert not [block.place for block in blocks if block.key == "not run" and len(block.value.split()) < 2]


@pytest.mark.sample(1, of="pages of the documentation")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", WITH_CODE)
def test_the_code_of_a_page_runs(page: str) -> None:
    follow(BLOCKS[page])


def follow(blocks: list[Block]) -> None:
    with tempfile.TemporaryDirectory() as home:  # a short path, as that of a real home: lines are as long as theirs
        folder = Path(home, "project")
        folder.mkdir()
        Reader.of_this_machine(Path(home)).follows(blocks, folder)
