"""The cipher of connections that carry much data. Runs in: mover.

OpenSSH prefers chacha20-poly1305. On processors with instructions for AES, AES-GCM is up to twice as fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from distrain.system.process import output_of

if TYPE_CHECKING:
    from collections.abc import Sequence

_PREFERRED = (
    "Ciphers=aes128-gcm@openssh.com,aes256-gcm@openssh.com,chacha20-poly1305@openssh.com,"
    "aes128-ctr,aes192-ctr,aes256-ctr"
)


def with_fast_cipher(argv: Sequence[str]) -> list[str]:
    """Return a command line of ssh that prefers AES-GCM, unless the user's configuration or options choose ciphers.

    Any other command line is returned as it is.
    """
    if Path(argv[0]).name != "ssh" or "--" not in argv:
        return list(argv)
    at = argv.index("--")
    usual = _ciphers([argv[0], "-G", "-F", "none", *argv[at : at + 2]])
    chosen = _ciphers([argv[0], "-G", *argv[1 : at + 2]])
    return [*argv[:at], "-o", _PREFERRED, *argv[at:]] if usual and chosen == usual else list(argv)


def _ciphers(argv: Sequence[str]) -> str:
    """Return the line of ``ssh -G`` with the ciphers, or an empty string."""
    lines = (output_of(argv, ".") or b"").decode(errors="replace").splitlines()  # the user's options may name files
    return next((line for line in lines if line.startswith("ciphers ")), "")
