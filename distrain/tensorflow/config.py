"""The TensorFlow backend: TF_CONFIG, the generation of Keras, and the GPUs of each worker.

Runs in: coordinator, worker; without TensorFlow in both.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import traceback
from dataclasses import dataclass
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from distrain.api.backend import BackendConfig
from distrain.api.ray_names import checks_arguments
from distrain.system.arguments import check_fields, check_seconds
from distrain.worker.addresses import bypass_proxies
from distrain.worker.session import session_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distrain.api.context import TrainContext

_FIT_FAILS = (
    "Keras 3's model.fit() does not work under MultiWorkerMirroredStrategy (keras issue 20585). What works: tf.keras "
    "with TF_USE_LEGACY_KERAS=1 set where the script is started, tf_keras instead of keras, or a loop of your own with "
    "strategy.run()"
)
_MIXED = (
    "tf.keras is Keras 2 in workers, but this is a part of Keras 3: it comes from keras, or from tensorflow.keras "
    "outside of train_func. To use the same Keras everywhere, set TF_USE_LEGACY_KERAS=1 (or 0, for Keras 3) where the "
    "script is started"
)
_NO_KERAS_2 = (
    "tf.keras is Keras 2 in workers, which is not installed: pip install 'distrain[tensorflow]'; or set "
    "TF_USE_LEGACY_KERAS=0 in the environment, for Keras 3"
)


@checks_arguments
@dataclass(frozen=True, kw_only=True)
class TensorflowConfig(BackendConfig):
    """Settings of TensorFlow's workers, for MultiWorkerMirroredStrategy or another strategy that reads TF_CONFIG.

    start_timeout_s: seconds to wait until every rank reaches train_func. After that the attempt fails, and the error
        names the missing ranks. TensorFlow itself would wait without a message.

    >>> TensorflowConfig(start_timeout_s=120).start_timeout_s
    120
    """

    framework: ClassVar[str] = "tensorflow"
    may_fork: ClassVar[bool] = False
    defaults: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "TF_USE_LEGACY_KERAS": "1",  # Keras 3 cannot model.fit() under MultiWorkerMirroredStrategy
            "TF_FORCE_GPU_ALLOW_GROWTH": "true",  # otherwise the first of those that share a GPU takes all its memory
        }
    )

    start_timeout_s: float = 600

    def __post_init__(self) -> None:
        check_fields(self, check_seconds, "start_timeout_s", above_zero=True)

    def setup(self, context: TrainContext) -> None:
        """Hide the GPUs of other workers, and set TF_CONFIG. No proxies are used between the workers.

        A strategy would take every GPU that it sees. Raises CollectiveError, naming them, for ranks that do not arrive
        within ``start_timeout_s``.
        """
        _hide_other_gpus(context.devices)
        reserved, call = session_of("tensorflow").addresses, "get_worker_addresses"
        workers = reserved.by_name(call, "tensorflow", on_every_rank=True, timeout_s=self.start_timeout_s)
        task = {"type": "worker", "index": context.world_rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
        bypass_proxies(workers)

    def at_report(self) -> None:
        """Reinstall Python's handler for SIGTERM, which stops train_func.

        The coordination service of TensorFlow, part of MultiWorkerMirroredStrategy, replaces it by one of its own.
        """
        handler = signal.getsignal(signal.SIGTERM)
        if callable(handler) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)

    def explain(self, error: BaseException) -> str | None:
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        has_keras_3 = any("/keras/src/" in file for file in files)
        if has_keras_3 and isinstance(error, ValueError) and "PerReplica" in str(error):
            return _FIT_FAILS
        if isinstance(error, ImportError) and "Keras cannot be imported" in str(error) and not find_spec("tf_keras"):
            return _NO_KERAS_2
        if any("/tf_keras/src/" in file for file in files) and "'keras.src." in str(error):
            return _MIXED
        return None


def _hide_other_gpus(devices: tuple[int, ...]) -> None:
    """Leave only this worker's GPUs visible. TensorFlow looks for GPUs when it first computes.

    devices: indices among the GPUs that are visible so far.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible is not None else None
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[n] if names else str(n) for n in devices)
