"""The options of a run, with those of the config file. Runs in: coordinator."""

from __future__ import annotations

import argparse
import json
from itertools import chain
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
    """Parse a command line in front of which the config file puts words. The parser's errors name their places there.

    Raises SystemExit for a wrong file or command line.
    """
    options = parse(parser, arguments)
    if options.no_config:
        return options
    words: dict[str, list[str]] = {}
    try:
        for layer in layers(options.on):
            _add_words(parser, words, layer)
    except (WrongArgument, OSError) as error:
        parser.error(str(error))
    typed = {name for name, value in vars(options).items() if value is not parser.get_default(name)}
    _forget_rivals(parser, words, typed)
    parser.sources = {name: place for name, place in parser.sources.items() if name not in typed}
    return parse(parser, [*chain.from_iterable(words.values()), *arguments])


def _add_words(parser: Parser, words: dict[str, list[str]], layer: Layer) -> None:
    """Add the options of a config file, in place of those of an earlier layer; repeated ones add up."""
    every = ((name, action) for action in parser._actions for name in action.option_strings)
    known = {name.removeprefix("--"): action for name, action in every if action.dest not in _NOT_IN_FILES}
    _forget_rivals(parser, words, {known[key].dest for key in layer.options if key in known})
    for key, value in layer.options.items():
        if key not in known:
            raise WrongArgument(f"{layer.label}{key}: config files have no option {key}{did_you_mean(key, known)}")
        action = known[key]
        parser.sources = {**parser.sources, action.dest: f"{layer.label}{key}"}
        before = words.get(action.dest, []) if isinstance(action, argparse._AppendAction) else []
        words[action.dest] = [*before, *_words(layer, action, value)]


def _forget_rivals(parser: Parser, words: dict[str, list[str]], given: Set[str]) -> None:
    """Forget the rivals of options that are given in a layer above."""
    for rival in {_RIVALS[name] for name in given & _RIVALS.keys()} - given:
        words.pop(rival, None)
        parser.sources.pop(rival, None)


def _words(layer: Layer, action: argparse.Action, value: Any) -> list[str]:
    """Return an option as it would be typed."""
    option = action.option_strings[0]
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise WrongArgument(f"{option}: must be true or false, got {value!r}")
        return [option] * value
    if isinstance(value, dict):
        value = [f"{name}={_typed(item)}" for name, item in value.items()]
    convert = layer.path if action.metavar == PATH else _typed
    texts = [convert(item) for item in (value if isinstance(value, list) else [value])]
    return [f"{option}={text}" for text in (texts if isinstance(action, argparse._AppendAction) else [",".join(texts)])]


def _typed(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
