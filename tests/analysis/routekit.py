"""The published replay of `route_trace v1` CSV files, in that program's own accounting.

One cache over (layer, expert) with a budget in bytes, or the budget split evenly over layers.
Prefill is one batch per layer, decode one per (token, layer); one look-up per distinct expert of a
batch. Eviction comes after the batch and spares its members, so a batch larger than the budget
stays (`LookUps.keep`). Members are touched in the order of the router's slots; where a prompt has
an expert more than once, the last time counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from moetap.policies import LookUps, get

POLICIES = {"lfu": "lfu-kept", "layer": "lru", "layerlfu": "lfu-kept"}  # others: the same name


@dataclass(frozen=True)
class Route:
    """asked: look-ups of (layer x n_expert + expert), in bytes. layer, decode, hit: per look-up;
    hit is the engine's own record."""

    asked: LookUps
    n_expert: int
    layer: np.ndarray
    decode: np.ndarray
    hit: np.ndarray


def read_route(text: str) -> Route:
    n_layer = int(re.search(r"n_layer=(\d+)", text)[1])
    n_expert = int(re.search(r"n_expert=(\d+)", text)[1])
    size = dict(re.findall(r"^# layer=(\d+) expert_bytes=(\d+)", text, re.MULTILINE))
    batches: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for line in text.splitlines():
        if not line[:1].isdigit():
            continue
        _, phase, step, layer, slot, expert, _, hit = line.split(",")[:8]
        at = (int(phase), int(step) if phase == "1" else 0, int(layer))
        batches.setdefault(at, []).append((int(step), int(slot), int(expert), int(hit)))
    starts, ids, layers, decode, hits = [0], [], [], [], []
    for (phase, _, layer), rows in sorted(batches.items()):
        rows.sort()
        last = {expert: at for at, (_, _, expert, _) in enumerate(rows)}
        first = {expert: hit for _, _, expert, hit in reversed(rows)}
        for expert in sorted(last, key=last.get):
            ids.append(layer * n_expert + expert)
            layers.append(layer)
            decode.append(phase == 1)
            hits.append(first[expert] == 1)
        starts.append(len(ids))
    per_layer = [int(size[str(layer)]) for layer in range(n_layer)]
    asked = LookUps(
        np.array(starts), np.array(ids, np.uint16), np.repeat(per_layer, n_expert), keep=True
    )
    return Route(asked, n_expert, np.array(layers), np.array(decode), np.array(hits))


def replayed(route: Route, policy: str, budget: int) -> np.ndarray:
    """Which look-ups miss, by a name of the published curve."""
    asked, n = route.asked, route.n_expert
    found = get(POLICIES.get(policy, policy))
    if not policy.startswith("layer"):
        return found.missed(asked, budget)
    n_layers = len(asked.size) // n
    missed = np.zeros(len(asked.ids), dtype=bool)
    batch_layer = route.layer[asked.starts[:-1]]
    for layer in range(n_layers):
        mine = route.layer == layer
        starts = np.cumsum([0, *np.diff(asked.starts)[batch_layer == layer]])
        ids = asked.ids[mine] - np.uint16(layer * n)
        own = LookUps(starts, ids, asked.size[layer * n : (layer + 1) * n], keep=True)
        missed[mine] = found.missed(own, budget // n_layers)
    return missed


def figures(route: Route, missed: np.ndarray) -> dict[str, float]:
    """As printed: per cent of hits with and without prefill, MiB read."""
    read = int(route.asked.size[route.asked.ids[missed]].sum())
    return {
        "hit_pct_cum": round(100 * (1 - missed.mean()), 3),
        "hit_pct_decode": round(100 * (1 - missed[route.decode].mean()), 3),
        "read_mib": round(read / 2**20, 1),
    }
