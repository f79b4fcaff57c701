"""The text, the tables in the code and the files agree; files of every version stay readable."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from storekit import a_model, a_stream, write

from moetap.store import read, spec
from moetap.trace import CaptureInfo, ModelInfo, Stream, StreamIO

ROOT = Path(__file__).parents[2]
FORMAT_MD = (ROOT / "docs" / "FORMAT.md").read_text(encoding="utf-8")
V1 = ROOT / "tests" / "data" / "format" / "v1" / "tiny.h5"
N = 65535


def scalar_fields(cls: type) -> list[str]:
    """Fields that are single values; the others are arrays over the MoE layers."""
    return [f.name for f in fields(cls) if "NDArray" not in str(f.type)]


def rows_of(heading: str) -> list[list[str]]:
    """The cells of the table under a heading of FORMAT.md, without the header."""
    section = FORMAT_MD.split(f"# {heading}\n", 1)[1].split("\n#", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


def join(group: str, name: str, between: str) -> str:
    return f"/{between.strip('/')}{name}" if group == "/" else f"{group}{between}{name}"


def test_attributes_in_text_and_code() -> None:
    text = {row[0]: (row[1], row[2]) for row in rows_of("Attributes")}
    code = {
        join(group, item.name, "@"): (item.dtype, "optional" if item.optional else "")
        for group, items in spec.ATTRIBUTES.items()
        for item in items
    }
    assert text == code


def test_datasets_in_text_and_code() -> None:
    text = {row[0]: tuple(row[1:4]) for row in rows_of("Datasets")}
    code = {
        join(group, item.name, "/"): (
            item.dtype,
            f"({', '.join(item.dims)})",
            "optional" if item.optional else "",
        )
        for group, items in spec.DATASETS.items()
        for item in items
    }
    assert text == code


def test_history_in_text_and_code() -> None:
    text = [row[0] for row in rows_of("History")]
    assert spec.__doc__ is not None
    code = re.findall(r"^ {4}(\d+) ", spec.__doc__.split("History:")[1], re.MULTILINE)
    assert text == code
    assert text[-1] == str(spec.FORMAT_VERSION)


def test_tables_have_every_field_of_the_value_types() -> None:
    for group, cls in (("/model", ModelInfo), ("/capture", CaptureInfo)):
        assert [i.name for i in spec.ATTRIBUTES[group]] == scalar_fields(cls)
    arrays = [f.name for f in fields(ModelInfo) if f.name not in scalar_fields(ModelInfo)]
    assert [d.name for d in spec.MODEL_DATASETS] == arrays
    kept = {spec.STREAM_FIELD.get(d.name, d.name) for d in spec.STREAM_DATASETS}
    assert kept == set(spec.Record._fields)
    assert kept | set(spec.Rows._fields) | {"io"} == {f.name for f in fields(Stream)} | {
        "first_row",
        "n_rows",
    }
    assert [d.name for d in spec.IO_DATASETS] == [f.name for f in fields(StreamIO)]


def test_a_written_file_is_what_the_tables_say(tmp_path: Path) -> None:
    streams = [a_stream(0, a_model(), scores=True, io=True)]
    write(tmp_path / "t.h5", streams, scores_kind="softmax", slots=4, mode="streaming")
    optional = {"resident_bytes", "slots"}
    with h5py.File(tmp_path / "t.h5") as f:
        for group, items in spec.ATTRIBUTES.items():
            expected = {i.name: i.dtype for i in items if not i.optional or i.name in optional}
            found = {}
            for name, value in f[group].attrs.items():
                if name != "DIMENSION_LABELS":
                    found[name] = "utf-8" if isinstance(value, bytes) else value.dtype.name
            assert found == expected
        rows = {d.name for d in spec.ROW_DATASETS}
        assert set(f) == {"model", "capture", "streams", "io", *rows}
        for group, datasets in spec.DATASETS.items():
            for item in datasets:
                found_dataset = f[group][item.name]
                kind = h5py.check_string_dtype(found_dataset.dtype)
                assert (kind.encoding if kind else found_dataset.dtype.name) == item.dtype
                assert tuple(d.label for d in found_dataset.dims) == item.dims
                assert found_dataset.fletcher32


def test_the_example_runs(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    code = FORMAT_MD.split("```python\n")[1].split("```")[0]
    assert len(code.strip().splitlines()) <= 11
    write(tmp_path / "trace.h5", [a_stream(i, a_model(), rows=5) for i in range(2)])
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert capsys.readouterr().out == "prompt-0 (3, 3, 6)\nprompt-1 (3, 3, 6)\n"


def test_version_1_stays_readable() -> None:
    trace = read(V1)
    assert trace.run_id == "0123456789abcdef"
    assert trace.created == "2026-01-02T03:04:05+00:00"
    assert trace.complete is True
    model = trace.model
    assert (model.id, model.revision) == ("example/tiny-moe", "abc123")
    assert model.model_type == "tiny_moe"
    assert (model.config_json, model.quantization) == ('{"note": "größer"}', '{"bits": 4}')
    assert (model.config_sha256, model.weights_sha256) == ("c0ffee", "beef")
    assert model.layer_index.tolist() == [1, 3]
    assert model.n_experts.tolist() == [300, 4]
    assert model.top_k.tolist() == [3, 1]
    assert model.expert_bytes.tolist() == [1000, 200]
    assert model.resident_bytes == 123456789012
    assert model.kv_bytes_per_token is None
    assert model.state_bytes_per_stream == 0
    assert trace.capture == CaptureInfo(
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
    a, b = trace.streams
    assert (a.prompt_id, a.cls, a.prompt_sha256) == ("prompt/ä", "code", "aa")
    assert (a.n_prompt, a.n_generated, a.first_position) == (3, 2, 0)
    assert (a.finish_reason, a.looped_from) == ("stop", -1)
    assert a.experts.tolist() == [
        [[0, 255, 299], [3, N, N]],
        [[1, 2, 3], [N, N, N]],
        [[4, 5, 256], [0, N, N]],
        [[7, 8, 9], [1, N, N]],
    ]
    assert a.tokens.tolist() == [1, 2, 3, 4]
    assert a.position.tolist() == [0, 1, 2, 3]
    assert a.scores is not None
    assert a.scores[2, 0].tolist() == [0.125, 0.75, 0.125]
    assert np.isnan(a.scores[1, 1]).all()
    assert (b.prompt_id, b.cls, b.prompt_sha256) == ("b", "agentic", "bb")
    assert (b.n_prompt, b.n_generated, b.first_position) == (6, 1, 4)
    assert (b.finish_reason, b.looped_from) == ("length", 0)
    assert b.experts.tolist() == [[[10, 20, 30], [2, N, N]], [[40, 50, 60], [3, N, N]]]
    assert b.tokens.tolist() == [2**32 - 1, 6]
    assert b.position.tolist() == [4, 5]
    assert b.scores is not None
    assert b.scores.dtype == np.float16
    assert b.scores[1, 1, 0] == 0.5


def test_the_package_imports_without_h5py() -> None:
    """The command line imports it before it knows whether a trace is needed."""
    code = "import sys, moetap.store; sys.exit('h5py' in sys.modules or 'numpy' in sys.modules)"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=env).returncode == 0
