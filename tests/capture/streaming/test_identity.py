"""Streamed runs equal resident ones to the bit: tokens, log-probabilities, routing.

The issue's grid, C in {k, k+1, 16, 64, E} x prompts of {1, 63, 64, 65, 513, 4096} tokens x prefill
steps {64, 512, 2048}, is sampled where its members would do the same: a step beyond a prompt's
length changes nothing, so short prompts run with one, and 4096 tokens, which take half a minute
each, run at C = k in chunks of 2048 and at C = 64 in chunks of 512. Everything else of the grid is
run on the bundled model; families and quantisations, on small random models, with a prompt of one
chunk and one of several.
"""

from __future__ import annotations

import gc
import time
import weakref
from contextlib import suppress
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from families import FAMILIES
from mlx_lm.models import qwen3_next
from modeldir import make_model_dir

from moetap.capture import _mlx
from moetap.capture.run import Settings, capture, prepare
from moetap.capture.streaming import engine, load, reads
from moetap.capture.streaming.engine import Engine, Layer
from moetap.capture.streaming.load import stream
from moetap.capture.streaming.selfcheck import arbitrary_tokens, difference, run
from moetap.errors import MoetapError
from moetap.models import bundled_model
from moetap.prompts import load_mix
from moetap.trace import NOT_EXECUTED

K, E = 8, 256
BUNDLED = str(bundled_model("tiny-qwen3_5-moe"))
N_TOKENS = 3


class Silent:
    def start(self, prompt_id, n_prompt): ...

    def prefill(self, done, total): ...

    def token(self, n_generated): ...


@cache
def bundled(slots: int | None) -> _mlx.Loaded:
    opened = _mlx.open_model(BUNDLED)
    return opened.resident() if slots is None else stream(opened, slots)


@cache
def expected(n_prompt: int, step: int):
    resident = bundled(None)
    return run(resident, arbitrary_tokens(resident, n_prompt), step, N_TOKENS)


GRID = [
    *((c, n, 64) for c in (K, K + 1, 16, 64, E) for n in (1, 63, 64, 65, 513)),
    *((c, 513, 512) for c in (K, K + 1, 16, 64, E)),
    *((c, 513, 2048) for c in (K, 64)),
    *((c, 65, 2048) for c in (K, K + 1, 16)),
    (K, 4096, 2048),
    (64, 4096, 512),
]


@pytest.mark.parametrize(("slots", "n_prompt", "step"), GRID)
def test_bundled_model(slots, n_prompt, step):
    streamed = bundled(slots)
    got = run(streamed, arbitrary_tokens(streamed, n_prompt), step, N_TOKENS)
    assert difference(expected(n_prompt, step), got) == ""


@pytest.mark.parametrize("full_prefill", [False, True])
def test_a_whole_capture(full_prefill):
    """Sampled, with scores; layers that prefill leaves out are left out by both."""
    settings = Settings(
        max_tokens=12, temp=0.8, prefill_step=128, scores=True, full_prefill=full_prefill
    )
    tasks, _ = prepare(bundled(None), load_mix(quick=True).prompts[:2], thinking=False)
    a, b = (list(capture(bundled(c), tasks, settings, Silent())) for c in (None, 16))
    for x, y in zip(a, b, strict=True):
        assert np.array_equal(x.tokens, y.tokens)
        assert np.array_equal(x.experts, y.experts)
        assert np.array_equal(x.scores, y.scores, equal_nan=True)
        assert (x.prefill() == NOT_EXECUTED).any() != full_prefill
        assert x.io is None and y.io is not None and y.io.n_steps == y.n_generated


def compare(folder, slots=None):
    """Resident against streamed, for prompts of one chunk and of several."""
    resident = _mlx.load(str(folder))
    k, n = resident.info.max_top_k, int(resident.info.n_experts.max())
    for c in slots or (k, k + 1, n):
        streamed = stream(_mlx.open_model(str(folder)), c)
        for n_prompt, step in ((1, 16), (70, 16), (70, 2048)):
            prompt = arbitrary_tokens(resident, n_prompt)
            a, b = (run(m, prompt, step) for m in (resident, streamed))
            assert difference(a, b) == "", (c, n_prompt, step)
        streamed.engine.close()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantization", [None, {"group_size": 32, "bits": 4}], ids=["plain", "4"])
def test_families(tmp_path, family, quantization):
    compare(make_model_dir(tmp_path / "m", family, quantization=quantization))


@pytest.mark.parametrize("k", [1, 3])
def test_halves_of_a_top_k_that_is_odd(tmp_path, k):
    compare(make_model_dir(tmp_path / "m", num_experts_per_tok=k))


def test_rows_that_depend_on_each_other_are_computed_together(tmp_path, monkeypatch):
    """As on MLX's CUDA backend; what one row's bits are there cannot be tested here."""
    monkeypatch.setattr(load, "rows_are_independent", lambda model: False)
    rows = []
    real = Layer.attach

    def attach(self):
        real(self)
        compute = self._compute
        self._compute = lambda x, slots: rows.append(slots.size) or compute(x, slots)

    monkeypatch.setattr(Layer, "attach", attach)
    folder = make_model_dir(tmp_path / "m")
    k = _mlx.open_model(str(folder)).info.max_top_k
    compare(folder, slots=(k, k + 1))
    decode_alone = stream(_mlx.open_model(str(folder)), k)
    rows.clear()
    run(decode_alone, arbitrary_tokens(decode_alone, 1), 64, 4)
    assert set(rows) == {k}


@pytest.fixture
def late_reads(monkeypatch):
    """Every read takes 3 ms longer than the disk does."""
    real = reads._File.fill

    def late(self, begin, buffers):
        time.sleep(0.003)
        return real(self, begin, buffers)

    monkeypatch.setattr(reads._File, "fill", late)


@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v3", "gpt_oss"])
def test_nothing_is_computed_before_its_reads_are_done(tmp_path, family, late_reads):
    folder = make_model_dir(tmp_path / "m", family)
    k = _mlx.open_model(str(folder)).info.max_top_k
    compare(folder, slots=(k, k + 1))


def test_the_late_reads_would_show(tmp_path, late_reads, monkeypatch):
    """The control of the test above: who doesn't wait computes with what was there before."""
    monkeypatch.setattr(Engine, "settle", lambda self: None)
    folder = make_model_dir(tmp_path / "m")
    with pytest.raises(AssertionError, match="routing|log-probabilities"):
        compare(folder, slots=(_mlx.open_model(str(folder)).info.max_top_k,))


def test_an_interrupt_anywhere_leaves_nothing_half_read(tmp_path, late_reads, monkeypatch):
    """The next stream is right, or refused."""
    folder = make_model_dir(tmp_path / "m")
    loaded = _mlx.load(str(folder))
    prompt = arbitrary_tokens(loaded, 12)
    right = run(loaded, prompt, 8, 2)
    left = 0

    def interrupted(real):
        def call(*args):
            nonlocal left
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
            out = real(*args)
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
            return out

        return call

    for owner, name in ((engine.mx, "eval"), (engine.mx, "async_eval"), (reads.Batch, "wait")):
        monkeypatch.setattr(owner, name, interrupted(getattr(owner, name)))
    refused, n = [], 0
    while left <= 0:  # the run before was interrupted
        n += 7
        streamed = stream(_mlx.open_model(str(folder)), 6)
        left = n
        with suppress(KeyboardInterrupt):
            run(streamed, prompt, 8, 2)
        before, left = left, 0
        try:
            assert difference(right, run(streamed, prompt, 8, 2)) == "", n
            refused.append(False)
        except MoetapError as error:
            assert "load the model again" in str(error)
            refused.append(True)
        streamed.engine.close()
        left = before
    assert not refused[-1] and 0 < sum(refused) < len(refused) - 1 > 10


def test_a_block_may_call_its_shared_expert_first(tmp_path, late_reads, monkeypatch):
    """As laguna and minimax_m3_vl do: its input then hangs on the reads of the layer before."""

    def call(self, x):
        shared = mx.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        gates = mx.softmax(self.gate(x), axis=-1, precise=True)
        chosen = mx.argpartition(gates, kth=-self.top_k, axis=-1)[..., -self.top_k :]
        scores = mx.take_along_axis(gates, chosen, axis=-1)
        return (self.switch_mlp(x, chosen) * scores[..., None]).sum(axis=-2) + shared

    monkeypatch.setattr(qwen3_next.Qwen3NextSparseMoeBlock, "__call__", call)
    folder = make_model_dir(tmp_path / "m", "qwen3_next")
    compare(folder, slots=(_mlx.open_model(str(folder)).info.max_top_k,))


def test_shared_experts_are_computed_while_experts_are_read(tmp_path, late_reads, monkeypatch):
    launched = []
    real = mx.async_eval

    def launch(*arrays):
        launched.append([a.shape for a in arrays])
        real(*arrays)

    folder = make_model_dir(tmp_path / "m", "qwen3_next")
    streamed = stream(_mlx.open_model(str(folder)), 5)
    monkeypatch.setattr(engine.mx, "async_eval", launch)
    run(streamed, arbitrary_tokens(streamed, 3), 64, 2)
    io = streamed.engine.take(2)
    shared = [shapes for shapes in launched if shapes == [(1, 1, 32)]]
    # Not of the last layer, whose reads are waited for at once. mlx-lm runs one more step.
    assert len(shared) >= (io.misses[:, :-1] > 0).sum() > 0


def test_the_first_half_is_computed_while_the_second_is_read(tmp_path, monkeypatch):
    """Exactly where something misses and half of the experts are resident."""
    launched = 0
    real = mx.async_eval

    def launch(*arrays):
        nonlocal launched
        launched += [a.shape for a in arrays] == [(1, 1, 2, 32)]
        real(*arrays)

    folder = make_model_dir(tmp_path / "m", num_experts_per_tok=5)
    streamed = stream(_mlx.open_model(str(folder)), 7)
    monkeypatch.setattr(engine.mx, "async_eval", launch)
    run(streamed, arbitrary_tokens(streamed, 3), 64, 12)
    n_steps = len(streamed.engine.meter._steps)  # one more than tokens: mlx-lm runs ahead
    misses = streamed.engine.take(n_steps).misses
    assert misses.shape[0] == 13
    assert 0 < launched == ((misses > 0) & (misses <= 3)).sum() < misses.size


def test_a_model_whose_files_were_closed_is_refused(tmp_path):
    streamed = stream(_mlx.open_model(str(make_model_dir(tmp_path / "m"))), 5)
    streamed.engine.close()
    streamed.engine.close()
    with pytest.raises(MoetapError, match="were closed; load the model again"):
        run(streamed, [1, 2], 8, 2)


@pytest.mark.parametrize("fails", [False, True])
def test_a_model_that_nobody_holds_is_gone(tmp_path, monkeypatch, fails):
    """Also if a read failed, whose error refers to all that called it."""
    real, n = reads._File.fill, 0

    def fill(*args):
        nonlocal n
        n += 1
        if fails and n > 40:
            raise MoetapError("injected")
        return real(*args)

    monkeypatch.setattr(reads._File, "fill", fill)
    streamed = stream(_mlx.open_model(str(make_model_dir(tmp_path / "m"))), 5)
    threads = streamed.engine.reader._threads
    parts = weakref.ref(streamed.model), weakref.ref(streamed.engine)
    try:
        run(streamed, arbitrary_tokens(streamed, 20), 8, 8)
    except MoetapError:
        assert fails
    assert n > 40
    del streamed
    gc.collect()
    assert [part() for part in parts] == [None, None]
    assert not any(thread.is_alive() for thread in threads)


def test_a_decode_step_of_several_tokens_is_refused(tmp_path):
    streamed = stream(_mlx.open_model(str(make_model_dir(tmp_path / "m"))), 5)
    streamed.engine.start(2, full_prefill=False)
    streamed.model(mx.array([[1]]))
    with pytest.raises(MoetapError, match="2 tokens in one decode step"):
        streamed.model(mx.array([[1, 2]]))


QUANTISATIONS = [
    *({"group_size": 32, "bits": bits} for bits in (2, 3, 4, 5, 6, 8)),
    {"group_size": 64, "bits": 4},
    {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    {"group_size": 16, "bits": 4, "mode": "nvfp4"},
]


@pytest.mark.parametrize(
    "quantization", QUANTISATIONS, ids=lambda q: f"{q.get('mode', 'affine')}-{q['bits']}"
)
def test_quantisations(tmp_path, quantization):
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "head_dim": 16}
    folder = make_model_dir(tmp_path / "m", quantization=quantization, **sizes)
    compare(folder, slots=(4, 7))


def test_two_matrices_an_expert(tmp_path):
    """SwitchMLP instead of SwitchGLU, and all trailing MoE layers idle in prefill."""
    config = {
        "vocab_size": 257,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 5,
        "max_position_embeddings": 4096,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attention_bias": False,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 2,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "hybrid_override_pattern": ["E", "M", "*", "E", "E"],
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "n_group": 1,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "topk_group": 1,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "time_step_limit": [0.0, 100.0],
    }
    folder = make_model_dir(tmp_path / "m", "nemotron_h", **config)
    compare(folder)
    resident = _mlx.load(str(folder))
    rows = run(resident, arbitrary_tokens(resident, 70), 16).experts
    assert (rows[:69, 1:] == NOT_EXECUTED).all() and (rows[:69, 0] != NOT_EXECUTED).all()
