"""The cipher of connections that carry much data. Runs in: mover.

OpenSSH prefers chacha20-poly1305. On processors with instructions for AES, AES-GCM is about twice as fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from distrain.system.process import output_of

if TYPE_CHECKING:
    from collections.abc import Sequence

_PREFERRED = "Ciphers=^aes128-gcm@openssh.com,aes256-gcm@openssh.com"
_CPUINFO = Path("/proc/cpuinfo")


def with_fast_cipher(argv: Sequence[str]) -> list[str]:
    """Return a command line of ssh that prefers AES-GCM, unless the user's configuration or options choose ciphers.

    Any other command line, and one for an ssh that does not know the option, is returned as it is.
    """
    if Path(argv[0]).name != "ssh" or "--" not in argv or not _has_aes():
        return list(argv)
    at = argv.index("--")
    ssh, options, host, command = argv[0], list(argv[1:at]), argv[at + 1], list(argv[at:])
    usual = _ciphers(ssh, ["-F", "none", "--", host])
    if usual is None or _ciphers(ssh, [*options, "--", host]) != usual:
        return list(argv)
    preferring = [*options, "-o", _PREFERRED]
    return list(argv) if _ciphers(ssh, [*preferring, "--", host]) is None else [ssh, *preferring, *command]


def _has_aes() -> bool:
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        return False
    return any("aes" in line.split() for line in lines if line.lower().startswith(("flags", "features")))


def _ciphers(ssh: str, arguments: Sequence[str]) -> str | None:
    """Return the ciphers that ssh would offer, or None if it refuses the arguments."""
    said = output_of([ssh, "-G", *arguments], ".")  # the user's options may name files
    lines = (said or b"").decode(errors="replace").splitlines()
    return next((line for line in lines if line.startswith("ciphers ")), None)
