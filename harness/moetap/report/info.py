"""The description of one trace, for `moetap info`: model, machine, settings, streams, what is
missing.

Knows how to say it; every figure is counted here from the Trace itself. Knows no statistics across
streams.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
from rich.table import Table

from moetap.analysis.lanes import COLD_STEPS
from moetap.analysis.measured import Phase, compare, has_io, measured
from moetap.report import words
from moetap.report.console import make_console
from moetap.report.measured_table import agreement_words
from moetap.report.words import NOT_RECORDED
from moetap.trace import NOT_EXECUTED, Trace


def print_info(trace: Trace, path: Path) -> None:
    """Print the description of `trace`, read from `path`, on standard output."""
    console = make_console()
    for title, rows in (
        (str(path), _file_rows(trace, path)),
        ("model", _model_rows(trace)),
        ("capture", _capture_rows(trace)),
        ("streams", _stream_rows(trace)),
        ("expert I/O, decode", _io_rows(trace)),
    ):
        if not rows:
            continue
        table = Table(
            title=title, title_justify="left", show_header=False, box=None, pad_edge=False
        )
        table.add_column(style="bold", min_width=22)
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(name, value)
        console.print(table)
        console.print()


def _file_rows(trace: Trace, path: Path) -> list[tuple[str, str]]:
    n, planned = len(trace.streams), trace.capture.n_prompts
    if trace.complete:
        state = f"complete, {words.count(n, 'stream')}"
    else:
        state = f"INCOMPLETE, {n} of {planned} streams; continue it with moetap capture --resume"
    # Of an imported trace nobody knows when the capture began.
    when = ("imported" if trace.capture.imported else "created", trace.created)
    rows = [("state", state), when, ("run", trace.run_id)]
    n_rows = sum(s.n_rows for s in trace.streams)
    if path.is_file():
        size = path.stat().st_size
        per_row = f", {size / n_rows:.0f} bytes a row" if n_rows else ""
        rows.append(("size", f"{size / 1e6:.2f} MB{per_row}"))
    return rows


def _model_rows(trace: Trace) -> list[tuple[str, str]]:
    m = trace.model
    sized = bool((m.expert_bytes > 0).all())
    return [
        ("id", (m.id or NOT_RECORDED) + (f" at {m.revision}" if m.revision else "")),
        ("type", m.model_type or NOT_RECORDED),
        ("quantisation", _quantization(m.quantization) if m.config_json else NOT_RECORDED),
        ("MoE layers", f"{m.n_layers} ({_ranges(m.layer_index)})"),
        ("experts per layer", _span(m.n_experts)),
        ("top-k", _span(m.top_k)),
        ("one expert", f"{_span(m.expert_bytes)} bytes" if sized else "not known"),
        ("all routed experts", _gb(int((m.n_experts * m.expert_bytes).sum()) if sized else None)),
        ("everything else", _gb(m.resident_bytes)),
        ("KV per token", _bytes(m.kv_bytes_per_token)),
        ("state per stream", _bytes(m.state_bytes_per_stream)),
    ]


def _capture_rows(trace: Trace) -> list[tuple[str, str]]:
    c = trace.capture
    # What no recorder wrote is not known; a default in its place would pose as a setting.
    unknown = NOT_RECORDED if c.imported else ""
    ram = "" if c.ram_bytes is None else f"{c.ram_bytes / 2**30:.0f} GiB RAM"
    versions = (
        ("moetap", c.moetap_version),
        ("mlx", c.mlx_version + (f" ({c.backend})" if c.backend else "")),
        ("mlx-lm", c.mlx_lm_version),
    )
    sha256 = f"sha256 {c.mix_sha256[:12]}" if c.mix_sha256 else ""
    sampler = (
        unknown or "greedy"
        if c.temp == 0
        else f"temperature {c.temp:g}, top-p {c.top_p:g}, seed {c.seed}"
    )
    thinking = {
        True: "on",
        False: "off",
        None: unknown or "no such switch in the chat template",
    }[c.thinking]
    prefill = f"chunks of {c.prefill_step}" if c.prefill_step else NOT_RECORDED
    names = {
        "row": "one product a row",
        "row, grouped": "one product a row, its bits depend on the rows beside it",
    }
    kernel = names.get(c.expert_kernel or "", unknown or "as mlx-lm chooses")
    mode = (c.mode or NOT_RECORDED) + (
        "" if c.slots is None else f", {c.slots} slots a layer, {c.policy or '?'}"
    )
    untraced = c.untraced_tokens_per_s
    rate = unknown or "not measured" if untraced is None else f"{untraced:.1f} tokens/s"
    return [
        ("machine", _listed(c.chip, ram, c.os)),
        ("software", _listed(*(f"{name} {value}" for name, value in versions if value))),
        ("prompts", _listed(f"{c.mix_name} {c.mix_version}".strip(), sha256)),
        ("left out", c.left_out.replace(",", ", ") or unknown or "none"),
        ("sampler", sampler),
        ("thinking", thinking),
        ("max tokens", str(c.max_tokens) if c.max_tokens else NOT_RECORDED),
        ("prefill", prefill + (", every layer computed" if c.full_prefill else "")),
        ("expert kernel", kernel),
        ("mode", mode),
        ("decode rate, untraced", rate),
        ("swap growth", _swap(c.swap_growth_bytes)),
        ("scores", c.scores_kind or "not kept"),
    ]


def _listed(*texts: str) -> str:
    return ", ".join(text for text in texts if text) or NOT_RECORDED


def _swap(n_bytes: int | None) -> str:
    if n_bytes is None:
        return NOT_RECORDED
    return words.swap_growth(n_bytes) or ("none" if n_bytes == 0 else f"{n_bytes / 1e6:.1f} MB")


def _stream_rows(trace: Trace) -> list[tuple[str, str]]:
    streams = trace.streams
    if not streams:
        return [("streams", "none")]
    classes = Counter(s.cls for s in streams)
    ends = Counter(s.finish_reason for s in streams)
    decode = sum(s.n_generated for s in streams)
    prefill = sum(s.decode_start for s in streams)
    looped = [s for s in streams if s.looped_from >= 0]
    lost = sum(s.n_generated - s.looped_from for s in looped)
    loops = f"{len(looped)} streams, {lost} decode steps"
    none = NOT_RECORDED if trace.capture.imported else "none"
    rows = [
        ("classes", _counted(classes)),
        ("ended by", _counted(ends)),
        ("prompt tokens", _spread([s.n_prompt for s in streams])),
        ("generated tokens", _spread([s.n_generated for s in streams])),
        ("rows", f"{prefill + decode}: {prefill} prefill, {decode} decode"),
        ("looping tails", loops if looped else none),
    ]
    missing = np.zeros(trace.model.n_layers, np.int64)
    missing_decode = 0
    for s in streams:
        absent = (s.experts == NOT_EXECUTED).all(axis=2)
        missing += absent.sum(axis=0)
        missing_decode += int(absent[s.decode_start :].sum())
    for layer in np.flatnonzero(missing):
        share = missing[layer] / (prefill + decode)
        rows.append(
            (
                f"layer {trace.model.layer_index[layer]} not executed",
                f"{missing[layer]} rows ({share:.1%}), left out of every figure",
            )
        )
    if missing_decode:
        rows.append(("of these in decode", f"{missing_decode} cells"))
    return rows


def _counted(names: Counter[str]) -> str:
    return ", ".join(f"{n} {name or NOT_RECORDED}" for name, n in sorted(names.items()))


def _io_rows(trace: Trace) -> list[tuple[str, str]]:
    """What a streaming capture measured; nothing for other traces. Hit rates are those of `moetap
    analyze`, without looped tails; the reads and the time are all that there were.
    """
    if not has_io(trace):
        return []
    everything = measured(trace, keep_loops=True)
    compared = compare(trace)
    phases = {line.phase: line.measured for line in compared.lines}
    where = "past the page cache" if trace.capture.cold_reads else "through the page cache"
    bandwidth = everything.bandwidth_bps
    looped = everything.steps - phases["all"].steps
    return [
        (f"first {COLD_STEPS} steps", _phase(phases["cold"])),
        ("later steps", _phase(phases["steady"])),
        *([("looping tails", f"{looped} steps, not counted above")] if looped else []),
        (
            "reads",
            f"{everything.read_bytes / 1e9:.3f} GB {where}"
            + ("" if bandwidth is None else f" at {bandwidth / 1e9:.2f} GB/s"),
        ),
        ("time of a step", _time(everything)),
        ("replayed misses", agreement_words(compared)),
    ]


def _phase(phase: Phase) -> str:
    if phase.hit_rate is None:
        return "none"
    return (
        f"hit rate {phase.hit_rate:.1%}, {phase.misses / phase.steps:.1f} misses and "
        f"{phase.read_bytes / phase.steps / 1e6:.2f} MB a token, {phase.steps} steps"
    )


def _time(phase: Phase) -> str:
    """Where it went. The rest is Python, launches, and what MLX computes while it launches."""
    if not phase.step_s:
        return "not known"
    rest = max(0.0, phase.step_s - phase.eval_s - phase.wait_s)
    return (
        f"{phase.step_s / phase.steps * 1e3:.1f} ms traced: {phase.eval_s / phase.step_s:.0%} "
        f"waiting for computation, {phase.wait_s / phase.step_s:.0%} for reads, "
        f"{rest / phase.step_s:.0%} Python and launches"
    )


def _quantization(text: str) -> str:
    """mlx-lm's quantisation entry in a line: the rule, and how many modules differ from it."""
    if not text:
        return "none"
    entry = json.loads(text)
    rule = f"{entry.get('bits', '?')} bits, groups of {entry.get('group_size', '?')}"
    own = sum(isinstance(value, dict) for value in entry.values())
    mode = entry.get("mode", "affine")
    return f"{mode}, {rule}" + (f"; {own} modules differ" if own else "")


def _spread(values: list[int]) -> str:
    return f"{min(values)} to {max(values)}, median {int(np.median(values))}, {sum(values)} in all"


def _span(values: np.ndarray) -> str:
    low, high = int(values.min()), int(values.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _ranges(values: np.ndarray) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    breaks = np.flatnonzero(np.diff(values) != 1)
    starts = values[np.r_[0, breaks + 1]]
    ends = values[np.r_[breaks, len(values) - 1]]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _bytes(value: int | None) -> str:
    return "not known" if value is None else f"{value:,} bytes"


def _gb(value: int | None) -> str:
    if value is None:
        return "not known"
    return f"{value:,} bytes ({value / 1e9:.2f} GB)" if value >= 1e8 else f"{value:,} bytes"
