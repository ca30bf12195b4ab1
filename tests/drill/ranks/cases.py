"""The table of scripts whose ranks do something wrong, something remarkable, and nothing wrong.

None of them imports distrain. `# <- here` is at the end of the line that a verdict should name, `# <- or here` at that
of others that are right as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node", "{workers}")
ACCELERATE = ("accelerate", "launch", "--multi_gpu", "--num_processes", "{workers}")
"""With `--cpu`, accelerate starts one process, whatever the number. The scripts say `Accelerator(cpu=True)`. With
`--multi_gpu`, accelerate refuses one process: ALONE."""
ALONE = ("accelerate", "launch", "--cpu", "--num_processes", "{workers}")
PYTHON = ("python",)
DEVICES = ("--devices", "{workers}")


@dataclass(frozen=True)
class Script:
    """A script and how to start it.

    path: below this directory. launcher, arguments: the words before and after it; `{workers}` stands for the number of
    processes. alone: the launcher for one process, if it differs. cause: what should be found, None if nothing. also:
    causes that are true as well, or a less precise name for the same.
    """

    path: str
    cause: str | None = None
    also: tuple[str, ...] = ()
    launcher: tuple[str, ...] = TORCHRUN
    arguments: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()

    @property
    def file(self) -> Path:
        """The script."""
        return HERE / self.path

    @property
    def lines(self) -> tuple[int, ...]:
        """The numbers of the lines that a verdict may name, that which it should name first."""
        lines = list(enumerate(self.file.read_text().splitlines(), start=1))
        return tuple(number for mark in ("# <- here", "# <- or here") for number, line in lines if line.endswith(mark))

    def command(self, workers: int) -> list[str]:
        """Return the command for this number of processes."""
        launcher = self.alone if workers == 1 and self.alone else self.launcher
        return [word.format(workers=workers) for word in (*launcher, str(self.file), *self.arguments)]


BAD = (
    Script("bad/same_rows.py", "same-rows"),
    Script("bad/not_sharded.py", "same-rows"),
    Script("bad/sampler_seed.py", "sampler-seed", also=("same-rows",)),
    Script("bad/some_set_epoch.py", "sampler-seed"),
    Script("bad/not_reduced.py", "not-reduced"),
    Script("bad/replica_start.py", "replica-start"),
    Script("bad/summed.py", "summed"),
    Script("bad/clip_before.py", "clip-before"),
    Script("bad/no_sync.py", "no-sync"),
    Script("bad/uneven.py", "uneven"),
    Script("bad/buffers_differ.py", "replicas"),
    Script("bad/optimizer_differs.py", "replicas"),
    Script("bad/lr_differs.py", "replicas"),
    # The same causes in other ways: a stream; one of two models, parameters that come later; a wrapper taken off again.
    Script("bad/iterable.py", "same-rows"),
    Script("bad/bypassed.py", "not-reduced"),
    Script("bad/unfrozen.py", "not-reduced", launcher=PYTHON, arguments=DEVICES),
    Script("bad/unwrapped.py", "not-reduced", launcher=ACCELERATE, alone=ALONE),
)
REMARKS = (
    Script("remarks/batchnorm.py", "batchnorm"),
    Script("remarks/lr_scales.py", "lr-scales"),
    Script("remarks/set_epoch.py", "set-epoch"),
    Script("remarks/loss_scale.py", "loss-scale"),
)
GOOD = (
    Script("good/ddp_padding.py"),
    Script("good/accumulates.py"),
    Script("good/fsdp2.py"),
    Script("good/tensor_parallel.py"),
    Script("good/iterable_sharded.py"),
    Script("good/evaluates.py"),
    Script("good/lightning_ddp.py", launcher=PYTHON, arguments=DEVICES),
    Script("good/accelerate_loop.py", launcher=ACCELERATE, alone=ALONE),
    Script("good/transformers_trainer.py"),
    Script("good/augmented.py", launcher=PYTHON, arguments=DEVICES),
    Script("good/replacement.py"),
    Script("good/duplicates.py"),
    Script("good/lazy_file.py"),
    Script("good/local_sgd.py"),  # replicas that differ on purpose between two averages
)
