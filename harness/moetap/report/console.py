"""The console that every table is printed on.

Knows the width of a table in a terminal and in a pipe. Refuses to know what is printed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

WIDTH = 100
"""Columns outside a terminal, and the least within one: a narrower table would cut figures off."""


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def visible(text: str, keep: str = "") -> str:
    """The text with its control characters as escapes: a name from a file could otherwise move
    the cursor, colour the terminal or make lines of its own. keep: those that stay."""
    return _CONTROL.sub(
        lambda m: m[0] if m[0] in keep else m[0].encode("unicode_escape").decode("ascii"), text
    )


class _Console(Console):
    def render(self, *args: Any, **kwargs: Any) -> Iterable[Segment]:
        """Nothing reaches the terminal raw, whoever made the text."""
        for segment in super().render(*args, **kwargs):
            yield segment if segment.control else segment._replace(text=visible(segment.text, "\n"))

    def on_broken_pipe(self) -> None:
        """Leave it to `moetap.cli`: rich would exit with 1 when a reader (head, less) goes away."""
        raise BrokenPipeError


def make_console() -> Console:
    """A console on standard output: as wide as the terminal; in a pipe or file WIDTH and plain."""
    # A terminal that has no "±" gets "?".
    if "utf" not in (sys.stdout.encoding or "utf").lower() and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    console = _Console(highlight=False)
    console.width = max(WIDTH, console.width) if console.is_terminal else WIDTH
    return console
