"""A training function is checked and pickled, its imports are found, and what cannot be pickled is explained."""

from __future__ import annotations

import functools
import importlib
import re
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from distrain import DataParallelTrainer, ValidationConfig
from distrain.api.backend import BackendConfig
from distrain.errors import JobError
from distrain.torch import TorchConfig
from distrain.worker.job import job
from distrain.worker.job.functions import check_signature
from distrain.worker.job.job import FunctionWork, TargetWork, make_job
from distrain.worker.job.preload import third_party_modules

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LOCK = threading.Lock()
MEGABYTE = 1_000_000


def work(function: Callable[..., Any] = lambda: None, **config: Any) -> FunctionWork:
    return FunctionWork(function=function, config=config, backend=BackendConfig())


def modules_of(function: Callable[..., Any], **config: Any) -> list[str]:
    prepared = work(function, **config)
    return third_party_modules(make_job(prepared).blob, prepared.function)


def explanation(function: Callable[..., Any] = lambda: None, **config: Any) -> str:
    with pytest.raises(JobError) as error:
        make_job(work(function, **config))
    return str(error.value)


# -- signatures ------------------------------------------------------------------------------------------------------


class Holder:
    def method(self, config: dict[str, Any]) -> Any:
        return config

    def __call__(self, config: dict[str, Any]) -> Any:
        return config


def scaled(config: dict[str, Any], *, factor: int) -> Any:
    return {**config, "factor": factor}


CONFIG = {"lr": 0.1}
ACCEPTED: list[tuple[str, Callable[..., Any], Any]] = [
    ("no argument", lambda: "called", "called"),
    ("one argument", lambda config: config, CONFIG),
    ("args", lambda *args: args, (CONFIG,)),
    ("kwargs", lambda **kwargs: kwargs, {}),
    ("two, the second optional", lambda config, verbose=False: (config, verbose), (CONFIG, False)),
    ("a method", Holder().method, CONFIG),
    ("a callable object", Holder(), CONFIG),
    ("a partial", functools.partial(scaled, factor=2), {**CONFIG, "factor": 2}),
    ("a partial with its config", functools.partial(lambda config: config, 3), 3),
]


@pytest.mark.parametrize(("function", "expected"), [row[1:] for row in ACCEPTED], ids=[row[0] for row in ACCEPTED])
def test_a_function_is_called_with_the_config_if_it_takes_it(function: Callable[..., Any], expected: Any) -> None:
    assert check_signature(function) is function
    assert work(function, **CONFIG).run() == expected


@pytest.mark.parametrize(
    ("function", "names"),
    [(lambda a, b: None, "a, b"), (lambda a, *, b: None, "a, b"), (lambda *, b: None, "b"), (scaled, "config, factor")],
    ids=["two", "one and a keyword", "a keyword", "a named one"],
)
def test_a_function_that_requires_more_is_refused_with_the_names(function: Callable[..., Any], names: str) -> None:
    with pytest.raises(ValueError, match=f"requires: {names}\\. .*functools.partial"):
        check_signature(function)


@pytest.mark.parametrize("value", [None, 3, "train.py"])
def test_what_cannot_be_called_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="must be a function"):
        check_signature(value)


async def coroutine(config: dict[str, Any]) -> None: ...


async def async_generator(config: dict[str, Any]) -> Any:
    yield


def generator(config: dict[str, Any]) -> Any:
    yield


class AsyncHolder:
    async def method(self, config: dict[str, Any]) -> None: ...

    async def __call__(self, config: dict[str, Any]) -> None: ...


NOT_RUN: list[tuple[Callable[..., Any], str]] = [
    (coroutine, "a call of coroutine makes a coroutine: .*asyncio.run"),
    (async_generator, "a call of async_generator makes an asynchronous generator: .*asyncio.run"),
    (generator, "a call of generator makes a generator: .*report"),
    (functools.partial(functools.partial(coroutine), {}), "makes a coroutine"),
    (AsyncHolder().method, "makes a coroutine"),
    (AsyncHolder(), "makes a coroutine"),
]


@pytest.mark.parametrize(("function", "said"), NOT_RUN)
def test_a_function_that_a_call_does_not_run_is_refused(function: Callable[..., Any], said: str) -> None:
    with pytest.raises(TypeError, match=f"train_loop_per_worker must be a plain function, but .*{said}"):
        DataParallelTrainer(function)
    with pytest.raises(TypeError, match=r"ValidationConfig.fn must be a plain function"):
        DataParallelTrainer(lambda: None, validation_config=ValidationConfig(fn=function))


# -- there and back --------------------------------------------------------------------------------------------------


def test_bytes_that_hold_something_else_are_refused() -> None:
    with pytest.raises(JobError, match="this job was not made by distrain: dict"):
        job.loads(b"}.")


# -- what cannot be pickled ------------------------------------------------------------------------------------------


def test_a_captured_variable_is_named() -> None:
    lock = threading.Lock()
    text = explanation(lambda: lock)
    assert "-> variable 'lock' (_thread.lock)" in text
    assert "inside the training function" in text


def test_a_config_entry_is_named() -> None:
    assert "train_loop_config['data']['lock'] (_thread.lock)" in explanation(data={"fine": 1, "lock": LOCK})


def test_an_argument_of_the_validation_function_is_named() -> None:
    work = FunctionWork(function=print, config={"lock": LOCK}, validates=True, backend=BackendConfig())
    with pytest.raises(JobError, match=r"fn_kwargs\['lock'\] \(_thread.lock\).* inside the validation function"):
        make_job(work)


def test_an_attribute_is_named() -> None:
    class Model:
        def __init__(self) -> None:
            self.weights = [1]
            self.lock = threading.Lock()

    assert "train_loop_config['model'].lock (_thread.lock)" in explanation(model=Model())


# -- what is large ---------------------------------------------------------------------------------------------------


def warning(function: Callable[..., Any] = lambda: None, **config: Any) -> str:
    return make_job(work(function, **config)).warning or ""


def test_a_large_payload_is_warned_of_with_its_size() -> None:
    text = warning(data=bytes(12 * MEGABYTE)) or ""  # the sources of test modules may add a little
    assert re.search(r"are 12\.\d MB, which every worker has to unpickle", text), text
    assert not warning(data=bytes(MEGABYTE))


# -- what is worth importing before the fork -------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site-packages directory of the test's own."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def package(folder: Path, name: str, source: str = "") -> None:
    (folder / f"{name}.py").write_text(source)
    importlib.invalidate_caches()


def train_func(*lines: str) -> Callable[..., Any]:
    """A function of a user's ``__main__`` with these lines as its body."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec("\n    ".join(["def train(config=None):", *lines]), namespace)
    function: Callable[..., Any] = namespace["train"]
    return function


IMPORTING = "import fake_framework"


def test_modules_that_the_function_imports_are_found(installed: Path) -> None:
    package(installed, "fake_framework")
    assert modules_of(train_func(IMPORTING)) == ["fake_framework"]


def test_modules_that_the_pickle_names_are_found() -> None:
    function = train_func("return used")
    function.__globals__["used"] = pytest
    assert modules_of(function) == ["pytest"]


def test_a_users_file_is_never_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "fake_framework")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert modules_of(train_func(IMPORTING)) == []


@pytest.mark.parametrize(
    "name", ["json", "xml.etree.ElementTree", "distrain.api.config", "cloudpickle", "no_such_module"]
)
def test_what_needs_no_preload_is_never_found(name: str) -> None:
    assert modules_of(train_func(f"import {name}")) == []


def optimize_by_attribute() -> None:
    import torch

    torch.optim.SGD([])


def optimize_by_import() -> None:
    from torch.optim import AdamW

    AdamW([])


@pytest.mark.parametrize("function", [optimize_by_attribute, optimize_by_import])
def test_what_an_optimizer_imports_is_preloaded_for_many_workers(function: Callable[..., Any]) -> None:
    prepared = FunctionWork(function=function, config={}, backend=TorchConfig())
    few, many = (make_job(prepared, workers_per_host=number).preload for number in (2, 8))
    assert "torch._dynamo" not in few
    assert many[-1] == "torch._dynamo"


# -- scripts and targets ---------------------------------------------------------------------------------------------


@pytest.fixture
def interpreter_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """What running a script changes, put back afterwards."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.usefixtures("interpreter_state")
def test_a_function_that_is_not_there_is_named() -> None:
    with pytest.raises(JobError, match=r"json has no function 'loda'; did you mean load\?"):
        TargetWork(target="json:loda", config={}, backend=BackendConfig()).run()
