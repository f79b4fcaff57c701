"""streamlx's warm-start trace: an .npz of (T, L, k) ids with a .meta.json beside it.

Knows both files. The sequences are texts that were run through a model, so nothing says where a
prompt ends: all rows are taken for the prompt's.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np

from moetap.errors import MoetapError, UsageError
from moetap.formats.base import (
    MISSING,
    Base,
    Options,
    Rows,
    ascending,
    chosen,
    int_array,
    load_json,
    load_npz,
    lost,
    make_trace,
    mapping,
    refusing,
    save,
    whole,
)
from moetap.trace import NOT_EXECUTED, Trace


def meta_file(path: Path) -> Path:
    """The JSON file beside an archive."""
    return path.parent / f"{path.stem}.meta.json"


class Streamlx(Base):
    name = "streamlx"
    summary = "streamlx warm-start trace, .npz with .meta.json"
    write_options = ("stream",)
    read_options = ("model_id", "n_prompt")
    not_kept = ("prompt class numbers",)

    def write(self, trace: Trace, path: Path, options: Options) -> list[str]:
        if path.suffix != ".npz":
            raise UsageError(f"{path}: give the archive a name that ends in .npz")
        streams = chosen(trace, options)
        model = trace.model
        lengths = [s.n_rows for s in streams]
        n = sum(lengths)
        buffer = io.BytesIO()
        np.savez_compressed(
            buffer,
            allow_pickle=False,
            experts=np.concatenate([s.experts for s in streams]),
            seq_id=np.repeat(np.arange(len(streams), dtype=np.uint32), lengths),
            pos=np.concatenate([s.position for s in streams]),
            prompt_class=np.zeros(n, dtype=np.uint8),
        )
        meta = {
            "schema_version": 1,
            "model": model.id,
            "n_experts": int(model.n_experts.max()),
            "k": model.max_top_k,
            "n_moe_layers": model.n_layers,
            "layer_ids": model.layer_index.tolist(),
            "bytes_per_expert": {
                str(layer): size
                for layer, size in zip(
                    model.layer_index.tolist(), model.expert_bytes.tolist(), strict=True
                )
            },
            "tokens": n,
            "sequences": len(streams),
        }
        save(meta_file(path), json.dumps(meta, indent=2).encode())
        save(path, buffer.getvalue())
        kept = ["model id", "layers", "expert_bytes", "first_position", "n_experts"]
        return lost(trace, *kept)

    def read(self, path: Path, options: Options) -> Trace:
        with refusing(path):
            arrays = load_npz(path)
            if not meta_file(path).exists():
                raise MoetapError(f"has no {meta_file(path).name} beside it, which streamlx writes")
        with refusing(meta_file(path)):
            meta = mapping(load_json(meta_file(path)), "the meta file")
            if meta.get("schema_version") != 1:
                raise MoetapError(f"schema_version {meta.get('schema_version')!r:.20} is not 1")
            layers = ascending(meta["layer_ids"], "layer_ids")
            k = whole(meta["k"], "k", 1)
            n_experts = whole(meta["n_experts"], "n_experts", 1)
            sizes = mapping(meta.get("bytes_per_expert", {}), "bytes_per_expert")
            expert_bytes = [whole(sizes.get(str(i), 0), "bytes_per_expert") for i in layers]
            n, n_sequences = (
                whole(meta["tokens"], "tokens", 1),
                whole(meta["sequences"], "sequences"),
            )
        with refusing(path):
            absent = [name for name in ("experts", "seq_id", "pos") if name not in arrays]
            if absent:
                raise MoetapError(f"has no array {absent[0]}")
            ids = int_array(arrays["experts"], 3, "experts")
            seq = int_array(arrays["seq_id"], 1, "seq_id")
            pos = int_array(arrays["pos"], 1, "pos")
            if ids.shape != (n, len(layers), k) or len(seq) != n or len(pos) != n:
                raise MoetapError(
                    f"experts {ids.shape}, seq_id {seq.shape} and pos {pos.shape} do not go with "
                    f"{n} tokens, {len(layers)} layers and k={k} of {meta_file(path).name}"
                )
            ids[ids == NOT_EXECUTED] = MISSING
            starts = np.flatnonzero(np.diff(seq, prepend=-1) != 0)
            if not np.array_equal(seq[starts], np.arange(n_sequences)):
                raise MoetapError(f"seq_id does not count {n_sequences} sequences from 0")
            if options.n_prompt is not None and n_sequences > 1:
                raise UsageError("--n-prompt goes with one sequence, the file has several")
            streams = []
            for i, start in enumerate(starts.tolist()):
                stop = int(starts[i + 1]) if i + 1 < len(starts) else n
                first = int(pos[start])
                gaps = np.flatnonzero(pos[start:stop] != np.arange(first, first + stop - start))
                if first < 0 or len(gaps):
                    raise MoetapError(f"pos[{start + (gaps[0] if len(gaps) else 0)}]: not on by 1")
                streams.append(
                    Rows(
                        prompt_id=f"s{i}",
                        n_prompt=options.n_prompt or first + stop - start,
                        first_position=first,
                        ids=ids[start:stop],
                        # mypy cannot infer a lambda with a bound default.
                        where=lambda row, layer, start=start: (  # type: ignore[misc]
                            f"experts[{start + row}, {layer}]"
                        ),
                    )
                )
            return make_trace(
                path,
                streams,
                layers,
                n_experts,
                model_id=options.model_id or str(meta.get("model", "")),
                expert_bytes=expert_bytes,
                fallback_k=k,
            )


FORMAT = Streamlx()
