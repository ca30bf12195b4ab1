"""``distrain run --as-ray``: run a script of Ray, which calls fit() itself, in this process. Runs in: coordinator."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from distrain.api.ray_names import AS_RAY, is_asked_for_as_ray
from distrain.api.tracker import VARIABLE as TRACKERS
from distrain.api.tracker import parse_tracker
from distrain.cli.run.options import environment_variables, is_function
from distrain.cli.run.target import work_of, workers_path
from distrain.worker.user_code import users_part

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from distrain.cli.parsers import Parser

_HOSTS = {"hosts": "DISTRAIN_HOSTS", "hostfile": "DISTRAIN_HOSTFILE"}
VARIABLES = {**_HOSTS, "transport": "DISTRAIN_TRANSPORT", "ssh_args": "DISTRAIN_SSH_ARGS"}
"""Options, and the variables that do the same for a fit()."""
_OTHERS = {
    "as_ray",
    "env",
    "tracker",
    "target",
    "arguments",
    "module",
    "wait",
    "gpus",
    "time",
    "after",
    "force",
    "name",
}
"""Further options that have a meaning here."""


def is_for_ray(options: argparse.Namespace) -> bool:
    """Tell if the target is a script of Ray: by the option, or by the variable, which is not about functions."""
    names_script = options.module is not None or (options.target is not None and not is_function(options.target))
    return options.as_ray or (names_script and is_asked_for_as_ray())


def driver_of(
    parser: Parser, options: argparse.Namespace, user_path: Sequence[str], in_copy: Callable[[str], str]
) -> Callable[[], None]:
    """Return what runs the script as ``python script.py`` does. Raises ValueError or OSError for a wrong option.

    in_copy: returns where a file is in a copy of the user's code, or its path.
    """
    if options.target is not None and is_function(options.target):
        raise ValueError(f"--as-ray {options.target}: is a function; name a script, or a module with -m")
    _refuse_others(parser, options)
    for text in options.tracker or ():
        parse_tracker(text)
    work, variables = work_of(options, user_path, in_copy), environment_variables(options.env)

    def drive() -> None:
        from distrain.as_ray.core import set_variables  # the import activates the stand-in, too

        _follow(options)
        set_variables(variables)
        sys.path[:] = map(in_copy, workers_path(work, user_path))
        try:
            work.run()
        except BaseException as error:
            _show_from_script(users_part(error))
            raise

    return drive


def _refuse_others(parser: Parser, options: argparse.Namespace) -> None:
    """Raise ValueError for an option that would start workers, or do something else than to run the script."""
    for action in parser._actions:
        known = action.dest in (*VARIABLES, *_OTHERS) or not hasattr(options, action.dest)
        if not known and getattr(options, action.dest) != action.default:
            asked = "--as-ray" if options.as_ray else f"{AS_RAY}={os.environ[AS_RAY]}"
            option = action.option_strings[0]
            raise ValueError(f"{option}: with {asked}, the script calls fit() itself; set it in its configs instead")


def _follow(options: argparse.Namespace) -> None:
    """Have the fit() of the script, and its workers, act by the options."""
    given: dict[str, Any] = {name: getattr(options, name) for name in VARIABLES}
    if given["hosts"] or given["hostfile"]:
        for name in _HOSTS.values():
            os.environ.pop(name, None)
    os.environ.update({VARIABLES[name]: value for name, value in given.items() if value and value != "auto"})
    if options.tracker:
        os.environ[TRACKERS] = ";".join(options.tracker)


def _show_from_script(trace: TracebackType | None) -> None:
    """Have the exception that ends the process shown from the script on, as the interpreter does."""
    show = sys.excepthook

    def show_users_part(kind: type[BaseException], error: BaseException, _: object) -> None:
        show(kind, error.with_traceback(trace), trace)

    sys.excepthook = show_users_part
