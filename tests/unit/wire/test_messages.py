"""The codec: any message, cut anywhere, comes out as it went in; anything else is a WireError."""

from __future__ import annotations

import contextlib
import json
import struct
import types
import typing
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distrain import wire
from distrain.errors import WireError

_PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(),
    bool: st.booleans(),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=100),
    Any: st.none() | st.integers() | st.text(max_size=5) | st.lists(st.integers(), max_size=3),
    type(None): st.none(),
}


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of an annotation; lists for tuples, since that is what JSON makes of them."""
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*map(values, arguments))
    if origin is list:
        return st.lists(values(arguments[0]), max_size=3)
    if origin is tuple:
        return st.tuples(*map(values, arguments)).map(list)
    assert origin is dict
    return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=3)


def messages_of(cls: type[wire.Message]) -> st.SearchStrategy[wire.Message]:
    hints = typing.get_type_hints(cls)
    return st.builds(cls, **{field.name: values(hints[field.name]) for field in fields(cls)})


any_message = st.sampled_from(sorted(wire.MESSAGES)).flatmap(lambda kind: messages_of(wire.MESSAGES[kind]))


def decoded(*pieces: bytes, greeting: bool = False) -> list[wire.Message]:
    decoder = wire.Decoder(greeting=greeting)
    return [frame.message() for piece in pieces for frame in decoder.feed(piece)]


def frame_bytes(header: bytes, body: bytes = b"") -> bytes:
    return struct.pack("!IQ", len(header), len(body)) + header + body


# -- what goes in comes out ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(wire.MESSAGES))
@settings(max_examples=10)
@given(data=st.data())
def test_every_message_survives_the_round_trip(kind: str, data: st.DataObject) -> None:
    message = data.draw(messages_of(wire.MESSAGES[kind]))
    assert decoded(wire.encode(message)) == [message]


@settings(max_examples=50)
@given(st.lists(any_message, max_size=4), st.data())
def test_any_split_of_the_stream_gives_the_same_messages(messages: list[wire.Message], data: st.DataObject) -> None:
    stream = b"".join(map(wire.encode, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert decoded(*pieces) == messages


def test_undecodable_bytes_in_arguments_survive() -> None:
    text = b"caf\xe9".decode(errors="surrogateescape")
    assert decoded(wire.encode(wire.Notice(text=text))) == [wire.Notice(text=text)]


# -- before the magic ------------------------------------------------------------------------------------------------


@given(chatter=st.binary(max_size=200).filter(lambda data: b"distrain" not in data), split=st.integers(0, 220))
def test_chatter_before_the_magic_is_skipped_and_kept(chatter: bytes, split: int) -> None:
    stream = chatter + wire.MAGIC + wire.encode(wire.Ping())
    decoder = wire.Decoder(greeting=True)
    frames = decoder.feed(stream[:split]) + decoder.feed(stream[split:])
    assert [frame.message() for frame in frames] == [wire.Ping()]
    assert decoder.chatter == chatter


# -- bytes that are no frames ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header",
    [b"", b"nonsense", b"\xff\xfe\xfd", b"5", b"null", b'"text"', b"[]", b"[1, 2]", b"{}", b'{"rank": 1}'],
)
def test_a_garbage_header_is_a_wire_error(header: bytes) -> None:
    with pytest.raises(WireError, match="not distrain's"):
        wire.Decoder().feed(frame_bytes(header))


@pytest.mark.parametrize("kind", ["NoSuchMessage", "Message", None, 7, [], {}])
def test_an_unknown_kind_is_a_wire_error(kind: object) -> None:
    with pytest.raises(WireError):
        decoded(frame_bytes(json.dumps({"kind": kind}).encode()))


@pytest.mark.parametrize("header", [{"kind": "Gone"}, {"kind": "Ping", "extra": 1}], ids=["missing", "unknown"])
def test_wrong_fields_are_a_wire_error_that_names_the_message(header: dict[str, object]) -> None:
    with pytest.raises(WireError, match=str(header["kind"])):
        decoded(frame_bytes(json.dumps(header).encode()))


@given(st.binary(max_size=64))
def test_random_bytes_give_nothing_or_a_wire_error(data: bytes) -> None:
    with contextlib.suppress(WireError):
        decoded(data)
