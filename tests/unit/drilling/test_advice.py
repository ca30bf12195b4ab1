"""Advice about a script that may have continued an earlier training."""

from __future__ import annotations

from distrain.drilling.drill import continued


def test_what_was_read_is_named_with_the_option_that_sets_it_aside() -> None:
    assert continued([]) == ""
    assert continued(["my snapshot.pt"]).endswith("Hide them from the drill: --fresh 'my snapshot.pt'")
    assert "has read my snapshot.pt, older than the drill" in continued(["my snapshot.pt"])


def test_a_directory_of_snapshots_is_set_aside_as_a_whole() -> None:
    files = [f"out/checkpoint-30/{name}" for name in ("model.bin", "optimizer.pt", "trainer_state.json")]
    assert continued(files).endswith("drill: --fresh out/checkpoint-30")
    assert continued(files[:2]).endswith(f"drill: --fresh {files[0]} --fresh {files[1]}")


def test_what_is_outside_of_the_directory_cannot_be_set_aside() -> None:
    assert continued(["../../scratch/snapshot.pt"]).endswith("Move them away for the drill")
