"""Slot memory: one array of C slots per parameter of a layer's experts, written in place.

Knows how an MLX array is reached as bytes and when that is safe. Refuses to know what is written,
by whom, and which slot holds what.

An evaluated array lends its memory through the buffer protocol, writable. The array must be
contiguous (MLX lends broadcast ones too, and a write would run over their end), must stay
referenced (else MLX may reuse its memory) and must never be updated by an MLX operation (which may
move it). `Arena.check` looks after all three.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from moetap.errors import MoetapError


class Arena:
    """The slots of one parameter, put in its place in the module that owns it.

    name: of the parameter in the expert module at `switch`, such as gate_proj.weight. slot_bytes:
    of one expert's slice.
    """

    def __init__(
        self, switch: str, name: str, owner: nn.Module, attribute: str, n_slots: int
    ) -> None:
        like = owner[attribute]
        self.name, self.path = name, f"{switch}.{name}"
        self._owner, self._name = owner, attribute
        self._array = mx.zeros((n_slots, *like.shape[1:]), like.dtype)
        owner[attribute] = self._array
        mx.eval(self._array)
        memory = memoryview(self._array)
        if not memory.c_contiguous or memory.nbytes != self._array.nbytes:
            raise MoetapError(
                f"{self.path}: MLX made an arena that is not contiguous; please report"
            )
        self._address = self._where()
        self._bytes = np.frombuffer(self._array, np.uint8).data
        self.slot_bytes = self._array.nbytes // n_slots

    def slot(self, number: int) -> memoryview:
        """The bytes of a slot, to be written. Nothing that reads them may be in flight."""
        return self._bytes[number * self.slot_bytes : (number + 1) * self.slot_bytes]

    def check(self) -> None:
        """MoetapError if the module has another array now, or MLX has moved this one."""
        if self._owner.get(self._name) is not self._array or self._where() != self._address:
            raise MoetapError(
                f"{self.path}: its slots were moved or replaced while experts are streamed; the "
                "model must not be changed (set_dtype, update, quantize)"
            )

    def _where(self) -> int:
        return int(np.frombuffer(self._array, np.uint8).ctypes.data)
