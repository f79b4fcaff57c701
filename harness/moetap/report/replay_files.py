"""A replay as JSON and as CSV, at full precision.

Knows the layouts. Refuses to round: a figure is written as the analysis returned it, and one that
is not available is null (JSON) or empty (CSV), with the reason in `missing`, never 0.

Both kinds of JSON begin with

    metric, moetap, model, complete, n_streams, sources, lookups, scope, b, prefill,
    prefill_chunks, n_groups, seed

`replay` goes on with

    left_out    (group, step, layer) cells that a lane did not execute
    figures     [{policy, forced, offline, fitted, preloaded, budget, slots per layer that fit,
                budget_bytes, missing, phases: {phase: {per_token, bytes_per_token, hit_rate,
                relative, and by layer misses, requests, tokens, extra_passes, misses_alone}}}]

`curve` with

    layer_index, capacities (the C below: slots of a layer, or all of a global cache), phases,
    policies,
    tokens              [phase][layer]
    requests            [phase][cache], a cache being a layer, or the only one of a global scope
    misses              {policy: [phase][cache][C]}
    extra_passes        [phase][cache][C]

Estimates are {value, low, high, why} or null. CSV has a line per policy, budget, phase and layer
("all" first, which has the estimates), or per policy, phase, layer ("all" of a global cache) and C.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moetap._version import __version__
from moetap.analysis.jackknife import Estimate
from moetap.analysis.replay import GLOBAL
from moetap.analysis.replay_study import Curve, Figure, Study, Values
from moetap.report.summary_files import csv_text


def replay_json(study: Study) -> str:
    """Everything."""
    content = _head("replay", study)
    content["left_out"] = study.left_out
    content["figures"] = [
        _figure(figure)
        | {
            "slots": figure.cache.slots.tolist(),
            "phases": {
                phase: None if values is None else {**_estimates(values), **_sums(values)}
                for phase, values in figure.phases.items()
            },
        }
        for figure in study.figures
    ]
    return json.dumps(content, indent=1) + "\n"


def replay_csv(study: Study) -> str:
    """One line per policy, budget, phase and layer."""
    lines: list[dict[str, Any]] = []
    same = _same(study)
    for figure in study.figures:
        head = same | {k: _plain(v) for k, v in _figure(figure).items()}
        if figure.missing:
            lines.append(head)
        for phase, values in figure.phases.items():
            if values is None:
                continue
            line: dict[str, Any] = head | {"phase": phase, "layer": "all"}
            for name, found in _sums(values).items():
                line[name] = "" if found is None else sum(found)
            for name, estimate in _estimates(values).items():
                if estimate is not None:
                    line |= {
                        name: estimate["value"],
                        f"{name}_low": estimate["low"],
                        f"{name}_high": estimate["high"],
                    }
            lines.append(line)
            for at, layer in enumerate(study.pool.model.layer_index.tolist()):
                lines.append(
                    head
                    | {"phase": phase, "layer": layer}
                    | {n: "" if f is None else f[at] for n, f in _sums(values).items()}
                )
    return csv_text(lines)


def curve_json(curve: Curve) -> str:
    """Everything, at each of the curve's capacities."""
    span = curve.capacities
    kept = curve.misses[..., span.start : span.stop]
    content = _head("curve", curve) | {
        "layer_index": curve.pool.model.layer_index.tolist(),
        "capacities": list(span),
        "phases": list(curve.phases),
        "policies": list(curve.policies),
        "requests": curve.requests.tolist(),
        "tokens": curve.tokens.tolist(),
        "misses": {p: kept[at].tolist() for at, p in enumerate(curve.policies)},
        "extra_passes": _extra_passes(curve).tolist(),
    }
    return json.dumps(content) + "\n"


def curve_csv(curve: Curve) -> str:
    """One line per policy, phase, layer and capacity. tokens: of a cache that all layers share,
    summed over them, as misses are."""
    same, extra = _same(curve), _extra_passes(curve)
    shared = curve.options.scope == GLOBAL
    tokens = curve.tokens.sum(axis=1, keepdims=True) if shared else curve.tokens
    layers = ["all"] if shared else curve.pool.model.layer_index.tolist()
    return csv_text(
        [
            same
            | {
                "policy": policy,
                "phase": phase,
                "layer": layer,
                "capacity": capacity,
                "misses": int(curve.misses[at, when, where, capacity]),
                "requests": int(curve.requests[when, where]),
                "tokens": int(tokens[when, where]),
                "extra_passes": int(extra[when, where, place]),
            }
            for at, policy in enumerate(curve.policies)
            for when, phase in enumerate(curve.phases)
            for where, layer in enumerate(layers)
            for place, capacity in enumerate(curve.capacities)
        ]
    )


def _extra_passes(curve: Curve) -> NDArray[np.int64]:
    """(phases, caches, C)."""
    return np.stack([curve.extra_passes(capacity) for capacity in curve.capacities], axis=-1)


def _head(metric: str, found: Study | Curve) -> dict[str, Any]:
    options = found.options
    return {
        "metric": metric,
        "moetap": __version__,
        "model": found.pool.model.id,
        "complete": found.pool.complete,
        "n_streams": found.pool.n_streams,
        "sources": [origin.source for origin in found.pool.origins],
        "lookups": options.rule,
        "scope": options.scope,
        "b": options.b,
        "prefill": options.prefill,
        "prefill_chunks": list(found.chunks) if options.prefill else None,
        "n_groups": found.draw.n_groups,
        "seed": options.seed,
    }


def _same(found: Study | Curve) -> dict[str, Any]:
    """What every CSV line says of the whole table."""
    head = _head("", found)
    names = ("model", "complete", "lookups", "scope", "b", "prefill")
    return {name: _plain(head[name]) for name in names}


def _figure(figure: Figure) -> dict[str, Any]:
    policy, cache = figure.policy, figure.cache
    return {
        "policy": policy.name,
        "forced": policy.forced,
        "offline": policy.offline,
        "fitted": policy.fitted,
        "preloaded": policy.preloaded,
        "budget": cache.label,
        "budget_bytes": cache.n_bytes,
        "missing": figure.missing,
    }


def _estimates(values: Values) -> dict[str, dict[str, Any] | None]:
    def plain(estimate: Estimate | None) -> dict[str, Any] | None:
        return None if estimate is None else asdict(estimate)

    return {
        "per_token": plain(values.per_token),
        "bytes_per_token": plain(values.bytes_per_token),
        "hit_rate": plain(values.hit_rate),
        "relative": plain(values.relative),
    }


def _sums(values: Values) -> dict[str, list[int] | None]:
    alone = values.misses_alone
    return {
        "misses": values.misses.tolist(),
        "requests": values.requests.tolist(),
        "tokens": values.tokens.tolist(),
        "extra_passes": values.extra_passes.tolist(),
        "misses_alone": None if alone is None else alone.tolist(),
    }


def _plain(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value
