"""One kernel for resident and streamed runs, and the check that it treats every row alike."""

from __future__ import annotations

import mlx.core as mx
import pytest
from families import FAMILIES
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from modeldir import make_model_dir

from moetap.capture import _mlx
from moetap.capture.run import Settings, describe
from moetap.capture.streaming.kernel import rows_are_independent
from moetap.capture.streaming.load import stream
from moetap.prompts import load_mix


@pytest.mark.parametrize("quantization", [None, {"group_size": 32, "bits": 4}], ids=["plain", "4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_independent_on_the_cpu(tmp_path, family, quantization):
    folder = make_model_dir(tmp_path / "m", family, quantization=quantization)
    assert rows_are_independent(_mlx.open_model(str(folder)).model)


@pytest.mark.parametrize(
    ("kind", "quantization"),
    [(SwitchLinear, None), (QuantizedSwitchLinear, {"group_size": 32, "bits": 4})],
)
def test_a_kernel_that_looks_at_the_number_of_rows(tmp_path, monkeypatch, kind, quantization):
    """As on CUDA: other bits from eight rows on. The capture says so and computes steps whole."""
    real = kind.__call__

    def by_rows(self, x, indices, sorted_indices=False):
        out = real(self, x, indices, sorted_indices)
        return out * (1 + 1e-6) if indices.size >= 4 else out

    folder = make_model_dir(tmp_path / "m", quantization=quantization)
    monkeypatch.setattr(kind, "__call__", by_rows)
    opened = _mlx.open_model(str(folder))
    assert not rows_are_independent(opened.model)
    loaded = stream(opened, 5)
    assert any("how many rows" in line for line in loaded.engine.warnings)
    about = describe(loaded, Settings(), load_mix(quick=True), [], None)
    assert about.expert_kernel == "row, grouped"
    loaded.engine.start(1, full_prefill=False)
    sizes = []
    for layer in loaded.engine.layers:
        compute = layer._compute
        layer._compute = lambda x, slots, compute=compute: (
            sizes.append(slots.size) or compute(x, slots)
        )
    for _ in range(4):
        mx.eval(loaded.model(mx.array([[7]]), cache=None))
    assert set(sizes) == {loaded.info.max_top_k}
