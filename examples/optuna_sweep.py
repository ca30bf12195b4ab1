"""Search for hyperparameters with Optuna: each trial is a run on two workers, and bad trials end early.

    pip install optuna
    python examples/optuna_sweep.py

The study and its runs are kept in `~/distrain_results/optuna_sweep`. Press Ctrl-C or send SIGTERM in the middle of a
trial: its run saves a checkpoint and ends, and so does the script. Start the script again: the study continues with the
interrupted run first, from its checkpoint.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import optuna
import torch
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distrain
from distrain import Checkpoint, CheckpointConfig, PreemptionError, RunConfig, ScalingConfig
from distrain.collective import broadcast_from_rank_zero
from distrain.torch import TorchTrainer, get_device, prepare_data_loader, prepare_model

EPOCHS = 6
PRUNED = "pruned"
"""The return value of a run that was not worth going on."""


def make_data(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    features = torch.randn(1024, 8, generator=torch.Generator().manual_seed(seed))
    return features, (features[:, :4] * features[:, 4:]).sum(dim=1, keepdim=True)


def train_func(config: dict[str, Any]) -> str | None:
    torch.manual_seed(0)
    width = config["width"]
    module = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
    model = prepare_model(module)
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    first = 0
    checkpoint = distrain.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder, "training.pt"), map_location=get_device())
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"] + 1

    loader = prepare_data_loader(DataLoader(TensorDataset(*make_data(seed=0)), batch_size=32, shuffle=True))
    features, targets = (tensor.to(get_device()) for tensor in make_data(seed=1))
    for epoch in range(first, EPOCHS):
        loader.sampler.set_epoch(epoch)
        for batch, wanted in loader:
            loss = nn.functional.mse_loss(model(batch), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            test_loss = nn.functional.mse_loss(module(features), targets).item()
        report(module, optimizer, {"epoch": epoch, "loss": test_loss})
        if is_hopeless(config["trial"], test_loss, epoch):
            return PRUNED
        if distrain.should_stop():
            break
    return None


def report(module: nn.Module, optimizer: torch.optim.Optimizer, metrics: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if distrain.get_context().get_world_rank() == 0:
            state = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": metrics["epoch"]}
            torch.save(state, Path(folder, "training.pt"))
        distrain.report(metrics, checkpoint=Checkpoint.from_directory(folder))


def is_hopeless(trial: optuna.Trial, loss: float, epoch: int) -> bool:
    """Return what rank 0 learns from the study, on all ranks, so that all of them stop after the same epoch."""
    is_hopeless = None
    if distrain.get_context().get_world_rank() == 0:
        trial.report(loss, epoch)
        is_hopeless = trial.should_prune()
    return broadcast_from_rank_zero(is_hopeless)


def objective(trial: optuna.Trial, folder: Path) -> float:
    """Train with the hyperparameters of a trial, and return the loss."""
    name = trial.user_attrs.get("run", f"trial-{trial.number}")
    trial.set_user_attr("run", name)
    config = {
        "lr": trial.suggest_float("lr", 1e-5, 1e-1, log=True),
        "width": trial.suggest_categorical("width", [8, 32, 128]),
    }
    try:
        result = TorchTrainer(
            train_func,
            train_loop_config={**config, "trial": trial},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(
                name=name,  # a run with the name of an unfinished one continues it
                storage_path=folder,
                checkpoint_config=CheckpointConfig(num_to_keep=1),
            ),
        ).fit()
    except (KeyboardInterrupt, PreemptionError):
        trial.study.enqueue_trial(trial.params, user_attrs={"run": name})
        raise  # this ends the study; its trial counts as failed, and the one in the queue takes its place
    if result.return_value == PRUNED:
        raise optuna.TrialPruned
    return result.metrics["loss"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=6, help="number of trials of the study (default: 6)")
    parser.add_argument("--folder", type=Path, default=Path("~/distrain_results/optuna_sweep"), help="for all files")
    args = parser.parse_args()
    folder = args.folder.expanduser()
    folder.mkdir(parents=True, exist_ok=True)

    study = optuna.create_study(
        study_name="sweep",
        storage=JournalStorage(JournalFileBackend(str(folder / "study.log"))),
        load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=1),
    )
    study.sampler = optuna.samplers.TPESampler(seed=len(study.trials))  # a study that continues draws other numbers
    ended = study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED))
    try:
        study.optimize(lambda trial: objective(trial, folder), n_trials=max(0, args.trials - len(ended)))
    except (KeyboardInterrupt, PreemptionError) as stop:
        print("stopped; start the script again to continue")
        sys.exit(stop.exit_code if isinstance(stop, PreemptionError) else 130)

    pruned = study.get_trials(states=(TrialState.PRUNED,))
    print(f"{args.trials} trials, {len(pruned)} of them ended early")
    print(f"best: loss {study.best_value:.4f} with {study.best_params} in run {study.best_trial.user_attrs['run']}")


if __name__ == "__main__":
    main()
