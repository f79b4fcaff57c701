"""Made tests/data/format/v1/tiny.h5, once. The file stays as it is when the writer changes.

    PYTHONPATH=harness python tests/store/make_v1.py tests/data/format/v1/tiny.h5

`test_store_format` knows what must be read from it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from moetap.store import spec, writer
from moetap.trace import CaptureInfo, ModelInfo

N = 65535

MODEL = ModelInfo(
    id="example/tiny-moe",
    revision="abc123",
    model_type="tiny_moe",
    config_json='{"note": "größer"}',
    config_sha256="c0ffee",
    weights_sha256="beef",
    quantization='{"bits": 4}',
    layer_index=np.array([1, 3]),
    n_experts=np.array([300, 4]),
    top_k=np.array([3, 1]),
    expert_bytes=np.array([1000, 200]),
    resident_bytes=123456789012,
    kv_bytes_per_token=None,
    state_bytes_per_stream=0,
)

CAPTURE = CaptureInfo(
    moetap_version="0.1.0",
    mlx_version="0.32.4",
    mlx_lm_version="0.32.2",
    backend="metal",
    chip="Apple M4",
    ram_bytes=17179869184,
    temp=0.7,
    top_p=0.95,
    seed=-1,
    max_tokens=2,
    prefill_step=512,
    mix_name="tiny",
    n_prompts=2,
    thinking=False,
    scores_kind="softmax, renormalised",
)

RECORDS = [
    spec.Record("prompt/ä", "code", "aa", 0, 4, 3, 2, 0, "stop", -1),
    spec.Record("b", "agentic", "bb", 4, 2, 6, 1, 4, "length", 0),
]

ROWS = spec.Rows(
    experts=np.array(
        [
            [[0, 255, 299], [3, N, N]],
            [[1, 2, 3], [N, N, N]],  # the last layer did not run
            [[4, 5, 256], [0, N, N]],
            [[7, 8, 9], [1, N, N]],
            [[10, 20, 30], [2, N, N]],
            [[40, 50, 60], [3, N, N]],
        ],
        np.uint16,
    ),
    tokens=np.array([1, 2, 3, 4, 2**32 - 1, 6], np.uint32),
    position=np.array([0, 1, 2, 3, 4, 5], np.uint32),
    scores=np.array(
        [
            [[0.5, 0.25, 0.25], [1, np.nan, np.nan]],
            [[0.5, 0.25, 0.25], [np.nan, np.nan, np.nan]],
            [[0.125, 0.75, 0.125], [1, np.nan, np.nan]],
            [[0.5, 0.25, 0.25], [1, np.nan, np.nan]],
            [[0.5, 0.25, 0.25], [1, np.nan, np.nan]],
            [[0.5, 0.25, 0.25], [0.5, np.nan, np.nan]],
        ],
        np.float16,
    ),
)


def main(path: Path) -> None:
    header = spec.Header(MODEL, CAPTURE, "0123456789abcdef", "2026-01-02T03:04:05+00:00")
    with path.open("x+b") as file:
        writer._write(file, header, True, RECORDS, [ROWS], [])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
