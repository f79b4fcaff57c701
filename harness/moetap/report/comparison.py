"""Several models side by side, one line each.

Knows which figures sum up a study. Refuses to judge models against each other: each was traced on
its own prompts and has its own verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from moetap.analysis.study import Study
from moetap.report import words
from moetap.report.sections import Note, Section, grid


def comparison_lines(studies: Sequence[Study]) -> list[dict[str, Any]]:
    """One line per model: sizes, the figures at the B of the criteria, the verdict."""
    return [_line(study) for study in studies]


def comparison_section(studies: Sequence[Study]) -> Section:
    """The same as a table."""
    table = grid(
        ("model",),
        (
            "streams", "layers", "E", "k", "B", "union", "saved %\ncold step", "\ncached",
            "over C\n%",
        ),
    )  # fmt: skip
    table.add_column("verdict\ncold / cached", no_wrap=True)
    for line in comparison_lines(studies):
        table.add_row(
            _short(line["model"]) + ("" if line["complete"] else " (INCOMPLETE)"),
            *(str(line[name]) for name in ("n_streams", "n_layers", "experts", "top_k", "b")),
            _number(line["union"], 2),
            _number(line["saved_cold"], 1, 100),
            _number(line["saved_cached"], 1, 100),
            line["overflow_state"] or _number(line["overflow"], 1, 100),
            " / ".join(line["verdicts"]) or "n/a",
        )
    cut = ", ".join(s.model.id for s in studies if words.incomplete(s.pool))
    note = Note(
        "B of the criteria; cached and overflow at the default C of the Mac that they are about. "
        "Each model has its own prompts and streams."
    )
    warning = f"INCOMPLETE: {cut}" if cut else ""
    return Section("comparison", "Models side by side", warning, (table, note))


def _line(study: Study) -> dict[str, Any]:
    model, lanes, capacity = study.model, study.options.criteria.lanes, study.default_capacity
    union = saved_cold = saved_cached = overflow = None
    state = ""
    if study.unions:
        lines = study.unions.select(study.unions.strata[0], ("overall",))
        values = next((f.values for f in lines if f.b == lanes), None)
        if values is not None:
            union, saved_cold = values.union.value, values.saved.value
    if study.cache and lanes in study.cache.sizes:
        cached = study.cache.find("all", lanes, capacity).values
        saved_cached = cached.saved.value if cached is not None and cached.saved else None
    if study.overflow and lanes in study.overflow.sizes:
        line = study.overflow.find("all", lanes, 1, capacity)
        overflow = line.fraction.value if line.fraction else None
        state = "impossible" if line.state.startswith("impossible") else ""
    return {
        "model": model.id,
        "complete": study.pool.complete,
        "n_streams": study.pool.n_streams,
        "n_layers": model.n_layers,
        "experts": _span(model.n_experts),
        "top_k": _span(model.top_k),
        "b": lanes,
        "capacity": capacity,
        "union": union,
        "saved_cold": saved_cold,
        "saved_cached": saved_cached,
        "overflow": overflow,
        "overflow_state": state,
        "verdicts": [d.word for d in study.verdict.decisions] if study.verdict else [],
    }


def _span(values: Any) -> str:
    low, high = int(np.min(values)), int(np.max(values))
    return str(low) if low == high else f"{low}-{high}"


def _short(name: str, most: int = 28) -> str:
    return name if len(name) <= most else "..." + name[-(most - 3) :]


def _number(value: float | None, digits: int, factor: float = 1) -> str:
    return "n/a" if value is None else f"{factor * value:.{digits}f}"
