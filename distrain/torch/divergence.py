"""A check that ranks which train copies of the same parameters still have the same ones. Runs in: worker."""

from __future__ import annotations

import sys
import zlib
from array import array
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import distributed, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from distrain import wire
from distrain.errors import Rollback
from distrain.system.text import name_ranks, rank_list

if TYPE_CHECKING:
    from collections.abc import Sequence

    Tensors = list[tuple[str, torch.Tensor]]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By size in bytes: the integers that have the bits of other numbers."""


class DivergenceCheck:
    """Compares the parameters that ranks share, in every ``every``-th report.

    Each rank adds its checksums to the store of the process group. The last one to do so compares them, and tells the
    run, or (``rolls_back``) raises :class:`~distrain.Rollback`. So no rank waits for another one.

    Shared are the parameters of DistributedDataParallel, and DTensors on the mesh dimensions where they are replicated.
    """

    def __init__(self, session: Any, every: int, *, rolls_back: bool) -> None:
        self._session, self._every, self._rolls_back = session, every, rolls_back
        self._reports = self._steps = 0
        self._is_off = False
        self._models: WeakKeyDictionary[Any, None] = WeakKeyDictionary()
        self._stepped: WeakKeyDictionary[Any, None] = WeakKeyDictionary()
        """The optimizers that have made a step since the last check. Older ones, and their models, may be garbage."""
        register_module_module_registration_hook(self._note_model)
        register_optimizer_step_post_hook(self._note_step)

    def _note_model(self, module: nn.Module, *_: Any) -> None:
        if isinstance(module, DistributedDataParallel):
            self._models[module] = None

    def _note_step(self, optimizer: Any, *_: Any) -> None:
        self._steps += 1
        self._stepped[optimizer] = None

    def at_report(self) -> None:
        """Compare, if it is time. Raises Rollback."""
        self._reports += 1
        if self._is_off or self._reports % self._every or not self._stepped:
            return
        try:
            shared = self._shared() if distributed.is_initialized() else {}
            for ranks, tensors in shared.items():
                self._compare(ranks, tensors)
        except RuntimeError as error:  # rank 0, which has the store, may be gone
            self._give_up(f"the ranks cannot exchange checksums: {error}")
        else:
            if not shared and self._session.context.world_rank == 0:
                self._give_up("no parameters are replicated by DistributedDataParallel, or in a device mesh")
        self._stepped.clear()

    def _give_up(self, why: str) -> None:
        self._is_off = True
        print(f"distrain: FailureConfig.on_divergence compares nothing: {why}", file=sys.stderr)

    def _shared(self) -> dict[tuple[int, ...], Tensors]:
        """Return the parameters that this rank shares with others, by the ranks that have them."""
        found: dict[tuple[int, ...], Tensors] = defaultdict(list)
        trained = [each for one in self._stepped for group in one.param_groups for each in group["params"]]
        left = {id(parameter) for parameter in trained}
        for model in self._models:
            parameters = dict(model.module.named_parameters())
            if left.isdisjoint(map(id, parameters.values())):
                continue
            left -= set(map(id, parameters.values()))  # it may be in an older DistributedDataParallel, too
            ranks = tuple(distributed.get_process_group_ranks(model.process_group))
            found[ranks] += [(name, one) for name, one in parameters.items() if name not in model.parameters_to_ignore]
        for number, parameter in enumerate(trained):
            if hasattr(parameter, "device_mesh"):
                found[_holders(parameter)].append((f"parameter {number} of the optimizers", parameter.to_local()))
        return {ranks: tensors for ranks, tensors in found.items() if len(ranks) > 1}

    def _compare(self, ranks: Sequence[int], tensors: Tensors) -> None:
        """Send the checksums of this rank. The last of the ranks takes those of all, and compares them."""
        store = distributed.distributed_c10d._get_default_store()
        place = f"distrain/divergence/{zlib.crc32(repr(ranks).encode()):x}"
        key = f"{place}/{self._reports}"
        row = [distributed.get_rank(), self._steps, len(tensors), *checksums([tensor for _, tensor in tensors])]
        store.append(key, array("q", row).tobytes())  # type: ignore[attr-defined]
        if store.add(f"{key}/ranks", 1) < len(ranks):
            reported = store.add(f"{place}/{self._every}/ranks", 0) if self._reports == 3 * self._every else 0
            if reported and store.add(f"{place}/told", 1) == 1:
                self._give_up(f"{reported} of {len(ranks)} ranks have made {self._every} reports; report on all ranks")
            return
        numbers, rows = array("q", store.get(key)), {}
        while numbers:
            end = 3 + numbers[2]
            rows[numbers[0]], numbers = tuple(numbers[1:end]), numbers[end:]
        for used in (key, f"{key}/ranks"):
            store.delete_key(used)
        self._judge(store, f"{place}/culprits", rows, [name for name, _ in tensors])

    def _judge(self, store: Any, place: str, rows: dict[int, tuple[int, ...]], names: Sequence[str]) -> None:
        """Name the ranks that differ from the majority, or all if there is none.

        rows: by rank, its optimizer steps, the number of its tensors, and their checksums. place: the key of the ranks
        that were named last.
        """
        if len({row[:2] for row in rows.values()}) > 1:
            steps = ", ".join(f"{row[0]} on rank {rank}" for rank, row in sorted(rows.items()))
            self._give_up(f"report {self._reports} comes after different optimizer steps: {steps:.200}")
            return
        (usual, votes), *others = Counter(rows.values()).most_common()
        culprits = [rank for rank, row in rows.items() if others and (row != usual or votes * 2 <= len(rows))]
        before = store.get(place).decode() if store.check([place]) else ""
        named = rank_list(culprits)
        first = next((name for name, *sums in zip(("", "", *names), *rows.values(), strict=True) if len({*sums}) > 1), "")
        usual_ones = f" from those of the other {votes} ranks" if len(culprits) < len(rows) else ""
        text = f"parameters differ{usual_ones} in report {self._reports}, first in {first}"
        if culprits and self._rolls_back:
            raise Rollback(f"{name_ranks(culprits)}: {text}")
        if before != named:
            store.set(place, named)
            troubles = [{"rank": rank, "kind": "parameters", "problem": "differ", "text": text} for rank in culprits]
            self._session.send(wire.TroublesSeen, sort="parameters", troubles=troubles)


def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a number for each tensor: the sum of its bits, taken as integers, so that any single bit changes it."""
    sums = [_sum(tensor.detach()) for tensor in tensors]
    numbers: list[int] = torch.stack([one.to(sums[0].device) for one in sums]).tolist()
    return numbers


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum whole words, and what is left at the end: CPUs add words ten times as fast as smaller integers."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    integers, width = _INTEGERS[flat.element_size()], 8 // flat.element_size()
    end = 0 if flat.storage_offset() % width else len(flat) // width * width
    return flat[:end].view(torch.int64).sum() + flat[end:].view(integers).sum(dtype=torch.int64)


def _holders(parameter: Any) -> tuple[int, ...]:
    """Return the ranks that have the same part of a DTensor."""
    mesh = parameter.device_mesh
    places = zip(parameter.placements, mesh.get_coordinate(), strict=True)
    where = tuple(slice(None) if placement.is_replicate() else at for placement, at in places)
    ranks: list[int] = mesh.mesh[where].flatten().tolist()
    return tuple(ranks)
