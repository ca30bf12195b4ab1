"""The function that ``distrain check --deep`` runs: do all bytes arrive as they were sent? Runs in: worker."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import torch
from torch import distributed

from distrain.session import get_context, report
from distrain.torch.device import get_device

_SIZES = {"cpu": (1, 4_099, 4_194_339), "cuda": (1, 4_099, 33_554_467)}
"""Bytes of the messages. Odd numbers leave parts of words at the end."""


def compare_bytes() -> None:
    """Copy patterns from each GPU of this host to each other one, and send them to every other rank, turn by turn.

    Reports the turn and the pair before each pair (``waiting``), and all pairs so far of which bytes have changed
    (``found``), each with a text.
    """
    context, device = get_context(), get_device()
    rank, ranks, sizes = context.get_world_rank(), context.get_world_size(), _SIZES[device.type]
    found: list[tuple[int, int, str]] = []

    def compare(turn: int, source: int, target: int, received: Any, place: Any = device) -> None:
        report({"found": found, "waiting": [turn, source, target]})
        text = ""
        for got, wanted in zip(received, _patterns(source, sizes, place), strict=True):
            if len(wrong := (got != wanted).nonzero()) and not text:
                text, at = f"{len(wrong)} of {len(got)} bytes differ", int(wrong[0])
                text += f", first at offset {at}: {int(got[at]):#04x} instead of {int(wanted[at]):#04x}"
                found.append((source, target, text))

    if device.type == "cuda" and context.get_local_rank() == 0:
        for a, b in permutations(range(context.get_local_world_size()), 2):
            sent = _patterns(rank + a, sizes, f"cuda:{a}")
            copies = (torch.zeros_like(one, device=f"cuda:{b}").copy_(one) for one in sent)
            compare(0, rank + a, rank + b, copies, f"cuda:{b}")
    for turn in range(1, ranks):
        target, source = (rank + turn) % ranks, (rank - turn) % ranks
        compare(turn, source, rank, (_exchange(sent, target, source) for sent in _patterns(rank, sizes, device)))
    report({"found": found, "waiting": []})


def _exchange(sent: torch.Tensor, target: int, source: int) -> torch.Tensor:
    received, send, receive = torch.zeros_like(sent), distributed.isend, distributed.irecv
    both = [distributed.P2POp(send, sent, target), distributed.P2POp(receive, received, source)]
    for work in distributed.batch_isend_irecv(both):
        work.wait()
    return received


def _patterns(seed: int, sizes: tuple[int, ...], device: Any) -> list[torch.Tensor]:
    """Return the messages of a sender: random bits, a single bit that walks, all but that one, and alternating bits."""
    words = torch.arange(sizes[-1] // 8 + 1, device=device)
    random = (words + seed * 0x1_0000_0001) * 0x1E37_79B9_7F4A_7C15  # any odd number
    walking = 1 << words % 64
    patterns = (random ^ (random >> 32), walking, ~walking, 0x5555_5555_5555_5555 ^ -(words % 2))
    return [pattern.view(torch.uint8)[:size] for pattern in patterns for size in sizes]
