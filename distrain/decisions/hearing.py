"""The table from kinds of messages, events and actions to the methods of parts that handle them.

Each method says itself what it handles. Runs in: coordinator.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Handler = Callable[[str, Any], None]
    _Method = TypeVar("_Method", bound=Callable[[Any, str, Any], None])
    _Act = TypeVar("_Act", bound=Callable[[Any, Any], None])


def _marked(name: str, value: object) -> Callable[[Any], Any]:
    def mark(method: Any) -> Any:
        setattr(method, name, value)
        return method

    return mark


def hears(*kinds: type) -> Callable[[_Method], _Method]:
    """Mark a method that is called with messages of these kinds, and with the host that each one is from.

    >>> class Launching:
    ...     @hears(wire.RendezvousPort)
    ...     def _on_port(self, host: str, message: wire.RendezvousPort) -> None: ...
    """
    return _marked("kinds", kinds)


def does(*kinds: type) -> Callable[[_Act], _Act]:
    """Mark a method that carries out actions of these kinds. It is called with the action alone."""
    return _marked("does", kinds)


def on(kind: type, *states: object) -> Callable[[_Method], _Method]:
    """Mark a method of a state machine that handles events of a kind, in these states; without states, in any other."""
    return _marked("on", [(kind, state) for state in states or (None,)])


def handlers_of(part: object) -> dict[type, Handler]:
    """Return the handlers of a part, by the kind that each one hears or carries out."""
    found: dict[type, Handler] = {}
    for name, method in (item for cls in type(part).__mro__ for item in vars(cls).items()):
        if hasattr(method, "kinds"):
            found |= dict.fromkeys(method.kinds, getattr(part, name))
        if hasattr(method, "does"):
            found |= dict.fromkeys(method.does, partial(_do, getattr(part, name)))
    return found


def _do(method: Callable[[Any], None], _: str, action: object) -> None:
    method(action)


class Parts:
    """The parts of a run, and the one table of what each of them hears, in the order in which they were added."""

    def __init__(self) -> None:
        self._handlers: dict[type, list[Handler]] = {}

    def add(self, *parts: object) -> None:
        """Let parts hear what they want to."""
        for part in parts:
            self.add_handlers(handlers_of(part))

    def add_handlers(self, handlers: Mapping[type, Handler]) -> None:
        """Let functions hear messages, events and actions, by kind."""
        for kind, handler in handlers.items():
            self._handlers.setdefault(kind, []).append(handler)

    def tell(self, host: str, event: object) -> None:
        """Tell all parts that hear this kind. ``host``: the one that a message is from."""
        for handler in self._handlers.get(type(event), ()):
            handler(host, event)


def table_of(machine: type) -> dict[tuple[type, object], Callable[[Any, str, Any], None]]:
    """Return what handles an event, by its kind and by the state, which is None for any other state."""
    return {pair: method for method in vars(machine).values() for pair in getattr(method, "on", ())}
