"""Keras on distrain: what ``ray.train.tensorflow.keras`` has. Runs in: worker.

The callback is one of whichever Keras ``tf.keras`` is in the process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distrain.session import get_context, report
from distrain.tensorflow.checkpoint import TensorflowCheckpoint

__all__ = ["ReportCheckpointCallback"]

_PHASES = ("epoch", "train", "test", "predict", "train_batch", "test_batch", "predict_batch")
_EVENTS = tuple(f"{phase}_{moment}" for phase in _PHASES for moment in ("begin", "end"))


def _callback_of_keras() -> Any:
    try:
        import tensorflow as tf

        return tf.keras.callbacks.Callback
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name != "tensorflow":
            raise
        raise ModuleNotFoundError(
            "distrain.tensorflow.keras needs TensorFlow and Keras 2: pip install 'distrain[tensorflow]'. To use Keras "
            "3 as tf.keras, set TF_USE_LEGACY_KERAS=0 in the environment",
            name="tensorflow",
        ) from error


class ReportCheckpointCallback(_callback_of_keras()):  # type: ignore[misc]
    """Report metrics and checkpoints while Keras trains. Every checkpoint is reported with metrics.

    checkpoint_on, report_metrics_on: one of Keras' events or several, such as ``"epoch_end"`` or ``"test_end"``.
    metrics: the logs of Keras to report: None for all, names, or ``{reported name: name in the logs}``.

    ::

        model.fit(dataset, epochs=2, callbacks=[ReportCheckpointCallback(metrics=["loss"])])

    Every rank reports. Every rank also saves the model, since saving is a collective; the model is the same on all
    ranks, so rank 0's is kept. ``TensorflowCheckpoint(checkpoint.path).get_model()`` reads it, and
    ``checkpoint.get_metadata()["epoch"]`` is the epoch, from 0, in which it was saved.

    Raises ValueError for unknown events.
    """

    def __init__(
        self,
        checkpoint_on: str | Sequence[str] = "epoch_end",
        report_metrics_on: str | Sequence[str] = "epoch_end",
        metrics: str | Sequence[str] | Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self._checkpoint_on = _events("checkpoint_on", checkpoint_on)
        self._report_on = _events("report_metrics_on", report_metrics_on) | self._checkpoint_on
        self._metrics = None if metrics is None else _by_reported_name(metrics)
        self._epoch = 0
        for event in self._report_on:
            self._listen_to(event)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._epoch = epoch

    def _listen_to(self, event: str) -> None:
        """Add the method for an event to this object.

        A class with methods for batches would make Keras collect the logs of every batch, which is slow.
        """
        method = f"on_{event}"
        inherited = getattr(self, method)

        def listen(*arguments: Any, **keywords: Any) -> None:
            inherited(*arguments, **keywords)
            self._report(event, keywords["logs"] if "logs" in keywords else arguments[-1])

        setattr(self, method, listen)

    def _report(self, event: str, logs: Mapping[str, Any] | None) -> None:
        metrics = self._chosen(logs or {})
        if event not in self._checkpoint_on:
            report(metrics)
            return
        checkpoint = TensorflowCheckpoint.from_model(self.model)
        checkpoint.update_metadata({"epoch": self._epoch})
        report(metrics, checkpoint=checkpoint if get_context().get_world_rank() == 0 else None)

    def _chosen(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        if self._metrics is None:
            return dict(logs)
        missing = sorted(set(self._metrics.values()) - logs.keys())
        if missing:
            raise KeyError(f"ReportCheckpointCallback(metrics=...): Keras logs no {missing} here, but {sorted(logs)}")
        return {name: logs[key] for name, key in self._metrics.items()}


def _events(argument: str, given: str | Sequence[str]) -> frozenset[str]:
    names = frozenset([given] if isinstance(given, str) else given)
    if unknown := sorted(map(str, names - set(_EVENTS))):
        raise ValueError(f"ReportCheckpointCallback({argument}=...): there is no {unknown}; there are {_EVENTS}")
    return names


def _by_reported_name(metrics: str | Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    if isinstance(metrics, Mapping):
        return dict(metrics)
    return {name: name for name in ([metrics] if isinstance(metrics, str) else metrics)}
