"""The JAX backend: it connects the processes, and chooses the devices of each. Runs in: coordinator, worker.

The methods import jax when they run, in the worker. The coordinator only reads the settings.
"""

from __future__ import annotations

import math
import signal
from dataclasses import InitVar, dataclass
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

_CURES = {
    "^ModuleNotFoundError: .* 'jax'$": "JAX is not installed in the workers' environment: pip install "
    "'distrain[jax]' for CPUs, or 'jax[cuda13]' for GPUs",
    r"^RuntimeError: .*jax.distributed.initialize\(\) must be called before": "JaxTrainer connects JAX before "
    "train_func, and JAX has computed something before that: a global that train_func uses is a jax.Array, or a module "
    "computes one when it is imported. Make it in train_func, or with numpy",
    "^RuntimeError: .*initialize should only be called once": "JaxTrainer has called jax.distributed.initialize() "
    "before train_func: leave it out",
}


@checks_arguments
@dataclass(frozen=True, kw_only=True)
class JaxConfig(BackendConfig):
    """Settings of JAX's workers.

    start_timeout_s: seconds to wait until every rank reaches train_func. After that the attempt fails, and the error
        names the missing ranks.
    use_gpu: an argument of Ray without effect; ``ScalingConfig(use_gpu=True)`` gives workers GPUs.

    >>> JaxConfig(start_timeout_s=120).start_timeout_s
    120
    """

    framework: ClassVar[str] = "jax"
    preload: ClassVar[tuple[str, ...]] = ("jax", "distrain.jax.config")
    cures: ClassVar[Mapping[str, str]] = MappingProxyType(_CURES)

    start_timeout_s: float = 600
    use_gpu: InitVar[bool] = False

    def __post_init__(self, use_gpu: bool) -> None:
        check_fields(self, check_seconds, "start_timeout_s", above_zero=True)

    def setup(self, context: TrainContext) -> None:
        """Choose the devices, and connect the processes if there are several.

        Raises ValueError for workers that share a GPU, and CollectiveError, naming them, for ranks that do not arrive
        within ``start_timeout_s``.
        """
        if context.shares_gpu:
            raise ValueError(
                "workers share a GPU, but JAX connects them with NCCL, which cannot do that: give every worker its own "
                "GPU, or set use_gpu=False"
            )
        import jax

        if context.devices:
            jax.config.update("jax_cuda_visible_devices", ",".join(map(str, context.devices)))
        elif not jax.config.jax_platforms:  # the user's JAX_PLATFORMS
            jax.config.update("jax_platforms", "cpu")
        if context.world_size == 1:
            return
        reserved = session_of("jax").addresses
        [address] = reserved.by_name("get_coordinator_address", "jax.distributed", timeout_s=self.start_timeout_s)
        bypass_proxies([address])
        handler = signal.getsignal(signal.SIGTERM)  # it stops train_func, and JAX replaces it by one of its own
        jax.distributed.initialize(
            address,
            context.world_size,
            context.world_rank,
            cluster_detection_method="deactivate",
            initialization_timeout=math.ceil(self.start_timeout_s),
        )
        signal.signal(signal.SIGTERM, handler)

    def teardown(self, context: TrainContext) -> object:
        """Disconnect when every rank has finished: JAX would wait for them for five minutes only."""
        if context.world_size > 1:
            import jax

            session_of("jax").wait_for_release()
            jax.distributed.shutdown()
        return None
