"""Ray's cluster, which is this machine, and its tasks, which the stand-in refuses."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from distrain.as_ray.importing import activate
from distrain.hosts.host_info import usable_cpus
from tests.stand_in import leave

if TYPE_CHECKING:
    from collections.abc import Iterator

activate()
import ray  # noqa: E402 - the stand-in

leave()


@pytest.fixture(autouse=True)
def _without_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("distrain.system.log._warned", set())
    yield
    ray.shutdown()


def test_tasks_and_actors_are_refused() -> None:
    for name in ("remote", "get", "put", "wait", "kill", "get_actor", "method"):
        with pytest.raises(AttributeError, match=rf"ray has no '{name}' here: there are no tasks, actors or objects"):
            getattr(ray, name)


def test_init_sets_variables_and_names_what_it_ignores(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTRAIN_ENV", "BEFORE")
    monkeypatch.setenv("PLACE", "old")
    env = ray.runtime_env.RuntimeEnv(env_vars={"PLACE": "here"}, pip=["x"])
    assert not ray.is_initialized()
    options: dict[str, Any] = {"num_cpus": 4, "ignore_reinit_error": True, "local_mode": True}
    with ray.init("auto", runtime_env=env, **options):
        assert ray.is_initialized()
    assert (os.environ["PLACE"], os.environ["DISTRAIN_ENV"]) == ("here", "BEFORE,PLACE")
    [notice] = [record.getMessage() for record in caplog.records]
    assert "ray.init(): no effect for address, num_cpus, runtime_env:" in notice


def test_the_cluster_is_this_machine() -> None:
    assert ray.cluster_resources()["CPU"] == usable_cpus() == ray.available_resources()["CPU"]
    (node,) = ray.nodes()
    assert node["Alive"]
    assert node["NodeManagerAddress"] == ray.util.get_node_ip_address()
