"""Observers that tell other services: TensorBoard, Weights & Biases, MLflow, and yours.

Names are loaded when they are first used. Runs in: coordinator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distrain.system.imports import lazy_names

if TYPE_CHECKING:
    from distrain.api.tracker import Report as Report
    from distrain.api.tracker import TrackedRun as TrackedRun
    from distrain.api.tracker import Tracker as Tracker
    from distrain.trackers.mlflow import Mlflow as Mlflow
    from distrain.trackers.tensorboard import TensorBoard as TensorBoard
    from distrain.trackers.wandb import Wandb as Wandb

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
