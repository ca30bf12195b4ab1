"""The options of ``distrain run``: those of the configs' fields, those of torchrun, and errors that name them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from distrain.api.config import CheckpointConfig, FailureConfig, LoggingConfig, RunConfig, ScalingConfig, ShippingConfig
from distrain.cli.run import command
from distrain.cli.run.config_options import CONFIGS, NO_OPTION, config_from, named_options, names_of
from distrain.cli.run.options import _INSTEAD, make_parser, parse
from distrain.hosts.host_info import usable_cpus
from distrain.hosts.hostfile import parse_hosts
from distrain.system.arguments import in_users_words, options_named

KNOWN = make_parser()._option_string_actions


def options_of(*arguments: str) -> Any:
    return parse(make_parser(), [*arguments, "train.py"])


# -- the fields of the configs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_every_field_has_an_option_or_a_reason_to_have_none(config: type) -> None:
    """A new field gets one by its name. If that makes no sense, cli/run/config_options.py says why."""
    for field in fields(config):
        if field.name not in NO_OPTION:
            assert names_of(field.name)[0] in KNOWN, f"{config.__name__}.{field.name} has no option"


def test_without_options_the_configs_have_their_defaults() -> None:
    options = options_of()
    for config in (ScalingConfig, RunConfig, FailureConfig, CheckpointConfig, LoggingConfig):
        assert config_from(config, options) == config()


def test_values_have_the_types_of_the_fields() -> None:
    given = [
        *("--hang-timeout", "60", "--hang-report", "none", "--max-restarts=2", "--retry-same-failure"),
        *("--use-gpu", "--resources-per-worker", "CPU=4,GPU=0.5", "--ssh-args=-v", "--interface", "ib0"),
        *("--ship", "words.txt", "--ship", "data", "--ship-limit", "1GB"),
    ]
    options = options_of(*given)
    assert config_from(FailureConfig, options) == FailureConfig(
        hang_timeout_s=60.0, hang_report_s=None, max_failures=2, retry_same_failure=True
    )
    assert config_from(ScalingConfig, options) == ScalingConfig(
        use_gpu=True, resources_per_worker={"CPU": 4, "GPU": 0.5}, ssh_args=["-v"], interface="ib0"
    )
    assert config_from(ShippingConfig, options) == ShippingConfig(include=["words.txt", "data"], limit_bytes=10**9)


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("FailureConfig.host_wait_s must be", "--hosts-wait must be"),
        ("with RunConfig(name='my run'), from scratch", "with --name 'my run', from scratch"),
        ("or num_workers=(min, max), or", "or --num-workers min:max, or"),
        ("debug_rank=3: ranks count", "--debug-rank 3: ranks count"),
        ("no name, no hosts=a and RunConfig.verbose", "no name, no hosts=a and RunConfig.verbose"),
        ("cannot read /data/storage_path/x or 'log_dir'", "cannot read /data/storage_path/x or 'log_dir'"),
        ("RunConfig: num_workers is 2", "--num-workers is 2"),
        ("RunConfig(name='log_dir')", "--name log_dir"),
        ("DataLoader(num_workers=2), HfConfig: x, HfConfig(use_gpu=1)",) * 2,
    ],
)
def test_texts_name_options_on_the_command_line_only(text: str, expected: str) -> None:
    with options_named(named_options()):
        assert in_users_words(text) == expected
        assert in_users_words("TrainConfig: num_workers=4", bare_names=False) == "TrainConfig: num_workers=4"
    assert in_users_words(text) == text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--max-restarts", "-2"), "--max-failures must be an int of at least -1, got -2"),
        (("--hosts", "a:1", "--hostfile", "b"), "--hosts and --hostfile are both given; drop one of the two"),
        (("--resources-per-worker", "GPU=1"), '--resources-per-worker asks for "GPU"; set --use-gpu, too'),
        (("--num-workers", "3:2"), "--num-workers as (min, max)"),
        (("--interface", "a b"), "--interface must be a network interface"),
        (("--env", "=1"), "--env =1: must be NAME=VALUE"),
        *(((name, "2"), f"there is no option {name}; use --num-workers N") for name in ("-n", "-np", "--num_procs")),
        (("--ngpus=2",), "there is no option --ngpus; use --num-workers N --use-gpu"),
        (("--no-python",), "there is no option --no-python; ranks are Python; in a script, subprocess.run()"),
        (("-m", "--num-workers", "2"), "-m --num-workers: is not a module; put -m after the options"),
    ],
)
def test_a_wrong_value_is_reported_by_its_option(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.run_command([*arguments, __file__], [])
    assert f"error: {said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "hosts", "workers"),
    [
        ([], "a:2,b:3", 5),
        (["--num-workers", "1:2"], "localhost:4", (1, 2)),
        (["--nproc-per-node", "cpu"], "localhost:1", usable_cpus()),
    ],
)
def test_the_number_of_workers_may_be_a_range_or_that_of_devices(
    given: list[str], hosts: str, workers: int | tuple[int, int]
) -> None:
    assert command._num_workers(options_of(*given), parse_hosts(hosts, "hosts")) == workers


# -- torchrun --------------------------------------------------------------------------------------------------------


def test_every_option_of_torchrun_is_known_in_each_of_its_spellings() -> None:
    for name, action in get_args_parser()._option_string_actions.items():
        known = name.lstrip("-").replace("_", "-")
        assert name in KNOWN or known in _INSTEAD, f"{name} of torchrun is not known"
        if name in KNOWN and action.nargs == 0 and action.dest != "module":
            assert KNOWN[name].nargs == 0, f"{name} takes no value under torchrun"
