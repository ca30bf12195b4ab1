"""The table of bugs in resume code that were found elsewhere, rebuilt small: old with ``--old``, and fixed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node", "2")
ACCELERATE = ("accelerate", "launch", "--multi_gpu", "--num_processes", "2")


@dataclass(frozen=True)
class Rebuilt:
    """A script and the words that start it. causes: the drill of the old version should name at least one of them."""

    file: Path
    launcher: tuple[str, ...]
    causes: tuple[str, ...]

    def command(self, old: bool) -> list[str]:
        """Return the command for the old version or the fixed one."""
        return [*self.launcher, str(self.file), *(["--old"] if old else [])]


REBUILT = {
    "accelerate#4071": Rebuilt(HERE / "accelerate_skip.py", ACCELERATE, ("sampler",)),
    "Megatron-Bridge#4601": Rebuilt(HERE / "megatron_loader.py", TORCHRUN, ("position",)),
    "Megatron-Bridge#5245": Rebuilt(HERE / "megatron_stream.py", TORCHRUN, ("position",)),
    "verl#7401": Rebuilt(HERE / "verl_handler.py", TORCHRUN, ("sampler", "position", "epoch")),
}
