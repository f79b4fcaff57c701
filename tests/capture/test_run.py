from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest
from families import expected_routing
from mlx.utils import tree_flatten
from mlx_lm.generate import stream_generate
from mlx_lm.sample_utils import make_sampler
from modeldir import make_model_dir

from moetap.capture import _machine, _mlx, run
from moetap.capture.run import Settings, capture, describe, prepare, stream_seed
from moetap.capture.tap import Rows
from moetap.errors import MoetapError
from moetap.prompts import Prompt, load_jsonl, load_mix
from moetap.trace import NOT_EXECUTED, check_stream


class Silent:
    def start(self, prompt_id, n_prompt): ...

    def prefill(self, done, total): ...

    def token(self, n_generated): ...


def prompt(text: str, prompt_id: str = "p") -> Prompt:
    return Prompt(prompt_id, "user", (), "", ({"role": "user", "content": text},), ())


@pytest.fixture(scope="module")
def loaded(model_dir):
    return _mlx.load(str(model_dir))


SAMPLED = Settings(max_tokens=24, temp=0.9, top_p=0.95, seed=3, prefill_step=16)


def captured(loaded, prompts, settings):
    tasks, refused = prepare(loaded, prompts, settings.thinking)
    assert not refused
    return list(capture(loaded, tasks, settings, Silent()))


@pytest.mark.parametrize("settings", [Settings(max_tokens=12), SAMPLED])
def test_tokens_are_those_of_an_untapped_run_and_rows_those_of_the_router(loaded, settings):
    streams = captured(loaded, [prompt("def f(x):"), prompt("one two three", "q")], settings)
    for stream, text in zip(streams, ("def f(x):", "one two three"), strict=True):
        mx.random.seed(stream_seed(settings.seed, prompt(text)))
        plain = list(
            stream_generate(
                loaded.model,
                loaded.tokenizer,
                loaded.tokenizer.encode(f"<|user|>{text}<|end|><|assistant|>"),
                max_tokens=settings.max_tokens,
                sampler=make_sampler(temp=settings.temp, top_p=settings.top_p),
                prefill_step_size=settings.prefill_step,
            )
        )
        generated = [r.token for r in plain]
        assert stream.n_generated == len(generated)
        assert stream.finish_reason == plain[-1].finish_reason
        assert stream.tokens[stream.n_prompt :].tolist() == generated[:-1]
        check_stream(stream, loaded.info)
        for layer, (ids, _) in enumerate(expected_routing(loaded.model, stream.tokens)):
            ran = stream.experts[:, layer, 0] != NOT_EXECUTED
            assert np.array_equal(stream.experts[ran, layer], ids[ran])
            assert ran[stream.decode_start :].all()


def test_a_stream_does_not_depend_on_the_ones_before_it(loaded):
    """Each stream is seeded from its prompt, so a resumed or partial run gives the same streams."""
    both = captured(loaded, [prompt("a"), prompt("b", "q")], SAMPLED)
    alone = captured(loaded, [prompt("b", "q")], SAMPLED)
    assert np.array_equal(both[1].tokens, alone[0].tokens)
    other = captured(loaded, [prompt("b", "q")], Settings(max_tokens=24, temp=0.9, seed=4))
    assert not np.array_equal(other[0].tokens, alone[0].tokens)


def test_stream_seed_is_the_documented_hash():
    # sha256 of "7:<hash of the prompt>", first 4 bytes big-endian; recomputed with a shell:
    # printf '7:%s' "$HASH" | sha256sum | cut -c1-8
    p = prompt("x")
    import hashlib

    expected = int(hashlib.sha256(f"7:{p.sha256}".encode()).hexdigest()[:8], 16)
    assert stream_seed(7, p) == expected < 2**32


def test_eos_ends_a_stream_and_is_its_last_token(loaded):
    """The random model reaches <|end|> (token 256) within a few hundred sampled tokens."""
    settings = Settings(max_tokens=2000, temp=1.0, seed=1)
    (stream,) = captured(loaded, [prompt("stop soon")], settings)
    assert stream.finish_reason == "stop"
    assert stream.n_rows == stream.n_prompt + stream.n_generated - 1
    assert 256 not in stream.tokens[stream.n_prompt :]  # the EOS is generated, never fed


def test_full_prefill_fills_the_layers_that_prefill_leaves_out(loaded):
    (without,) = captured(loaded, [prompt("some words here")], Settings(max_tokens=3))
    (full,) = captured(
        loaded, [prompt("some words here")], Settings(max_tokens=3, full_prefill=True)
    )
    missing = without.experts == NOT_EXECUTED
    assert missing[:, -1].all(axis=1).sum() == without.n_prompt - 1
    assert not (full.experts == NOT_EXECUTED).any()
    assert np.array_equal(full.experts[~missing], without.experts[~missing])
    for layer, (ids, _) in enumerate(expected_routing(loaded.model, full.tokens)):
        assert np.array_equal(full.experts[:, layer], ids)


def test_geometry_is_read_from_the_model(loaded):
    """By hand: 3 matrices of 16 x 32 a 4-bit expert (down_proj, 32 x 16, cannot be cut into groups
    of 32 and stays float32): 2 x (16 x 32 / 2 + 16 x 2 x 4) + 32 x 16 x 4 = 2816 bytes.
    KV: 4 layers x 2 (K, V) x 2 heads x 16 x 4 bytes = 1024 bytes a token.
    """
    info = loaded.info
    assert info.layer_index.tolist() == [0, 2, 3]
    assert info.n_experts.tolist() == [16] * 3
    assert info.top_k.tolist() == [4] * 3
    assert info.expert_bytes.tolist() == [2816] * 3
    assert info.kv_bytes_per_token == 1024
    assert info.state_bytes_per_stream == 0
    total = sum(v.nbytes for _, v in tree_flatten(loaded.model.parameters()))
    assert info.resident_bytes == total - 3 * 16 * 2816
    assert info.id == "tiny-random"
    assert json.loads(info.config_json)["model_type"] == info.model_type == "qwen3_moe"


def test_linear_attention_layers_hold_a_constant_state(tmp_path):
    """By hand, one of the 2 linear layers: conv (4 - 1) x (2 x 2 x 16 + 2 x 16) x 4 bytes = 1152,
    recurrent 2 heads x 16 x 16 x 4 bytes = 2048.
    """
    info = _mlx.load(str(make_model_dir(tmp_path / "next", "qwen3_next"))).info
    assert info.state_bytes_per_stream == 2 * (1152 + 2048)
    assert info.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4


def test_the_capture_is_described(loaded, prompts_file):
    mix = load_jsonl(prompts_file("a", "b"))
    tasks, _ = prepare(loaded, mix.prompts[:1], thinking=False)
    about = describe(loaded, SAMPLED, mix, tasks)
    assert (about.temp, about.top_p, about.seed, about.max_tokens) == (0.9, 0.95, 3, 24)
    assert about.backend in {"cpu", "metal", "cuda"}
    assert about.mlx_version == mx.__version__
    assert about.ram_bytes is not None and about.ram_bytes > 2**30
    assert about.chip and about.os
    assert (about.mix_name, about.mix_sha256, about.n_prompts) == ("prompts.jsonl", mix.sha256, 1)
    assert about.left_out == "p1"
    assert about.thinking is False


def test_chip_on_a_mac_comes_from_sysctl(monkeypatch):
    def fake(command, **_):
        assert command == ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        return type("Done", (), {"stdout": "Apple M4 Pro\n"})

    monkeypatch.setattr(_machine.sys, "platform", "darwin")
    monkeypatch.setattr(_machine.subprocess, "run", fake)
    assert _machine.chip() == "Apple M4 Pro"
    monkeypatch.setattr(
        _machine.subprocess, "run", lambda *_, **__: (_ for _ in ()).throw(OSError())
    )
    assert _machine.chip() == ""


def test_thinking_reaches_the_template(loaded):
    off, _ = prepare(loaded, [prompt("a")], thinking=False)
    on, _ = prepare(loaded, [prompt("a")], thinking=True)
    assert (
        loaded.tokenizer.decode(on[0].tokens) == loaded.tokenizer.decode(off[0].tokens) + "<think>"
    )


def test_every_prompt_of_the_mix_renders_with_tools_and_calls(loaded):
    """The template iterates over call arguments, as real ones do: they must be objects."""
    tasks, refused = prepare(loaded, load_mix().prompts, thinking=False)
    assert not refused and len(tasks) >= 48
    with_tools = next(t for t in tasks if t.prompt.tools)
    name = with_tools.prompt.tools[0]["function"]["name"]
    assert name in loaded.tokenizer.decode(with_tools.tokens)


def test_prompts_that_the_template_refuses_are_named_and_left_out(tmp_path):
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}"
        "{{ raise_exception('no system role') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    loaded = _mlx.load(str(make_model_dir(tmp_path / "m", template=template)))
    system = Prompt(
        "s",
        "user",
        (),
        "",
        ({"role": "system", "content": "x"}, {"role": "user", "content": "y"}),
        (),
    )
    tasks, refused = prepare(loaded, [system, prompt("a")], False)
    assert [t.prompt.id for t in tasks] == ["p"]
    assert refused == [("s", "the chat template refuses it (TemplateError: no system role)")]
    with pytest.raises(
        MoetapError, match="renders none of the prompts; the first: .*no system role"
    ):
        prepare(loaded, [system], False)


def test_a_tokenizer_without_chat_template_is_refused(tmp_path):
    loaded = _mlx.load(str(make_model_dir(tmp_path / "m", template=None)))
    with pytest.raises(MoetapError, match="no chat template"):
        prepare(loaded, [prompt("a")], False)


def rows_of(tokens, experts):
    n = len(tokens)
    return Rows(
        np.asarray(experts, np.uint16),
        np.asarray(tokens, np.uint32),
        np.arange(n, dtype=np.uint32),
        None,
    )


def test_rows_that_repeat_while_tokens_change_are_refused(loaded):
    tokens = list(range(40))
    real = np.random.default_rng(0).permuted(np.tile(np.arange(16), (40, 2, 1)), axis=2)[..., :4]
    run._check("p", rows_of(tokens, real), tokens, loaded.info)
    stale = np.repeat(real[:1], 40, axis=0)
    with pytest.raises(MoetapError, match="repeat the row before"):
        run._check("p", rows_of(tokens, stale), tokens, loaded.info)
    # The same token fed over and over may well be routed the same way: a loop, not a broken hook.
    run._check("p", rows_of([7] * 40, stale), [7] * 40, loaded.info)
    # Neither are prefill rows of a single MoE layer that prefill never runs.
    run._check("p", rows_of(tokens, np.full((40, 1, 4), NOT_EXECUTED)), tokens, loaded.info)


def test_rows_of_other_tokens_are_refused(loaded):
    real = np.zeros((3, 1, 1))
    with pytest.raises(MoetapError, match="3 rows recorded for 4 tokens"):
        run._check("p", rows_of([1, 2, 3], real), [1, 2, 3, 4], loaded.info)
