"""The drill of a command that knows nothing of distrain, such as ``torchrun train.py``. Runs in: worker, launcher.

Python runs ``sitecustomize`` first, in each process that inherits PYTHONPATH. Ours waits until torch is imported. From
then on, the process is watched as a rank of distrain would be, whoever has launched it. Its notes go to a file.
"""

from __future__ import annotations

import os
import pickle
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.drilling.probe import Probe
from distrain.system.imports import when_imported
from distrain.system.process import run_guarded

if TYPE_CHECKING:
    from distrain.drilling.order import Order

ORDER = "DISTRAIN_DRILL"
"""The variable with the path of the trial's order, by which its processes are known, too."""
_SITE = str(Path(__file__).with_name("site"))


def notes_folder(folder: Path) -> Path:
    """Return the directory with the notes of a trial's processes."""
    return folder / "notes"


def execute(order: Order, path: str) -> int:
    """Run the command of an order, whose file is ``path``, and return its exit code. Ranks die with the drill."""
    places = filter(None, (_SITE, os.environ.get("PYTHONPATH")))
    variables = {ORDER: path, "PYTHONPATH": os.pathsep.join(places)}
    again = f" {order.again}" if order.start else ""
    return run_guarded(["/bin/sh", "-c", f'exec "$@"{again}', "sh", *order.command], os.environ | variables)


# -- in the processes of the command ---------------------------------------------------------------------------------


def arm() -> None:
    """Import the user's own ``sitecustomize``, too, and watch this process once it imports torch."""
    users = PathFinder.find_spec("sitecustomize", [path for path in sys.path if path != _SITE])
    if users is not None and users.loader is not None:
        sys.modules["sitecustomize"] = module = module_from_spec(users)
        users.loader.exec_module(module)
    with open(os.environ[ORDER], "rb") as file:
        probe = CommandProbe(pickle.load(file))  # noqa: S301 - made by the drill
    when_imported("torch", probe.begin)


class CommandProbe(Probe):
    """The probe in a process that may be, or become, a rank."""

    def __init__(self, order: Order) -> None:
        super().__init__(order)
        self._start = order.start
        self._notes = notes_folder(Path(order.folder))

    def begin(self) -> None:
        """Begin to watch."""
        self.watch()
        self.watch_torch()

    @property
    def rank(self) -> int:  # type: ignore[override]
        """The rank as torch knows it, as the launcher has said, or 0."""
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return int(distributed.get_rank())
        return int(os.environ.get("RANK", "0"))

    @property
    def attempt(self) -> int:  # type: ignore[override]
        """The number of starts by the drill or, within the first, by torchrun."""
        return self._start or self._restarts

    @property
    def _restarts(self) -> int:
        return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

    def write(self, line: bytes) -> None:
        """Append a line to the file of this process as this rank."""
        folder = self._notes / f"{self._start:03}-{self._restarts:03}"
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"{self.rank}.{os.getpid()}", "ab") as file:
            file.write(line)
