"""The union table as JSON and CSV, at full precision.

Knows the two layouts. Refuses to round: a figure is written as the analysis returned it, and one
that is not available is null or absent (JSON) or empty (CSV), never 0.

JSON, one object:

    metric                "unions"
    model                 {id, revision, config_sha256, weights_sha256}
    complete              false: the table is of a part of a capture
    traces                per trace, as `pool.Origin`
    n_streams             streams with decode rows, pooled over the traces
    keep_loops, n_looped_streams, n_looped_rows
                          looped tails, and whether they were counted
    n_streams_without_decode_rows
    n_cells               decode cells (stream, step) per layer, executed or not
    not_executed          of these, per MoE layer, cells that did not execute and are left out
    confidence            of the intervals
    groups_asked, seed    of the sampled distribution
    figures               one per stratum, layers and b:

        stratum           "all", a class, or "mixed" (groups of more than one class)
        n_streams         streams of the stratum
        layers            {label, kind: "overall" | "group" | "layer", first, last}; first and last
                          are absolute decoder layers, inclusive
        b                 lanes
        missing           "", or why there are no such groups; then the keys below are absent
        n_groups          groups of b streams behind the means
        n_steps           decode steps at which there is at least one
        union             mean union, in experts
        loads_per_token   union / b, per layer
        saved             1 - io_b / io_1, a fraction
        bytes_per_token   expert bytes summed over the layers; null if a size is not known
        uniform           mean union of independent uniform routing
        uniform_saved     what that would save, a fraction
        full_overlap      mean union if all lanes selected the same experts: k
        distribution      {n_groups, exhaustive (these are all groups), q5, q25, q50, q75, q95, max,
                          mean, histogram}; the histogram counts (group, step, layer) triples by
                          union size from 0

    union, loads_per_token, saved and bytes_per_token are {value, low, high, why}; low and high are
    null where there is no interval, and why says why.

CSV, one line per printed line (stratum, layers, b), with the same names: an estimate takes the
columns NAME, NAME_low and NAME_high; the columns complete and streams_planned say what the printed
title says.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from moetap.analysis.jackknife import CONFIDENCE, Estimate
from moetap.analysis.sampling import Distribution
from moetap.analysis.unions import Figure, UnionTable
from moetap.report.union_table import QUANTILES, shown_layers


def union_dict(table: UnionTable) -> dict[str, Any]:
    """The whole table, per-layer figures included, ready for `json.dumps`."""
    pool = table.pool
    model = pool.model
    return {
        "metric": "unions",
        "model": {
            "id": model.id,
            "revision": model.revision,
            "config_sha256": model.config_sha256,
            "weights_sha256": model.weights_sha256,
        },
        "complete": pool.complete,
        "traces": [asdict(origin) for origin in pool.origins],
        "n_streams": pool.n_streams,
        "keep_loops": pool.keep_loops,
        "n_looped_streams": pool.n_looped,
        "n_looped_rows": pool.n_looped_rows,
        "n_streams_without_decode_rows": pool.n_empty,
        "n_cells": table.n_cells,
        "not_executed": table.not_executed.tolist(),
        "confidence": CONFIDENCE,
        "groups_asked": table.groups_asked,
        "seed": table.seed,
        "figures": [_figure(table, figure) for figure in table.figures],
    }


def union_lines(table: UnionTable, by_layer: bool = False) -> list[dict[str, Any]]:
    """The lines for CSV: depth groups, or each layer with `by_layer`."""
    kinds = shown_layers(by_layer)
    return [
        _flat(_figure(table, figure))
        for stratum in table.strata
        for figure in table.select(stratum, kinds)
    ]


def _figure(table: UnionTable, figure: Figure) -> dict[str, Any]:
    layer_index = table.pool.model.layer_index[figure.layers.span]
    line: dict[str, Any] = {
        "stratum": figure.stratum.name,
        "n_streams": figure.stratum.n_streams,
        "layers": {
            "label": figure.layers.label,
            "kind": figure.layers.kind,
            "first": int(layer_index[0]),
            "last": int(layer_index[-1]),
        },
        "b": figure.b,
        "missing": figure.missing,
    }
    values = figure.values
    if values is None:
        return line
    return line | {
        "n_groups": values.n_groups,
        "n_steps": values.n_steps,
        "union": _estimate(values.union),
        "loads_per_token": _estimate(values.loads),
        "saved": _estimate(values.saved),
        "bytes_per_token": None
        if values.bytes_per_token is None
        else _estimate(values.bytes_per_token),
        "uniform": values.uniform,
        "uniform_saved": values.uniform_saved,
        "full_overlap": values.overlap,
        "distribution": _distribution(values.distribution),
    }


def _estimate(estimate: Estimate) -> dict[str, Any]:
    return asdict(estimate)


def _distribution(spread: Distribution) -> dict[str, Any]:
    names = ["max" if q == 1 else f"q{q * 100:.0f}" for q in QUANTILES]
    return {
        "n_groups": spread.n_groups,
        "exhaustive": spread.exhaustive,
        **{name: spread.quantile(q) for name, q in zip(names, QUANTILES, strict=True)},
        "mean": spread.mean,
        "histogram": spread.histogram.tolist(),
    }


def _flat(line: dict[str, Any]) -> dict[str, Any]:
    """A JSON line as CSV columns, without the histogram."""
    flat: dict[str, Any] = {}
    for name, value in line.items():
        if name == "layers":
            flat |= {"layers": value["label"], "layers_kind": value["kind"]}
            flat |= {"first_layer": value["first"], "last_layer": value["last"]}
        elif name == "distribution":
            for key, inner in value.items():
                if key in ("n_groups", "exhaustive", "mean"):
                    key = f"sampled_{key}"
                if key != "histogram":
                    flat[key] = str(inner).lower() if isinstance(inner, bool) else inner
        elif isinstance(value, dict):
            flat |= {name: value["value"], f"{name}_low": value["low"]}
            flat[f"{name}_high"] = value["high"]
        else:
            flat[name] = value
    return flat
