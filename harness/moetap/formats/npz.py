"""NumPy archive (rows, L, K) with a JSON sidecar: everything a trace holds, in files any tool
reads, except for the measured I/O of streaming captures.

Knows the two files that moetap writes, and archives of others with the same arrays: `topk` or
`experts` of shape (rows, L, K), optional `seq_offsets`, and a sidecar with model, num_experts,
layer_ids and seqs. Never unpickles.
"""

from __future__ import annotations

import io
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moetap.errors import MoetapError, UsageError
from moetap.formats.base import (
    MISSING,
    Base,
    Options,
    Rows,
    ascending,
    check_text,
    chosen,
    int_array,
    load_json,
    load_npz,
    make_trace,
    mapping,
    need_n_experts,
    refusing,
    save,
    whole,
)
from moetap.trace import NOT_EXECUTED, CaptureInfo, ModelInfo, Stream, Trace

MARK = "moetap-npz"
_COLUMNS = (
    "prompt_id",
    "cls",
    "prompt_sha256",
    "n_prompt",
    "n_generated",
    "finish_reason",
    "looped_from",
    "first_position",
)


def sidecar(path: Path) -> Path:
    """The JSON file beside an archive."""
    return path.with_suffix(".json")


class Npz(Base):
    name = "npz"
    summary = "NumPy archive with a sidecar JSON, keeps nearly all"
    write_options = ("stream", "dtype", "missing")
    read_options = ("model_id", "n_experts", "layers", "n_prompt")
    not_kept = ("run id and creation date (an import is a run of its own)",)

    def write(self, trace: Trace, path: Path, options: Options) -> list[str]:
        if path.suffix != ".npz":
            raise UsageError(f"{path}: give the archive a name that ends in .npz")
        streams = chosen(trace, options)
        try:
            dtype = np.dtype(options.dtype or "uint16")
        except TypeError:
            raise UsageError(f"--dtype {options.dtype!r:.40} is no type that NumPy knows") from None
        if dtype.kind not in "iu":
            raise UsageError(f"--dtype {dtype}: ids need an integer type, such as uint16")
        limits = np.iinfo(dtype)
        missing = options.missing
        if missing is None:
            missing = NOT_EXECUTED if limits.max >= NOT_EXECUTED else -1
        if not limits.min <= missing <= limits.max:
            raise UsageError(f"--missing {missing} does not fit {dtype}")
        largest = int(trace.model.n_experts.max()) - 1
        if largest > limits.max or 0 <= missing <= largest:
            raise UsageError(
                f"ids up to {largest} and {missing} for none do not go together in {dtype}; "
                "choose a wider --dtype or another --missing"
            )
        experts = np.concatenate([s.experts for s in streams]).astype(np.int64)
        experts[experts == NOT_EXECUTED] = missing
        arrays: dict[str, NDArray[Any]] = {
            "experts": experts.astype(dtype),
            "seq_offsets": np.cumsum([0, *(s.n_rows for s in streams)]),
            "tokens": np.concatenate([s.tokens for s in streams]),
            "position": np.concatenate([s.position for s in streams]),
        }
        if trace.capture.scores_kind:
            arrays["scores"] = np.concatenate([s.scores for s in streams if s.scores is not None])
        header = {
            "format": MARK,
            "version": 1,
            "missing": missing,
            "run_id": trace.run_id,
            "created": trace.created,
            "complete": trace.complete,
            "model": {
                f.name: value.tolist() if isinstance(value, np.ndarray) else value
                for f in fields(ModelInfo)
                for value in [getattr(trace.model, f.name)]
            },
            "capture": asdict(trace.capture),
            "streams": [{name: getattr(s, name) for name in _COLUMNS} for s in streams],
        }
        buffer = io.BytesIO()
        np.savez_compressed(buffer, allow_pickle=False, **arrays)
        save(sidecar(path), json.dumps(header, indent=1).encode())
        save(path, buffer.getvalue())
        measured = any(s.io is not None for s in streams)
        return ["measured I/O of the decode steps"] if measured else []

    def read(self, path: Path, options: Options) -> Trace:
        with refusing(path):
            arrays = load_npz(path)
        header: dict[str, Any] = {}
        if sidecar(path).exists():
            with refusing(sidecar(path)):
                header = mapping(load_json(sidecar(path)), "the sidecar")
        with refusing(path):
            if header.get("format") == MARK:
                return _own(path, arrays, header)
            return _foreign(path, arrays, header, options)


def _own(path: Path, arrays: dict[str, NDArray[Any]], header: dict[str, Any]) -> Trace:
    if header.get("version") != 1:
        raise MoetapError(f"sidecar version {header.get('version')!r:.20} is not 1; upgrade moetap")
    missing = whole(header["missing"], "missing", -(2**31))
    experts = int_array(arrays["experts"], 3, "experts")
    experts[experts == missing] = NOT_EXECUTED
    if experts.size and (experts.min() < 0 or experts.max() > NOT_EXECUTED):
        raise MoetapError("experts: an id does not fit 16 bits")
    offsets = int_array(arrays["seq_offsets"], 1, "seq_offsets")
    records = header["streams"]
    if len(offsets) != len(records) + 1:
        raise MoetapError(f"{len(records)} streams in the sidecar, {len(offsets) - 1} in the array")
    _check_offsets(offsets, len(experts))
    about: dict[str, Any] = {
        name: int_array(value, 1, name) if isinstance(value, list) else value
        for name, value in mapping(header["model"], "model").items()
    }
    _check_types(ModelInfo, about)
    model = ModelInfo(**about)
    how = mapping(header["capture"], "capture")
    _check_types(CaptureInfo, how)
    capture = CaptureInfo(**how)
    scores = arrays.get("scores")
    if (scores is None) == bool(capture.scores_kind):
        raise MoetapError(f"scores_kind is {capture.scores_kind!r}, but scores do not agree")
    for name in ("tokens", "position"):
        if arrays[name].dtype != np.uint32 or len(arrays[name]) != len(experts):
            raise MoetapError(f"{name} must be uint32, one a row")
    if scores is not None and (scores.dtype != np.float16 or scores.shape != experts.shape):
        raise MoetapError("scores must be float16 of the shape of experts")
    ids = experts.astype(np.uint16)
    streams = []
    for record, start, stop in zip(records, offsets[:-1], offsets[1:], strict=True):
        at = slice(int(start), int(stop))
        _check_types(Stream, {name: record[name] for name in _COLUMNS})
        streams.append(
            Stream(
                **{name: record[name] for name in _COLUMNS},
                experts=ids[at],
                tokens=arrays["tokens"][at],
                position=arrays["position"][at],
                scores=None if scores is None else scores[at],
            )
        )
    return Trace(
        model=model,
        capture=capture,
        streams=tuple(streams),
        run_id=str(header["run_id"]),
        created=str(header["created"]),
        complete=bool(header["complete"]),
        source=str(path),
    )


_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "None": (type(None),),
}


def _check_types(cls: type, values: dict[str, Any]) -> None:
    """Refuse a value that is not of its field's type: JSON has no types of its own."""
    declared = {f.name: str(f.type) for f in fields(cls)}
    for name, value in values.items():
        if isinstance(value, np.ndarray) and declared[name].startswith("NDArray"):
            continue
        allowed = [t for part in declared[name].split(" | ") for t in _KINDS.get(part, ())]
        if type(value) not in allowed or (isinstance(value, int) and abs(value) >= 2**63):
            raise MoetapError(f"{name} is {value!r:.40}, expected {declared[name]}")
        if isinstance(value, str):
            check_text(value)


def _foreign(
    path: Path, arrays: dict[str, NDArray[Any]], header: dict[str, Any], options: Options
) -> Trace:
    name = next((n for n in ("experts", "topk") if n in arrays), None)
    if name is None:
        raise MoetapError(
            f"has no array experts or topk, only {', '.join(sorted(arrays)) or 'nothing'}"
        )
    ids = int_array(arrays[name], 3, name)
    ids[ids == NOT_EXECUTED] = MISSING
    n_layers = ids.shape[1]
    layers: Any = options.layers or header.get("layer_ids") or list(range(n_layers))
    layer_index = ascending(layers, "layer_ids")
    if len(layer_index) != n_layers:
        raise MoetapError(f"{n_layers} layers in {name}, {len(layer_index)} layer ids")
    declared = header.get("num_experts")
    n_experts = need_n_experts(options) if declared is None else whole(declared, "num_experts", 1)
    offsets = int_array(arrays.get("seq_offsets", [0, len(ids)]), 1, "seq_offsets")
    _check_offsets(offsets, len(ids))
    facts = header.get("seqs") or [{}] * (len(offsets) - 1)
    if len(facts) != len(offsets) - 1:
        raise MoetapError(f"{len(facts)} seqs in the sidecar, {len(offsets) - 1} in seq_offsets")
    if options.n_prompt is not None and len(facts) > 1:
        raise UsageError("--n-prompt goes with one sequence, the file has several")
    streams = []
    for i, fact in enumerate(facts):
        start, stop = int(offsets[i]), int(offsets[i + 1])
        fact = mapping(fact, f"seqs[{i}]")
        if whole(fact.get("n", stop - start), "n") != stop - start:
            raise MoetapError(f"seqs[{i}] has n={fact['n']}, seq_offsets say {stop - start}")
        # The prompt's rows were not recorded: the first row takes the place of the last prompt
        # token.
        first = whole(fact.get("first_token_pos", 0), "first_token_pos")
        streams.append(
            Rows(
                prompt_id=f"s{i}",
                cls=str(fact.get("category", "")),
                n_prompt=options.n_prompt or first + 1,
                first_position=0 if options.n_prompt else first,
                ids=ids[start:stop],
                # mypy cannot infer a lambda with a bound default.
                where=lambda row, layer, start=start: (  # type: ignore[misc]
                    f"{name}[{start + row}, {layer}]"
                ),
            )
        )
    model = header.get("model")
    return make_trace(
        path,
        streams,
        layer_index,
        n_experts,
        model_id=options.model_id or (model if isinstance(model, str) else ""),
        fallback_k=ids.shape[2],
    )


def _check_offsets(offsets: NDArray[np.int64], rows: int) -> None:
    if (
        len(offsets) < 1
        or offsets[0] != 0
        or offsets[-1] != rows
        or (len(offsets) > 1 and (np.diff(offsets) < 1).any())
    ):
        raise MoetapError(f"seq_offsets must rise from 0 to the {rows} rows")


FORMAT = Npz()
