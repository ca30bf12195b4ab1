"""Which method of a part handles which kind of message or event: it says so itself. Runs in: coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    Handler = Callable[[str, Any], None]
    _Method = TypeVar("_Method", bound=Callable[[Any, str, Any], None])


def hears(*kinds: type) -> Callable[[_Method], _Method]:
    """Mark a method that is called with messages of these kinds, and with the host that each one is from.

    >>> class Launching:
    ...     @hears(wire.RendezvousPort)
    ...     def _on_port(self, host: str, message: wire.RendezvousPort) -> None: ...
    """

    def mark(method: _Method) -> _Method:
        method.kinds = kinds  # type: ignore[attr-defined]
        return method

    return mark


def handlers_of(part: object) -> dict[type, Handler]:
    """Return the handlers of a part, by the kind that each one hears."""
    methods = [getattr(part, name) for name, method in vars(type(part)).items() if hasattr(method, "kinds")]
    return {kind: method for method in methods for kind in method.kinds}


def on(kind: type, *states: object) -> Callable[[_Method], _Method]:
    """Mark a method of a state machine that handles events of a kind, in these states; without states, in any other."""

    def mark(method: _Method) -> _Method:
        method.on = [(kind, state) for state in states or (None,)]  # type: ignore[attr-defined]
        return method

    return mark


def table_of(machine: type) -> dict[tuple[type, object], Callable[[Any, str, Any], None]]:
    """Return what handles an event, by its kind and by the state, which is None for any other state."""
    return {pair: method for method in vars(machine).values() for pair in getattr(method, "on", ())}
