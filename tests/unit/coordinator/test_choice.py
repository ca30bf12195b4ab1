"""Which hosts a run uses, and how each is reached."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from distrain.api.config import RunConfig, ScalingConfig
from distrain.coordinator.connection.choice import hosts_of, ssh_args_of, transports_for
from distrain.errors import HostfileError

if TYPE_CHECKING:
    from pathlib import Path


def names(scaling: ScalingConfig, **environment: str) -> list[str]:
    return [host.name for host in hosts_of(scaling, environment)]


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
    with pytest.raises(HostfileError, match=r"bad:2: a is already named in line 1"):
        names(ScalingConfig(hostfile=tmp_path / "bad"))


def test_arguments_for_ssh_with_an_open_quote_are_refused_by_name() -> None:
    with pytest.raises(HostfileError, match=r"^DISTRAIN_SSH_ARGS: .*my key.*: no closing quotation$"):
        ssh_args_of(ScalingConfig(), {"DISTRAIN_SSH_ARGS": '-i "my key'})
    with pytest.raises(HostfileError, match=r"^ScalingConfig\.ssh_args: .*my key.*: no closing quotation$"):
        ScalingConfig(ssh_args='-i "my key')


# -- which transport -------------------------------------------------------------------------------------------------


def reached(scaling: ScalingConfig, **environment: str) -> list[str]:
    """Return the first word of each command line, or the name of the transport of this machine."""
    transports = transports_for(hosts_of(scaling, environment), scaling, environment, RunConfig())
    return [one.program or "this machine" for one in transports]


def test_the_line_of_a_host_goes_before_the_config_and_that_before_the_environment(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text('localhost\na transport="docker exec -i {host}"\nb\n')
    scaling = ScalingConfig(hostfile=tmp_path / "hosts")
    assert reached(scaling) == ["this machine", "docker", "ssh"]
    environment = {"DISTRAIN_TRANSPORT": "podman exec -i {host}"}
    assert reached(scaling, **environment) == ["this machine", "docker", "podman"]
    assert reached(replace(scaling, transport="lxc exec {host} --"), **environment)[2] == "lxc"


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("docker", r"'docker': unknown transport; must be auto, local, ssh, slurm, or a command line such as 'docker"),
        ("docker exec -i", r"the command line must contain \{host\}"),
        ("docker exec '{host}", r"no closing quotation"),
        ("{host} exec", r"the first word must be a program"),
        ("", r"'': unknown transport"),
    ],
)
def test_a_transport_that_cannot_work_is_refused_by_name(value: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(HostfileError, match=rf"^ScalingConfig\.transport: .*{problem}"):
        ScalingConfig(transport=value)
    if value:
        with pytest.raises(HostfileError, match=rf"^DISTRAIN_TRANSPORT: .*{problem}"):
            reached(ScalingConfig(), DISTRAIN_TRANSPORT=value)
        (tmp_path / "hosts").write_text(f'a\nb transport="{value}"\n')
        with pytest.raises(HostfileError, match=rf"hosts:2: .*{problem}"):
            reached(ScalingConfig(hostfile=tmp_path / "hosts"))


def test_a_transport_that_does_not_fit_its_host_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HostfileError, match=r"^far: the transport local cannot reach other machines"):
        reached(ScalingConfig(hosts="far:1", transport="local"))
    (tmp_path / "hosts").write_text("me@a\n")
    with pytest.raises(HostfileError, match=r"^a: docker takes only the name of a host"):
        reached(ScalingConfig(hostfile=tmp_path / "hosts", transport="docker exec -i {host}"))
    (tmp_path / "hosts").write_text("localhost transport=ssh\n")
    with pytest.raises(HostfileError, match="hosts:1: transport=ssh: localhost is this machine"):
        reached(ScalingConfig(hostfile=tmp_path / "hosts"))


# -- in a job of Slurm -----------------------------------------------------------------------------------------------

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2,1"}


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of Slurm that know one list of nodes. tests/hosts/test_slurm.py uses the real ones."""
    for name in ("scontrol", "srun"):
        (tmp_path / name).write_text('#!/bin/sh\n[ "$3" = "n[1-2]" ] && printf "n1\\nn2\\n"\n')
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


@pytest.mark.usefixtures("scontrol")
def test_in_a_job_its_nodes_are_used_unless_the_user_names_hosts_or_this_machine() -> None:
    hosts = hosts_of(ScalingConfig(), JOB)
    assert [(host.name, host.slots) for host in hosts] == [("n1", 2), ("n2", 1)]
    assert reached(ScalingConfig(), **JOB) == ["srun", "srun"]
    assert reached(ScalingConfig(transport="ssh"), **JOB) == ["ssh", "ssh"]
    assert reached(ScalingConfig(transport="srun -w {host}"), **JOB) == ["srun", "srun"]
    assert reached(ScalingConfig(transport="local"), **JOB) == ["this machine"]
    assert reached(ScalingConfig(), **JOB, DISTRAIN_TRANSPORT="local") == ["this machine"]
    assert reached(ScalingConfig(hosts="n1:2"), **JOB) == ["ssh"]
    assert reached(ScalingConfig(hosts="n2:8", transport="slurm"), **JOB) == ["srun"]
    assert reached(ScalingConfig(), **JOB, TORCHELASTIC_RUN_ID="id") == ["this machine"], "a fit() in a worker"
    assert reached(ScalingConfig(), **JOB, DISTRAIN_WITHIN_RUN="id") == ["this machine"], "a fit() in a rank of srun"
    with pytest.raises(HostfileError, match=r"^n3: not a node of Slurm job 7, which has n1, n2$"):
        reached(ScalingConfig(hosts="n3:8", transport="slurm"), **JOB)


def test_variables_of_a_job_without_its_programs_mean_this_machine_and_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert reached(ScalingConfig(), **JOB, SLURM_PROCID="0") == ["this machine"]
    assert "training on this machine only: SLURM_JOB_ID=7 is set, but there is no srun" in capsys.readouterr().err
    assert reached(ScalingConfig(), SLURM_JOB_ID="8", SLURM_NTASKS="4") == ["this machine"]
    assert "only: SLURM_JOB_ID=8 is set" in capsys.readouterr().err
    assert reached(ScalingConfig(transport="local"), **JOB) == ["this machine"]
    assert reached(ScalingConfig(), **JOB, TORCHELASTIC_RUN_ID="id") == ["this machine"]
    assert not capsys.readouterr().err
    with pytest.raises(HostfileError, match=r"^SLURM_JOB_ID=7 is set, but there is no srun in PATH"):
        reached(ScalingConfig(transport="slurm"), **JOB)
