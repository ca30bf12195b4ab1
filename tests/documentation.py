"""The code in the pages of the documentation, and how it is run.

Blocks of a page run in order, in one directory. A comment in the line above a block says if it is treated otherwise:

    <!-- file: train.py -->           the block is the content of a file, for the blocks after it
    <!-- not run: needs two hosts --> the block is not run, and why
    <!-- exit code: 1 -->             the exit code of the block (default: 0)
    <!-- cell: 1 -->                  the block is a cell of a notebook, which runs after the other blocks
    <!-- hosts: alpha beta -->        the block runs where there are such hosts, in tests/hosts

What readers do not see, but the blocks need, is in comments of several lines:

    <!-- file: train.py               a file
    <!-- run:                         commands

A Python block is a script of its own, ``script.py``. Shell blocks run on a terminal. Of a console block, the lines
after ``$`` are run, and its other lines have to be in the output, where numbers and names of runs may differ; ``...``
stands for any lines.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import nbclient
import nbformat

from tests.terminal import Terminal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).resolve().parent.parent
LANGUAGES = ("python", "sh", "console")
_FENCE = re.compile(
    r"(?:^<!-- (?P<key>[a-z ]+): (?P<value>[^\n]+?) -->\n+)?"
    r"^(?P<fence>```+)(?P<language>\w+)\n(?P<text>.*?)^(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)
_HIDDEN = re.compile(
    r"^<!-- (?P<key>file|run):(?P<value>(?:(?!-->)[^\n])*)\n(?P<text>.*?)^-->$", re.MULTILINE | re.DOTALL
)
_INCLUDED = re.compile(r"^```\{include\} (\S+)$", re.MULTILINE)
_KEYS = (None, "file", "not run", "exit code", "hosts", "cell")
_TIMEOUT_S = 100.0


@dataclass(frozen=True)
class Block:
    """A block of code of a page."""

    place: str
    language: str
    text: str
    key: str | None
    value: str

    @property
    def runs(self) -> bool:
        return self.language in LANGUAGES and self.key in (None, "exit code")

    def command(self, folder: Path) -> list[str]:
        if self.language == "python":
            (folder / "script.py").write_text(self.text)
            return [sys.executable, "script.py"]
        return ["bash", "-euo", "pipefail", "-c", self.commands()]

    def commands(self) -> str:
        if self.language != "console":
            return self.text
        lines = self.text.splitlines()
        continued = [bool(number) and lines[number - 1].endswith("\\") for number in range(len(lines))]
        shown = zip(lines, continued, strict=True)
        return "\n".join(line.removeprefix("$ ") for line, goes_on in shown if goes_on or line.startswith("$ "))

    def output(self) -> list[str]:
        """Return the lines of output that a console block shows."""
        if self.language != "console":
            return []
        commands = self.commands().splitlines()
        return [line for line in self.text.splitlines() if line.removeprefix("$ ") not in commands and line.strip()]


def pages() -> list[Path]:
    return sorted((ROOT / "docs").rglob("*.md"))


def words() -> dict[str, int]:
    """Return the number of words of the README and of each page of the site, with what it includes."""
    found = {}
    for page in (ROOT / "README.md", *pages()):
        if "internals" not in page.parts:
            included = [page.parent / name for name in _INCLUDED.findall(page.read_text())]
            found[str(page.relative_to(ROOT))] = sum(len(file.read_text().split()) for file in (page, *included))
    return found


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page that have a language, and what is hidden, in their order."""
    text = page.read_text()
    matches = sorted((*_FENCE.finditer(text), *_HIDDEN.finditer(text)), key=lambda match: match.start())
    return [
        _block(match, f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, match.start('text'))}") for match in matches
    ]


def _block(match: re.Match[str], place: str) -> Block:
    parts = match.groupdict()
    key = parts["key"] if parts["key"] != "run" else None
    assert key in _KEYS, f"{place}: nobody knows the comment {key!r}; there are {_KEYS[1:]}"
    return Block(place, parts.get("language", "sh"), parts["text"], key, (parts["value"] or "").strip())


@dataclass(frozen=True)
class Reader:
    """A reader, who follows a page: in front of which hosts, and with which command before each other one."""

    home: Path
    settings: Mapping[str, str]
    hosts: bool = False
    become: Sequence[str] = ()
    columns: int = 118

    @classmethod
    def of_this_machine(cls, home: Path) -> Reader:
        """Return a reader with a home directory, and without GPUs, hosts and network."""
        settings = {
            "HOME": str(home),
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "https_proxy": "http://127.0.0.1:9",
        }
        return cls(home, settings)

    def follows(self, blocks: list[Block], folder: Path) -> None:
        """Run the blocks of a page in order. Raises AssertionError, with the output, for the first that fails."""
        for block in blocks:
            if block.key == "file":
                (folder / block.value).write_text(block.text)
            elif block.runs or (self.hosts and block.key == "hosts"):
                self._runs(block, folder)
        if cells := [block.text for block in blocks if block.key == "cell"]:
            self._runs_notebook(cells, folder)

    def _runs_notebook(self, cells: list[str], folder: Path) -> None:
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
        environment = {**os.environ, **self.settings}
        nbclient.NotebookClient(notebook, timeout=_TIMEOUT_S, kernel_name="python3").execute(
            cwd=folder, env=environment
        )

    def _runs(self, block: Block, folder: Path) -> None:
        """Run a block on a terminal."""
        path = f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"
        settings = [f"{name}={value}" for name, value in self.settings.items()]
        terminal = Terminal([*self.become, "env", *settings, path, *block.command(folder)], self.columns, 40, folder)
        try:
            lines = [line.replace(str(self.home), "/home/me") for line in terminal.wait_for_end(_TIMEOUT_S)]
        finally:
            terminal.close()
        output = "\n".join(lines)
        wanted = int(block.value) if block.key == "exit code" else 0
        assert terminal.process.returncode == wanted, f"{block.place}: exit code is not {wanted}\n{output}"
        printed = {like(line) for line in lines}
        missing = [line for line in block.output() if line != "..." and like(line) not in printed]
        assert not missing, f"{block.place}: not in the output: {missing}\n{output}"


def like(line: str) -> str:
    """Return what a line has in common with that of another run."""
    line = re.sub(r", [\d.]+/s at the end", "", line)
    line = re.sub(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d-[0-9a-f]{6}", "RUN", line)
    return " ".join(re.sub(r"[-+]?\d[\d.,:e+-]*", "N", line).split())
