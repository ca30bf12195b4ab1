"""Stores checkpoints while the workers train on. Runs in: uploader, one per host, started when it is first needed.

Orders come in on stdin, answers go out on stdout, in the order of the orders. It ends with its agent.
"""

from __future__ import annotations

import signal

from distrain import process, wire
from distrain.channel import Channel
from distrain.uploads import bring

__all__ = ["main"]


def main(arguments: list[str]) -> None:
    """``arguments``: the pid of the agent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process.die_with_parent(int(arguments[0]))
    channel = Channel(*process.private_stdio())
    while not channel.at_end:
        for frame in channel.wait():
            order = frame.message()
            assert isinstance(order, wire.Upload)
            channel.send(bring(order))
