"""``distrain drill``: proves that a script resumes exactly. Runs in: coordinator."""

from __future__ import annotations

import argparse
import ast
import io
import os
import shlex
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from rich.console import Console
from rich.text import Text

from distrain.cli import parsers
from distrain.cli.run.driver import is_for_ray
from distrain.cli.run.options import make_parser, parse
from distrain.cli.text import write_json
from distrain.drilling.drill import DISTURBANCES, Drill, DrillReport, Verdict
from distrain.drilling.order import Order
from distrain.errors import JobError
from distrain.system.text import did_you_mean, printable

if TYPE_CHECKING:
    from collections.abc import Sequence


def run_drill(arguments: Sequence[str]) -> int:
    """Run ``distrain drill`` and return its exit code. Raises SystemExit for a wrong command line."""
    parser = parsers.parser_of("drill", add_drill_options)
    parser.usage = (
        "distrain drill [options] [options of distrain run] TARGET [arguments]\n"
        "       distrain drill [options] -- COMMAND, such as torchrun --nproc-per-node {workers} train.py"
    )
    split = [*arguments, "--"].index("--")
    options, words = parser.parse_known_args(arguments[:split])
    is_command = not words and shutil.which("".join(arguments[split + 1 : split + 2])) is not None
    words += arguments[split + 1 :]
    words = [os.path.abspath(word) if word.startswith("..") and os.path.exists(word) else word for word in words]
    kinds = options.only.split(",")
    for kind in kinds:
        if kind not in DISTURBANCES:
            parser.error(f"--only {kind}: must be some of {','.join(DISTURBANCES)}{did_you_mean(kind, DISTURBANCES)}")
    try:
        if is_command:
            order = Order.of_command(words, options.workers, options.resume_with)
            name, places = shlex.join(words), words
        else:
            order, name, places = _order_of_target(words, options, parser)
    except JobError as error:
        parser.error(str(error))
    console = Console(record=True, highlight=False, soft_wrap=True, file=io.StringIO() if options.json else None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends the trial, too
    drill = Drill(
        order,
        reports=options.reports,
        minutes=options.minutes,
        keep=options.keep,
        fresh=options.fresh,
        roots=[os.path.dirname(os.path.abspath(place)) for place in places if os.path.isfile(place)],
        tell=lambda verdict: console.print(_line(verdict)),
    )
    console.print(f"drilling {name}; all files are in {drill.folder}", markup=False)
    try:
        report = replace(drill.run(kinds), target=name)
    except JobError as error:
        parser.exit(2, f"distrain drill: error: {error}\n")
    except KeyboardInterrupt:
        return 130
    console.print(_findings(report))
    if options.json:
        write_json("drill", **report.to_dict())
    if options.page:
        console.save_html(os.path.expanduser(options.page))
    if options.junit:
        Path(options.junit).expanduser().write_bytes(_junit(report))
    return 0 if report.ok else 1


def _order_of_target(
    words: Sequence[str], options: argparse.Namespace, parser: argparse.ArgumentParser
) -> tuple[Order, str, list[str]]:
    """Return the order, the target's name, and its script if it has one."""
    target = parse(make_parser("distrain drill"), words)
    if target.target is None and target.module is None:
        parser.error("nothing to drill: name a script, `-m MODULE`, file.py:function, or `-- COMMAND`")
    if options.resume_with:
        parser.error("--resume-with: only for `-- COMMAND`; distrain tells a script that it continues")
    if options.workers is None and any("{workers}" in word for word in words):
        parser.error("{workers}: pass --workers N, the number that it stands for")
    home, colon, _ = (target.target or "").partition(":")
    script = Path(home).resolve()
    if script.is_file() and not colon and not target.as_ray and (is_for_ray(target) or _calls_fit(script)):
        words = ["--as-ray", *words]  # which only means that the script calls fit() itself
    order = Order(arguments=tuple(words), workers=options.workers)
    return order, target.target or f"-m {target.module[0]}", [str(script)]


def add_drill_options(add: parsers.Add) -> None:
    """Add the drill's own options."""
    kinds = ",".join(DISTURBANCES)
    add("--workers", type=int, metavar="N", help="the number of workers (default: that of the script, or 1)")
    add("--reports", type=int, default=20, metavar="N", help="reports of an undisturbed run (default: 20)")
    add("--minutes", type=_positive, default=2.0, metavar="M", help="its longest time (default: 2)")
    add("--only", default=kinds, metavar="KIND,...", help=f"disturbances (default: {kinds})")
    add("--fresh", action="append", default=[], metavar="PATTERN", help="files to hide from the runs")
    add("--resume-with", default="", metavar="WORDS", help="what a shell appends to COMMAND when it continues")
    add("--page", metavar="FILE.html", help="also write the report as a page")
    add("--junit", metavar="FILE.xml", help="also write the report for a CI system")
    add("--keep", action="store_true", help="keep the directory with all runs")


def _positive(text: str) -> float:
    if not float(text) > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return float(text)


def _calls_fit(script: Path) -> bool:
    """Return whether a script calls ``fit()`` of a trainer: without arguments, which other libraries need."""
    try:
        tree = ast.parse(script.read_bytes())
    except SyntaxError:  # the run says it better
        return False
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    bare = [call.func for call in calls if not call.args and not call.keywords]
    return any(isinstance(function, ast.Attribute) and function.attr == "fit" for function in bare)


# -- the report ------------------------------------------------------------------------------------------------------


def _line(verdict: Verdict) -> Text:
    """Return a verdict and its causes."""
    sign, style = ("✓", "green") if verdict.is_good else ("✗", "bold red")
    text = Text.assemble((f"{sign} {verdict.disturbance}: ", style), verdict.text)
    for cause in verdict.causes:
        text.append(f"\n    {cause} (docs/drill.md#{cause.name})", style="yellow")
    return text


def _junit(report: DrillReport) -> bytes:
    """Return the report in the format of JUnit, with a test case for each verdict."""
    suite = ElementTree.Element(
        "testsuite", name=printable(f"distrain drill {report.target}"), tests=str(len(report.verdicts))
    )
    suite.set("failures", str(sum(not one.is_good for one in report.verdicts)))
    for one in report.verdicts:
        case = ElementTree.SubElement(suite, "testcase", classname="distrain.drill", name=one.disturbance)
        kind = {"untested": "skipped"}.get(one.outcome, "system-out") if one.is_good else "failure"
        message = {} if kind == "system-out" else {"message": printable(one.text)}
        ElementTree.SubElement(case, kind, message).text = "\n".join(map(printable, _line(one).plain.splitlines()))
    return bytes(ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True))


def _findings(report: DrillReport) -> Text:
    """Return the notes and the result."""
    lines = [*report.notes, *([f"all files are in {report.directory}"] if report.directory else [])]
    size = f"{report.workers} workers, {report.until} {report.unit}s, {report.seconds:.0f} s"
    bad = ", ".join(one.disturbance for one in report.verdicts if not one.is_good)
    result = Text(f"{report.target} {f'fails: {bad}' if bad else 'passes'}", "bold red" if bad else "green")
    return Text("\n").join([Text(), *map(Text, lines), result.append(f" ({size})", "not bold default")])
