"""What a script may forget in its checkpoints, and how the state of a training shows it. Runs in: coordinator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    Step = Mapping[str, Any]
    """The state at the beginning of a step, as the probe has noted it."""

PARTS = ("model", "optimizer", "lr", "scheduler", "scaler", "buffers", "averages", "random", "data")
"""The parts of the state on which the training depends."""
WORDS = {
    "not-loaded": "training starts again from the beginning, so no checkpoint is loaded",
    "prefix": "keys of the model in the checkpoint have another prefix, such as `module.`, and were not loaded",
    "early": "the checkpoint has the model of an earlier step",
    "rank-0": "other ranks get the state of rank 0",
    "model": "the model is not, or not wholly, in the checkpoint",
    "epoch": "the number of the epoch is not in the checkpoint",
    "optimizer": "the optimizer is not in the checkpoint",
    "scheduler": "the learning rate scheduler is not in the checkpoint",
    "scaler": "the GradScaler is not in the checkpoint",
    "random": "random states are not in the checkpoint",
    "sampler": "the sampler does not get the number of the epoch, so that the order of the data is another one",
    "position": "the position in the data is not restored",
    "buffers": "buffers of the model, such as BatchNorm's statistics, are not in the checkpoint",
    "averages": "the moving average of the weights is not in the checkpoint",
    "step": "the step counter is not in the checkpoint",
    "unknown": "what the probe sees is equal; something else has a state, such as an object of your own",
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

    keys: by part, the names of what differs. step, expected: the states. straight: all steps of the undisturbed run.
    of_rank_0: what rank 0 has at this step in the undisturbed run. misfits: notes about keys that did not fit.
    """

    rank: int
    keys: Mapping[str, Sequence[str]]
    step: Step
    expected: Step
    straight: Sequence[Step]
    of_rank_0: Step
    misfits: Sequence[Mapping[str, Any]]

    def causes(self) -> list[Cause]:
        """Return the likely causes, the most telling one first."""
        if "model" in self.keys:
            return [self._of_model()]
        if started_again := self._counters(lambda name: "epoch" in name.lower()):
            return [Cause("epoch", started_again)]
        return list(self._of_parts()) or [Cause("unknown", "")]

    def _of_model(self) -> Cause:
        keys, evidence = self.keys["model"], self._tensors("model")
        prefixed = [key for note in self.misfits for key in note["unexpected"] if key.startswith(("module.", "_orig"))]
        same = [index for index, one in enumerate(self.straight) if one.get("model") == self.step["model"]]
        if prefixed:
            return Cause("prefix", f"`{prefixed[0]}` does not fit the model")
        if 0 in same:
            return Cause("not-loaded", "")
        if self.rank and self.of_rank_0.get("model") == self.step["model"]:
            return Cause("rank-0", evidence)
        if same:
            return Cause("early", f"the parameters are those that step {same[0] + 1} begins with")
        missing = [key for note in self.misfits for key in note["missing"]]
        return Cause("model", f"the checkpoint has no `{missing[0]}`" if missing else f"{evidence} of {len(keys)}")

    def _of_parts(self) -> Iterator[Cause]:
        keys = self.keys
        if "optimizer" in keys:
            yield Cause("optimizer", self._tensors("optimizer"))
        for part in ("scheduler", "lr"):
            if part in keys and (part == "scheduler" or not {"optimizer", "scheduler"} & keys.keys()):
                yield Cause("scheduler", self._values(part))
        if "scaler" in keys:
            yield Cause("scaler", self._values("scaler"))
        if "random" in keys:
            names = ", ".join(keys["random"])
            is_of_0 = self.rank and all(self.step["random"].get(n) == self.of_rank_0["random"].get(n) for n in keys["random"])
            yield Cause("rank-0" if is_of_0 else "random", f"the random state of {names} differs")
        if "data" in keys and (cause := self._of_data()):
            yield cause
        if "buffers" in keys:
            yield Cause("buffers", self._tensors("buffers"))
        if "averages" in keys:
            yield Cause("averages", self._tensors("averages"))
        if "data" not in keys and (started_again := self._counters(lambda name: True)):
            yield Cause("step", started_again)

    def _of_data(self) -> Cause | None:
        now, then = self.step["loader"], self.expected["loader"]
        if now.get("epoch") != then.get("epoch"):
            return Cause("sampler", f"the sampler's epoch is {now.get('epoch')} instead of {then.get('epoch')}")
        if now.get("batch") != then.get("batch"):
            return Cause("position", f"batch {now.get('batch')} of the loader is read instead of batch {then.get('batch')}")
        if "random" in self.keys:
            return None  # the data depend on it, or are made with it
        same = [index for index, one in enumerate(self.straight) if one["data"] == self.step["data"]]
        if same:
            return Cause("position", f"the batch of step {same[0] + 1} is read again")
        return Cause("sampler", "the batch is one that the undisturbed run has not read")

    def _counters(self, is_meant: Callable[[str], bool]) -> str:
        """Return which counter has begun again, or ``""``."""
        first, expected = self.straight[0]["counters"], self.expected["counters"]
        for name, value in self.step["counters"].items():
            began_again = value == first.get(name) != expected.get(name)
            if is_meant(name.rpartition(".")[2]) and began_again and value < expected.get(name, value):
                return f"`{name}` is {value} instead of {expected[name]}"
        return ""

    def _tensors(self, part: str) -> str:
        keys = self.keys[part]
        everything = len(self.expected[part])
        shown = sorted({key.rpartition(".")[0] if part == "optimizer" else key for key in keys})
        named = ", ".join(f"`{name}`" for name in shown[:2])
        more = f" and {len(shown) - 2} more" if len(shown) > 2 else ""
        has_none = part == "optimizer" and not self.step[part]
        return "the optimizer's state is empty" if has_none else f"{named}{more} differ ({len(keys)} of {everything} tensors)"

    def _values(self, part: str) -> str:
        key = self.keys[part][0]
        return f"`{key}` is {_shown(self.step[part].get(key))} instead of {_shown(self.expected[part].get(key))}"


def _shown(value: Any) -> str:
    return _shown(value[0]) if isinstance(value, list) and len(value) == 1 else f"{value:g}" if isinstance(value, float) else str(value)
