"""The sections of a study, in the order in which they are read: the verdict last.

Knows which sections there are. Refuses to know how they are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

from moetap.analysis.study import (
    CACHE,
    LOCALITY,
    MEASURED,
    OVERFLOW,
    PARTS,
    TIME,
    UNION,
    VERDICT,
    Study,
)
from moetap.report import words
from moetap.report.cache_table import cache_section
from moetap.report.comparison import comparison_section
from moetap.report.console import make_console
from moetap.report.ledger_table import ledger_section
from moetap.report.locality_table import locality_section
from moetap.report.measured_table import measured_section
from moetap.report.overflow_table import overflow_section
from moetap.report.sections import Note, Section, print_section, print_warnings
from moetap.report.time_table import time_section
from moetap.report.union_table import union_section
from moetap.report.verdict_table import verdict_section


def sections(study: Study, by_layer: bool = False) -> list[Section]:
    """The sections of the parts that were asked for. Few traces measure their reads, so that their
    absence is worth a word only to those who ask for some parts."""
    asked = [part for part in PARTS if part in study.options.parts]
    if len(asked) == len(PARTS) and not study.measured:
        asked.remove(MEASURED)
    return [_section(study, part, by_layer) for part in asked]


def _section(study: Study, part: str, by_layer: bool) -> Section:
    if part == UNION:
        assert study.unions is not None
        return union_section(study.unions, study.curves, by_layer)
    if part == CACHE:
        assert study.cache is not None and study.unions is not None
        return cache_section(study.cache, study.unions, study.default_capacity)
    if part == MEASURED:
        return measured_section(study.pool, study.measured)
    if part == OVERFLOW:
        assert study.overflow is not None
        return overflow_section(study.overflow, study.prefill)
    if part == TIME:
        assert study.time is not None
        return time_section(study, study.time)
    if part == LOCALITY:
        assert study.locality is not None
        return locality_section(study.locality, by_layer)
    if part == VERDICT:
        assert study.verdict is not None
        return verdict_section(study, study.verdict)
    cut = words.incomplete(study.pool)
    if study.ledger is None:
        note = Note(f"Not available: {study.no_ledger}.", main=True)
        return Section("ledger", f"RAM ledger: {study.model.id}", cut, (note,))
    return ledger_section(study.ledger, cut, defaults_only=study.options.capacities is None)


def print_studies(studies: Sequence[Study], by_layer: bool = False) -> None:
    """Print every section; the comparison of several models after them."""
    console = make_console()
    for study in studies:
        print_warnings(console, words.warnings(study.pool))
        for section in sections(study, by_layer):
            print_section(console, section)
    if len(studies) > 1:
        print_section(console, comparison_section(studies))
