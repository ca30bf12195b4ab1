"""Command lines for hosts, near and behind a program that takes a shell command."""

from __future__ import annotations

import shlex

from hypothesis import given
from hypothesis import strategies as st

from distrain.transport import LocalTransport, PrefixTransport


def test_a_local_command_is_left_alone() -> None:
    assert LocalTransport().argv(["python", "-c", "a b"]) == ["python", "-c", "a b"]


def test_a_prefix_gets_the_command_as_its_last_argument() -> None:
    transport = PrefixTransport(name="one", prefix=("ssh", "-T", "one"))
    assert transport.argv(["python", "-c", "a b"]) == ["ssh", "-T", "one", "python -c 'a b'"]


@given(st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8")), min_size=1))
def test_a_shell_takes_the_command_apart_again(command: list[str]) -> None:
    [_, text] = PrefixTransport(name="one", prefix=("ssh",)).argv(command)
    assert shlex.split(text) == command
