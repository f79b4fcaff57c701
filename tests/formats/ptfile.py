"""Files as torch.save writes them, without torch: a zip of a pickle and raw storages."""

from __future__ import annotations

import io
import pickle
import sys
import types
import zipfile
from typing import Any

import numpy as np


def torch_file(content: dict[str, Any]) -> bytes:
    """Arrays of `content` become tensors."""
    storages: list[np.ndarray] = []
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    storage_type = type("IntStorage", (), {"__module__": "torch"})

    def rebuild(*_: Any) -> None:
        raise AssertionError("only ever pickled by name")

    rebuild.__module__, rebuild.__qualname__ = "torch._utils", "_rebuild_tensor_v2"
    rebuild.__name__ = "_rebuild_tensor_v2"
    # Modules made here have no attributes that mypy knows.
    torch.IntStorage, utils._rebuild_tensor_v2 = storage_type, rebuild  # type: ignore[attr-defined]

    class Storage:
        def __init__(self, key: int, n: int) -> None:
            self.id = ("storage", storage_type, str(key), "cuda:0", n)

    class Tensor:
        def __init__(self, array: np.ndarray) -> None:
            self.array = array

        def __reduce__(self) -> tuple[Any, ...]:
            array = self.array
            storages.append(array)
            storage = Storage(len(storages) - 1, array.size)
            stride = tuple(s // array.itemsize for s in array.strides)
            return rebuild, (storage, 0, array.shape, stride, False, {})

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return obj.id if isinstance(obj, Storage) else None

    old = {name: sys.modules.get(name) for name in ("torch", "torch._utils")}
    sys.modules.update({"torch": torch, "torch._utils": utils})
    try:
        stream = io.BytesIO()
        Pickler(stream, 2).dump(
            {k: Tensor(v) if isinstance(v, np.ndarray) else v for k, v in content.items()}
        )
    finally:
        for name, module in old.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("dump/data.pkl", stream.getvalue())
        archive.writestr("dump/byteorder", b"little")
        for key, array in enumerate(storages):
            archive.writestr(f"dump/data/{key}", array.tobytes())
        archive.writestr("dump/version", b"3\n")
    return out.getvalue()
