"""A check that ranks which train copies of the same parameters still have the same ones. Runs in: worker."""

from __future__ import annotations

import json
import sys
import zlib
from collections import Counter, defaultdict
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import distributed
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from distrain import wire
from distrain.errors import Rollback
from distrain.system.text import name_ranks, rank_list

Tensors = list[tuple[str, torch.Tensor]]
"""Parameters with their names."""


class DivergenceCheck:
    """Compares the parameters that ranks share, in every ``every``-th report.

    Each rank adds its checksums to the store of the process group. The last one to do so compares them, and tells the
    run, or (with the ``action`` "rollback") raises :class:`~distrain.Rollback`. So no rank waits for another one.

    Shared are the parameters of DistributedDataParallel, and DTensors on the mesh dimensions where they are replicated.
    """

    def __init__(self, session: Any, action: str, every: int) -> None:
        self._session, self._every, self._rolls_back = session, every, action == "rollback"
        self._reports = self._steps = 0
        self._keys: dict[str, str] = {}
        """The keys of the last check in the store."""
        self._models: WeakKeyDictionary[Any, None] = WeakKeyDictionary()
        self._stepped: WeakKeyDictionary[Any, None] = WeakKeyDictionary()
        """The optimizers that have made a step since the last check. Older ones, and their models, may be garbage."""
        register_module_module_registration_hook(self._note_model)
        register_optimizer_step_post_hook(self._note_step)

    def _note_model(self, module: Any, *_: Any) -> None:
        if isinstance(module, DistributedDataParallel):
            self._models[module] = None

    def _note_step(self, optimizer: Any, *_: Any) -> None:
        self._steps += 1
        self._stepped[optimizer] = None

    def at_report(self) -> None:
        """Compare, if it is time. Raises Rollback."""
        self._reports += 1
        if self._reports % self._every or not self._stepped:
            return
        try:
            shared = self._shared() if distributed.is_initialized() else {}
            if not shared:
                self._give_up("no parameters are replicated", speaks=self._session.context.world_rank == 0)
            for ranks, tensors in shared.items():
                self._compare(ranks, tensors)
        except RuntimeError as error:  # rank 0, which has the store, may be gone
            self._give_up(f"the ranks cannot exchange checksums: {error}")
        self._stepped.clear()

    def _give_up(self, why: str, *, speaks: bool = True) -> None:
        self._session.check_replicas = lambda: None
        if speaks:
            print(f"distrain: FailureConfig.on_divergence compares nothing: {why}", file=sys.stderr)

    def _shared(self) -> dict[tuple[int, ...], Tensors]:
        """Return the parameters that this rank shares with others, by the ranks that have them."""
        found: dict[tuple[int, ...], Tensors] = defaultdict(list)
        trained = [each for one in self._stepped for group in one.param_groups for each in group["params"]]
        for model in self._models:
            named = [pair for pair in model.module.named_parameters() if pair[0] not in model.parameters_to_ignore]
            if not {id(one) for _, one in named}.isdisjoint(map(id, trained)):
                found[tuple(distributed.get_process_group_ranks(model.process_group))] += named
        for number, parameter in enumerate(trained):
            if hasattr(parameter, "device_mesh"):
                found[_holders(parameter)].append((f"parameter {number} of the optimizers", parameter.to_local()))
        return {ranks: tensors for ranks, tensors in found.items() if len(ranks) > 1}

    def _compare(self, ranks: tuple[int, ...], tensors: Tensors) -> None:
        """Send the checksums of this rank. The last of the ranks takes those of all, and judges them."""
        store: Any = distributed.distributed_c10d._get_default_store()
        place = f"distrain/divergence/{zlib.crc32(repr(ranks).encode()):x}"
        key = f"{place}/{self._reports}/{self._steps}/{len(tensors)}"
        before, self._keys[place] = self._keys.get(place), key
        if before is not None and store.check([f"{before}/ranks"]):  # all ranks have made another step since then
            self._give_up("ranks report after different optimizer steps", speaks=store.add(f"{place}/off", 1) == 1)
        sums = torch.stack([checksum(tensor).to(tensors[0][1].device) for _, tensor in tensors]).tolist()
        store.append(key, json.dumps([distributed.get_rank(), *sums]) + "\n")
        if store.add(f"{key}/ranks", 1) == len(ranks):
            rows = {rank: tuple(row) for rank, *row in map(json.loads, store.get(key).splitlines())}
            store.delete_key(key)
            store.delete_key(f"{key}/ranks")
            self._judge(store, f"{place}/culprits", rows, [name for name, _ in tensors])

    def _judge(self, store: Any, place: str, rows: dict[int, tuple[int, ...]], names: list[str]) -> None:
        """Name the ranks that differ from the majority, or all if there is none.

        rows: the checksums of each rank. place: the key of the ranks that were named last.
        """
        (usual, votes), *others = Counter(rows.values()).most_common()
        culprits = [rank for rank, row in sorted(rows.items()) if others and (row != usual or votes * 2 <= len(rows))]
        first = next((name for name, *sums in zip(names, *rows.values(), strict=True) if len({*sums}) > 1), "")
        which = f"from those of the other {votes} ranks " if len(culprits) < len(rows) else ""
        text = f"parameters differ {which}in report {self._reports}, first in {first}"
        if culprits and self._rolls_back:
            raise Rollback(f"{name_ranks(culprits)}: {text}")
        if (named := rank_list(culprits)) != (store.get(place).decode() if store.check([place]) else ""):
            store.set(place, named)
            troubles = [{"rank": rank, "kind": "diverged", "problem": "parameters", "text": text} for rank in culprits]
            self._session.send(wire.TroublesSeen, troubles=troubles)


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the bits, taken as integers, so that any single bit changes it.

    It sums words if it can: CPUs add them 25 times as fast as smaller integers.
    """
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().reshape(-1)
    width = 8 // flat.element_size()
    are_words = len(flat) % width == 0 == flat.storage_offset() % width
    return flat.view(torch.int64 if are_words else getattr(torch, f"int{64 // width}")).sum(dtype=torch.int64)


def _holders(parameter: Any) -> tuple[int, ...]:
    """Return the ranks that have the same part of a DTensor."""
    places = zip(parameter.placements, parameter.device_mesh.get_coordinate(), strict=True)
    where = tuple(slice(None) if placement.is_replicate() else at for placement, at in places)
    return tuple(parameter.device_mesh.mesh[where].flatten().tolist())
