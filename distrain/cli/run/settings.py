"""The options of a run, with those of the config file. Runs in: coordinator."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from distrain.cli.run.config_file import layers
from distrain.cli.run.config_options import PATH
from distrain.cli.run.options import WITHOUT_EFFECT, parse
from distrain.storage.runs.listing import WrongArgument
from distrain.system.text import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence, Set

    from distrain.cli.parsers import Parser
    from distrain.cli.run.config_file import Layer

_PAIRS = {"hosts": "hostfile", "num_workers": "nproc_per_node"}
_RIVALS = _PAIRS | {second: first for first, second in _PAIRS.items()}
"""Options for the same thing: each also replaces the other one of a layer below."""
_NOT_IN_FILES = {"as_ray", "check", "config", "help", "json", "module", "no_config", "on", "set", "version"}
_NOT_IN_FILES |= {"nnodes", "run_path", "standalone", *(name.replace("-", "_") for name in WITHOUT_EFFECT)}
"""Options about a single command, and what it runs."""


def parse_with_file(parser: Parser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command line whose defaults are in the config file. The parser's errors then name their places there.

    Raises SystemExit for a wrong file or command line.
    """
    options = parse(parser, arguments)
    if options.no_config:
        return options
    try:
        for layer in layers(options.on):
            _set_defaults(parser, layer)
    except (WrongArgument, argparse.ArgumentError, OSError) as error:
        parser.error(str(error))
    options = parse(parser, arguments)
    typed = {name for name, value in vars(options).items() if value is not parser.get_default(name)}
    _forget_replaced(parser, typed)
    return parse(parser, arguments)


def _set_defaults(parser: Parser, layer: Layer) -> None:
    """Have a parser take the options of a config file for its defaults. Raises WrongArgument or ArgumentError."""
    known = _options_for_files(parser)
    _forget_replaced(parser, {known[key].dest for key in layer.options if key in known})
    for key, value in layer.options.items():
        place = f"{layer.label}{key}"
        if key not in known:
            raise WrongArgument(f"{place}: config files have no option {key}{did_you_mean(key, known)}")
        parser.sources[known[key].dest] = place
        parser.set_defaults(**{known[key].dest: _value(parser, layer, known[key], value)})


def _forget_replaced(parser: Parser, given: Set[str]) -> None:
    """Have a parser forget what is from the config file for options that are given in a layer above."""
    rivals = {_RIVALS[name] for name in given & _RIVALS.keys()} - given
    parser.set_defaults(**dict.fromkeys(rivals))
    parser.sources = {name: place for name, place in parser.sources.items() if name not in given | rivals}


def _value(parser: Parser, layer: Layer, action: argparse.Action, value: Any) -> Any:
    """Return the value of an option as the parser would from the command line; repeated ones add up."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise WrongArgument(f"{action.option_strings[0]}: must be true or false, got {value!r}")
        return action.const if value else not action.const
    if isinstance(value, dict):
        value = [f"{name}={_typed(item)}" for name, item in value.items()]
    adds_up = isinstance(action, argparse._AppendAction)
    if action.metavar == PATH and not adds_up:
        return layer.path(value)
    convert = layer.path if action.metavar == PATH else _typed
    texts = [convert(item) for item in (value if isinstance(value, list) else [value])]
    if adds_up:
        return [*(action.default or ()), *texts]
    return parser._get_values(action, [",".join(texts)])


def _options_for_files(parser: Parser) -> dict[str, argparse.Action]:
    return {
        name.removeprefix("--"): action
        for action in parser._actions
        for name in action.option_strings
        if action.dest not in _NOT_IN_FILES
    }


def _typed(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
