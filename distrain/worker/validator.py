"""Validate one checkpoint: call the user's function in a process of its own. Runs in: validator, one at a time.

The process reads the order from stdin and writes the result to stdout. The function's output goes to a log file.
"""

from __future__ import annotations

import base64
import os
import pickle
import sys
import traceback
from pathlib import Path

from distrain import wire
from distrain.storage.checkpoint import Checkpoint
from distrain.storage.ownership import open_without_links
from distrain.storage.paths import RunPaths
from distrain.system.remote_path import decode_filesystem
from distrain.wire.child_link import channel_to_parent
from distrain.worker.job import job, main_module
from distrain.worker.reporting.metrics import encode_metrics


def main(arguments: list[str]) -> None:
    """Read an order, validate, and send the result.

    arguments: the pid of the coordinator, the run directory, and the log file.
    """
    coordinator, run, log = arguments
    channel = channel_to_parent(coordinator)
    frames = channel.wait()
    if frames:
        order = frames[0].message()
        assert isinstance(order, wire.RunValidation)
        channel.send(_validate(order, Path(run), Path(log)))


def _validate(order: wire.RunValidation, run: Path, log: Path) -> wire.OrderDone:
    try:
        RunPaths(run).make_parent(log)
        fd = open_without_links(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for output in (1, 2):
            os.dup2(fd, output)
        os.chdir(order.directory)
        sys.path[:] = order.sys_path
        main_module.replace_main()
        work = job.loads(order.body)
        assert isinstance(work, job.FunctionWork)
        main_module.publish(work.function)
        overrides = pickle.loads(base64.b64decode(order.overrides))  # noqa: S301 - the worker of this run has pickled it
        checkpoint = Checkpoint(order.checkpoint, decode_filesystem(order.filesystem))
        metrics = work.function(checkpoint, **{**work.config, **overrides})
        if not isinstance(metrics, dict):
            raise TypeError(
                f"the function must return a dict of metrics, got {metrics!r:.80} ({type(metrics).__name__})"
            )
        return wire.OrderDone(body=encode_metrics(metrics))
    except BaseException as error:
        traceback.print_exc()
        return wire.OrderDone(failed=f"{type(error).__qualname__}: {error}")
    finally:
        sys.stderr.flush()
