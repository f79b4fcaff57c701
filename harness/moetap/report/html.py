"""One HTML file with every table and plot of a study.

Knows how a section becomes HTML. Refuses to know figures: sections and plots are those of the
terminal and of `--plots`. The file needs no network and runs no script: styles, drawings and the
criteria are in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from moetap._version import __version__
from moetap.analysis.study import VERDICT, Study
from moetap.report import words
from moetap.report.comparison import comparison_section
from moetap.report.plots import DARK, LIGHT, css_colors, left_out, plots, svg_inline
from moetap.report.sections import Heading, Note, Section, flagged
from moetap.report.study import sections
from moetap.report.verdict_table import STYLES

TEMPLATES = Path(__file__).with_name("templates")


def report_html(studies: Sequence[Study], by_layer: bool = False) -> str:
    """The report on one model, or on several with their comparison first."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    criteria = studies[0].options.criteria
    return environment.get_template("report.html").render(
        version=__version__,
        light=css_colors(LIGHT),
        dark=css_colors(DARK),
        comparison=_section(comparison_section(studies), "all") if len(studies) > 1 else None,
        studies=[_study(study, f"m{i}", by_layer) for i, study in enumerate(studies)],
        criteria=criteria,
    )


def _study(study: Study, prefix: str, by_layer: bool) -> dict[str, Any]:
    from markupsafe import Markup

    shown = sections(study, by_layer)
    # Whoever opens a report wants to know what came out; the terminal's last lines are first here.
    shown.sort(key=lambda section: section.key != VERDICT)
    drawn: dict[str, list[dict[str, Any]]] = {}
    for plot in plots(study):
        drawn.setdefault(plot.section, []).append(
            {
                "id": f"{prefix}-plot-{plot.key}",
                "title": plot.title,
                "words": plot.words,
                # Our own drawing: its texts were escaped by matplotlib.
                "svg": Markup(svg_inline(plot, study, f"{prefix}-{plot.key}")),
            }
        )
    absent: dict[str, list[str]] = {}
    for plot in left_out(study):
        absent.setdefault(plot.section, []).append(f"{plot.title}: not drawn, {plot.missing}.")
    return {
        "id": prefix,
        "model": study.model.id,
        "warnings": [x for x in (words.incomplete(study.pool), *words.warnings(study.pool)) if x],
        "facts": _facts(study),
        "decisions": [
            {
                "definition": decision.definition,
                "word": decision.word,
                "style": STYLES[decision.word],
                "sentence": decision.sentence,
            }
            for decision in (study.verdict.decisions if study.verdict else ())
        ],
        "sections": [
            _section(s, prefix) | {"plots": drawn.get(s.key, []), "no_plots": absent.get(s.key, [])}
            for s in shown
        ],
    }


def _facts(study: Study) -> list[tuple[str, str]]:
    """Where the figures come from."""
    model = study.model
    experts, top_k = (_span(values) for values in (model.n_experts, model.top_k))
    facts = [
        ("model", model.id + (f" at {model.revision}" if model.revision else "")),
        ("type", model.model_type or "not recorded"),
        ("MoE layers", f"{model.n_layers}, top-{top_k} of {experts} experts"),
        ("config sha256", model.config_sha256 or "not recorded"),
        ("weights sha256", model.weights_sha256 or "not recorded"),
    ]
    for trace in study.traces:
        c = trace.capture
        ram = "" if c.ram_bytes is None else f", {c.ram_bytes / 2**30:.0f} GiB RAM"
        mix = f"{c.mix_name} {c.mix_version}".strip() or "not recorded"
        state = "complete" if trace.complete else "INCOMPLETE"
        sampler = "greedy" if c.temp == 0 else f"temperature {c.temp:g}, seed {c.seed}"
        sampler = words.NOT_RECORDED if c.imported and c.temp == 0 else sampler
        facts.append(
            (
                f"trace {Path(trace.source).name}",
                f"{state}, {words.count(len(trace.streams), 'stream')}; {trace.created}; run "
                f"{trace.run_id or 'not recorded'}; {c.chip or 'machine not recorded'}{ram}"
                f"{', ' + c.os if c.os else ''}; prompts: {mix}"
                f"{', sha256 ' + c.mix_sha256[:16] if c.mix_sha256 else ''}; sampler: {sampler}; "
                f"mlx {c.mlx_version or '?'}, mlx-lm {c.mlx_lm_version or '?'}, moetap "
                f"{c.moetap_version or '?'}; mode: {c.mode or words.NOT_RECORDED}",
            )
        )
    loops = words.left_out(study.pool)
    return facts + ([("loops", loops)] if loops else [])


def _span(values: Any) -> str:
    low, high = int(values.min()), int(values.max())
    return str(low) if low == high else f"{low} to {high}"


def _section(section: Section, prefix: str) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    caption = ""
    for part in section.parts:
        if isinstance(part, Heading):
            caption = flagged(part, section)
        elif isinstance(part, Note):
            text = part.text.plain if isinstance(part.text, Text) else part.text
            style = "warning" if part.warning else "" if part.main else "note"
            parts.append({"kind": "note", "text": text, "style": style})
        else:
            parts.append(_table(part, caption or flagged(Heading(section.title), section)))
            caption = ""
    return {
        "id": f"{prefix}-{section.key}",
        "title": section.title,
        "warning": section.warning,
        "parts": parts,
        "plots": [],
        "no_plots": [],
    }


def _table(table: Table, caption: str) -> dict[str, Any]:
    """A rich table as cells of HTML."""
    columns = [list(column.cells) for column in table.columns]
    return {
        "kind": "table",
        "caption": caption,
        "head": [
            (str(column.header).replace("\n", " ").strip(), column.justify == "right")
            for column in table.columns
        ],
        "rows": [
            {
                "cells": [
                    _cell(cells[i], column.justify == "right")
                    for cells, column in zip(columns, table.columns, strict=True)
                ],
                "end": row.end_section,
            }
            for i, row in enumerate(table.rows)
        ],
    }


def _cell(cell: Any, right: bool) -> tuple[str, bool, str]:
    """Text, whether it is set right, and a style class."""
    style = str(cell.style) if isinstance(cell, Text) else ""
    text = cell.plain if isinstance(cell, Text) else str(cell)
    return text, right, style
