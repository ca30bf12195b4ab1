"""``distrain drill``: proves that a script resumes exactly. Runs in: coordinator."""

from __future__ import annotations

import argparse
import ast
import json
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.cli.run.driver import is_for_ray
from distrain.cli.run.options import is_function, make_parser, parse
from distrain.cli.text import echo, paint
from distrain.drilling.drill import DISTURBANCES, Drill, drill_directory, fenced_directories
from distrain.drilling.page import drill_page, findings
from distrain.drilling.trial import Target
from distrain.errors import JobError
from distrain.system.text import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distrain.drilling.verdict import Verdict

_FLAGS = ("--keep", "--json")


def run_drill(arguments: Sequence[str]) -> int:
    """Run ``distrain drill`` and return its exit code. Raises SystemExit for a wrong command line."""
    parser = make_parser("distrain drill")
    parser.description = "Prove that a script resumes exactly: run it undisturbed, then disturbed, and compare."
    _add_options(parser.add_argument_group("the drill").add_argument)
    options, words = _parse(parser, arguments)
    kinds = options.only.split(",")
    for kind in kinds:
        if kind not in DISTURBANCES:
            parser.error(f"--only {kind}: is none of {', '.join(DISTURBANCES)}{did_you_mean(kind, DISTURBANCES)}")
    if options.target is None and options.module is None:
        parser.error("nothing to drill: name a script, `-m MODULE`, or file.py:function")
    if _calls_fit(options) and not options.as_ray:
        words = ["--as-ray", *words]  # which only means that the script calls fit() itself
    script = [Path(options.target).resolve().parent] if options.target and Path(options.target).is_file() else []
    here = Path.cwd()
    target = Target("command", tuple(words), here, fenced_directories(here, *script), options.workers)
    name = options.target or f"-m {options.module[0]}"

    def tell(verdict: Verdict) -> None:
        if not options.json:
            sign = paint("✓", "32") if verdict.is_good else paint("✗", "31")
            echo(f"{sign} {verdict.disturbance}: {verdict}")

    try:
        with drill_directory(keep=options.keep) as folder:
            if not options.json:
                echo(f"drilling {name}; all files are in {folder}")
            drill = Drill(target, folder, name, reports=options.reports, minutes=options.minutes, tell=tell)
            report = drill.run(kinds)
    except JobError as error:
        parser.exit(2, f"distrain drill: error: {error}\n")
    if options.json:
        echo(json.dumps(report.to_dict(), indent=1))
    else:
        echo("\n".join(["", *findings(report, options.failures_per_day)]))
    if options.page:
        Path(options.page).write_text(drill_page(report, options.failures_per_day))
    return 0 if report.ok else 1


def _add_options(add: Callable[..., object]) -> None:
    kinds = ",".join(DISTURBANCES)
    add("--workers", type=int, metavar="N", help="workers of the undisturbed run (default: the script's own number)")
    add("--reports", type=int, default=20, metavar="N", help="reports of an undisturbed run (default: 20)")
    add("--minutes", type=float, default=2.0, metavar="M", help="its longest time (default: 2)")
    add("--only", default=kinds, metavar="KIND,...", help=f"disturbances: {kinds} (default: all)")
    add("--failures-per-day", type=float, default=1.0, metavar="F", help="for the best checkpoint interval (default: 1)")
    add("--page", metavar="FILE.html", help="also write the report as a page")
    add("--keep", action="store_true", help="keep the directory with all runs")


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the words that are for ``distrain run``. Options of the drill may follow the target."""
    own = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    _add_options(own.add_argument)
    names = {"--json", *own._option_string_actions}
    target = parser.parse_known_args(arguments)[0].target
    drill, run = [], []
    words, is_over = list(arguments), False
    while words:
        word = words.pop(0)
        if not is_over and word.partition("=")[0] in names:
            drill += [word] if word in _FLAGS or "=" in word else [word, *words[:1]]
            del words[: len(drill[-2:]) - 1 if drill[-1] is not word else 0]
            continue
        is_over = is_over or (target is not None and target in run and not is_function(target)) or "-m" in run
        run.append(word)
    return parse(parser, [*drill, *run]), run


def _calls_fit(options: argparse.Namespace) -> bool:
    """Return whether a script calls ``fit()`` of a trainer itself, without arguments, as those of others do not."""
    if is_for_ray(options):
        return True
    if options.target is None or not Path(options.target).is_file():
        return False
    calls = (one for one in ast.walk(ast.parse(Path(options.target).read_text())) if isinstance(one, ast.Call))
    return any(
        isinstance(call.func, ast.Attribute) and call.func.attr == "fit" and not call.args and not call.keywords
        for call in calls
    )
