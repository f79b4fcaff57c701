"""A table and the words around it, before they are drawn.

Knows what a section of a report consists of, and how it is printed on a terminal; `report.html`
draws the same sections as HTML, so that the two can't differ in a figure. Refuses to know which
figures they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from moetap.report.console import visible


@dataclass(frozen=True)
class Heading:
    """The title of the table that follows."""

    text: str


@dataclass(frozen=True)
class Note:
    """Words under a table. `main` ones are not set back: they say a result, not how it was made.
    warning: something is wrong, and must not be overlooked."""

    text: Text | str
    main: bool = False
    warning: bool = False


@dataclass(frozen=True)
class Section:
    """One part of a report. key: its name on the command line and in links. warning: what must be
    said of every table in it, "" if nothing."""

    key: str
    title: str
    warning: str
    parts: tuple[Heading | Note | Table, ...]


def grid(left: Sequence[str], right: Sequence[str]) -> Table:
    """An empty table with columns set left and right."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def flagged(heading: Heading, section: Section) -> str:
    """The heading of a table, which says so if the trace behind it is incomplete."""
    return heading.text + (" (INCOMPLETE TRACE)" if section.warning else "")


def print_section(console: Console, section: Section) -> None:
    """Print one section."""
    console.print(Text(visible(section.title), style="bold"))
    if section.warning:
        console.print(Text(visible(section.warning), style="bold red"))
    for part in section.parts:
        if isinstance(part, Heading):
            console.print(
                Padding(Text(visible(flagged(part, section)), style="bold"), (1, 0, 0, 1))
            )
        elif isinstance(part, Note):
            text = part.text if isinstance(part.text, Text) else Text(part.text)
            text = _visible(text)
            if part.warning:
                text.stylize("bold red")
            elif not part.main:
                text.stylize("dim")
            console.print(Padding(text, (0, 1)))
        else:
            _print_table(console, part)
    console.print()


def print_warnings(console: Console, lines: Sequence[str]) -> None:
    """Print what must be said of all sections that follow."""
    for line in lines:
        console.print(Text(visible(line), style="bold red"))
    if lines:
        console.print()


def _visible(text: Text) -> Text:
    """As `visible`, with the same style; its spans only where nothing had to be escaped."""
    shown = visible(text.plain)
    return text.copy() if shown == text.plain else Text(shown, style=text.style)


def _print_table(console: Console, table: Table) -> None:
    """Print a table; one that is too wide for the console goes beyond it, since rich would cut
    figures off."""
    for column in table.columns:
        # In place: rich has no way to change cells that are there.
        column._cells = [
            _visible(cell) if isinstance(cell, Text) else visible(str(cell))
            for cell in column.cells
        ]
        if column.no_wrap:
            texts = [str(cell) for cell in (column.header, *column.cells)]
            column.min_width = max(len(line) for text in texts for line in text.split("\n"))
    usual = console.width
    least = console.measure(table, options=console.options.update(max_width=1000)).minimum
    console.width = max(least, usual)
    console.print(table)
    console.width = usual
