"""The cipher of connections for files, with a script that answers as ssh does."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from distrain.transfer.streams import ciphers
from distrain.transfer.streams.ciphers import with_fast_cipher

if TYPE_CHECKING:
    from pathlib import Path

FAST = ["-o", "Ciphers=^aes128-gcm@openssh.com,aes256-gcm@openssh.com"]
OPTIONS = ["-T", "-p", "22", "-o", "BatchMode=yes"]
COMMAND = ["--", "host", "env A=b python -c 'code'"]
ARGV = ["ssh", *OPTIONS, *COMMAND]

SSH = """#!/bin/sh
echo "$@" >> "$0.log"
[ "$1" = -G ] && [ "$3" != host ] || exit 9
for last; do :; done
[ "$last" = host ] || exit 9
found=$CONFIGURED
case "$*" in
  *"-F none"*) found=chacha20,aes128-gcm ;;
  *"Ciphers=^"*) [ -z "$OLD" ] || { echo "Bad SSH2 cipher spec" >&2; exit 255; }; found=aes128-gcm,chacha20 ;;
  *"-c aes256-ctr"*) found=aes256-ctr ;;
esac
echo user me
echo "ciphers $found"
echo "macs x"
"""


@pytest.fixture(autouse=True)
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recent ssh with the usual configuration, on a machine with a fast AES."""
    path = tmp_path / "bin" / "ssh"
    path.parent.mkdir()
    path.write_text(SSH)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}/usr/bin:/bin")
    monkeypatch.setenv("CONFIGURED", "chacha20,aes128-gcm")
    monkeypatch.delenv("OLD", raising=False)
    cpus = tmp_path / "cpuinfo"
    cpus.write_text("processor: 0\nflags\t\t: fpu sse2 aes avx\n")
    monkeypatch.setattr(ciphers, "_CPUINFO", cpus)
    return path


def asked(ssh: Path) -> list[str]:
    log = ssh.with_name("ssh.log")
    return log.read_text().splitlines() if log.exists() else []


def test_the_fast_cipher_is_preferred(ssh: Path) -> None:
    assert with_fast_cipher(ARGV) == ["ssh", *OPTIONS, *FAST, *COMMAND]
    # The options come along, as configurations depend on them; the command does not.
    assert asked(ssh)[1:] == [f"-G {' '.join(OPTIONS)} -- host", f"-G {' '.join([*OPTIONS, *FAST])} -- host"]


def test_ciphers_of_the_configuration_are_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONFIGURED", "aes256-ctr")
    assert with_fast_cipher(ARGV) == ARGV


def test_ciphers_of_the_command_line_are_respected() -> None:
    argv = ["ssh", *OPTIONS, "-c", "aes256-ctr", *COMMAND]
    assert with_fast_cipher(argv) == argv


def test_an_ssh_that_cannot_prefer_ciphers_is_not_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLD", "yes")
    assert with_fast_cipher(ARGV) == ARGV


def test_an_ssh_that_tells_nothing_is_left_alone(ssh: Path) -> None:
    for script in ("#!/bin/sh\nexit 255\n", "#!/bin/sh\necho user me\n"):
        ssh.write_text(script)
        assert with_fast_cipher(ARGV) == ARGV
    ssh.unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(ssh.parent))
        assert with_fast_cipher(ARGV) == ARGV


@pytest.mark.parametrize(
    "argv", [["sh", "-c", "a -- b"], ["other", *OPTIONS, "--", "host", "true"], ["ssh", "host", "true"]]
)
def test_other_commands_stay_as_they_are(ssh: Path, argv: list[str]) -> None:
    ssh.with_name("other").symlink_to(ssh)
    assert with_fast_cipher(argv) == argv
    assert not asked(ssh)


def test_the_users_own_ssh_stays_the_one_that_is_started(ssh: Path, tmp_path: Path) -> None:
    other = tmp_path / "ssh"
    other.write_text(SSH)
    other.chmod(0o755)
    assert with_fast_cipher([str(other), *OPTIONS, *COMMAND]) == [str(other), *OPTIONS, *FAST, *COMMAND]
    assert not asked(ssh)


@pytest.mark.parametrize(
    ("text", "is_fast"),
    [
        ("flags\t\t: fpu sse2 avx\n", False),
        ("flags\t\t: fpu vaes aes_x\n", False),
        ("model name : aes\nflags : fpu\n", False),
        ("Features\t: fp asimd aes sha1\n", True),
        ("", False),
    ],
)
def test_only_processors_with_instructions_for_it_use_aes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, is_fast: bool
) -> None:
    cpus = tmp_path / "other"
    cpus.write_text(text)
    monkeypatch.setattr(ciphers, "_CPUINFO", cpus)
    assert (with_fast_cipher(ARGV) != ARGV) is is_fast


def test_a_machine_that_says_nothing_about_its_processors_is_taken_for_a_slow_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ciphers, "_CPUINFO", tmp_path / "missing")
    assert with_fast_cipher(ARGV) == ARGV
