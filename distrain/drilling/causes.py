"""The causes of a drift, and how the state of the training shows them. Runs in: coordinator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from distrain.drilling.journal import Attempt

    Step = Mapping[str, Any]
    """The state at the beginning of a step, as the probe has noted it."""

PARTS = ("model", "optimizer", "lr", "scheduler", "scaler", "buffers", "averages", "random", "data")
"""The parts of the state on which the training depends."""
SAVED = ("model", "optimizer")
"""Those that every checkpoint has."""
TRAINED = (*SAVED, "buffers", "averages")
"""Those that every step changes, so that they differ once anything has differed."""
WORDS = {
    "not-loaded": "no checkpoint is loaded, and training starts again from the beginning",
    "prefix": "keys of the model have another prefix, such as `module.`, and are not loaded",
    "early": "the checkpoint has the model of an earlier step",
    "rank-0": "other ranks get the state of rank 0",
    "model": "the model is not, or not wholly, in the checkpoint",
    "epoch": "the number of the next epoch is not in the checkpoint",
    "optimizer": "the optimizer is not in the checkpoint",
    "scheduler": "the learning rate scheduler is not in the checkpoint",
    "scaler": "the GradScaler is not in the checkpoint",
    "random": "random states are not in the checkpoint",
    "sampler": "the order of the data does not follow from the epoch",
    "position": "the position in the data is not restored",
    "buffers": "buffers of the model, such as BatchNorm's statistics, are not in the checkpoint",
    "averages": "the moving average of the weights is not in the checkpoint",
    "step": "a counter starts again, which may be what the checkpoint lacks",
    "same-rows": "ranks train on the same rows",
    "sampler-seed": "the samplers of the ranks do not divide one order among them",
    "uneven": "ranks have different numbers of batches",
    "not-reduced": "gradients are not averaged over the ranks",
    "no-sync": "the last backward() before the step is under no_sync(), so gradients are not averaged",
    "clip-before": "gradients are clipped before they are averaged",
    "summed": "gradients are added up over the ranks, not averaged",
    "replica-start": "the ranks begin with different models",
    "replicas": "the ranks train different models",
    "unknown": "all that the probe sees is equal, so something else has a state",
}
"""By the name of a cause: what it means. docs/drill.md has a section with the lines to add for each."""


@dataclass(frozen=True, slots=True)
class Cause:
    """name: a key of :data:`WORDS`. evidence: what differs, such as ``StepLR.last_epoch is 0 instead of 10``."""

    name: str
    evidence: str

    def __str__(self) -> str:
        return f"{self.evidence}: {WORDS[self.name]}" if self.evidence else WORDS[self.name]


@dataclass(frozen=True, slots=True)
class Differences:
    """The state of a rank at the beginning of a step, compared with that of the undisturbed run.

    index: the number of the step in its attempt, from 0. keys: by part, the names of what differs.
    step, expected: the states. attempt, undisturbed: those that have them. at: the number of the step in the latter.
    """

    rank: int
    index: int
    keys: Mapping[str, Sequence[str]]
    step: Step
    expected: Step
    attempt: Attempt
    undisturbed: Attempt
    at: int = 0

    @property
    def straight(self) -> Sequence[Step]:
        """All steps of the undisturbed run."""
        return self.undisturbed.of("step", self.rank)

    def causes(self) -> list[Cause]:
        """Return the likely causes. After the first step, what training changes differs as a consequence."""
        if self.index == 0 and "model" in self.keys:
            return [self._of_model()]
        if self.index == 0 and "data" in self.keys and (started_again := self.counter("epoch")):
            return [Cause("epoch", started_again)]
        return list(self._of_parts([part for part in self.keys if self.index == 0 or part not in TRAINED]))

    def _of_model(self) -> Cause:
        same = [index for index, step in enumerate(self.straight) if step.get("model") == self.step["model"]]
        misfits = self.attempt.of("misfit", self.rank)
        prefixed = [key for note in misfits for key in note["unexpected"] if key.startswith(("module.", "_orig"))]
        missing = [key for note in misfits for key in note["missing"]]
        if prefixed:
            return Cause("prefix", f"`{prefixed[0]}` does not fit the model")
        if 0 in same:
            return Cause("not-loaded", "")
        if self._is_of_rank_0("model"):
            return Cause("rank-0", f"rank {self.rank} has other parameters")
        if same:
            return Cause("early", f"the parameters are those that step {same[0] + 1} begins with")
        return Cause("model", f"the checkpoint has no `{missing[0]}`" if missing else self._tensors("model"))

    def _of_parts(self, keys: Sequence[str]) -> Iterator[Cause]:
        if "optimizer" in keys:
            yield Cause("optimizer", self._tensors("optimizer") if self.step["optimizer"] else "its state is empty")
        if "scheduler" in keys or ("lr" in keys and "optimizer" not in keys):
            yield Cause("scheduler", self._value("scheduler" if "scheduler" in keys else "lr"))
        if "scaler" in keys:
            yield Cause("scaler", self._value("scaler"))
        yield from self._of_data()
        if "random" in keys:
            name = "rank-0" if self._is_of_rank_0("random") else "random"
            yield Cause(name, f"the random state of {', '.join(self.keys['random'])} differs on rank {self.rank}")
        for part in ("buffers", "averages"):
            if part in keys:
                yield Cause(part, self._tensors(part))

    def _of_data(self) -> Iterator[Cause]:
        now, then = self.step["loader"], self.expected["loader"]
        if "data" not in self.keys:
            return
        same = [index for index, step in enumerate(self.straight) if step.get("data") == self.step["data"]]
        if now.get("epoch") != then.get("epoch"):
            yield Cause("sampler", f"the sampler's epoch is {now.get('epoch')} instead of {then.get('epoch')}")
        elif same:
            is_placed = now.get("batch") == then.get("batch") is not None  # in a pass over the data, in another order
            text = f"the batch of step {same[0] + 1} is read instead of that of step {self.at + 1}"
            yield Cause("sampler" if is_placed else "position", text)
        elif now.get("batch") != then.get("batch"):
            yield Cause("position", f"batch {now.get('batch')} is read instead of batch {then.get('batch')}")
        elif "random" not in self.keys:  # on which the data may depend
            yield Cause("sampler", "no undisturbed step reads this batch")

    def _is_of_rank_0(self, part: str) -> bool:
        names, of_rank_0 = self.keys[part], self.undisturbed.of("step", 0)[self.at : self.at + 1]
        same = [all(self.step[part].get(name) == step[part].get(name) for name in names) for step in of_rank_0]
        return self.rank > 0 and any(same)

    def counter(self, word: str) -> str:
        """Return which counter with a word in its name has begun again, or is behind if it is an epoch; or ``""``."""
        first, expected = (step.get("counters", {}) for step in (self.straight[0], self.expected))
        for name, value in self.step.get("counters", {}).items():
            is_again = word == "epoch" or value == first.get(name)
            if word in name.lower() and is_again and value < expected.get(name, value):
                return f"`{name}` is {value} instead of {expected[name]}"
        return ""

    def _tensors(self, part: str) -> str:
        keys = self.keys[part]
        shown = list(dict.fromkeys(key.rpartition(".")[0] if part == "optimizer" else key for key in keys))
        more = f" and {len(shown) - 2} more" if len(shown) > 2 else ""
        named = ", ".join(f"`{name}`" for name in shown[:2])
        return f"{named}{more} differ ({len(keys)} of {len(self.expected[part])} tensors)"

    def _value(self, part: str) -> str:
        name = self.keys[part][0]
        now, then = (str(step[part].get(name)).strip("[]") for step in (self.step, self.expected))
        return f"`{name}` is {now} instead of {then}"
