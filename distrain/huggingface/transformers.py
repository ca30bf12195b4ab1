"""The Trainer of transformers on distrain, as in ``ray.train.huggingface.transformers``. Runs in: worker.

Workers carry torchrun's environment variables, so a Trainer inside ``train_func`` trains on all workers as it is.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain.data.iterator import Epochs
from distrain.session import get_context, report
from distrain.storage.checkpoint import Checkpoint
from distrain.system.imports import require
from distrain.system.scratch import temporary_directory
from distrain.torch.batches import loader

if TYPE_CHECKING:
    from typing import TypeVar

    import transformers

    Trainer = TypeVar("Trainer", bound=transformers.Trainer)
else:
    transformers = require("transformers")

__all__ = ["RayTrainReportCallback", "TrainReportCallback", "prepare_trainer"]


class TrainReportCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Report metrics and a checkpoint whenever the Trainer saves.

    The metrics are the latest value of everything that the Trainer has logged, ``epoch`` and ``step``. The checkpoint
    has the saved files in its directory ``checkpoint``; one rank of each host adds them. To resume, pass
    ``os.path.join(folder, "checkpoint")`` to ``Trainer.train(resume_from_checkpoint=...)``. ::

        trainer = transformers.Trainer(model, arguments, train_dataset=dataset)
        trainer.add_callback(TrainReportCallback())
    """

    CHECKPOINT_NAME = "checkpoint"

    def on_save(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        **kwargs: Any,
    ) -> None:
        metrics = {name: value for entry in state.log_history for name, value in entry.items()}
        metrics |= {"epoch": state.epoch, "step": state.global_step}
        args.distributed_state.wait_for_everyone()  # every rank writes the state of its random numbers
        saved = Path(args.output_dir, f"checkpoint-{state.global_step}")  # a host may be without it
        if not saved.is_dir() or get_context().get_local_rank() != 0:
            report(metrics)
            return
        with temporary_directory("distrain-transformers-") as folder:
            link = Path(folder, self.CHECKPOINT_NAME)
            link.symlink_to(saved.resolve(), target_is_directory=True)  # report() follows links
            report(metrics, checkpoint=Checkpoint.from_directory(folder))


def prepare_trainer(trainer: Trainer) -> Trainer:
    """Let the Trainer read batches of distrain's datasets: ``shard.iter_torch_batches(...)`` as one of its datasets.

    It needs ``max_steps``, as such data has no length, and ignores ``per_device_train_batch_size``. A resumed run
    continues with the next rows, so the Trainer skips none. Other datasets stay as they are.

    ::

        trainer = prepare_trainer(transformers.Trainer(model, arguments, train_dataset=dataset))
    """
    if isinstance(trainer.train_dataset, Epochs):
        trainer.args.ignore_data_skip = True
        trainer.get_train_dataloader = partial(loader, trainer.train_dataset)
    if isinstance(trainer.eval_dataset, Epochs):
        others = trainer.get_eval_dataloader

        def get_eval_dataloader(eval_dataset: Any = None) -> Any:
            dataset = trainer.eval_dataset if eval_dataset is None else eval_dataset
            return loader(dataset) if isinstance(dataset, Epochs) else others(eval_dataset)

        trainer.get_eval_dataloader = get_eval_dataloader
    return trainer


RayTrainReportCallback = TrainReportCallback
