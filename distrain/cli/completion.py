"""``distrain completion``: the completion of the command line in bash, zsh and fish. Runs in: coordinator.

The shell passes the words of the command line to ``distrain completion --words``, which prints the candidates.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from typing import TYPE_CHECKING

from distrain.cli import parsers
from distrain.cli.main import COMMANDS, LAUNCHING, command_of
from distrain.storage.runs.listing import LAST, run_names, storage_at

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_SHELLS = {
    "bash": """\
_distrain() {
    local IFS=$'\\n'
    COMPREPLY=($(distrain completion --words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
    [[ ${#COMPREPLY[@]} -gt 0 ]] || compopt -o default
}
complete -F _distrain distrain
""",
    "zsh": """\
#compdef distrain
_distrain() {
    local -a found
    found=("${(@f)$(distrain completion --words "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    [[ -n "$found" ]] && compadd -- $found || _files
}
if [ "$funcstack[1]" = "_distrain" ]; then _distrain "$@"; else compdef _distrain distrain; fi
""",
    "fish": """\
function __distrain_complete
    set -l words (commandline -opc) (commandline -ct)
    distrain completion --words $words[2..-1] 2>/dev/null
end
complete -c distrain -a '(__distrain_complete)'
""",
}


def completion_parser() -> argparse.ArgumentParser:
    """Make the parser of ``distrain completion``."""
    parser = parsers.make_parser(
        "completion",
        "Print what a shell needs to complete commands, options and the names of runs.",
        '  eval "$(distrain completion bash)"                             in ~/.bashrc\n'
        '  eval "$(distrain completion zsh)"                              in ~/.zshrc, after compinit\n'
        "  distrain completion fish > ~/.config/fish/completions/distrain.fish",
    )
    parser.add_argument("shell", nargs="?", choices=sorted(_SHELLS), help="the shell")
    parser.add_argument("--words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def run_completion(options: argparse.Namespace) -> int:
    """Print the script for a shell, or the candidates for the last of some words."""
    if options.words is not None:
        words = options.words or [""]
        names = _candidates(words[:-1], words[-1])
        print("\n".join(name for name in names if name.startswith(words[-1]) and name.isprintable()))
    elif options.shell is None:
        completion_parser().error(f"name a shell: {', '.join(_SHELLS)}")
    else:
        print(_SHELLS[options.shell], end="")
    return 0


def _candidates(before: Sequence[str], word: str) -> Iterable[str]:
    """Return what may follow these words; nothing where the shell shall complete the name of a file."""
    if not before:
        return [*LAUNCHING, *COMMANDS, "--help", "--version"]
    parser = _parser_of(before[0])
    if parser is None:
        return []
    options = {name: action for action in parser._actions for name in action.option_strings}
    previous = options.get(before[-1])
    if previous is not None and previous.nargs != 0:
        return [str(choice) for choice in previous.choices or ()]
    if word.startswith("-"):
        return [name for name, action in options.items() if action.help is not argparse.SUPPRESS]
    positional = next((action for action in parser._actions if not action.option_strings), None)
    if positional is None:
        return []
    if positional.metavar == parsers.RUN:
        return [LAST, *run_names(storage_at(_storage_path(before)))]
    return [str(choice) for choice in positional.choices or ()]


def _parser_of(command: str) -> argparse.ArgumentParser | None:
    if command in LAUNCHING:
        from distrain.cli.run.options import make_parser

        return make_parser(f"distrain {command}")
    return command_of(command)[0] if command in COMMANDS else None


def _storage_path(words: Sequence[str]) -> str | None:
    given = [after for word, after in pairwise(words) if word == "--storage-path"]
    return given[-1] if given else None
