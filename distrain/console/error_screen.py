"""The error of a run, as one screen of a terminal. Runs in: coordinator."""

from __future__ import annotations

from distrain.system.text import without_controls


def show_error(kind: type[BaseException], text: str) -> None:
    """Show the error of a run on stderr."""
    from rich.console import Console  # these take a while, and most commands show no such error
    from rich.rule import Rule
    from rich.text import Text

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Rule(f"distrain: {_title_of(kind)}", style="red"))
    first, _, rest = without_controls(text).partition("\n")
    console.print(Text(first, style="bold red"))
    if rest:
        console.print(Text(rest))


def _title_of(kind: type[BaseException]) -> str:
    from distrain.errors import LaunchError, PreemptionError, TrainingFailedError

    if issubclass(kind, PreemptionError):
        return "stopped"
    return "training failed" if issubclass(kind, TrainingFailedError) and kind is not LaunchError else "cannot launch"
