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
    texts_that_are_no_errors,
)

HELP = """\
docs/troubleshooting.md has no entry for these texts:

{texts}

Add a part of each as code to the line "Also: `…`" of the entry that explains it, or write a new entry:

    ### `a part of the text, with … for what varies`

    What it means, what the causes are, and what to do.

If it is no error, add its beginning (at most 100 characters) as a line to tests/no_errors.txt.
"""


def test_every_error_has_an_entry() -> None:
    found = missing(keys_of(PAGE.read_text()), errors())
    assert not found, HELP.format(texts="\n".join(f"{text.place}: {text.beginning}" for text in found))


def test_every_entry_is_about_an_error_of_the_source() -> None:
    known = [text.text for text in texts()]
    stale = [key for key in keys_of(PAGE.read_text()) if not any(covers(key, text) for text in known)]
    assert not stale, f"docs/troubleshooting.md: no text of distrain has these parts any more: {stale}"
    beginnings = {text.beginning for text in texts()}
    stale = [line for line in texts_that_are_no_errors() if line not in beginnings]
    assert not stale, f"tests/no_errors.txt: no text of distrain begins like this any more: {stale}"


def test_a_key_is_long_enough_to_mean_one_trouble() -> None:
    """Short keys would cover texts that they do not explain."""
    vague = [key for key in keys_of(PAGE.read_text()) if sum(map(len, fixed_parts(key))) < 11 or count(key) > 10]
    assert not vague, f"docs/troubleshooting.md: name more of the text: {vague}"


def count(key: str) -> int:
    return sum(covers(key, text.text) for text in errors())


def test_an_entry_that_is_left_out_is_missed() -> None:
    page = PAGE.read_text()
    for heading in ("### `exited with code", "### `cannot pickle", "### `no virtual environment could be made"):
        [entry] = [entry for title, entry in entries_of(page).items() if title.startswith(heading)]
        assert missing(keys_of(page.replace(entry, "")), errors()), heading


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ('raise StorageError(f"the moon hides {path}")', "the moon hides …"),
        ('raise StorageError(f"the moon {verb} " + "too much of it")', "the moon … too much of it"),
        ('error = LaunchError("no moon") if far else None', "no moon"),
        ('def why(path):\n    """Say it."""\n    return f"{path} is on the moon"', "… is on the moon"),
        ('raise Eclipse("the moon is hidden")', "the moon is hidden"),
        ('raise StorageError("the moon hides {}".format(path))', "the moon hides {}"),
        ('warn("the moon is full")', "the moon is full"),
        ('REASONS = {1: "it waits for the moon"}', "it waits for the moon"),
        ('raise LaunchError(explain(name, why="the sun is not up"))', "the sun is not up"),
    ],
)
def test_a_new_error_is_found(source: str, text: str) -> None:
    assert [found.text for found in missing(keys_of(PAGE.read_text()), texts_of(source))] == [text]


@pytest.mark.parametrize(
    "source",
    [
        'def moon():\n    """Return the moon of this planet."""',
        'parser.add_argument("--moon", help="the moon to fly to")',
        'say(f"flying to the moon in {seconds} s")',
        'raise NotImplementedError("every moon has its own")',
        'raise ValueError("moon must be an int of at least 1")',
        'parser.error(f"there is no option --moon {moon}")',
        'name = "moon base"',
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
