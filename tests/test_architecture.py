"""The rules of the house, read from the source: layers, circles, who owns which mechanism, what an import may load."""

from __future__ import annotations

import ast
import json
import pickle
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import distrain
from distrain import errors
from distrain.coordinator.observers import OBSERVERS

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(distrain.__file__).parent

LAYERS = [
    "errors", "system", "wire", "hosts", "storage", "data", "api", "transfer", "decisions", "worker", "session",
    "collective", "agent", "coordinator", "jobs", "trackers", "console", "page", "torch", "tensorflow", "jax",
    "lightgbm", "xgboost", "lightning", "huggingface", "prometheus", "as_ray", "drilling", "board", "cli", "launch",
    "pytest_plugin", "__main__",
]  # fmt: skip
"""A package, or a module that users import, may import what stands before it, for types too."""

PURE = {
    "distrain.api.observer", "distrain.errors", "distrain.wire", "distrain.hosts.host", "distrain.hosts.world",
    "distrain.storage.commit", "distrain.storage.names", "distrain.storage.retention",
    "distrain.system.peer_errors", "distrain.system.stacks", "distrain.system.text",
}  # fmt: skip
"""Modules of other packages that decisions may import: facts and texts, without I/O."""
ACTING = {"os", "time", "threading", "socket", "subprocess", "pathlib", "select", "selectors", "asyncio", "random"}
ONE_PACKAGE = ({"as_ray", "as_ray.data"}, {"cli", "cli.run"})
"""Folders that are used together, and may import each other."""
MOST_MODULES = 16
MOST_ROOMS = 17
"""The queue has a room of its own: it is above the engine, which starts its processes on hosts, and runs without it."""
MOST_LEVELS = 10
"""The queue is one of its own: above the coordinator, by whose connections it asks hosts, and below the commands."""
FOR_USERS = {
    "errors", "session", "collective", "torch", "tensorflow", "jax", "lightgbm", "xgboost", "lightning", "huggingface",
    "prometheus", "drilling", "board", "launch", "pytest_plugin", "__main__",
}  # fmt: skip
"""Names at the top level that users import, or start: they are no rooms."""
NAMED_ABOVE = {
    "api.tracker": {"trackers"},
    "coordinator.observers": {"console.choice", "console.on_end", "page.at_end", "trackers.observer"},
    "data.iterator": {"torch.batches", "tensorflow.data"},
    "storage.runs.details": {"launch"},
    "system.process": {
        "agent.forkserver", "agent.main", "cli.debugging", "jobs.side", "transfer.mover",
        "transfer.stream_server", "transfer.uploader", "worker.main", "worker.validator",
    },
}  # fmt: skip
"""Strings that may name modules above: tables of frameworks and observers, a command that is run or shown, programs."""


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
        self.strings = set(self._strings())

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

    def _strings(self) -> Iterator[str]:
        """Modules of ours that a string names, or begins to name, except what may be named above."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.JoinedStr) and node.values:
                node = node.values[0]
            if not isinstance(node, ast.Constant) or not re.fullmatch(r"distrain(\.\w+)+\.?", str(node.value)):
                continue
            name = str(node.value).rstrip(".")
            below = ROOT.parent.joinpath(*name.split("."))
            named = name.removeprefix("distrain.")
            if (below.with_suffix(".py").exists() or below.is_dir()) and named not in NAMED_ABOVE.get(self.name, ()):
                yield name

    @property
    def names(self) -> set[str]:
        """Modules of ours that are imported, for types too, or that a string names."""
        return {found.name for found in self.imports if found.name.startswith("distrain.")} | self.strings

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


# -- layers ----------------------------------------------------------------------------------------------------------


def layer_of(name: str) -> str:
    return name.removeprefix("distrain.").partition(".")[0]


def test_every_package_has_its_place_in_the_order() -> None:
    assert sorted(LAYERS) == sorted({layer_of(name) for name in MODULES if name})


def test_a_module_imports_only_from_its_own_layer_and_those_below() -> None:
    for name, module in MODULES.items():
        if not name:
            continue  # the public face, which imports on first use only
        allowed = LAYERS[: LAYERS.index(layer_of(name)) + 1]
        assert set(map(layer_of, module.names)) <= set(allowed), name


def test_the_top_level_has_few_rooms() -> None:
    rooms = set(LAYERS) - FOR_USERS
    assert len(rooms) <= MOST_ROOMS, rooms


def test_the_rooms_stand_on_few_levels() -> None:
    below: dict[str, set[str]] = {layer: set() for layer in LAYERS}
    for name, module in MODULES.items():
        if name:
            below[layer_of(name)] |= set(map(layer_of, module.names)) - {layer_of(name)}
    levels: dict[str, int] = {}
    for layer in LAYERS:  # each imports only those before it
        levels[layer] = 1 + max((levels[other] for other in below[layer]), default=0)
    rooms = {layer: level for layer, level in levels.items() if layer not in FOR_USERS}
    assert len(set(rooms.values())) <= MOST_LEVELS, rooms


def test_modules_import_each_other_in_no_circle() -> None:
    """Imports for types and by strings count, too. The packages' own ``__init__`` are below their modules."""
    graph = {
        name: ({found.removeprefix("distrain.") for found in module.names} & PLAIN.keys()) - {name}
        for name, module in PLAIN.items()
    }

    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path, name])
        if name not in done:
            for other in graph[name]:
                walk(other, (*path, name))
            done.add(name)

    done: set[str] = set()
    for name in graph:
        walk(name, ())


def test_packages_import_each_other_in_no_circle() -> None:
    """Each folder is a package of its own. A module at the top level stands alone."""
    graph: dict[str, set[str]] = {}
    for name, module in PLAIN.items():
        found = {folder_of(other.removeprefix("distrain.")) for other in module.names}
        graph.setdefault(folder_of(name), set()).update(found - {folder_of(name)})
    for those in ONE_PACKAGE:
        for one in those:
            graph[one] -= those
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def folder_of(name: str) -> str:
    return name.rpartition(".")[0] or name


def test_no_package_has_more_modules_than_one_can_remember() -> None:
    counts = Counter(name.rpartition(".")[0] for name in PLAIN if "." in name)
    assert max(counts.values()) <= MOST_MODULES, counts


@pytest.mark.parametrize("name", [name for name in PLAIN if name.startswith("decisions.")])
def test_decisions_have_no_clock_and_no_io(name: str) -> None:
    assert not MODULES[name].tops & ACTING
    runtime = {found.name for found in MODULES[name].imports if found.runtime and found.name.startswith("distrain.")}
    assert {other for other in runtime if not other.startswith("distrain.decisions.")} <= PURE


@pytest.mark.parametrize("package", [module for module in MODULES.values() if module.is_package and module.name])
def test_a_package_says_what_happens_there_and_in_which_process(package: Module) -> None:
    text = ast.get_docstring(package.tree) or ""
    assert "Runs in: " in text
    assert len(text.splitlines()) <= 20


def test_a_package_imports_none_of_its_modules() -> None:
    """That is left to whoever uses one. The messages of the protocol, and the import that acts, are the exceptions."""
    for name, module in MODULES.items():
        if module.is_package and name not in ("wire", "as_ray"):
            assert module.own <= {"system.imports", "api.ray_names"}, name


def test_the_engine_imports_no_observer() -> None:
    """They are above it in the order. One table names the modules, and every name in it leads to one."""
    named = {
        node.value
        for node in ast.walk(MODULES["coordinator.observers"].tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("distrain.")
    }
    assert named == set(OBSERVERS)
    assert all(hasattr(import_module(name), "observers") for name in named)


# -- who owns which mechanism ----------------------------------------------------------------------------------------

STARTS_NOTHING = {"TimeoutExpired", "PIPE", "DEVNULL", "STDOUT", "_args_from_interpreter_flags"}
"""Names of ``subprocess`` that anybody may use: they neither start, nor signal, nor wait for a process."""
KILLS_OR_STARTS = {"kill", "killpg", "system", "popen", "posix_spawn", "posix_spawnp", "spawnv", "spawnve", "startfile"}


def test_only_process_starts_and_kills() -> None:
    for name, module in PLAIN.items():
        if name == "system.process":
            continue
        nodes = ast.walk(module.tree)
        assert not any(isinstance(node, ast.ImportFrom) and node.module in ("subprocess", "os") for node in nodes), name
        assert module.uses("subprocess") <= STARTS_NOTHING, name
        assert not module.uses("os") & KILLS_OR_STARTS, name
        assert "pidfd_send_signal" not in module.uses("signal"), name


def test_only_the_forkserver_and_the_guard_fork() -> None:
    assert {name for name, module in PLAIN.items() if module.uses("os") & {"fork", "forkpty"}} == {
        "agent.forkserver",
        "agent.guard",
    }


def test_only_wire_packs_bytes() -> None:
    of_the_kernel = {"worker.reporting.written_files"}
    assert {name for name, module in PLAIN.items() if "struct" in module.tops} - of_the_kernel == {"wire.codec"}


def test_psutil_is_asked_for_the_network_and_memory_of_a_host_only() -> None:
    """It takes longer than a look at /proc to tell of processes."""
    assert {name for name, module in PLAIN.items() if "psutil" in module.tops} == {"hosts.memory", "hosts.network"}


@pytest.mark.parametrize(
    ("leaf", "packages"),
    [
        ("torch", {"torch", "torchvision"}),
        ("tensorflow", {"tensorflow", "keras", "tf_keras"}),
        ("jax", {"jax", "jaxlib"}),
    ],
)
def test_a_framework_is_imported_in_its_leaf_only(leaf: str, packages: set[str]) -> None:
    for name, module in MODULES.items():
        if not name.startswith(leaf):
            assert not {found.name.partition(".")[0] for found in module.imports} & packages, name


# -- the document ----------------------------------------------------------------------------------------------------

DOCUMENT = (ROOT.parent / "docs" / "internals" / "architecture.md").read_text()
NAMED_FILES = set(re.findall(r"(?<![\w/.])(?:\w+/)*\w+\.(?:py|md|svg|txt)\b|(?<=`)(?:\w+/)+\w*(?=`)", DOCUMENT))
NAMED_CODE = set(re.findall(r"(?<=`)(?:[A-Z][a-z]\w+(?:\.\w+)?(?=`|\(\)`)|\w+(?=\(\)`))", DOCUMENT))


def test_the_files_that_the_document_names_exist() -> None:
    folders = (ROOT, ROOT.parent, ROOT.parent / "docs", ROOT.parent / "docs" / "internals")
    assert {name for name in NAMED_FILES if not any((folder / name).exists() for folder in folders)} == set()


def test_the_code_that_the_document_names_exists() -> None:
    """Classes, functions, methods and fields, the latter two in any class."""
    nodes = [node for module in MODULES.values() for node in ast.walk(module.tree)]
    defined = {node.name for node in nodes if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    fields = {ast.unparse(node.target) for node in nodes if isinstance(node, ast.AnnAssign)}
    named = {part for name in NAMED_CODE for part in name.split(".")}
    assert named - defined - fields == set()


# -- what every module has -------------------------------------------------------------------------------------------


def test_the_docstring_says_where_it_runs() -> None:
    assert {
        name for name, module in MODULES.items() if "Runs in: " not in (ast.get_docstring(module.tree) or "")
    } == set()


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


PUBLIC = [name for name in PLAIN if "." not in name or name in ("huggingface.transformers", "tensorflow.keras")]
PUBLIC.remove("errors")
"""Modules that users import by these names. The names of others are those that their packages show, and exceptions."""


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_module_lists_its_names(name: str) -> None:
    names = public_names(MODULES[name].tree)
    assert len(set(names)) == len(names)
    assert set(names) <= top_level_names(MODULES[name].tree)


# -- what an import loads --------------------------------------------------------------------------------------------

HEAVY = {"torch", "torchvision", "numpy", "pandas", "tensorflow", "keras", "tf_keras", "jax"}
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
        "import distrain.coordinator.run.trainer",
        "import distrain.cli.run.command",
        "import distrain.torch",
        "from distrain.torch import TorchTrainer",
        "from distrain.tensorflow import TensorflowConfig, TensorflowTrainer",
        "from distrain.jax import JaxConfig, JaxTrainer",
        "from distrain import DataParallelTrainer",
    ],
)
def test_the_coordinators_side_loads_no_framework(statement: str) -> None:
    assert not loaded_by(statement) & HEAVY


def test_the_agent_loads_the_standard_library_and_us() -> None:
    assert loaded_by("import distrain.agent.main") <= sys.stdlib_module_names | {"distrain"}


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
