"""The settings of each host's workers."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from distrain.api.config import RunConfig, ScalingConfig
from distrain.coordinator.connection.choice import transports_for
from distrain.coordinator.connection.worker_settings import for_another_interpreter, settings_for
from distrain.hosts.hostfile import HostSpec

if TYPE_CHECKING:
    from distrain.hosts.host import HostSettings

FAR = HostSpec(name="far", address="far")


def settings_of(host: HostSpec, *, own: dict[str, str], path: list[str] | None = None, **given: str) -> HostSettings:
    [transport] = transports_for([host], ScalingConfig(), {}, RunConfig())
    settings = settings_for(
        [transport], directory="/here", sys_path=path or ["/p"], environment=given, own_environment=own
    )
    return settings[transport.host.name]


def test_an_explicit_list_of_variables_goes_along() -> None:
    own = {"NCCL_DEBUG": "INFO", "HOME": "/home/me", "SECRET": "x", "PATH": "/bin", "RANK": "3"}
    own["CUDA_VISIBLE_DEVICES"] = "1"
    assert settings_of(FAR, own=own).environment == {"NCCL_DEBUG": "INFO", "PATH": "/bin"}
    assert settings_of(FAR, own={**own, "DISTRAIN_ENV": "SECRET,MY_*"}).environment["SECRET"] == "x"


@pytest.mark.parametrize("host", [HostSpec(), FAR])
def test_where_the_ranks_meet_goes_along_if_the_user_names_it(host: HostSpec) -> None:
    """This holds for this machine, too: a value in its environment may belong to another launcher."""
    own = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29511", "X": "1"}
    assert not settings_of(host, own=own).environment
    assert settings_of(host, own={**own, "DISTRAIN_ENV": "MASTER_*"}).environment == {
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29511",
    }


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
    assert for_another_interpreter([*mine, *installed, "/last"]) == [*mine, None, "/last"]
    assert for_another_interpreter(mine) == [*mine, None]
