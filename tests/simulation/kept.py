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
    # A checkpoint of memory got another name in a bucket, while ranks were about to read it.
    Scenario(
        seed=41811522861076, steps=2, step_s=(1.5, 0.2), mode="MEMORY", storage_every_s=0.5,
        rolls_back=frozenset({(0, 1)}), lists=True, bucket=True,
    ),
    # A checkpoint of a bucket was deleted while a rank looked at it, which got an empty directory.
    Scenario(
        seed=17892957655010, ranks=3, steps=7, step_s=(0.05, 0.05, 1.5), mode="ASYNC", saving="some", own_names=False,
        collectives=False, looks=True, num_to_keep=1, score="min", raises=frozenset({(0, 0, 0)}),
        rolls_back=frozenset({(1, 6)}), bucket=True, faults=(Fault(1.5344230933062477, "kill child", 6, 2),),
    ),
    # A host without the storage had just come back when the run ended, and was told to store a checkpoint there.
    Scenario(
        seed=26120792582286, hosts=2, steps=6, step_s=(0.05, 0.2), memory_every=3, storage_every_s=600,
        own_names=False, shares_files=False,
        faults=(
            Fault(1.4936067421696606, "slow link", 1, 20), Fault(2.83787386261364, "full disk", 12, 20),
            Fault(3.678983658947455, "kill child", 10, 20), Fault(3.8435285806518418, "slow disk", 8, 3),
        ),
    ),
    # A rank was stopped while it waited in a collective, before the others came: all were blamed for the hang.
    Scenario(
        seed=800014104, ranks=4, hosts=2, steps=2, step_s=(1.5, 0.2, 0.2, 0.05),
        faults=(Fault(5.317398225138658, "stop rank", 6, 20),),
    ),
    # A lost host was to hash a file, and a rank of another host waited with its file of the same name, for a minute.
    Scenario(
        seed=1100010656, hosts=2, steps=3, mode="MEMORY", storage_every_s=600, saving="some", own_names=False,
        collectives=False, looks=True, builds=True, faults=(Fault(0.8534840695043481, "cut link", 9, 0.5),),
    ),
    # A lost host was told to store files from memory, and was waited for.
    Scenario(
        seed=7940, hosts=2, steps=7, step_s=(0.2, 0.05), memory_every=1, storage_every_s=600, save_every=2,
        collectives=False, looks=True, bucket=True,
        faults=(Fault(2.4606356631765545, "kill host", 15, 0.5), Fault(4.881422473106432, "take over", 15, 20)),
    ),
    # A run was taken over while its uploader was suspended, which published a checkpoint when it woke up.
    Scenario(seed=54, steps=30, bucket=True, faults=(Fault(3.0, "take over", 0, 2),)),
    # A host was lost whose rank had finished, and was still asked for stacks: no hang of the others was shown.
    Scenario(seed=1, hosts=2, steps=6, early=(0, 1), faults=(Fault(2.0, "kill host", 0, 20),)),
    # A rank was stuck, and then finished at once: its hang never ended, and no other one was found.
    Scenario(seed=210001035, hosts=2, steps=5, mode="MEMORY", early=(0, 4), sticks=(0, 3, 0)),
    # A restart queued a checkpoint for its validation that was waiting for that; it was deleted during the second one.
    Scenario(
        seed=210002436, ranks=4, hosts=2, spares=1, steps=6, step_s=(0.2, 0.05, 0.2, 0.2), mode="ASYNC",
        own_names=False, asks_to_stop=True, num_to_keep=1, rolls_back=frozenset({(3, 5)}), sticks=(1, 5, 0),
        validates=True,
        faults=(
            Fault(2.632524430726616, "stop coordinator", 12, 20), Fault(3.2287675817570136, "kill rank", 5, 20),
            Fault(3.389584326328646, "stop agent", 6, 0.5),
        ),
    ),
    # A checkpoint in memory got a name that the owner from whom the run was taken over was still writing to.
    Scenario(
        seed=27143653720623, ranks=1, steps=2, memory_every=2, missing_rank_s=60, sticks=(0, 0, 0), reads=True,
        bucket=True,
        faults=(Fault(0.8377589337603598, "slow bucket", 0, 400), Fault(1.2970877012549464, "take over", 2, 20)),
    ),
    # A rank that had waited for one that never reports got the checkpoint before: its own was still being listed.
    Scenario(
        seed=27685530404237, steps=3, mode="NO_UPLOAD", quiet=frozenset({1, 2, 3, 4, 5}), save_every=2, looks=True,
        builds=True, missing_rank_s=60,
    ),
    # A checkpoint in memory had the name of another one in the bucket.
    Scenario(
        seed=13444361079379, ranks=3, hosts=3, steps=6, step_s=(1.5, 1.5, 0.2), mode="MIXED", quiet=frozenset({0}),
        missing_rank_s=60, raises=frozenset({(2, 3, 0)}), rolls_back=frozenset({(1, 5)}), bucket=True,
        faults=(Fault(2.239379987553344, "slow bucket", 13, 2), Fault(3.0200423642946808, "take over", 1, 2)),
    ),
    # A rank failed while the run was stopping; the wait for the other ranks lasted for a minute, not for the grace.
    Scenario(
        seed=42723307554538, ranks=4, steps=3, step_s=(0.2, 1.5, 1.5, 0.2), mode="MEMORY", early=(2, 2),
        asks_to_stop=True, missing_rank_s=60,
        faults=(
            Fault(0.33014777652895316, "kill rank", 8, 3), Fault(2.818922007522656, "debug", 7, 0.5),
            Fault(3.007748235555625, "signal", 2, 3),
        ),
    ),
]  # fmt: skip
