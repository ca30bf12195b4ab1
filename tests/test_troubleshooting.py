"""docs/troubleshooting.md has an entry for every error, and docs/messages.md those about arguments."""

from __future__ import annotations

import re

import pytest

from tests.error_texts import (
    MESSAGES,
    PAGE,
    covers,
    entries_of,
    errors,
    fixed_parts,
    keys_of,
    messages_page,
    missing,
    texts,
    texts_of,
)

HELP = """\
docs/troubleshooting.md has no entry for these texts:

{texts}

Add a part of each as code to the line "Also: `…`" of the entry that explains it, or write a new entry:

    ### `a part of the text, with … for what varies`

    What it means, what the causes are, and what to do.
"""


def test_every_error_has_an_entry() -> None:
    found = missing(keys_of(PAGE.read_text()), errors())
    assert not found, HELP.format(texts="\n".join(f"{text.place}: {text.beginning}" for text in found))


def test_every_entry_is_about_an_error_of_the_source() -> None:
    known = [text.text for text in texts()]
    stale = [key for key in keys_of(PAGE.read_text()) if not any(covers(key, text) for text in known)]
    assert not stale, f"docs/troubleshooting.md: no text of distrain has these parts any more: {stale}"


def test_a_key_is_long_enough_to_mean_one_trouble() -> None:
    """Short keys would cover texts that they do not explain."""
    vague = [key for key in keys_of(PAGE.read_text()) if sum(map(len, fixed_parts(key))) < 11 or count(key) > 10]
    assert not vague, f"docs/troubleshooting.md: name more of the text: {vague}"


def count(key: str) -> int:
    return sum(covers(key, text.text) for text in errors())


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ('raise StorageError(f"the moon hides {path}")', "the moon hides …"),
        ('error = LaunchError("there is no moon") if far else None', "there is no moon"),
        ('raise Eclipse("the moon is hidden")', "the moon is hidden"),
        ('raise LaunchError(explain(name, why="the sun is not up"))', "the sun is not up"),
    ],
)
def test_a_new_error_is_found(source: str, text: str) -> None:
    assert [found.text for found in missing(keys_of(PAGE.read_text()), texts_of(source))] == [text]


@pytest.mark.parametrize(
    "source",
    [
        'parser.add_argument("--moon", help="the moon to fly to")',
        'say(f"flying to the moon in {seconds} s")',
        'raise ValueError("moon must be an int of at least 1")',
        'parser.error(f"there is no option --moon {moon}")',
    ],
)
def test_what_is_no_error_needs_no_entry(source: str) -> None:
    assert missing([], texts_of(source)) == []


def test_the_page_of_messages_is_current() -> None:
    assert MESSAGES.read_text() == messages_page(), "run scripts/list_messages"


def test_headings_are_unique_and_links_lead_somewhere() -> None:
    page = PAGE.read_text()
    headings = re.findall(r"^### .+", page, flags=re.MULTILINE)
    assert len(headings) == len(set(headings)) == len(entries_of(page))
    for file in set(re.findall(r"\]\(([\w/]+\.md)", page)):
        assert (PAGE.parent / file).exists(), file
