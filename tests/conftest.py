from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# Test helpers live beside the tests that use them most.
sys.path.insert(0, str(Path(__file__).parent / "capture"))


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random qwen3_moe of 3 MoE layers (one dense in between), 16 experts, top-4, 4 bits."""
    from modeldir import make_model_dir

    return make_model_dir(tmp_path_factory.mktemp("model") / "tiny-random")


@pytest.fixture
def prompts_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes a JSONL prompt file of one user message each."""

    def write(*texts: str) -> Path:
        path = tmp_path / "prompts.jsonl"
        lines = [
            json.dumps({"id": f"p{i}", "messages": [{"role": "user", "content": text}]})
            for i, text in enumerate(texts)
        ]
        path.write_text("\n".join(lines) + "\n")
        return path

    return write
