"""The locality figures as JSON and CSV, at full precision.

Knows the layouts. Refuses to round: a figure is written as the analysis returned it, and one that
is not available is null (JSON) or empty (CSV), never 0.

JSON, one object:

    metric                "locality"
    model                 {id, revision, config_sha256, weights_sha256}
    complete              false: the figures are of a part of a capture
    traces                [{source, run_id, complete, n_streams, n_planned, temp, top_p, seed}]
    n_streams             streams with decode rows, pooled over the traces; each by itself (B = 1)
    keep_loops, n_looped_streams, n_looped_rows
                          looped tails, and whether they were counted
    n_streams_without_decode_rows
    n_cells               decode cells (stream, step) per layer, executed or not
    not_executed          of these, per MoE layer, cells that did not execute and are left out
    confidence            of the intervals
    seed, halves          of the split of the streams; half (0 or 1) of each, null if there is one
    cold_steps            decode steps that are "cold"
    lags                  one per layers and lag:
        layers            {label, kind: "overall" | "group" | "layer", first, last}; first and last
                          are absolute decoder layers, inclusive
        lag               decode steps
        overlap           share of k that the two steps have in common
        uniform, all_shuffled, own_shuffled
                          the same under uniform routing, and with the steps of all streams, or of
                          each stream, in random order
        n_pairs           (stream, step, layer) triples
    reuse                 one per layers:
        layers, lookups, first_uses
        distance, depth, time
                          histograms, by number from 0, of all uses but the first: other experts at
                          the steps between, depth in the recency stack, steps since the last use
        lru               per capacity {capacity, missing, cold, steady, every, uniform}: hit rates
    hottest               one per layers and n: {layers, n, missing, fitted, tested, uniform}: share
                          of the selections; fitted and uniform are numbers
    transfers             {fitted_on, tested_on, n, share}, for two classes
    usage                 one per MoE layer: {layer, n_experts, selections, entropy_bits,
                          corrected_bits, effective, never_used, max_share, gini, counts}; counts
                          are the cells that select each expert, so that counts / selections is the
                          row of the heat map
    lifts                 one per pair of neighbouring MoE layers: {source, target, n_cells,
                          plug_in, tested}
    predictions           one per target, method and layers: {target, method, layers, missing,
                          n_cells, top_k, top_2k, uniform_k, uniform_2k}: share of a cell's experts

overlap, the hit rates, tested, share, top_k and top_2k are {value, low, high, why} or null; low and
high are null where there is no interval, and why says why.

CSV, a file for each of lags, reuse (a line per capacity), hottest, transfers, usage, lifts and
predictions, of the printed layers (all of usage and lifts), with the same names and no histograms:
an estimate takes the columns NAME, NAME_low and NAME_high; the columns complete and streams_planned
say what the printed title says. A file that would have no line is left out.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from moetap.analysis.jackknife import CONFIDENCE, Estimate
from moetap.analysis.lanes import COLD_STEPS
from moetap.analysis.locality import Locality
from moetap.analysis.locality.recency import LagLine, ReuseLine, histogram_quantile
from moetap.analysis.strata import Layers
from moetap.report.locality_table import QUANTILES
from moetap.report.union_table import shown_layers

Line = dict[str, Any]


def locality_dict(found: Locality) -> Line:
    """All figures, per-layer ones included, ready for `json.dumps`."""
    pool = found.pool
    model = pool.model
    return {
        "metric": "locality",
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
        "n_cells": found.n_cells,
        "not_executed": found.not_executed.tolist(),
        "confidence": CONFIDENCE,
        "seed": found.seed,
        "halves": None if found.half is None else found.half.tolist(),
        "cold_steps": COLD_STEPS,
        "lags": [x for line in found.lags for x in _lags(found, line)],
        "reuse": [_reuse(found, line) for line in found.reuse],
        "hottest": _hottest(found, found.layers),
        "transfers": _transfers(found),
        "usage": _usage(found),
        "lifts": _lifts(found),
        "predictions": _predictions(found, found.layers),
    }


def locality_json(found: Locality) -> str:
    """All figures as JSON text."""
    return json.dumps(locality_dict(found), indent=1, allow_nan=False) + "\n"


def locality_csvs(found: Locality, by_layer: bool = False) -> dict[str, str]:
    """CSV texts by file name; depth groups, or each layer with `by_layer`."""
    kinds = shown_layers(by_layer)
    shown = [x for x in found.layers if x.kind in kinds]
    tables: dict[str, list[Line]] = {
        "lags": [x for line in found.lags if line.layers in shown for x in _lags(found, line)],
        "reuse": [
            x for line in found.reuse if line.layers in shown for x in _reuse_csv(found, line)
        ],
        "hottest": _hottest(found, shown),
        "transfers": _transfers(found),
        "usage": [{k: v for k, v in x.items() if k != "counts"} for x in _usage(found)],
        "lifts": _lifts(found),
        "predictions": _predictions(found, shown),
    }
    origins = found.pool.origins
    head = {
        "model": found.pool.model.id,
        "complete": str(found.pool.complete).lower(),
        "streams_planned": sum(origin.n_planned for origin in origins) or "",
        "n_streams": found.pool.n_streams,
    }
    return {
        f"locality_{name}.csv": _csv([head | _flat(line) for line in lines])
        for name, lines in tables.items()
        if lines
    }


def _csv(lines: list[Line]) -> str:
    columns = list(dict.fromkeys(name for line in lines for name in line))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _lags(found: Locality, line: LagLine) -> list[Line]:
    return [
        {
            "layers": _layers(found, line.layers),
            "lag": j + 1,
            "overlap": _estimate(overlap),
            "uniform": _number(line.uniform[j]),
            "all_shuffled": _number(line.popular[j]),
            "own_shuffled": _number(line.own[j]),
            "n_pairs": int(line.n_pairs[j]),
        }
        for j, overlap in enumerate(line.overlap)
    ]


def _reuse(found: Locality, line: ReuseLine) -> Line:
    return {
        "layers": _layers(found, line.layers),
        "lookups": line.lookups,
        "first_uses": line.first_uses,
        "distance": line.distance.tolist(),
        "depth": line.depth.tolist(),
        "time": line.time.tolist(),
        "lru": [
            {
                "capacity": hits.capacity,
                "missing": hits.missing,
                "cold": _estimate(hits.cold),
                "steady": _estimate(hits.steady),
                "every": _estimate(hits.every),
                "uniform": _number(hits.uniform),
            }
            for hits in line.hits
        ],
    }


def _reuse_csv(found: Locality, line: ReuseLine) -> list[Line]:
    """One line per capacity; the histograms become quantiles."""
    whole = _reuse(found, line)
    quantiles = {
        f"{name}_q{q * 100:.0f}": histogram_quantile(histogram, q)
        for name, histogram in (("distance", line.distance), ("time", line.time))
        for q in QUANTILES
    }
    head = {name: whole[name] for name in ("layers", "lookups", "first_uses")} | quantiles
    return [head | hits for hits in whole["lru"]]


def _hottest(found: Locality, shown: Iterable[Layers]) -> list[Line]:
    return [
        {
            "layers": _layers(found, x.layers),
            "n": x.n,
            "missing": x.missing,
            "fitted": _number(x.fitted),
            "tested": _estimate(x.tested),
            "uniform": _number(x.uniform),
        }
        for x in found.hottest
        if x.layers in shown
    ]


def _transfers(found: Locality) -> list[Line]:
    return [
        {
            "fitted_on": x.fitted_on,
            "tested_on": x.tested_on,
            "n": x.n,
            "share": _estimate(x.share),
        }
        for x in found.transfers
    ]


def _usage(found: Locality) -> list[Line]:
    usage = found.usage
    return [
        {
            "layer": int(layer),
            "n_experts": int(usage.n_experts[i]),
            "selections": int(usage.counts[i].sum()),
            "entropy_bits": _number(usage.entropy[i]),
            "corrected_bits": _number(usage.corrected[i]),
            "effective": _number(usage.effective[i]),
            "never_used": int(usage.never[i]),
            "max_share": _number(usage.max_share[i]),
            "gini": _number(usage.gini[i]),
            "counts": usage.counts[i, : usage.n_experts[i]].tolist(),
        }
        for i, layer in enumerate(found.pool.model.layer_index)
    ]


def _lifts(found: Locality) -> list[Line]:
    lifts = found.lifts
    return [
        {
            "source": int(lifts.source[i]),
            "target": int(lifts.target[i]),
            "n_cells": int(lifts.n_cells[i]),
            "plug_in": _number(lifts.plug_in[i]),
            "tested": _number(lifts.tested[i]),
        }
        for i in range(len(lifts.source))
    ]


def _predictions(found: Locality, shown: Iterable[Layers]) -> list[Line]:
    return [
        {
            "target": x.target,
            "method": x.method,
            "layers": _layers(found, x.layers),
            "missing": x.missing,
            "n_cells": x.n_cells,
            "top_k": _estimate(x.top_k),
            "top_2k": _estimate(x.top_2k),
            "uniform_k": _number(x.uniform_k),
            "uniform_2k": _number(x.uniform_2k),
        }
        for x in found.predictions
        if x.layers in shown
    ]


def _layers(found: Locality, layers: Layers) -> Line:
    index = found.pool.model.layer_index[layers.span]
    return {
        "label": layers.label,
        "kind": layers.kind,
        "first": int(index[0]),
        "last": int(index[-1]),
    }


def _estimate(estimate: Estimate | None) -> Line | None:
    return None if estimate is None else asdict(estimate)


def _number(value: float) -> float | None:
    """A Python number, None for NaN."""
    return None if math.isnan(value) else float(value)


def _flat(line: Line) -> Line:
    """A JSON line as CSV columns."""
    flat: Line = {}
    for name, value in line.items():
        if name == "layers":
            flat |= {"layers": value["label"], "layers_kind": value["kind"]}
            flat |= {"first_layer": value["first"], "last_layer": value["last"]}
        elif isinstance(value, dict):
            flat |= {name: value["value"], f"{name}_low": value["low"]}
            flat[f"{name}_high"] = value["high"]
        else:
            flat[name] = value
    return flat
