"""The code of the documents that the project was made from, run as a user runs it: that for PyTorch.

Every block of code is cut out of the seed files, edited as little as the README's migration promises (imports,
``use_gpu=False`` without GPUs, one epoch instead of ten, and what stands for the documents' ``...``), and run as a
script of its own. Every edit must match, so no test can come to test nothing.

The documents are not part of the repository: DISTRAIN_SEEDS names their directory (default: ``shared/seeds`` beside the
repository). Their names here: S0 = 000_..., S1 = 001_..., S2 = 002_..., S4 = 004_...; S3 is about TensorFlow, see
test_tensorflow_seed.py. What a document only includes from elsewhere (``literalinclude``) is not in it; of that, S1's
TorchMetrics example is written anew from its description.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest

from distrain import Result
from tests.process.bucket import BUCKET, Bucket, Door, forget_connections, moto_server

REPOSITORY = Path(__file__).resolve().parent.parent
SEEDS = Path(os.environ.get("DISTRAIN_SEEDS") or REPOSITORY.parent / "shared" / "seeds")
pytestmark = [
    pytest.mark.skipif(
        not SEEDS.is_dir(), reason=f"the seed documents are not at {SEEDS}; name their directory in DISTRAIN_SEEDS"
    ),
    pytest.mark.timeout(300),
]
needs_torchvision = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed"
)

# -- finding the blocks ----------------------------------------------------------------------------------------------

RST_BLOCKS = {
    "S0": (
        *("skeleton", "plain", "full", "function", "model diff", "loader diff", "global batch size", "report diff"),
        *("scaling", "launch", "result"),
    ),
    "S1": (
        *("model diff", "loader diff", "global batch size", "trainer", "torch backend", "fit"),
        *("save", "load", "amp diff", "reproducibility diff"),
    ),
    "S3": (
        *("strategy", "batch size diff", "trainer", "tensorflow backend", "fit", "data shard", "callback"),
        *("save", "load"),
    ),
}
"""The blocks of the documents with markup, in order."""

TEXT_BLOCKS = {
    "S2": {
        "full": ("这一块比较建议", "模型"),
        "report diff": ("报告 checkpoints", "data_loader ="),
        "scaling": ("配置 scale", "配置持久化存储"),
        "storage": ("多节点分布式训练时", "启动训练任务"),
        "launch": ("启动训练任务", None),
    },
    "S4": {
        "skeleton": ("For reference, the final code", "train_func is the Python code"),
        "plain": ("PyTorch\n", "PyTorch + Ray Train\n"),
        "full": ("PyTorch + Ray Train\n", "Set up a training function#"),
        "function": ("Begin by wrapping your code", "Each distributed training worker"),
        "config": ("You can also specify the input", "Warning\n"),
        "large data diff": ("initialize large objects", "Set up a model#"),
        "model diff": ("Wrap it in DistributedDataParallel.", "Set up a dataset#"),
        "loader diff": ("See Data Loading and Preprocessing.\n", "Tip\n"),
        "global batch size": ("The global batch size can be", "Note\n"),
        "report diff": ("To monitor progress, you can", "For more details, see Monitoring"),
        "scaling": ("use_gpu - Whether each", "For more details, see Configuring"),
        "storage": ("(including checkpoints and artifacts)", "Warning\n"),
        "launch": ("with a TorchTrainer.\n", "Access training results#"),
        "result": ("information about the training run", "For more usage examples"),
    },
}
"""The blocks of the documents without: how the line before each begins, and how the line after it does."""


def block(name: str) -> str:
    """The block of that name, such as ``block("S0 full")``, as the document has it."""
    document, _, title = name.partition(" ")
    paths = list(SEEDS.glob(f"00{document[1]}_*.txt"))
    assert len(paths) == 1, f"{document} is not in {SEEDS}"
    text = paths[0].read_text()
    if document in RST_BLOCKS:
        found = rst_blocks(text)
        assert len(found) == len(RST_BLOCKS[document]), f"{document} has {len(found)} blocks of code"
        return found[RST_BLOCKS[document].index(title)]
    before, after = TEXT_BLOCKS[document][title]
    start = re.search(rf"^{re.escape(before)}.*\n?", text, re.MULTILINE)
    assert start, f"{document} has no line that begins with {before!r}"
    rest = text[start.end() :]
    if before.endswith("\n"):
        rest = text[start.start() + len(before) :]
    if after is None:
        return rest
    end = re.search(rf"^{re.escape(after)}", rest, re.MULTILINE)
    assert end, f"{document} has no line that begins with {after!r} after {before!r}"
    return rest[: end.start()]


def rst_blocks(text: str) -> list[str]:
    """The content of every ``.. code-block::``, without its options and its indentation."""
    directive = re.compile(r"^( *)\.\. code-block:: \w+\n(?:\1 +:.*\n)*((?:\1 +.*\n|\s*\n)+)", re.MULTILINE)
    return [textwrap.dedent(match[2]).strip("\n") + "\n" for match in directive.finditer(text)]


# -- editing them ----------------------------------------------------------------------------------------------------


def edit(source: str, *edits: tuple[str, str]) -> str:
    """Replace each old text, which must be there exactly once, by the new one."""
    for old, new in edits:
        assert source.count(old) == 1, f"{old!r} is there {source.count(old)} times in:\n{source}"
        source = source.replace(old, new)
    return source


def fill(source: str, *bodies: str) -> str:
    """Put a body in the place of each line that is ``...``, of which there must be as many."""
    holes = len(re.findall(r"(?m)^ *\.\.\.$", source))
    assert holes == len(bodies), f"there are {holes} lines of '...' in:\n{source}"
    rest = iter(bodies)
    return re.sub(r"(?m)^( *)\.\.\.$", lambda match: textwrap.indent(next(rest), match[1]), source)


def new_side(diff: str) -> str:
    assert re.search(r"(?m)^\+", diff), f"nothing is added by:\n{diff}"
    return "".join(line[1:] if line.strip() else line for line in diff.splitlines(keepends=True) if line[0] != "-")


def old_side(diff: str) -> str:
    assert re.search(r"(?m)^-", diff), f"nothing is removed by:\n{diff}"
    return "".join(line[1:] if line.strip() else line for line in diff.splitlines(keepends=True) if line[0] != "+")


def migrated(source: str) -> str:
    """The whole of the migration, and the import of what is used but not imported."""
    for old, new in (
        ("from ray import train", "import distrain as train"),
        ("from ray.air import", "from distrain import"),
        ("ray.train", "distrain"),
    ):
        source = source.replace(old, new)
    assert not re.search(r"\bray\b", source), f"Ray is left in:\n{source}"
    assert "distrain" in source
    if re.search(r"\bdistrain\.\w", source) and not re.search(r"(?m)^import distrain\b(?! as)", source):
        source = "import distrain\n" + source
    return source


def squeezed(text: str) -> str:
    """Without white space."""
    return re.sub(r"\s", "", text)


CPU = ("use_gpu=True", "use_gpu=False")
ONE_EPOCH = ("range(10)", "range(1)")

TOYS = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

class NeuralNetwork(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 3)
        torch.nn.init.zeros_(self.bias)

    def forward(self, inputs):
        outputs = super().forward(inputs)
        self.computed_in = str(outputs.dtype)
        return outputs

my_dataset = TensorDataset(torch.arange(40.0).reshape(10, 4), torch.arange(10) % 3)
worker_batch_size = 2

"""
"""What the documents' names stand for."""
ROWS = list(range(0, 40, 4))
"""The first numbers of the rows of the data."""

# -- running them ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ran:
    """A script that has run, and what it has left."""

    exit_code: int
    output: str
    errors: str
    home: Path

    @property
    def results(self) -> list[Result]:
        """Of the runs in the default place, in the order of their start."""
        runs = (self.home / "distrain_results").glob("*/run.json")
        return [Result.from_path(file.parent) for file in sorted(runs, key=lambda file: file.parent.stat().st_ctime_ns)]

    @property
    def result(self) -> Result:
        """Of the only run."""
        (result,) = self.results
        return result


def reports(result: Result) -> dict[int, list[dict[str, Any]]]:
    """The metrics of every report, by rank."""
    by_rank: dict[int, list[dict[str, Any]]] = {}
    for line in (Path(result.path) / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        by_rank.setdefault(record["rank"], []).append(record["metrics"])
    return by_rank


def checkpoint_files(result: Result) -> list[str]:
    assert result.checkpoint is not None
    return sorted(path.name for path in Path(result.checkpoint.path).iterdir() if not path.name.startswith("."))


@pytest.fixture(scope="session")
def fashion_mnist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root in which torchvision finds a FashionMNIST, so that ``download=True`` downloads nothing: the digits that
    come with the examples, the first few of them, enlarged from 8x8 to 28x28 pixels."""
    digits = REPOSITORY / "examples" / "data" / "digits" / "MNIST" / "raw"
    root = tmp_path_factory.mktemp("fashion-mnist")
    raw = root / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", 64), ("t10k", 8)):
        images = numpy.frombuffer((digits / f"{part}-images-idx3-ubyte").read_bytes(), numpy.uint8, offset=16)
        labels = numpy.frombuffer((digits / f"{part}-labels-idx1-ubyte").read_bytes(), numpy.uint8, offset=8)
        large = images.reshape(-1, 8, 8)[:count].repeat(3, axis=1).repeat(3, axis=2)
        write_idx(raw / f"{part}-images-idx3-ubyte", numpy.pad(large, ((0, 0), (2, 2), (2, 2))))
        write_idx(raw / f"{part}-labels-idx1-ubyte", labels[:count])
    return root


def write_idx(path: Path, array: numpy.ndarray[Any, Any]) -> None:
    """As MNIST is stored: the element type, the number of dimensions, big-endian sizes, elements."""
    header = bytes([0, 0, 8, array.ndim]) + numpy.array(array.shape, ">u4").tobytes()
    path.write_bytes(header + array.tobytes())


Run = Callable[..., Ran]


@pytest.fixture
def run(tmp_path: Path, fashion_mnist: Path) -> Run:
    """Run a source text as a script, in a directory, a home and a place for temporary files of its own.

    FashionMNIST lies where the documents look for it: in ``./data`` and in ``data`` among the temporary files. The GPUs
    are hidden unless ``use_gpu``.
    """

    def run_script(source: str, *, through: tuple[str, ...] = (), use_gpu: bool = False) -> Ran:
        home, temporary = tmp_path / "home", tmp_path / "tmp"
        for folder in (home, temporary):
            folder.mkdir(exist_ok=True)
        for link in (tmp_path / "data", temporary / "data"):
            if not link.is_symlink():
                link.symlink_to(fashion_mnist)
        (tmp_path / "script.py").write_text(source)
        environment = {**os.environ, "HOME": str(home), "TMPDIR": str(temporary)}
        if not use_gpu:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        done = subprocess.run(
            [sys.executable, *through, "script.py"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
        return Ran(done.returncode, done.stdout, done.stderr, home)

    return run_script


@pytest.fixture
def finish(run: Run) -> Run:
    """Like ``run``, for scripts that have to run to their end and must not be told of anything wrong."""

    def run_to_the_end(source: str, **options: Any) -> Ran:
        ran = run(source, **options)
        assert ran.exit_code == 0, f"{ran.errors}\n{ran.output}\n--- of:\n{source}"
        assert "Traceback" not in ran.errors, ran.errors
        return ran

    return run_to_the_end


# -- the whole programs of S0, S2 and S4 -----------------------------------------------------------------------------


@pytest.mark.parametrize("document", ["S0", "S4"])
def test_the_skeleton(finish: Run, document: str) -> None:
    source = edit(block("S0 skeleton") if document == "S0" else block("S4 skeleton"), CPU)
    ran = finish(migrated(edit(source, ("# Your PyTorch training code here.", "print('trained')"))))
    assert (ran.result.metrics, ran.result.checkpoint, ran.result.error) == (None, None, None)
    assert ran.output.count("trained") == 2


def test_s0s_training_function_is_that_of_its_skeleton() -> None:
    assert block("S0 function") in block("S0 skeleton")


@needs_torchvision
@pytest.mark.parametrize("document", ["S0", "S4"])
def test_the_script_before_its_migration_runs_under_the_launcher(finish: Run, document: str) -> None:
    source = edit({"S0": block("S0 plain"), "S4": block("S4 plain")}[document], ONE_EPOCH)
    if document == "S4":
        assert source.count('.to("cuda")') == 3
        source = source.replace('.to("cuda")', '.to("cpu")')
    ran = finish(source, through=("-m", "distrain.launch", "--num-workers", "1"))
    assert ran.result.error is None
    assert ("'epoch': 0" in ran.output) == (document == "S4")  # S0 prints nothing


@needs_torchvision
def test_s0_stops_at_a_checkpoint_of_all_temporary_files_and_runs_with_the_fix_that_the_error_tells(run: Run) -> None:
    source = migrated(edit(block("S0 full"), CPU, ONE_EPOCH))
    shared = re.search(r"checkpoint_dir = tempfile\.gettempdir\(\)", source)
    assert shared
    stopped = run(source)
    assert stopped.exit_code != 0
    assert "shared directory" in stopped.errors, stopped.errors
    assert stopped.result.error is not None
    assert stopped.result.checkpoint is None
    fix = re.search(r"checkpoint_dir = tempfile\.\w+\(\)", re.sub(r"[\s│]+", " ", stopped.errors.split("shared")[-1]))
    assert fix, stopped.errors

    ran = run(edit(source, (shared[0], fix[0])))
    assert ran.exit_code == 0, ran.errors
    result = ran.results[-1]
    assert result.error is None
    assert result.metrics is not None
    assert result.metrics.keys() == {"loss"}
    assert checkpoint_files(result) == ["model.checkpoint"]


def check_the_full_program(ran: Ran) -> None:
    """It printed rank 0's metrics once per epoch; that its last lines load the checkpoint shows by its end."""
    (printed,) = re.findall(r"{'loss': .*}", ran.output)
    assert ran.result.metrics == ast.literal_eval(printed)
    assert ran.result.metrics["epoch"] == 0
    assert set(reports(ran.result)) == {0, 1}
    assert checkpoint_files(ran.result) == ["model.pt"]


def s2_full() -> str:
    """S2's program has lost most of its line breaks, and all indentation. S4's is a later version of it: with S4's
    layout and S2's text, which the comparison makes sure of."""
    removed = """\
        if ray.train.get_context().get_world_size() > 1:
            train_loader.sampler.set_epoch(epoch)

"""
    remark = '    # model.to("cuda")  # This is done by `prepare_model`\n'
    source = edit(
        block("S4 full"),
        ("def train_func():", "def train_func(config):"),
        ("((0.28604,), (0.32025,))", "((0.5,), (0.5,))"),
        (removed, ""),
        (remark, ""),
        ("    # [1] Prepare model.\n", remark + "    # [1] Prepare model.\n"),
    )
    assert squeezed(source) == squeezed(block("S2 full"))
    return source


@needs_torchvision
@pytest.mark.parametrize("document", ["S2", "S4"])
def test_the_full_program(finish: Run, document: str) -> None:
    source = s2_full() if document == "S2" else block("S4 full")
    check_the_full_program(finish(migrated(edit(source, CPU, ONE_EPOCH))))


@needs_torchvision
@pytest.mark.gpu(2)
def test_the_full_program_on_gpus(finish: Run) -> None:
    check_the_full_program(finish(migrated(edit(block("S4 full"), ONE_EPOCH)), use_gpu=True))


def test_the_rest_of_s2_is_code_of_s0_and_s4() -> None:
    """But for the line breaks that it has lost."""
    assert squeezed(block("S2 report diff")) == squeezed(block("S0 report diff"))
    assert squeezed(block("S2 scaling")) == squeezed(block("S4 scaling"))
    assert squeezed(block("S2 storage")) == squeezed(block("S4 storage"))
    assert squeezed(block("S2 launch")) == squeezed(block("S4 launch"))


# -- the pieces of S0 and S4, in small programs ------------------------------------------------------------------------

TOLD_OF_THE_MODEL = """\
weights = next(model.parameters())
distrain.report({"class": type(model).__name__, "device": str(weights.device)})
"""
PREPARED = {"class": "DistributedDataParallel", "device": "cpu"}


def the_model(document: str) -> str:
    source = new_side(block("S0 model diff") if document == "S0" else block("S4 model diff"))
    return fill(edit(source, ("model = ...", "model = NeuralNetwork()")), "pass", TOLD_OF_THE_MODEL)


def the_loader(document: str) -> str:
    """Reports the data that the worker has seen, and the global batch size."""
    if document == "S0":
        source, size, indent = new_side(block("S0 loader diff")), block("S0 global batch size"), " " * 4
    else:
        source, size, indent = new_side(block("S4 loader diff")), block("S4 global batch size"), " " * 8
        source = edit(source, ("range(10)", "range(2)"))
    loop = indent + "for X, y in data_loader:\n"
    source = edit(
        source, ("dataset = ...", "dataset = my_dataset"), (loop, loop + indent + "    seen += X[:, 0].tolist()\n")
    )
    return fill(source, "seen = []", f'{size}distrain.report({{"seen": seen, "size": global_batch_size}})')


def check_the_loader(result: Result, *, epochs: int = 1) -> None:
    """The workers have shared the data of every epoch, and batches are twice as large as a worker's."""
    first, second = (reports(result)[rank][0] for rank in (0, 1))
    assert first["size"] == second["size"] == 4
    each = len(ROWS) // 2
    assert len(first["seen"]) == len(second["seen"]) == epochs * each
    orders = [first["seen"][i * each :][:each] + second["seen"][i * each :][:each] for i in range(epochs)]
    assert [sorted(order) for order in orders] == [ROWS] * epochs
    assert len(set(map(tuple, orders))) == epochs, "set_epoch() did not change the order"


def the_report(document: str) -> str:
    trained = "model = NeuralNetwork()\nloss = model(torch.ones(1, 4)).sum()"
    if document == "S4":
        return fill(new_side(block("S4 report diff")), trained, "pass")
    source = edit(new_side(block("S0 report diff")), ('model.pth"))', 'model.pth")'))  # a slip of the document
    source = fill(source, trained + "\ncheckpoint_dir = tempfile.mkdtemp()", "pass")
    return "import tempfile\n" + source


@pytest.mark.parametrize("document", ["S0", "S4"])
def test_the_pieces_of_the_guide(finish: Run, document: str) -> None:
    """Each followed by the guide's own lines that start it and look at the result."""
    if document == "S0":
        start = edit(block("S0 scaling"), CPU) + block("S0 launch") + block("S0 result")
    else:  # its training function and its RunConfig: below
        launch = edit(block("S4 launch"), (", run_config=run_config", ""))
        start = edit(block("S4 scaling"), CPU) + launch + block("S4 result")
    pieces = [the_model(document), the_loader(document), the_report(document)]
    ran = finish(migrated("import ray.train.torch\n" + TOYS + "".join(piece + start for piece in pieces)))

    model, loader, report = ran.results
    assert reports(model) == {rank: [PREPARED] for rank in (0, 1)}
    check_the_loader(loader, epochs={"S0": 1, "S4": 2}[document])
    assert report.metrics is not None
    assert report.metrics.keys() == {"loss"}
    assert checkpoint_files(report) == [{"S0": "model.pth", "S4": "model.pt"}[document]]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``s3://bucket``, and the environment that leads there."""
    forget_connections()
    with moto_server() as port:
        found = Bucket(port, Door(port), BUCKET)
        for name, value in found.environment.items():
            monkeypatch.setenv(name, value)
        found.filesystem.mkdir(BUCKET)
        yield
        forget_connections()
        found.door.close()


@pytest.mark.parametrize("path", ["/some/local/path", "/mnt/nfs", "s3://bucket"])
def test_s4s_storage(finish: Run, tmp_path: Path, request: pytest.FixtureRequest, path: str) -> None:
    where = f"{tmp_path}{path}"
    if path.startswith("s3:"):
        request.getfixturevalue("bucket")
        where = path
    statement = f'RunConfig(storage_path="{path}", name="unique_run_name")'
    lines = block("S4 storage").splitlines(keepends=True)
    storage = "".join(line for line in lines if not line.startswith("run_config =") or statement in line)
    storage = edit(storage, (statement, statement.replace(path, where)))
    start = edit(block("S4 scaling"), CPU) + storage + block("S4 launch") + block("S4 result")
    function = edit(block("S4 function"), ("# Your model training code here.", 'ray.train.report({"trained": 1})'))
    ran = finish(migrated(function + start))
    assert ran.results == []
    assert Result.from_path(f"{where}/unique_run_name").metrics == {"trained": 1}


def test_s4s_config_and_large_objects(finish: Run) -> None:
    """Objects in the config, which the document advises against, work as well as those that the worker makes."""
    read = 'num_epochs = config["num_epochs"]\n'
    told = "    ray.train.report({'lr': lr, 'num_epochs': num_epochs})\n"
    placeholder = "train_loop_config=config, ...)"
    small = edit(block("S4 config"), (read, read + told), (placeholder, "train_loop_config=config)"))
    in_config = edit(old_side(block("S4 large data diff")), (placeholder, "train_loop_config=config)"))
    in_worker = edit(new_side(block("S4 large data diff")), (placeholder, ")"))
    told = 'distrain.report({"rows": len(data), "model": type(model).__name__})'
    large = [fill(source, "return my_dataset", "return NeuralNetwork()", told) for source in (in_config, in_worker)]
    source = "".join(piece + "trainer.fit()\n" for piece in (small, *large))
    ran = finish(migrated("import ray.train.torch\n" + TOYS + source))
    metrics = [result.metrics for result in ran.results]
    assert metrics == [{"lr": 1e-4, "num_epochs": 10}, *[{"rows": 10, "model": "NeuralNetwork"}] * 2]


# -- S1: the names of Ray AIR ------------------------------------------------------------------------------------------


def s1s_loader(source: str) -> str:
    """Reports the data that the worker has seen, the global batch size, and the torch backend."""
    loop = "    for X, y in data_loader:\n"
    source = fill(edit(source, (loop, f"    seen = []\n{loop}")), "pass").rstrip("\n")
    backend = "torch.distributed.get_backend_config()"
    told = f'session.report({{"seen": seen, "size": global_batch_size, "backend": {backend}}})\n'
    told = textwrap.indent(block("S1 global batch size") + told, "    ")
    return source + "\n        seen += X[:, 0].tolist()\n" + told


def test_s1s_model_and_data_loader_prepared_and_by_hand(finish: Run) -> None:
    """Both sides of its differences, as "Ray Train will still work even if you don't use" what prepares them. The
    loaders are started with the document's TorchConfig."""
    no_gpu = ("    torch.cuda.set_device(device)\n", "")
    by_hand = "from ray.air import session\n" + edit(old_side(block("S1 loader diff")), no_gpu)
    by_hand = edit(
        by_hand,
        ("DistributedSampler(dataset)", "DistributedSampler(my_dataset)"),  # slips of the document
        ("X = X.to_device(device)", "X = X.to(device)"),
        ("y = y.to_device(device)", "y = y.to(device)"),
    )
    models = [new_side(block("S1 model diff")), edit(old_side(block("S1 model diff")), no_gpu)]
    loaders = [s1s_loader(new_side(block("S1 loader diff"))), s1s_loader(by_hand)]
    backend = edit(block("S1 torch backend"), ("TorchConfig(...)", 'TorchConfig(backend="cpu:gloo")'))
    source = "".join(fill(model, TOLD_OF_THE_MODEL) + block("S1 trainer") + block("S1 fit") for model in models)
    source += "".join(loader + backend + block("S1 fit") for loader in loaders)
    ran = finish(migrated(TOYS + source))

    for result in ran.results[:2]:
        assert reports(result) == {rank: [PREPARED] for rank in (0, 1)}
    for result in ran.results[2:]:
        check_the_loader(result)
        assert [reports(result)[rank][0]["backend"] for rank in (0, 1)] == ["cpu:gloo"] * 2
    assert len(ran.results) == 4


def check_the_printed_checkpoint(output: str, *, epoch: int, number: int) -> None:
    """What the document prints, but for the numbers that differ from run to run."""
    (printed,) = re.findall(r"^{'epoch': .*?}$", output, re.MULTILINE | re.DOTALL)
    tensor = r"tensor\([^()]*\)"
    one_line = " ".join(printed.split())
    names = re.findall(rf"'([\w.]+)'[:,] {tensor}", one_line)
    assert sorted(names) == ["bias", "weight"], printed
    one_line = re.sub(tensor, "0", one_line)
    one_line = re.sub(r"'model_weights': OrderedDict\(.*?\)\]?\)", "'model_weights': 0", one_line)
    found = ast.literal_eval(one_line)
    assert isinstance(found["_timestamp"], int)
    assert found == {
        "epoch": epoch,
        "model_weights": 0,
        "_timestamp": found["_timestamp"],
        "_preprocessor": None,
        "_current_checkpoint_id": number,
    }


def test_s1_saves_checkpoints(finish: Run) -> None:
    ran = finish(migrated(block("S1 save")))
    check_the_printed_checkpoint(ran.output, epoch=4, number=4)
    assert len(ran.result.best_checkpoints) == 5


def test_s1_loads_a_checkpoint(finish: Run) -> None:
    ran = finish(migrated(block("S1 load")))
    check_the_printed_checkpoint(ran.output, epoch=3, number=2)
    assert [len(result.best_checkpoints) for result in ran.results] == [2, 2]


TORCHMETRICS = """\
from ray import train
import ray.train.torch
import torch
import torchmetrics

def train_func(config):
    X = torch.randn(100, 4)
    Y = X.sum(dim=1, keepdim=True)
    model = train.torch.prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    r2 = torchmetrics.R2Score()
    train_loss = torchmetrics.MeanMetric()
    valid_loss = torchmetrics.MeanMetric()
    for epoch in range(config["num_epochs"]):
        for part in range(0, 80, 20):
            loss = torch.nn.functional.mse_loss(model(X[part : part + 20]), Y[part : part + 20])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            train_loss(loss.item())
        with torch.no_grad():
            outputs = model(X[80:])
        r2(outputs, Y[80:])
        valid_loss(torch.nn.functional.mse_loss(outputs, Y[80:]).item())
        train.report(
            {
                "r2": r2.compute().item(),
                "train_loss": train_loss.compute().item(),
                "valid_loss": valid_loss.compute().item(),
            }
        )
        for metric in (r2, train_loss, valid_loss):
            metric.reset()

trainer = train.torch.TorchTrainer(
    train_func, train_loop_config={"num_epochs": 5}, scaling_config=train.ScalingConfig(num_workers=2)
)
result = trainer.fit()
print("valid_loss:", result.metrics["valid_loss"])
"""


@pytest.mark.skipif(importlib.util.find_spec("torchmetrics") is None, reason="torchmetrics is not installed")
def test_s1s_torchmetrics(finish: Run) -> None:
    """Metrics of all workers, reported without a checkpoint, are in the result."""
    ran = finish(migrated(TORCHMETRICS))
    first, second = (reports(ran.result)[rank] for rank in (0, 1))
    assert first == second  # each worker has data of its own, so only shared metrics are equal
    assert len(first) == 5
    assert ran.result.metrics == first[-1]
    assert f"valid_loss: {first[-1]['valid_loss']}" in ran.output
    assert first[-1]["valid_loss"] < first[0]["valid_loss"]


def test_s1s_mixed_precision_and_reproducibility(finish: Run) -> None:
    told = """\
train.report(
    {
        "computed": model.module.computed_in,
        "weights": str(next(model.parameters()).dtype),
        "trained": model.module.bias.abs().sum().item() > 0,
    }
)
"""
    amp = edit(
        new_side(block("S1 amp diff")),
        ("range(90)", "range(2)"),
        ("in dataloader:", "in data_loader:"),  # a slip of the document, and another
        ("\n   ...\n", "\n    ...\n"),
    )
    amp = fill(amp, told) + block("S1 trainer") + block("S1 fit")
    told = """\
weights = next(model.parameters()).flatten().tolist()
train.report({"weights": weights, "random": [random.random(), numpy.random.rand(), torch.rand(1).item()]})
"""
    reproducible = fill(new_side(block("S1 reproducibility diff")), told)
    reproducible += block("S1 trainer") + block("S1 fit") + block("S1 trainer") + block("S1 fit")
    imports = "import random\nimport numpy\nfrom ray import train\nimport ray.train.torch\n"
    ran = finish(migrated(imports + TOYS + amp + reproducible))

    mixed, first, second = ran.results
    expected = {"computed": "torch.bfloat16", "weights": "torch.float32", "trained": True}
    assert reports(mixed) == {rank: [expected] for rank in (0, 1)}
    assert reports(first) == reports(second)
    assert set(reports(first)) == {0, 1}


def test_every_block_is_in_a_test() -> None:
    names = {
        f"{document} {title}" for names in (RST_BLOCKS, TEXT_BLOCKS) for document in names for title in names[document]
    }
    tests = "".join(Path(__file__).with_name(f"test_{name}.py").read_text() for name in ("seeds", "tensorflow_seed"))
    assert set(re.findall(r'\bblock\("(S\d [\w ]+)"\)', tests)) == names
