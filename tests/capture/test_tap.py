from __future__ import annotations

import copy
import pickle

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from families import FAMILIES, VOCABULARY, divisible, expected_routing, make_model, moe_blocks
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchGLU

import moetap
from moetap.errors import MoetapError
from moetap.trace import NOT_EXECUTED


def prompt_of(n: int, seed: int = 1) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, VOCABULARY, n)]


def generate(model, prompt, n, prefill_step=2048, stop_after=None):
    """Tokens and log-probabilities of n generated tokens; closes the generator early like an EOS
    does.
    """
    tokens, logprobs = [], []
    steps = generate_step(mx.array(prompt), model, max_tokens=n, prefill_step_size=prefill_step)
    for token, lp in steps:
        tokens.append(token)
        logprobs.append(np.array(lp))
        if stop_after is not None and len(tokens) == stop_after:
            break
    steps.close()
    return tokens, np.stack(logprobs)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_equal_an_independent_router_over_one_forward(family):
    model = make_model(family)
    prompt = prompt_of(21)
    with moetap.tap(model, scores=True, full_prefill=True) as rows:
        tokens, _ = generate(model, prompt, 12, prefill_step=7)
    fed = prompt + tokens[:-1]
    assert rows.tokens.tolist() == fed
    assert rows.position.tolist() == list(range(21 + 12 - 1))
    expected = expected_routing(model, fed)
    assert rows.experts.shape == (32, len(expected), expected[0][0].shape[1])
    for layer, (ids, weights) in enumerate(expected):
        assert np.array_equal(rows.experts[:, layer], ids), layer
        np.testing.assert_allclose(rows.scores[:, layer], weights, atol=2e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_numbers_experts_and_top_k_are_read_from_what_ran(family):
    model = make_model(family)
    with moetap.tap(model) as rows:
        generate(model, prompt_of(5), 2)
    assert [s.layer_index for s in rows.switches] == [n for n, _ in moe_blocks(model)]
    assert {s.n_experts for s in rows.switches} == {8 if family == "mixtral" else 16}
    assert set(rows.top_k) == {2 if family == "mixtral" else 4}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantised", [False, True])
def test_tokens_and_logprobs_are_bit_identical_with_and_without(family, quantised):
    model = make_model(family)
    if quantised:
        nn.quantize(model, group_size=32, bits=4, class_predicate=divisible)
    prompt = prompt_of(70)  # more than 64 routed rows: SwitchGLU sorts
    plain = generate(model, prompt, 16, prefill_step=40)
    for options in ({}, {"scores": True}, {"full_prefill": True}):
        with moetap.tap(model, **options) as rows:
            tapped = generate(model, prompt, 16, prefill_step=40)
        assert rows.experts.shape[0] == 70 + 16 - 1
        assert tapped[0] == plain[0]
        assert np.array_equal(tapped[1], plain[1])
    assert np.array_equal(generate(model, prompt, 16, prefill_step=40)[1], plain[1])


def test_the_tie_is_what_keeps_results_identical():
    """Negative control: a hook that touches x at all would be seen by the comparison above."""
    model = make_model("qwen3_moe")
    plain = generate(model, prompt_of(20), 8)
    original = SwitchGLU.__call__
    SwitchGLU.__call__ = lambda self, x, indices: original(self, x * (1 + 1e-6), indices)
    try:
        touched = generate(model, prompt_of(20), 8)
    finally:
        SwitchGLU.__call__ = original
    assert not np.array_equal(plain[1], touched[1])


@pytest.mark.parametrize("n_prompt", [1, 2, 3, 9, 10, 17])
@pytest.mark.parametrize("n_generated", [1, 2, 7])
@pytest.mark.parametrize("stop", ["length", "eos"])
def test_a_stream_has_p_plus_g_minus_1_rows(n_prompt, n_generated, stop):
    """Prefill step 8: prompts of 2, 10 and 17 tokens make chunks of length 1 and 8."""
    model = make_model("qwen3_moe")
    prompt = prompt_of(n_prompt)
    with moetap.tap(model) as rows:
        if stop == "length":
            tokens, _ = generate(model, prompt, n_generated, prefill_step=8)
        else:
            tokens, _ = generate(model, prompt, 64, prefill_step=8, stop_after=n_generated)
    assert len(tokens) == n_generated
    assert rows.tokens.tolist() == prompt + tokens[:-1]
    assert rows.position.tolist() == list(range(n_prompt + n_generated - 1))
    # Prefill evaluates the caches alone: the last MoE layer runs for the last prompt token and
    # after.
    ran = (rows.experts != NOT_EXECUTED).all(axis=2)
    assert ran[:, :-1].all()
    assert ran[:, -1].tolist() == [False] * (n_prompt - 1) + [True] * n_generated
    full = expected_routing(model, rows.tokens)
    for layer, (ids, _) in enumerate(full):
        assert np.array_equal(rows.experts[ran[:, layer], layer], ids[ran[:, layer]])


def test_a_single_moe_layer_that_prefill_never_runs():
    model = make_model("olmoe")
    for layer in model.layers[:-1]:
        layer.mlp = nn.Identity()
    with moetap.tap(model) as rows:
        tokens, _ = generate(model, prompt_of(9), 3, prefill_step=4)
    ran = (rows.experts != NOT_EXECUTED).all(axis=2)[:, 0]
    assert ran.tolist() == [False] * 8 + [True] * 3
    assert rows.tokens.tolist() == prompt_of(9) + tokens[:-1]


def test_several_streams_under_one_tap_are_kept_apart():
    model = make_model("qwen3_next")
    lengths = [(5, 4), (1, 1), (12, 2)]
    alone = []
    for seed, (p, g) in enumerate(lengths):
        with moetap.tap(model) as rows:
            generate(model, prompt_of(p, seed), g)
        alone.append(rows.experts)
    with moetap.tap(model) as rows:
        for seed, (p, g) in enumerate(lengths):
            generate(model, prompt_of(p, seed), g)
    assert len(rows.streams) == 3
    for got, want in zip(rows.streams, alone, strict=True):
        assert np.array_equal(got.experts, want)
    with pytest.raises(MoetapError, match="3 streams were recorded"):
        _ = rows.experts


def test_a_prompt_cache_starts_the_stream_at_its_offset():
    model = make_model("qwen3_moe")
    prompt = prompt_of(20)
    with moetap.tap(model) as rows:
        generate(model, prompt, 4)
        cache = make_prompt_cache(model)
        mx.eval(model(mx.array([prompt[:12]]), cache=cache))
        whole, _ = rows.streams
        for _ in generate_step(mx.array(prompt[12:]), model, max_tokens=4, prompt_cache=cache):
            pass
        rest = rows.streams[-1]
    assert rest.position.tolist() == list(range(12, 23))
    ran = rest.experts != NOT_EXECUTED
    assert np.array_equal(rest.experts[ran], whole.experts[12:][ran])


def test_a_loop_without_run_ahead():
    model = make_model("mixtral")
    with moetap.tap(model, run_ahead=False) as rows:
        cache = make_prompt_cache(model)
        y = mx.array([prompt_of(6)])
        for _ in range(3):
            y = mx.argmax(model(y, cache=cache)[:, -1:], axis=-1)
            mx.eval(y)
    assert rows.experts.shape == (8, 3, 2)
    assert (rows.experts != NOT_EXECUTED).all()


def test_classes_and_parameters_are_untouched_after_and_paths_during():
    model = make_model("qwen3_moe")
    before = {k: type(m) for k, m in model.named_modules()}
    paths = [k for k, _ in nn.utils.tree_flatten(model.parameters())]
    with pytest.raises(RuntimeError, match="user"), moetap.tap(model):
        assert [k for k, _ in nn.utils.tree_flatten(model.parameters())] == paths
        assert all(isinstance(m, before[k]) for k, m in model.named_modules())
        raise RuntimeError("user")
    assert {k: type(m) for k, m in model.named_modules()} == before


def test_copies_come_out_unhooked():
    switch = make_model("mixtral").layers[0].block_sparse_moe.switch_mlp
    model = make_model("mixtral")
    with moetap.tap(model):
        hooked = model.layers[0].block_sparse_moe.switch_mlp
        assert type(hooked) is not SwitchGLU
        assert type(copy.deepcopy(hooked)) is SwitchGLU
    assert type(pickle.loads(pickle.dumps(switch))) is SwitchGLU


def test_a_second_model_of_the_same_class_stays_silent():
    model, draft = make_model("qwen3_moe"), make_model("qwen3_moe", seed=9)
    with moetap.tap(model) as rows:
        generate(model, prompt_of(5), 3)
        generate(draft, prompt_of(9), 3)
    assert rows.experts.shape[0] == 7


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda m: m(mx.zeros((2, 3), mx.int32)), "one stream at a time"),
        (lambda m: moetap.tap(m).__enter__(), "tapped already"),
    ],
)
def test_misuse_is_refused(use, message):
    model = make_model("mixtral")
    with moetap.tap(model), pytest.raises(MoetapError, match=message):
        use(model)


def test_a_rewound_cache_is_refused():
    model = make_model("mixtral")
    cache = make_prompt_cache(model)
    with moetap.tap(model), pytest.raises(MoetapError, match="rewound"):
        model(mx.array([prompt_of(6)]), cache=cache)
        for layer in cache:
            layer.trim(2)
        model(mx.array([[1]]), cache=cache)


def test_a_dense_model_is_refused_by_name():
    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.Linear(4, 4)]

    with (
        pytest.raises(MoetapError, match="no routed experts found in .*Dense"),
        moetap.tap(Dense()),
    ):
        pass


def test_memory_of_a_long_prefill_stays_flat():
    """The router's (T, E) buffers must not outlive their chunk: 8 layers x 2048 x 256 x 4 bytes =
    16 MiB if they did.
    """
    model = make_model("qwen3_moe")

    def peak(tapped: bool) -> int:
        mx.clear_cache()
        mx.reset_peak_memory()
        if tapped:
            with moetap.tap(model):
                generate(model, prompt_of(8192), 2)
        else:
            generate(model, prompt_of(8192), 2)
        return mx.get_peak_memory()

    plain = peak(False)
    assert peak(True) <= 1.05 * plain
