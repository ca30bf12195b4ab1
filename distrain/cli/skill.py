"""``distrain skill``: the command line as a skill file, from which a coding agent learns it. Runs in: coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distrain.cli import parsers
from distrain.cli.drilling import drill_parser
from distrain.cli.main import COMMANDS, command_of
from distrain.cli.run.options import make_parser
from distrain.system import __version__

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

_HEAD = """\
---
name: distrain
description: Starts, checks, follows, diagnoses, stops and resumes distributed training, on one host or many.
---

# distrain

Rules:

- This is distrain {version}. `distrain COMMAND --help` describes all options; there are no others.
- Check first: `distrain check --json`, then a short run. `distrain config` shows options of the project's config file.
- Start a run that lasts without a terminal: `nohup distrain run --json --name NAME ... >end.json 2>NAME.log &`.
- Read results from `--json`, which docs/json.md describes, not from the text. A RUN may be `last`.
- Exit code 2 means a wrong command line, or a launch that is not possible. The message names the fix.
- After a failure, read `distrain show RUN --json` (`error`, `verdict`), then `distrain logs RUN -r RANK -n 50`.
- If a run seems to hang, use `distrain stacks RUN --json`. It does not disturb the run.
- To continue a run that has not finished, start it again with the same `--name`.
- Never kill a run's processes. `distrain stop RUN` lets them save a checkpoint.
- `distrain clean` deletes checkpoints. Use `--dry-run`, and ask before you delete.
- To try a script, you need neither a GPU nor other hosts: `--num-workers 2`.

`distrain check` and `distrain config` take the options of `distrain run`.
"""


def skill_parser() -> argparse.ArgumentParser:
    """Make the parser of ``distrain skill``."""
    return parsers.make_parser(
        "skill",
        "Print a skill file for coding agents: what distrain is for, the rules, and each command as it is installed.",
        "  distrain skill > SKILL.md",
    )


def run_skill(options: argparse.Namespace) -> int:
    """Print the file."""
    print(_HEAD.format(version=__version__), *map(_section, all_parsers()), sep="\n")
    return 0


def all_parsers() -> Iterator[argparse.ArgumentParser]:
    """Yield the parser of each command. Those of ``check`` and ``config`` are that of ``run``."""
    yield make_parser("distrain run")
    yield drill_parser()
    yield from (command_of(name)[0] for name in COMMANDS)


def _section(parser: argparse.ArgumentParser) -> str:
    usage = f"{parser.format_usage()}\n{parser.epilog or ''}".strip()
    return f"## {parser.prog}\n\n{parser.description}\n\n```text\n{usage}\n```\n"
