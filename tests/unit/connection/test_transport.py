"""Command lines for hosts, and the settings of their workers."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrain.config import ScalingConfig
from distrain.connection.transport import (
    LocalTransport,
    PrefixTransport,
    SshTransport,
    for_another_interpreter,
    hosts_of,
    interpreter_entries,
    settings_for,
    ssh_args_of,
    transports_for,
)
from distrain.errors import HostfileError
from distrain.hosts.hostfile import HostSpec

if TYPE_CHECKING:
    from distrain.hosts.host import HostSettings

FAR = HostSpec(name="far", address="far")


def test_a_local_command_is_left_alone() -> None:
    assert LocalTransport().argv(["python", "-c", "a b"]) == ["python", "-c", "a b"]


def test_a_prefix_gets_the_command_as_its_last_argument() -> None:
    transport = PrefixTransport(host=FAR, prefix=("ssh", "-T", "one"))
    assert transport.argv(["python", "-c", "a b"]) == ["ssh", "-T", "one", "python -c 'a b'"]


@given(st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8")), min_size=1))
def test_a_shell_takes_the_command_apart_again(command: list[str]) -> None:
    [_, text] = PrefixTransport(host=FAR, prefix=("ssh",)).argv(command)
    assert shlex.split(text) == command


# -- ssh -------------------------------------------------------------------------------------------------------------


def ssh(*arguments: str, **host: Any) -> list[str]:
    return SshTransport(host=HostSpec(**{"name": "far", "address": "far", **host}), arguments=arguments).argv(["a b"])


def effective(argv: list[str], tmp_path: Path, config: str = "") -> dict[str, str]:
    """Return the options that OpenSSH derives from the command line."""
    (tmp_path / "config").write_text(config)
    argv = ["ssh", "-G", "-F", str(tmp_path / "config"), *argv[1:]]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return dict(line.partition(" ")[::2] for line in done.stdout.splitlines())


def test_ssh_asks_nobody_and_waits_for_nobody_for_ever(tmp_path: Path) -> None:
    options = effective(ssh(), tmp_path, "Host far\n HostName far.lan\n User alice\n ProxyJump gate\n")
    assert options["batchmode"] == "yes"
    assert options["connecttimeout"] == "10"
    assert options["serveraliveinterval"] == "5"
    assert options["requesttty"] == "false"
    assert (options["hostname"], options["user"], options["proxyjump"]) == ("far.lan", "alice", "gate")


@pytest.mark.parametrize(("lease_s", "interval_s"), [(15.0, "5"), (2.0, "1"), (100.0, "34")])
def test_ssh_itself_is_as_patient_as_the_lease(tmp_path: Path, lease_s: float, interval_s: str) -> None:
    [transport] = transports_for([FAR], lease_s=lease_s)
    options = effective(transport.argv(["true"]), tmp_path)
    assert (options["serveraliveinterval"], options["serveralivecountmax"]) == (interval_s, "3")


def test_arguments_of_the_user_come_before_ours(tmp_path: Path) -> None:
    options = effective(ssh("-o", "ConnectTimeout=77", "-p", "23"), tmp_path)
    assert (options["connecttimeout"], options["port"]) == ("77", "23")


def test_what_a_host_says_of_itself_goes_before_the_arguments_for_all(tmp_path: Path) -> None:
    options = effective(ssh("-p", "2200", "-l", "you", "-o", "Port=23", user="me", port=2222), tmp_path)
    assert (options["port"], options["user"]) == ("2222", "me")
    options = effective(ssh("-o", "Port=23", "-l", "you", port=2222), tmp_path)
    assert (options["port"], options["user"]) == ("2222", "you")


def test_user_port_and_ipv6_are_options_of_their_own(tmp_path: Path) -> None:
    options = effective(ssh(user="alice", port=2222, address="fd77::11"), tmp_path)
    assert (options["user"], options["port"], options["hostname"]) == ("alice", "2222", "fd77::11")


def test_a_host_is_never_taken_for_an_option() -> None:
    assert ssh(address="-oProxyCommand=true")[-3:] == ["--", "-oProxyCommand=true", "'a b'"]


# -- which hosts -----------------------------------------------------------------------------------------------------


def names(scaling: ScalingConfig, **environment: str) -> list[str]:
    return [host.name for host in hosts_of(scaling, environment)]


def test_without_a_word_it_is_this_machine() -> None:
    [host] = hosts_of(ScalingConfig(), {})
    assert host.is_local
    assert host.slots is None
    [transport] = transports_for([host])
    assert isinstance(transport, LocalTransport)


def test_what_the_config_says_goes_before_the_environment(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("file slots=2\n")
    (tmp_path / "others").write_text("other slots=2\n")
    environment = {"DISTRAIN_HOSTFILE": str(tmp_path / "others"), "DISTRAIN_HOSTS": "env:1"}
    assert names(ScalingConfig(hosts="a:1,b:2"), **environment) == ["a", "b"]
    assert names(ScalingConfig(hosts=["a:1", "b"]), **environment) == ["a", "b"]
    assert names(ScalingConfig(hostfile=tmp_path / "hosts"), **environment) == ["file"]
    assert names(ScalingConfig(), **environment) == ["env"]
    assert names(ScalingConfig(), DISTRAIN_HOSTFILE=str(tmp_path / "others")) == ["other"]


def test_a_hostfile_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(HostfileError, match=r"DISTRAIN_HOSTFILE: the hostfile '.*none' cannot be read: .*No such file"):
        names(ScalingConfig(), DISTRAIN_HOSTFILE=str(tmp_path / "none"))
    (tmp_path / "bad").write_text("a\na\n")
    with pytest.raises(HostfileError, match=r"bad:2: a is named in line 1 already"):
        names(ScalingConfig(hostfile=tmp_path / "bad"))


def test_arguments_for_ssh_are_a_list_or_a_line() -> None:
    assert ssh_args_of(ScalingConfig(ssh_args="-F 'my config'"), {}) == ("-F", "my config")
    assert ssh_args_of(ScalingConfig(ssh_args=["-F", "my config"]), {"DISTRAIN_SSH_ARGS": "-v"}) == ("-F", "my config")
    assert ssh_args_of(ScalingConfig(), {"DISTRAIN_SSH_ARGS": "-F 'my config'"}) == ("-F", "my config")


def test_arguments_for_ssh_with_an_open_quote_are_refused_by_name() -> None:
    with pytest.raises(HostfileError, match=r"^DISTRAIN_SSH_ARGS: .*my key.*: no closing quotation$"):
        ssh_args_of(ScalingConfig(), {"DISTRAIN_SSH_ARGS": '-i "my key'})
    with pytest.raises(HostfileError, match=r"^ScalingConfig\.ssh_args: .*my key.*: no closing quotation$"):
        ScalingConfig(ssh_args='-i "my key')


def test_only_localhost_needs_no_ssh() -> None:
    local, far = transports_for([HostSpec(slots=2), FAR], ("-v",))
    assert local.argv(["x"]) == ["x"]
    assert far.argv(["x"])[:3] == ["ssh", "-T", "-v"]


# -- what goes along -------------------------------------------------------------------------------------------------


def settings_of(host: HostSpec, *, own: dict[str, str], path: list[str] | None = None, **given: str) -> HostSettings:
    [transport] = transports_for([host])
    settings = settings_for(
        [transport], directory="/here", sys_path=path or ["/p"], environment=given, own_environment=own
    )
    return settings[transport.host.name]


def test_an_explicit_list_of_variables_goes_along() -> None:
    own = {"NCCL_DEBUG": "INFO", "HOME": "/home/me", "SECRET": "x", "PATH": "/bin", "RANK": "3"}
    own["CUDA_VISIBLE_DEVICES"] = "1"
    assert settings_of(FAR, own=own).environment == {"NCCL_DEBUG": "INFO", "PATH": "/bin"}
    assert settings_of(FAR, own={**own, "DISTRAIN_ENV": "SECRET,MY_*"}).environment["SECRET"] == "x"


def test_settings_of_tensorflow_go_along_but_not_which_worker_the_users_process_is() -> None:
    settings = {"TF_USE_LEGACY_KERAS": "0", "TF_CPP_MIN_LOG_LEVEL": "2", "KERAS_BACKEND": "jax", "XLA_FLAGS": "-x"}
    assert settings_of(FAR, own={**settings, "TF_CONFIG": "{}"}).environment == settings


def test_to_this_machine_nothing_has_to_go() -> None:
    assert settings_of(HostSpec(), own={"NCCL_DEBUG": "INFO"}, A="1").environment == {"A": "1"}


def test_variables_may_be_named_with_blanks_between_them() -> None:
    own = {"X": "1", "B": "2"}
    assert settings_of(FAR, own={**own, "DISTRAIN_ENV": " X, B ,"}).environment == {"X": "1", "B": "2"}


@pytest.mark.parametrize("host", [HostSpec(), FAR])
def test_where_the_ranks_meet_goes_along_if_the_user_names_it(host: HostSpec) -> None:
    """This holds for this machine, too: a value in its environment may belong to another launcher."""
    own = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29511", "X": "1"}
    assert not settings_of(host, own=own).environment
    assert settings_of(host, own={**own, "DISTRAIN_ENV": "MASTER_*"}).environment == {
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29511",
    }


@pytest.mark.parametrize("host", [HostSpec(), FAR])
def test_a_fit_in_a_worker_does_not_meet_where_the_worker_has_met_others(host: HostSpec) -> None:
    own = {"MASTER_PORT": "29511", "DISTRAIN_ENV": "MASTER_*,X", "X": "1", "TORCHELASTIC_RUN_ID": "id"}
    assert "MASTER_PORT" not in settings_of(host, own=own).environment


@pytest.mark.parametrize("host", [HostSpec(gpus=("2",)), replace(FAR, gpus=("2",))])
def test_the_gpus_of_a_host_go_before_those_for_all(host: HostSpec) -> None:
    """The agent is started with them; no later value may replace them."""
    own = {"CUDA_VISIBLE_DEVICES": "0", "DISTRAIN_ENV": "CUDA_*"}
    assert settings_of(host, own=own, CUDA_VISIBLE_DEVICES="1", A="1").environment == {"A": "1"}


def test_the_hostfile_goes_before_what_is_for_all_and_that_before_ones_own() -> None:
    host = HostSpec(name="far", address="far", cwd="/there", environment={"A": "host"})
    settings = settings_of(host, own={"TORCH_X": "own", "TORCH_Y": "own"}, A="all", TORCH_X="all")
    assert settings.environment == {"A": "host", "TORCH_X": "all", "TORCH_Y": "own"}
    assert settings.directory == "/there"
    assert settings_of(FAR, own={}).directory == "/here"


def test_another_interpreter_keeps_its_libraries_and_gets_the_users_folders() -> None:
    host = HostSpec(name="far", address="far", python="/opt/bin/python")
    folders = [path for path in sys.path if Path(path).name.startswith(("python", "lib-dynload", "site-packages"))]
    assert folders
    settings = settings_of(host, own={"PATH": "/bin"}, path=["/script", "/pythonpath", *folders, "/editable"])
    assert settings.sys_path == ["/script", "/pythonpath", None, "/editable"]
    assert settings.environment == {}
    assert settings_of(FAR, own={}, path=["/script", *folders]).sys_path == ["/script", *folders]


def test_another_interpreters_libraries_come_where_those_of_this_one_are() -> None:
    """A program that pip has installed has its directory first on the path. The user's PYTHONPATH comes next."""
    installed = ["/lib/site-packages", "/lib/site-packages/nested", "/lib/dist-packages", "/lib/python311.zip"]
    mine = ["", os.path.dirname(sys.executable), "/home/me/my-packages", "/home/me/.ipython", "/home/me/other.zip"]
    assert interpreter_entries([*mine, *installed]) == installed
    assert for_another_interpreter([*mine, *installed, "/last"]) == [*mine, None, "/last"]
    assert for_another_interpreter(mine) == [*mine, None]
