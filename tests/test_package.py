"""What `pip install .` installs: the package with its data, found from anywhere."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built offline with the build backend that is installed for development."""
    folder = tmp_path_factory.mktemp("wheel")
    code = f"import hatchling.build as b; print(b.build_wheel({str(folder)!r}))"
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return folder / out.stdout.splitlines()[-1]


def test_contents(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for name in (
        "moetap/py.typed",
        "moetap/_data/prompts/mix.toml",
        "moetap/_data/models/tiny-qwen3_5-moe/model.safetensors",
        "moetap/_data/models/qwen3.6-35b-a3b.toml",
        "moetap/_data/traces/sample/demo.h5",
    ):
        assert name in names
    # models, prompts and traces are taken on PyPI; at the top of a wheel they would break others.
    assert {name.split("/")[0] for name in names} == {
        "moetap",
        next(n.split("/")[0] for n in names if n.endswith("/METADATA")),
    }
    assert wheel.stat().st_size < 40_000_000


def test_installed_package_finds_its_data(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = (
        "from moetap.models import bundled_model; from moetap.prompts import load_mix;"
        "import moetap; print(moetap.__file__); print(bundled_model('tiny-qwen3_5-moe'));"
        "print(len(load_mix().prompts))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert out[0].startswith(str(site)) and out[1].startswith(str(site))
    assert int(out[2]) >= 48
