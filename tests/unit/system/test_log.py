"""Text from others on a terminal: it prints characters and colours, and does nothing else."""

from __future__ import annotations

import io
import re
import sys
from typing import TYPE_CHECKING, Any

import pyte
from hypothesis import example, given
from hypothesis import strategies as st

from distrain.system.log import say
from distrain.system.output_lines import readable
from distrain.system.text import without_controls

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

_HARMLESS = re.compile(r"(?:[^\x00-\x08\x0b-\x1f\x7f-\x9f]|\x1b\[[0-9;:]*m)*")
_PIECES = st.sampled_from(
    [*"\x00\x07\x08\x0b\x0c\r\x0e\x0f\x18\x1a\x1b\x7f\x84\x8d\x90\x9b\x9c\x9d\t\n[]?>;:#%()PX^_\\012347hJHmrcsdABMxé ",
     "\x1b[", "\x1b]", "\x1b[31m", "\x1b\\", "2J", "0;title\x07", "?1049h", "text"]
)  # fmt: skip
_TEXTS = st.lists(_PIECES, max_size=12).map("".join)


class Actions:
    """Note what a terminal is told to do other than printing characters, colours, tabulators and line ends."""

    def __init__(self) -> None:
        self.others: list[str] = []
        self.drawn = ""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name in ("draw", "select_graphic_rendition", "tab", "linefeed"):
            return self._draw if name == "draw" else lambda *_, **__: None
        return lambda *_, **__: self.others.append(name)

    def _draw(self, text: str, *_: Any) -> None:
        self.drawn += text


def actions_of(text: str) -> Actions:
    """Return what an emulator does with the text and with ``END`` after it."""
    actions = Actions()
    pyte.Stream(actions).feed(text + "END")  # type: ignore[arg-type]
    return actions


def assert_harmless(text: str) -> None:
    actions = actions_of(text)
    assert actions.others == []
    assert actions.drawn.endswith("END"), "no sequence is left open"
    assert _HARMLESS.fullmatch(text)


def test_the_emulator_would_notice() -> None:
    assert actions_of("\x1b[2J").others == ["erase_in_display"]
    assert actions_of("\x1b]0;title\x07").others == ["set_icon_name", "set_title"]
    assert not actions_of("\x1b[3").drawn.endswith("END")


@given(_TEXTS)
@example("\x1b[\x002J")
@example("\x1b[2\x7fJ")
@example("\x1b[\x1b\x1b2J")
@example("\x9b2J")
@example("\x1b[>4;2m")  # changes what keys send
def test_no_text_does_more_on_a_terminal_than_print(text: str) -> None:
    cleaned = without_controls(text)
    assert_harmless(cleaned)
    assert without_controls(cleaned) == cleaned


@given(st.lists(st.one_of(_TEXTS.map(str.encode), st.binary(max_size=8)), max_size=4).map(b"".join))
def test_no_bytes_of_a_rank_do_more_on_a_terminal_than_print(data: bytes) -> None:
    assert_harmless(readable(data, 0).decode())


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"])))
def test_ordinary_text_stays(text: str) -> None:
    assert without_controls(f"{text}\t\x1b[1;38;5;196m{text}\x1b[m\n") == f"{text}\t\x1b[1;38;5;196m{text}\x1b[m\n"


def test_a_line_of_distrain_may_quote_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", console := io.StringIO())
    say("rank 1: ValueError: \x1b[2J\x1b]0;title\x07text")
    assert console.getvalue() == "distrain: rank 1: ValueError: text\n"
