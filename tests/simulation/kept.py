"""Scenarios in which something was wrong once. Each is played again by ``scripts/fuzz --kept``."""

from __future__ import annotations

from tests.simulation.scenario import Fault, Scenario

KEPT = [
    # num_to_keep had deleted the start when a rank, which had not read it, reported its first checkpoint.
    Scenario(
        seed=665, ranks=4, spares=1, steps=3, step_s=(0.2, 0.2, 0.05, 0.2), mode="ASYNC", saving="some",
        asks_to_stop=True, looks=True, num_to_keep=1, max_failures=1, sticks=(0, 1, 0), meets=True,
        faults=(Fault(1.08, "kill rank", 13),),
    ),
    # A rank that waited in get_checkpoint() for another one hid that this one hung.
    Scenario(
        seed=22211, ranks=4, hosts=2, steps=6, step_s=(1.5, 0.05, 1.5, 0.05), memory_every=2, saving="some",
        asks_to_stop=True, looks=True, score="max", max_failures=1, sticks=(0, 3, 0), least=1,
    ),
    # A run that was stopped, and whose processes could not be ended, was shown as failed.
    Scenario(
        seed=5989, ranks=4, spares=1, steps=5, step_s=(0.2, 1.5, 0.2, 1.5), saving="first", num_to_keep=2,
        max_failures=0,
        faults=(
            Fault(3.316, "flip memory", 8, 20), Fault(3.833, "stop coordinator", 10, 20),
            Fault(4.046, "slow link", 1, 3),
        ),
    ),
    # A checkpoint in memory was committed before an earlier one on storage, whose local files then stayed.
    Scenario(seed=1849, ranks=1, steps=5, step_s=(0.05, 0.05), mode="MIXED"),
    # A checkpoint was copied to a host while its manifest was replaced, and the copy failed for the file that was gone.
    Scenario(
        seed=204371, ranks=3, hosts=3, step_s=(0.2, 0.05, 0.05), mode="ASYNC", saving="first", own_names=False,
        collectives=False, asks_to_stop=True, looks=True, rolls_back=frozenset({(2, 3)}), meets=True,
        shares_files=False,
    ),
]  # fmt: skip
