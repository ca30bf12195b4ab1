"""The cipher of connections for files, with a script that answers as ssh does."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from distrain.transfer import ciphers
from distrain.transfer.ciphers import with_fast_cipher

if TYPE_CHECKING:
    from pathlib import Path

OPTIONS = ["-T", "-p", "22", "-o", "BatchMode=yes"]
COMMAND = ["--", "host", "env A=b python -c 'code'"]
ARGV = ["ssh", *OPTIONS, *COMMAND]

SSH = """#!/bin/sh
[ "$1" = -G ] || exit 9
for last; do :; done
[ "$last" = host ] || exit 9
found=$CONFIGURED
case "$*" in
  *"-F none"*) found=chacha20,aes128-gcm ;;
  *"-c aes256-ctr"*) found=aes256-ctr ;;
esac
echo user me
echo "ciphers $found"
"""


@pytest.fixture(autouse=True)
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ssh with the usual configuration."""
    path = tmp_path / "bin" / "ssh"
    path.parent.mkdir()
    path.write_text(SSH)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}/usr/bin:/bin")
    monkeypatch.setenv("CONFIGURED", "chacha20,aes128-gcm")
    return path


def test_the_fast_cipher_is_preferred() -> None:
    assert with_fast_cipher(ARGV) == ["ssh", *OPTIONS, "-o", ciphers._PREFERRED, *COMMAND]


def test_ciphers_of_the_user_are_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["ssh", *OPTIONS, "-c", "aes256-ctr", *COMMAND]
    assert with_fast_cipher(argv) == argv
    monkeypatch.setenv("CONFIGURED", "aes256-ctr")
    assert with_fast_cipher(ARGV) == ARGV


def test_other_commands_and_an_ssh_that_tells_nothing_stay_as_they_are(ssh: Path) -> None:
    for argv in (["sh", "-c", "a -- b"], ["other", *OPTIONS, "--", "host", "true"], ["ssh", "host", "true"]):
        assert with_fast_cipher(argv) == argv
    ssh.write_text("#!/bin/sh\nexit 255\n")
    assert with_fast_cipher(ARGV) == ARGV
