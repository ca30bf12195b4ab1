"""Command lines for hosts."""

from __future__ import annotations

import shlex
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrain.coordinator.connection.transport import Transport, by_srun, by_ssh
from distrain.hosts.hostfile import HostSpec

if TYPE_CHECKING:
    from pathlib import Path

FAR = HostSpec(name="far", address="far")


# -- any command ---------------------------------------------------------------------------------------------------


def by(*template: str) -> list[str]:
    return Transport(host=FAR, template=template).argv(["python", "-c", "a b"])


def test_a_template_gets_the_words_of_the_command_at_its_end_or_a_line_for_a_shell_where_it_says() -> None:
    assert by("docker", "exec", "-i", "{host}") == ["docker", "exec", "-i", "far", "python", "-c", "a b"]
    assert by("ssh", "me@{host}", "exec {command}") == ["ssh", "me@far", "exec python -c 'a b'"]
    assert by("kubectl", "exec", "-i", "pod/{host}", "{not}", "--")[3:6] == ["pod/far", "{not}", "--"]


@given(st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8")), min_size=1))
def test_a_shell_takes_the_command_apart_again(command: list[str]) -> None:
    [_, text] = Transport(host=FAR, template=("ssh", "{command}")).argv(command)
    assert shlex.split(text) == command


# -- Slurm -----------------------------------------------------------------------------------------------------------


def test_a_step_is_on_one_node_and_hides_the_options_and_the_rank_that_slurm_has_set() -> None:
    argv = by_srun(FAR, "7", ("SLURM_NTASKS", "SRUN_DEBUG")).argv(["python", "x"])
    assert argv[:6] == ["env", "-u", "SLURM_NTASKS", "-u", "SRUN_DEBUG", "srun"]
    assert {"--jobid=7", "--nodelist=far", "--nodes=1", "--ntasks=1", "--overlap"} < set(argv)
    inner = argv[argv.index("env", 1) :]
    assert inner[:3] == ["env", "-u", "SLURM_PROCID"]
    assert inner[-2:] == ["python", "x"]


# -- ssh -------------------------------------------------------------------------------------------------------------


def ssh(*arguments: str, **host: Any) -> list[str]:
    return by_ssh(HostSpec(**{"name": "far", "address": "far", **host}), arguments).argv(["a b"])


def effective(argv: list[str], tmp_path: Path, config: str = "") -> dict[str, str]:
    """Return the options that OpenSSH derives from the command line."""
    (tmp_path / "config").write_text(config)
    argv = ["ssh", "-G", "-F", str(tmp_path / "config"), *argv[1:]]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return dict(line.partition(" ")[::2] for line in done.stdout.splitlines())


def test_ssh_asks_nobody_and_waits_for_nobody_for_ever(tmp_path: Path) -> None:
    options = effective(
        ssh(), tmp_path, "Host far\n HostName far.lan\n User alice\n ProxyJump gate\n RemoteCommand tmux\n"
    )
    assert options.get("remotecommand", "none") == "none"
    assert options["batchmode"] == "yes"
    assert options["connecttimeout"] == "10"
    assert options["serveraliveinterval"] == "5"
    assert options["requesttty"] == "false"
    assert (options["hostname"], options["user"], options["proxyjump"]) == ("far.lan", "alice", "gate")


@pytest.mark.parametrize(("lease_s", "interval_s"), [(15.0, "5"), (2.0, "1"), (100.0, "34")])
def test_ssh_itself_is_as_patient_as_the_lease(tmp_path: Path, lease_s: float, interval_s: str) -> None:
    options = effective(by_ssh(FAR, lease_s=lease_s).argv(["true"]), tmp_path)
    assert (options["serveraliveinterval"], options["serveralivecountmax"]) == (interval_s, "3")


def test_what_a_host_says_of_itself_goes_before_the_arguments_for_all(tmp_path: Path) -> None:
    options = effective(ssh("-p", "2200", "-l", "you", "-o", "Port=23", user="me", port=2222), tmp_path)
    assert (options["port"], options["user"]) == ("2222", "me")
    options = effective(ssh("-o", "Port=23", "-l", "you", port=2222), tmp_path)
    assert (options["port"], options["user"]) == ("2222", "you")


def test_a_host_is_never_taken_for_an_option() -> None:
    assert ssh(address="-oProxyCommand=true")[-3:] == ["--", "-oProxyCommand=true", "'a b'"]
