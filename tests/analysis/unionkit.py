"""Small traces, and the union table worked out with Python sets."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from moetap.trace import NOT_EXECUTED, CaptureInfo, ModelInfo, Stream, Trace


def make_model(n_experts, top_k, expert_bytes=None, layer_index=None, **fields) -> ModelInfo:
    n = len(n_experts)
    return ModelInfo(
        id=fields.pop("id", "tiny"),
        revision="",
        model_type="",
        config_json="{}",
        config_sha256=fields.pop("config_sha256", "c"),
        weights_sha256=fields.pop("weights_sha256", "w"),
        quantization="",
        layer_index=np.arange(n) if layer_index is None else np.array(layer_index),
        n_experts=np.array(n_experts),
        top_k=np.array(top_k),
        expert_bytes=np.array(expert_bytes or [0] * n),
    )


def make_stream(name, cls, cells, top_k, looped_from=-1) -> Stream:
    """cells[step][layer] is a set of ids, empty where not executed. A prefill row goes before."""
    width = max(top_k)
    experts = np.full((len(cells) + 1, len(top_k), width), NOT_EXECUTED, dtype=np.uint16)
    for step, layers in enumerate(cells):
        for layer, ids in enumerate(layers):
            experts[step + 1, layer, : len(ids)] = sorted(ids)
    for layer, k in enumerate(top_k):  # a prefill row that would change every union
        experts[0, layer, :k] = range(k)
    rows = len(experts)
    return Stream(
        prompt_id=name,
        cls=cls,
        prompt_sha256="",
        n_prompt=2,
        n_generated=len(cells),
        finish_reason="length",
        looped_from=looped_from,
        experts=experts,
        tokens=np.zeros(rows, dtype=np.uint32),
        position=np.arange(rows, dtype=np.uint32),
    )


def make_trace(model, streams, **fields) -> Trace:
    capture = CaptureInfo(
        moetap_version="", n_prompts=fields.pop("n_prompts", 0), temp=fields.pop("temp", 0.0)
    )
    return Trace(
        model,
        capture,
        tuple(streams),
        run_id=fields.pop("run_id", ""),
        created="",
        complete=fields.pop("complete", True),
        source=fields.pop("source", "tiny.h5"),
    )


def golden_streams() -> list[Stream]:
    """Two layers, top-2 of 4; d ends after one step, c did not execute layer 1 at step 1."""
    cells = {
        ("a", "code"): [[{0, 1}, {0, 1}], [{0, 1}, {0, 1}]],
        ("b", "code"): [[{0, 1}, {2, 3}], [{1, 2}, {0, 2}]],
        ("c", "agentic"): [[{0, 2}, {0, 1}], [{0, 1}, set()]],
        ("d", "agentic"): [[{2, 3}, {0, 2}]],
    }
    return [make_stream(name, cls, steps, (2, 2)) for (name, cls), steps in cells.items()]


def golden_trace(**fields) -> Trace:
    model = make_model((4, 4), (2, 2), expert_bytes=[100, 10], layer_index=[3, 5])
    return make_trace(model, golden_streams(), **fields)


def random_trace(seed: int, n_streams: int, max_steps: int = 4, missing: float = 0.15) -> Trace:
    """Ragged streams of up to three classes; E and k differ from layer to layer."""
    rng = np.random.default_rng(seed)
    n_layers = int(rng.integers(1, 4))
    n_experts = rng.integers(2, 70, n_layers)
    top_k = np.minimum(rng.integers(1, 4, n_layers), n_experts)
    streams = []
    for i in range(n_streams):
        steps = int(rng.integers(1, max_steps + 1))
        cells = []
        for _ in range(steps):
            layers = []
            for e, k in zip(n_experts, top_k, strict=True):
                # Often among the first few experts, so that lanes share some.
                among = e if rng.random() < 0.3 else min(e, 6)
                ids = set(rng.choice(among, k, replace=False).tolist())
                layers.append(set() if rng.random() < missing else ids)
            cells.append(layers)
        cls = ("code", "agentic", "chat")[int(rng.integers(0, 3))]
        streams.append(make_stream(f"s{i}", cls, cells, tuple(top_k)))
    return make_trace(make_model(n_experts, top_k, rng.integers(1, 99, n_layers).tolist()), streams)


class Twin:
    """Every union of a trace, group by group, with sets."""

    def __init__(self, trace: Trace, keep_loops: bool = False) -> None:
        self.model = trace.model
        self.classes = [s.cls for s in trace.streams]
        self.cells = [
            [[set(c.tolist()) - {NOT_EXECUTED} for c in row] for row in s.decode(keep_loops)]
            for s in trace.streams
        ]

    def groups(self, stratum: str, b: int, without: int | None = None):
        for group in combinations([i for i in range(len(self.cells)) if i != without], b):
            classes = {self.classes[i] for i in group}
            mixed = stratum == "mixed" and len(classes) > 1
            if stratum == "all" or mixed or classes == {stratum}:
                yield group

    def unions(self, stratum: str, b: int, layers: slice, without: int | None = None):
        """(layer, union) of every (group, step, layer)."""
        found = []
        for group in self.groups(stratum, b, without):
            for step in range(min(len(self.cells[i]) for i in group)):
                for layer in range(self.model.n_layers)[layers]:
                    sets = [self.cells[i][step][layer] for i in group]
                    if all(sets):
                        found.append((layer, len(set().union(*sets))))
        return found

    def figures(self, stratum: str, b: int, layers: slice, without: int | None = None):
        """(mean union, saved, bytes per token), None where there is nothing to average."""
        found = self.unions(stratum, b, layers, without)
        if not found:
            return None, None, None
        mean = sum(u for _, u in found) / len(found)
        saved = 1 - sum(u for _, u in found) / b / sum(int(self.model.top_k[la]) for la, _ in found)
        size = 0.0
        for layer in range(self.model.n_layers)[layers]:
            own = [u for la, u in found if la == layer]
            if not own:
                return mean, saved, None
            size += float(self.model.expert_bytes[layer]) * sum(own) / len(own) / b
        return mean, saved, size

    def interval(self, which: int, stratum: str, b: int, layers: slice, t: float):
        """Half the jackknife interval of figure `which`, None if it is not defined."""
        members = [i for i, c in enumerate(self.classes) if stratum in ("all", "mixed", c)]
        out = [self.figures(stratum, b, layers, i)[which] for i in members]
        if len(out) < 2 or None in out:
            return None
        mean = sum(out) / len(out)
        return t * ((len(out) - 1) / len(out) * sum((o - mean) ** 2 for o in out)) ** 0.5
