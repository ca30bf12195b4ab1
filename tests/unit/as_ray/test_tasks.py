"""Ray's functions and actors in place: results, copies, and the exceptions that Ray raises."""

from __future__ import annotations

import os
import pickle
import threading
from typing import TYPE_CHECKING, Any

import pytest

from distrain.as_ray.importing import activate
from distrain.hosts.host_info import usable_cpus
from tests.stand_in import leave

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

activate()
import ray  # noqa: E402 - the stand-in

leave()


@ray.remote
def double(x: int) -> int:
    return 2 * x


@ray.remote
def fail(x: object) -> None:
    raise FileNotFoundError(f"no {x}")


@ray.remote
class Counter:
    def __init__(self, *, start: int = 0) -> None:
        self.values = [start]

    def add(self, value: int = 1) -> list[int]:
        self.values.append(value)
        return self.values

    def ends(self) -> tuple[int, int]:
        return self.values[0], self.values[-1]

    @staticmethod
    def unit() -> str:
        return "one"

    def fail(self) -> None:
        raise ZeroDivisionError("of a counter")


@pytest.fixture(autouse=True)
def _without_ray() -> Any:
    yield
    ray.shutdown()


def test_results() -> None:
    refs = [double.remote(i) for i in range(3)]
    assert ray.get(refs) == [0, 2, 4]
    assert ray.get(double.remote(double.remote(x=5))) == 20
    assert ray.wait(refs, num_returns=2) == (refs[:2], refs[2:])
    assert double.remote(0) not in refs
    assert ray.get(pickle.loads(pickle.dumps(refs))) == [0, 2, 4]  # as in the config of a run


def test_a_task_works_on_copies() -> None:
    values = [1]

    @ray.remote
    def change(given: list[int], nested: list[Any]) -> list[int]:
        given.append(2)
        return [*given, ray.get(nested[0])]

    ref = change.remote(values, [ray.put(3)])
    ray.get(ref).append(4)
    assert (ray.get(ref), values) == ([1, 2, 3], [1])


def test_the_error_of_a_task_is_raised_by_get() -> None:
    ref = double.remote(fail.remote("door"))  # an argument that has failed
    with pytest.raises(FileNotFoundError, match="no door"):
        ray.get(ref)
    with pytest.raises(ray.exceptions.RayTaskError):
        ray.get([pickle.loads(pickle.dumps(ref))])


def test_an_actor_keeps_its_state() -> None:
    counter = Counter.remote(start=5)
    first, second = counter.add.remote(), counter.add.remote(7)
    assert (ray.get(first), ray.get(second)) == ([5, 1], [5, 1, 7])
    assert ray.get(counter.ends.remote()) == (5, 7)
    assert ray.get(counter.unit.remote()) == "one"
    with pytest.raises(ZeroDivisionError, match="of a counter"):
        ray.get(counter.fail.remote())
    called = ray.remote(lambda actor: ray.get(actor.add.remote(9)))
    assert ray.get(called.remote(counter)) == [5, 1, 7, 9]  # the actor, not a copy


def test_actors_die() -> None:
    counter, other = Counter.options(name="one").remote(), Counter.remote()
    ray.kill(counter)
    assert ray.get(other.add.remote()) == [0, 1]
    with pytest.raises(AttributeError, match="no method 'add', or was killed"):
        counter.add.remote()


def test_an_actor_stays_in_its_process() -> None:
    with pytest.raises(
        TypeError, match=r"actor \(Counter\) lives in this process, .* not to workers, which can report"
    ):
        pickle.dumps(Counter.remote())


class Yields:
    def step(self) -> Iterator[int]:
        yield 1

    async def wait(self) -> None: ...


WRONG: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: double(1), TypeError, r"double is remote: call double.remote\(\), not double\(\)"),
    (lambda: Counter.remote().add(), TypeError, r"call Counter.add.remote\(\)"),
    (lambda: Counter.options(get_if_exists=True).remote(), TypeError, "actors have no names: pass the handle"),
    (lambda: double.options(num_returns=2), TypeError, r"num_returns=...\) is not supported: .* return a tuple"),
    (lambda: Counter.remote().subtract, AttributeError, "no method 'subtract'"),
    (lambda: ray.get([3]), TypeError, "an ObjectRef, or a list of them, got"),
    (lambda: ray.put(threading.Lock()), TypeError, "cannot pickle"),
    (lambda: ray.get(ray.remote(Yields).remote().step.remote()), TypeError, "Yields.step.. is async or yields"),
    (lambda: ray.get(ray.remote(Yields).remote().wait.remote()), TypeError, "Yields.wait.. is async or yields"),
]


@pytest.mark.parametrize("case", WRONG, ids=[text for _, _, text in WRONG])
def test_what_is_wrong_is_said(case: tuple[Callable[[], Any], type[Exception], str]) -> None:
    action, kind, text = case
    with pytest.raises(kind, match=text):
        action()


# -- notices ---------------------------------------------------------------------------------------------------------


def test_a_notice_says_once_how_tasks_run(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        assert ray.get(double.options(num_cpus=1, runtime_env={"pip": ["x"]}).remote(1)) == 2
    (notice,) = notices(caplog)
    assert "one after the other, and their options have no effect" in notice


def test_init_sets_variables_and_names_what_it_ignores(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTRAIN_ENV", "BEFORE")
    monkeypatch.setenv("PLACE", "old")
    env = ray.runtime_env.RuntimeEnv(env_vars={"PLACE": "here"}, pip=["x"])
    assert not ray.is_initialized()
    with ray.init("auto", runtime_env=env, num_cpus=4, ignore_reinit_error=True, local_mode=True):
        assert ray.is_initialized()
    assert (os.environ["PLACE"], os.environ["DISTRAIN_ENV"]) == ("here", "BEFORE,PLACE")
    (notice,) = notices(caplog)
    assert "ray.init(): no effect for address, num_cpus, runtime_env:" in notice


def notices(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@pytest.fixture(autouse=True)
def _fresh_notices(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("distrain.system.log._warned", set())


def test_the_cluster_is_this_machine() -> None:
    assert ray.cluster_resources()["CPU"] == usable_cpus() == ray.available_resources()["CPU"]
    (node,) = ray.nodes()
    assert node["Alive"]
    assert node["NodeManagerAddress"] == ray.util.get_node_ip_address()
