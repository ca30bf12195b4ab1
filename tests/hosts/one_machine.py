"""Hosts that are one machine; they need neither root nor namespaces.

``ThisMachine`` is "localhost" without ssh. ``FakeSsh`` has names behind a program named ssh. These hosts share a
network, so ranks meet on the loopback interface.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from tests.hosts.lab import Hosts


@dataclass(frozen=True, kw_only=True)
class ThisMachine(Hosts):
    """On each host, the environment variable PLACE is its name."""

    def argv(self, host: str, *argv: str) -> list[str]:
        return list(argv)


FAKE_SSH = """\
#!/bin/sh
while [ "$1" != -- ]; do shift; done
host=$2 command=$3
[ "$host" != alpha ] || echo "Welcome to alpha"
{body}
"""
EXECUTES = 'cd / && env -i PLACE="$host" PATH=/usr/bin:/bin sh -c "$command"'
"""Run the command in another directory and without this machine's environment, as the real ssh would."""


@dataclass(frozen=True, kw_only=True)
class FakeSsh(ThisMachine):
    """The user's PATH begins with a folder that has a program named ssh. ``alpha`` greets at login."""

    def make_ssh(self, body: str = EXECUTES) -> None:
        """Write the program. ``body``: shell code that handles ``$command`` for ``$host``."""
        program = self.folder / "bin" / "ssh"
        program.parent.mkdir(exist_ok=True)
        program.write_text(FAKE_SSH.format(body=body))
        program.chmod(0o755)

    def environment(self, **more: str) -> dict[str, str]:
        return super().environment(**{"PATH": f"{self.folder}/bin:{os.environ['PATH']}", **more})
