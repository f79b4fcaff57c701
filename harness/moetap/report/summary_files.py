"""A whole study as JSON and as CSV files, at full precision.

Knows the layouts. Refuses to round: a figure is written as the analysis returned it, and one that
is not available is null (JSON) or empty (CSV), with the reason in `missing`, never 0.

JSON, one object:

    metric        "study"
    moetap        version that wrote it
    studies       one per model, each with

        model         {id, revision, model_type, config_sha256, weights_sha256, quantization,
                      n_layers}
        complete      false: of a part of a capture
        warnings      sentences that a reader must not miss: traces that were not computed alike,
                      captures during which the machine swapped
        captures      per trace {source, run_id, created, complete, n_streams, and how it was
                      captured: versions, chip, ram_bytes, os, sampler, mix, mode}
        n_streams     streams with decode rows
        capacities    C of every table
        union         as `union_files`; null here and below if it was not asked for
        curves        [{stratum, b, steps, mean, n_groups, cold, steady}]
        cache         {policy, groups_asked, seed, left_out, figures: [{stratum, kind, b, capacity,
                      phase, missing, n_groups, exhaustive, loads, loads_alone, relative, saved,
                      uncached, uncached_alone, bytes_per_token, bytes_alone, hit_rate,
                      hit_rate_alone, extra_passes, misses, misses_alone, tokens}]}
        measured      per trace that measured its reads {source, run_id, policy, slots, cold_reads,
                      swap_growth_bytes, keep_loops, missing (why it was not replayed), cells and
                      different_cells ((step, layer) cells compared with the replay, and those whose
                      misses differ, which is a bug; null if not replayed), lines: [{phase, steps,
                      requests, misses, replayed, misses_per_token, replayed_per_token, hit_rate,
                      read_bytes, miss_bytes (misses x bytes of an expert), bytes_per_token,
                      miss_bytes_per_token, bandwidth_bps, read_s, wait_s, wait_s_per_token, eval_s,
                      step_s}]}
        overflow      {groups_asked, seed, windows, verify, footprints: [{stratum, b, window,
                      missing, mean, uniform, n_short, left_out, q50, q95, max, histogram}],
                      lines: [{stratum, b, window, capacity, state, missing, fraction, passes,
                      layers}]}
        prefill       [{stratum, chunk, capacity, state, missing, n_chunks, n_full, n_streams,
                      n_without, not_executed, union, fraction, passes, layers}]
        ledger        as `ledger_table`; no_ledger says why it is null
        time          {missing, bandwidth, lines: [{b, capacity, phase, missing, slow, fast}]},
                      slow and fast {bytes_per_step, step_s, lane_tokens_per_s, total_tokens_per_s,
                      full_overlap_lane_tokens_per_s, no_overlap_lane_tokens_per_s (null without
                      an untraced decode rate in the traces)}
        locality      as `locality_files`
        verdict       {criteria: {name, sha256, text}, macs, decisions}

    comparison    one line per model, if there are several

Estimates are {value, low, high, why} or null; low and high are null where there is no interval. CSV
has the same names: an estimate takes the columns NAME, NAME_low and NAME_high, lists are left out,
and the columns complete and streams_planned say what the printed title says. A table without a line
has no file.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from moetap._version import __version__
from moetap.analysis.cache_io import CacheTable
from moetap.analysis.jackknife import Estimate
from moetap.analysis.measured import Comparison
from moetap.analysis.measured import Line as MeasuredLine
from moetap.analysis.overflow import Footprint, OverflowTable, PrefillOverflow
from moetap.analysis.study import Study, TimeTable
from moetap.analysis.timing import TimeBound
from moetap.analysis.verdict import Judgement, MacVerdict, Verdict
from moetap.report import words
from moetap.report.comparison import comparison_lines
from moetap.report.ledger_table import ledger_dict
from moetap.report.locality_files import locality_csvs, locality_dict
from moetap.report.union_files import union_dict, union_lines

Line = dict[str, Any]


def studies_json(studies: Sequence[Study]) -> str:
    """All studies as JSON text."""
    content: Line = {
        "metric": "study",
        "moetap": __version__,
        "studies": [study_dict(study) for study in studies],
    }
    if len(studies) > 1:
        content["comparison"] = comparison_lines(studies)
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def study_dict(study: Study) -> Line:
    """One study, ready for `json.dumps`."""
    model = study.model
    return {
        "model": {
            "id": model.id,
            "revision": model.revision,
            "model_type": model.model_type,
            "config_sha256": model.config_sha256,
            "weights_sha256": model.weights_sha256,
            "quantization": model.quantization,
            "n_layers": model.n_layers,
        },
        "complete": study.pool.complete,
        "warnings": words.warnings(study.pool),
        "captures": [
            {
                "source": trace.source,
                "run_id": trace.run_id,
                "created": trace.created,
                "complete": trace.complete,
                "n_streams": len(trace.streams),
                **asdict(trace.capture),
            }
            for trace in study.traces
        ],
        "n_streams": study.pool.n_streams,
        "capacities": list(study.capacities),
        "union": union_dict(study.unions) if study.unions else None,
        "curves": [
            {
                "stratum": curve.stratum,
                "b": curve.b,
                "steps": curve.steps.tolist(),
                "mean": curve.mean.tolist(),
                "n_groups": list(curve.n_groups),
                "cold": curve.cold,
                "steady": curve.steady,
            }
            for curve in study.curves
        ],
        "cache": _cache(study.cache) if study.cache else None,
        "measured": [_measured(found) for found in study.measured],
        "overflow": _overflow(study.overflow) if study.overflow else None,
        "prefill": [_prefill(study, line) for line in study.prefill],
        "ledger": ledger_dict(study.ledger) if study.ledger else None,
        "no_ledger": study.no_ledger,
        "time": _time(study.time) if study.time else None,
        "locality": locality_dict(study.locality) if study.locality else None,
        "verdict": _verdict(study.verdict) if study.verdict else None,
    }


def study_csvs(study: Study, by_layer: bool = False) -> dict[str, str]:
    """CSV texts by file name; depth groups, or each layer with `by_layer`."""
    tables: dict[str, list[Line]] = {}
    if study.unions:
        tables["unions"] = union_lines(study.unions, by_layer)
        tables["union_steps"] = [
            {"stratum": c.stratum, "b": c.b, "step": step, "n_groups": n, "union": mean}
            for c in study.curves
            for step, mean, n in zip(c.steps.tolist(), c.mean.tolist(), c.n_groups, strict=True)
        ]
    if study.cache:
        tables["cache"] = _cache(study.cache)["figures"]
    tables["measured"] = [
        {**found, **line} for found in map(_measured, study.measured) for line in found["lines"]
    ]
    if study.overflow:
        overflow = _overflow(study.overflow)
        tables["footprints"], tables["overflow"] = overflow["footprints"], overflow["lines"]
        tables["prefill"] = [_prefill(study, line) for line in study.prefill]
    if study.ledger:
        tables["ledger"] = _ledger_lines(ledger_dict(study.ledger))
    if study.time:
        tables["time"] = [
            {**line, "slow": None, "fast": None}
            | {f"slow_{k}": v for k, v in (line["slow"] or {}).items()}
            | {f"fast_{k}": v for k, v in (line["fast"] or {}).items()}
            for line in _time(study.time)["lines"]
        ]
    if study.verdict:
        tables["verdict"] = _verdict_lines(study.verdict)
    origins = study.pool.origins
    head = {
        "model": study.model.id,
        "complete": str(study.pool.complete).lower(),
        "streams_planned": sum(origin.n_planned for origin in origins) or "",
    }
    texts = {
        f"{name}.csv": csv_text([head | _flat(line) for line in lines])
        for name, lines in tables.items()
        if lines
    }
    return texts | (locality_csvs(study.locality, by_layer) if study.locality else {})


def folder_name(study: Study, studies: Sequence[Study]) -> str:
    """A folder for the files of one of several models; "" if there is one model only."""
    if len(studies) == 1:
        return ""
    names = [Path(s.model.id).name or "model" for s in studies]
    at = next(i for i, s in enumerate(studies) if s is study)
    return names[at] if names.count(names[at]) == 1 else f"{names[at]}-{at + 1}"


def csv_text(lines: Sequence[Line]) -> str:
    """Lines as CSV; columns in the order in which they first occur."""
    columns = list(dict.fromkeys(name for line in lines for name in line))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    for line in lines:
        writer.writerow({k: str(v).lower() if isinstance(v, bool) else v for k, v in line.items()})
    return text.getvalue()


def _flat(line: Line) -> Line:
    """A JSON line as CSV columns: estimates spread out, lists left out."""
    flat: Line = {}
    for name, value in line.items():
        if isinstance(value, dict) and "low" in value:
            flat |= {name: value["value"], f"{name}_low": value["low"]}
            flat[f"{name}_high"] = value["high"]
        elif isinstance(value, bool):
            flat[name] = str(value).lower()
        elif not isinstance(value, list | dict):
            flat[name] = value
    return flat


def _estimate(estimate: Estimate | None) -> Line | None:
    return None if estimate is None else asdict(estimate)


# -- the parts


def _cache(table: CacheTable) -> Line:
    figures = []
    for figure in table.figures:
        draw, values = figure.draw, figure.values
        line: Line = {
            "stratum": draw.stratum,
            "kind": draw.kind,
            "b": draw.b,
            "capacity": figure.capacity,
            "phase": figure.phase,
            "missing": figure.missing,
            "n_groups": draw.n_groups,
            "exhaustive": draw.exhaustive,
        }
        if values is not None:
            for name in (
                "loads", "loads_alone", "relative", "saved", "uncached", "uncached_alone",
                "bytes_per_token", "bytes_alone", "hit_rate", "hit_rate_alone",
            ):  # fmt: skip
                line[name] = _estimate(getattr(values, name))
            line["extra_passes"] = values.extra_passes
            for name in ("misses", "misses_alone", "tokens"):
                line[name] = getattr(values, name).tolist()
        figures.append(line)
    return {
        "policy": table.policy,
        "groups_asked": table.groups_asked,
        "seed": table.seed,
        "left_out": table.left_out.tolist(),
        "figures": figures,
    }


def _measured(found: Comparison) -> Line:
    same = found.agreement
    return {
        "source": found.source,
        "run_id": found.run_id,
        "policy": found.policy,
        "slots": found.slots,
        "cold_reads": found.cold_reads,
        "swap_growth_bytes": found.swap_growth_bytes,
        "keep_loops": found.keep_loops,
        "missing": found.missing,
        "cells": same.cells if same else None,
        "different_cells": same.different if same else None,
        "lines": [_measured_line(line) for line in found.lines],
    }


def _measured_line(line: MeasuredLine) -> Line:
    phase = line.measured
    return {
        "phase": line.phase,
        "steps": phase.steps,
        "requests": phase.requests,
        "misses": phase.misses,
        "replayed": line.replayed,
        "misses_per_token": phase.per_token(phase.misses),
        "replayed_per_token": None if line.replayed is None else phase.per_token(line.replayed),
        "hit_rate": phase.hit_rate,
        "read_bytes": phase.read_bytes,
        "miss_bytes": phase.miss_bytes,
        "bytes_per_token": phase.per_token(phase.read_bytes),
        "miss_bytes_per_token": phase.per_token(phase.miss_bytes),
        "bandwidth_bps": phase.bandwidth_bps,
        "read_s": phase.read_s,
        "wait_s": phase.wait_s,
        "wait_s_per_token": phase.per_token(phase.wait_s),
        "eval_s": phase.eval_s,
        "step_s": phase.step_s,
    }


def _overflow(table: OverflowTable) -> Line:
    return {
        "groups_asked": table.groups_asked,
        "seed": table.seed,
        "windows": list(table.windows),
        "verify": list(table.verify),
        "footprints": [_footprint(found) for found in table.footprints],
        "lines": [
            {
                "stratum": line.draw.stratum,
                "b": line.draw.b,
                "window": line.window,
                "capacity": line.capacity,
                "state": line.state,
                "missing": line.missing,
                "fraction": _estimate(line.fraction),
                "passes": _estimate(line.passes),
                "layers": [
                    {"layer": int(table.pool.model.layer_index[layer]), "fraction": share}
                    for layer, share in line.footprint.layer_fractions(line.capacity)
                ],
            }
            for line in table.lines
        ],
    }


def _footprint(found: Footprint) -> Line:
    return {
        "stratum": found.draw.stratum,
        "b": found.draw.b,
        "window": found.window,
        "missing": found.missing,
        "mean": _estimate(found.mean),
        "uniform": found.uniform,
        "n_short": found.n_short,
        "left_out": found.left_out.tolist(),
        "q50": found.quantile(0.5),
        "q95": found.quantile(0.95),
        "max": found.quantile(1.0),
        "histogram": found.histogram.sum(axis=0).tolist(),
    }


def _prefill(study: Study, line: PrefillOverflow) -> Line:
    return {
        "stratum": line.stratum,
        "chunk": line.chunk,
        "capacity": line.capacity,
        "state": line.state,
        "missing": line.missing,
        "n_chunks": line.n_chunks,
        "n_full": line.n_full,
        "n_streams": line.n_streams,
        "n_without": line.n_without,
        "not_executed": line.not_executed.tolist(),
        "union": _estimate(line.union),
        "fraction": _estimate(line.fraction),
        "passes": _estimate(line.passes),
        "layers": [
            {"layer": layer, "fraction": share}
            for layer, share in zip(
                study.model.layer_index.tolist(), np.asarray(line.worst).tolist(), strict=True
            )
        ],
    }


def _ledger_lines(ledger: Line) -> list[Line]:
    """One line per Mac, C, B and working-set rule."""
    return [
        {"context": ledger["context"]}
        | {name: value for name, value in line.items() if name != "nets"}
        | {f"net_{name}" if name == "tight" else name: value for name, value in net.items()}
        for line in ledger["lines"]
        for net in (
            {
                k if not k.endswith("_bytes") or k == "net_bytes" else f"net_{k}": v
                for k, v in n.items()
            }
            for n in line["nets"]
        )
    ]


def _time(table: TimeTable) -> Line:
    return {
        "missing": table.missing,
        "bandwidth": asdict(table.bandwidth) if table.bandwidth else None,
        "lines": [
            {
                "b": line.b,
                "capacity": line.capacity,
                "phase": line.phase,
                "missing": line.missing,
                "slow": _bound(line.slow),
                "fast": _bound(line.fast),
            }
            for line in table.lines
        ],
    }


def _bound(bound: TimeBound | None) -> Line | None:
    if bound is None:
        return None
    line: Line = {
        "bytes_per_step": bound.step_bytes,
        "step_s": bound.io.step_s,
        "lane_tokens_per_s": bound.io.lane_tokens_per_s,
        "total_tokens_per_s": bound.io.total_tokens_per_s,
    }
    for name in ("full_overlap", "no_overlap"):
        rate = getattr(bound, name)
        line[f"{name}_lane_tokens_per_s"] = None if rate is None else rate.lane_tokens_per_s
    return line


def _verdict(verdict: Verdict) -> Line:
    criteria = verdict.criteria
    return {
        "criteria": {"name": criteria.name, "sha256": criteria.sha256, "text": criteria.text},
        "macs": [_mac(mac) for mac in verdict.macs],
        "decisions": [
            {
                "definition": decision.definition,
                "word": decision.word,
                "sentence": decision.sentence,
                "would_change": list(decision.would_change),
            }
            for decision in verdict.decisions
        ],
    }


def _mac(mac: MacVerdict) -> Line:
    return {
        "definition": mac.definition,
        "ram_gib": mac.tier.ram_gib,
        "slots": mac.slots,
        "outcome": mac.outcome,
        "judgements": [_judgement(j) for j in mac.judgements],
        "beside": [_judgement(j) for j in mac.beside],
    }


def _judgement(judgement: Judgement) -> Line:
    nets = judgement.line.nets if judgement.line else ()
    return {
        "criterion": judgement.criterion,
        "definition": judgement.definition,
        "lanes": judgement.lanes,
        "rows": judgement.rows,
        "figure": _estimate(judgement.figure),
        "nets": [{"rule": net.rule, "net_bytes": net.net_bytes} for net in nets],
        "point": judgement.point,
        "interval": judgement.interval,
        "outcome": judgement.outcome,
        "why": judgement.why,
    }


def _verdict_lines(verdict: Verdict) -> list[Line]:
    """One line per judgement, those beside included, and one per decision."""
    sha256 = verdict.criteria.sha256
    lines: list[Line] = []
    for mac in verdict.macs:
        for counted, judgements in ((True, mac.judgements), (False, mac.beside)):
            for judgement in judgements:
                line = _judgement(judgement)
                nets = {f"net_bytes_{net['rule']}": net["net_bytes"] for net in line["nets"]}
                lines.append(
                    {
                        "definition": mac.definition,
                        "ram_gib": mac.tier.ram_gib,
                        "slots": mac.slots,
                        "counted": counted,
                    }
                    | {k: v for k, v in line.items() if k != "definition"}
                    | nets
                    | {"criteria_sha256": sha256}
                )
    lines += [
        {
            "definition": decision.definition,
            "criterion": "decision",
            "outcome": decision.word,
            "why": decision.sentence,
            "criteria_sha256": sha256,
        }
        for decision in verdict.decisions
    ]
    return lines
