"""The rules of the house, read from the source: floors, cycles, who owns which mechanism, what an import may load."""

from __future__ import annotations

import ast
import json
import pickle
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import distrain
from distrain import errors

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(distrain.__file__).parent

FLOORS = [
    "version", "absent", "errors", "background", "callbacks", "hostfile", "config", "states",
    "wire", "hosts", "plan", "failures", "rounds", "rows", "collectives", "stacks", "stopping", "retries",
    "backend", "main_module", "job", "roster", "events", "checks", "machine",
    "loop", "channel", "process", "scratch", "guard", "ports", "network", "transport", "host_link",
    "cgroup", "gpus", "survey", "inspection", "neighbours", "consoles", "output",
    "connections", "launch_checks", "place",
    "checkpoint", "runpaths", "files", "records", "uploads", "storage", "runlock", "keeper", "result", "reported",
    "metrics", "context", "report_checks", "session", "collective", "execution", "validations", "ledger", "watch",
    "worker", "forkserver", "forkserver_link", "uploader", "uploader_link", "agent",
    "stores", "manifest", "validator", "preemption", "coordinator",
    "desk", "outer", "local", "trainer", "preflight", "preflight_table",
    "torch.checkpoint", "torch.config", "torch.trainer", "torch.device", "torch.nested", "torch.amp", "torch.model",
    "torch.sampler", "torch.reproducibility", "torch.data",
    "tensorflow.checkpoint", "tensorflow.config", "tensorflow.trainer", "tensorflow.data", "tensorflow.keras",
    "lightning", "huggingface.transformers",
    "driver", "command", "launch",
]  # fmt: skip
"""A module may import what stands before it. The packages' ``__init__`` are lazy, and exempt."""

PROGRAMS = {"agent", "forkserver", "uploader", "validator", "worker", "coordinator"}
THINKING = [
    "errors", "states", "hostfile", "config", "wire", "hosts", "plan", "failures", "rounds", "rows", "collectives",
    "stacks", "stopping", "retries", "roster", "events", "checks", "machine",
]  # fmt: skip
ACTING = {"os", "time", "threading", "socket", "subprocess", "pathlib", "select", "selectors", "asyncio"}


# -- reading the source ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Import:
    """One imported module, by its full name; ``runtime`` is False under ``if TYPE_CHECKING``."""

    name: str
    runtime: bool


class Module:
    """One source file, by its name below ``distrain``."""

    def __init__(self, path: Path) -> None:
        parts = path.relative_to(ROOT).with_suffix("").parts
        self.is_package = parts[-1] == "__init__"
        self.name = ".".join(parts[:-1] if self.is_package else parts)
        self.tree = ast.parse(path.read_text())
        self.imports = list(self._imports(self.tree, runtime=True))

    def _imports(self, node: ast.AST, *, runtime: bool) -> Iterator[Import]:
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for child in node.body:
                yield from self._imports(child, runtime=False)
            for child in node.orelse:
                yield from self._imports(child, runtime=runtime)
            return
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, runtime) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{self.name}: relative import"
            yield from (Import(_origin(str(node.module), alias.name), runtime) for alias in node.names)
        for child in ast.iter_child_nodes(node):
            yield from self._imports(child, runtime=runtime)

    @property
    def tops(self) -> set[str]:
        """Top-level packages that are imported at run time."""
        return {found.name.partition(".")[0] for found in self.imports if found.runtime}

    @property
    def own(self) -> set[str]:
        """Modules of ours that are imported at run time, functions included."""
        names = {found.name for found in self.imports if found.runtime}
        return {name.removeprefix("distrain.") for name in names if name.startswith("distrain.")}

    def uses(self, module: str) -> set[str]:
        """Attributes of an imported module that are named anywhere."""
        return {
            node.attr
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == module
        }


def _origin(module: str, name: str) -> str:
    """``from distrain import wire`` imports a module, ``from distrain.wire import encode`` what is in one."""
    below = ROOT.parent.joinpath(*module.split("."), name)
    is_module = module.startswith("distrain") and (below.with_suffix(".py").exists() or below.is_dir())
    return f"{module}.{name}" if is_module else module


MODULES = {module.name: module for module in map(Module, sorted(ROOT.rglob("*.py")))}
PLAIN = {name: module for name, module in MODULES.items() if not module.is_package}
every_module = pytest.mark.parametrize("module", MODULES.values(), ids=[name or "distrain" for name in MODULES])
plain_module = pytest.mark.parametrize("module", PLAIN.values(), ids=list(PLAIN))


# -- floors ----------------------------------------------------------------------------------------------------------


def test_every_module_has_its_place_in_the_order() -> None:
    assert sorted(FLOORS) == sorted(PLAIN)


@plain_module
def test_a_module_imports_only_what_stands_above_it(module: Module) -> None:
    above = set(FLOORS[: FLOORS.index(module.name)])
    assert module.own <= above


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_programs_do_not_import_each_other(name: str) -> None:
    """A forked worker is the forkserver's own child, so that one may."""
    allowed = {"worker"} if name == "forkserver" else set()
    assert MODULES[name].own & PROGRAMS <= allowed


LEAVES = ("torch", "tensorflow")


@pytest.mark.parametrize(("leaf", "allowed"), [("torch", {"command", "lightning"}), ("tensorflow", set())])
def test_only_the_command_line_names_a_leaf(leaf: str, allowed: set[str]) -> None:
    named = {name for name, module in PLAIN.items() if any(own.startswith(leaf) for own in module.own)}
    assert {name for name in named if not name.startswith(f"{leaf}.")} <= allowed


def test_there_is_no_cycle_at_any_level() -> None:
    """Packages included: whoever imports ``a.b`` imports ``a``."""
    graph = {name: module.own & MODULES.keys() for name, module in MODULES.items()}

    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path, name])
        if name not in done:
            for other in graph[name]:
                walk(other, (*path, name))
            done.add(name)

    done: set[str] = set()
    for name in graph:
        walk(name, ())


@every_module
def test_packages_import_nothing_of_ours_but_lazily(module: Module) -> None:
    if module.is_package:
        assert module.own <= {"absent"}  # what explains the names that a package lacks


# -- who owns which mechanism ----------------------------------------------------------------------------------------

STARTS_NOTHING = {"TimeoutExpired", "PIPE", "DEVNULL", "STDOUT", "_args_from_interpreter_flags"}
"""Names of ``subprocess`` that anybody may use: they neither start, nor signal, nor wait for a process."""
KILLS_OR_STARTS = {"kill", "killpg", "system", "popen", "posix_spawn", "posix_spawnp", "spawnv", "spawnve", "startfile"}


@plain_module
def test_only_process_starts_and_kills(module: Module) -> None:
    if module.name == "process":
        return
    assert not any(isinstance(n, ast.ImportFrom) and n.module in ("subprocess", "os") for n in ast.walk(module.tree))
    assert module.uses("subprocess") <= STARTS_NOTHING
    assert not module.uses("os") & KILLS_OR_STARTS
    assert "pidfd_send_signal" not in module.uses("signal")


def test_only_the_forkserver_and_the_guard_fork() -> None:
    assert {name for name, module in PLAIN.items() if module.uses("os") & {"fork", "forkpty"}} == {
        "forkserver",
        "guard",
    }


def test_only_wire_packs_bytes() -> None:
    assert {name for name, module in PLAIN.items() if "struct" in module.tops} == {"wire"}


def test_only_process_hunts_with_psutil() -> None:
    """The other one asks it for interfaces."""
    assert {name for name, module in PLAIN.items() if "psutil" in module.tops} == {"process", "network"}


@pytest.mark.parametrize("name", THINKING)
def test_thinking_modules_do_not_act(name: str) -> None:
    allowed = {"os"} if name == "config" else set()
    assert MODULES[name].tops & ACTING <= allowed
    assert MODULES[name].uses("os") <= {"PathLike", "fspath"}


@every_module
@pytest.mark.parametrize(
    ("leaf", "packages"), [("torch", {"torch", "torchvision"}), ("tensorflow", {"tensorflow", "keras", "tf_keras"})]
)
def test_a_framework_is_imported_in_its_leaf_only(module: Module, leaf: str, packages: set[str]) -> None:
    if not module.name.startswith(leaf):
        assert not {found.name.partition(".")[0] for found in module.imports} & packages


@every_module
def test_the_core_never_imports_a_framework_by_name(module: Module) -> None:
    if module.name.startswith(LEAVES):
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            named = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            assert all(str(name).startswith("distrain.") for name in named), ast.unparse(node)


# -- what every module has -------------------------------------------------------------------------------------------


@every_module
def test_the_docstring_says_where_it_runs(module: Module) -> None:
    assert "Runs in: " in (ast.get_docstring(module.tree) or "")


def top_level_names(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in [*tree.body, *(child for node in tree.body if isinstance(node, ast.If) for child in node.body)]:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name for alias in aliases}
            case ast.Assign(targets=targets):
                names |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return names


def public_names(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    raise AssertionError("no __all__")


@every_module
def test_all_names_exist_and_none_is_named_twice(module: Module) -> None:
    names = public_names(module.tree)
    assert len(set(names)) == len(names)
    assert set(names) <= top_level_names(module.tree)


def test_the_public_names_are_those_that_are_mapped() -> None:
    assert sorted(distrain.__all__) == sorted(distrain._HOME_OF)


@pytest.mark.parametrize("name", distrain.__all__)
def test_a_public_name_is_public_where_it_comes_from(name: str) -> None:
    assert getattr(distrain, name) is not None
    assert name in public_names(MODULES[distrain._HOME_OF[name]].tree)


def test_dir_shows_the_public_names() -> None:
    assert set(distrain.__all__) <= set(dir(distrain))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = distrain.no_such_name


@pytest.mark.parametrize("name", LEAVES)
def test_a_leaf_maps_what_it_lists(name: str) -> None:
    leaf = import_module(f"distrain.{name}")
    assert sorted(leaf.__all__) == sorted(leaf._HOME_OF)
    for public, home in leaf._HOME_OF.items():
        assert public in public_names(MODULES[f"{name}.{home}"].tree)


# -- what an import loads --------------------------------------------------------------------------------------------

HEAVY = {"torch", "torchvision", "numpy", "pandas", "tensorflow", "keras", "tf_keras"}
LOADED = "import sys, json; before = set(sys.modules); {}; print(json.dumps(sorted(set(sys.modules) - before)))"


def loaded_by(statement: str) -> set[str]:
    """Top-level packages that a new interpreter loads for a statement."""
    command = [sys.executable, "-c", LOADED.format(statement)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return {name.partition(".")[0] for name in json.loads(done.stdout)}


def test_import_distrain_loads_nothing_large() -> None:
    assert not loaded_by("import distrain") & (HEAVY | {"cloudpickle", "rich", "psutil", "fsspec"})


@pytest.mark.parametrize(
    "statement",
    [
        "import distrain.coordinator.coordinator",
        "import distrain.trainer",
        "import distrain.cli.command",
        "import distrain.torch",
        "from distrain.torch import TorchTrainer",
        "from distrain.tensorflow import TensorflowConfig, TensorflowTrainer",
        "from distrain import DataParallelTrainer",
    ],
)
def test_the_coordinators_side_loads_no_framework(statement: str) -> None:
    assert not loaded_by(statement) & HEAVY


def test_the_agent_loads_the_standard_library_and_us() -> None:
    assert loaded_by("import distrain.agent.main") <= sys.stdlib_module_names | {"distrain"}


def test_all_public_names_can_be_had_without_a_framework() -> None:
    assert not loaded_by("import distrain; [getattr(distrain, name) for name in distrain.__all__]") & HEAVY


# -- exceptions ------------------------------------------------------------------------------------------------------


def example(kind: type[errors.DistrainError]) -> errors.DistrainError:
    if issubclass(kind, errors.WorkerGroupError):
        return kind("text", worker_failures={3: ValueError("boom")}, culprit=3, exit_code=7)
    return kind("text")


@pytest.mark.parametrize("name", errors.__all__)
def test_exceptions_survive_pickling_with_their_attributes(name: str) -> None:
    error = example(getattr(errors, name))
    if isinstance(error, errors.TrainingFailedError):
        error.result = "stands for a Result"  # type: ignore[assignment]
    error.__notes__ = ["a note"]
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == "text"
    assert repr(vars(again)) == repr(vars(error))


@pytest.mark.parametrize("name", errors.__all__)
def test_exceptions_are_drawn_in_the_tree(name: str) -> None:
    assert issubclass(getattr(errors, name), errors.DistrainError)
    assert f" {name} " in str(errors.__doc__) or f" {name}\n" in str(errors.__doc__)
