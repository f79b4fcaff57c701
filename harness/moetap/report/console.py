"""The console that every table is printed on.

Knows the width of a table in a terminal and in a pipe. Refuses to know what is printed.
"""

from __future__ import annotations

from rich.console import Console

WIDTH = 100
"""Columns outside a terminal, and the least within one: a narrower table would cut figures off."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to `moetap.cli`: rich would exit with 1 when a reader (head, less) goes away."""
        raise BrokenPipeError


def make_console() -> Console:
    """A console on standard output: as wide as the terminal; in a pipe or file WIDTH and plain."""
    console = _Console(highlight=False)
    console.width = max(WIDTH, console.width) if console.is_terminal else WIDTH
    return console
