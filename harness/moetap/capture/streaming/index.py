"""Where each expert's bytes lie in the checkpoint, for the parameters that the model really has.

Knows how to tell which stored tensor became a parameter, without reading it. Refuses to guess:
whatever mlx-lm computes from the stored tensors, beyond stacking experts that are stored one by
one, is refused by name.

A tensor that mlx-lm takes as it is stays the same Python object from the file to the parameter.
Experts stored one by one are stacked lazily, and MLX can print the graph of an array that was not
evaluated: loads and a concatenation say that it is stacked and nothing else. Their order and names
are then checked by value on the smallest parameter of each projection of the first MoE layer.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from moetap.capture.checkpoint import Checkpoint, ExpertPart, classify
from moetap.capture.tap import Switch
from moetap.errors import MoetapError

# Names of the projections in checkpoints that store experts one by one, beside mlx-lm's own.
_STORED_AS = {
    "gate_proj": ("gate_proj", "w1"),
    "up_proj": ("up_proj", "w3"),
    "down_proj": ("down_proj", "w2"),
    "fc1": ("fc1", "up_proj"),
    "fc2": ("fc2", "down_proj"),
}
# What mx.stack is made of.
_STACKING = {"Load", "ExpandDims", "Concatenate", "Reshape", "Stack"}


@dataclass(frozen=True)
class Part:
    """One parameter of a layer's experts: name within the expert module (gate_proj.weight), bytes
    of one expert's slice, and per expert the file and the first byte.
    """

    name: str
    nbytes: int
    places: tuple[tuple[Path, int], ...]


def locate(
    switches: list[Switch], checkpoint: Checkpoint, stored: Mapping[str, mx.array]
) -> list[tuple[Part, ...]]:
    """Per MoE layer the parts of its experts. stored: tensors by name, as mlx-lm loaded them; the
    model's parameters must not have been evaluated.

    Raises MoetapError if a parameter is not a stored tensor, or a stack of some.
    """
    names = {id(array): name for name, array in stored.items()}
    tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
    numbered: dict[int, dict[tuple[str, str], dict[int, ExpertPart]]] | None = None
    found = []
    for ordinal, switch in enumerate(switches):
        parts = []
        for name, array in expert_parameters(switch):
            size = array.nbytes // switch.n_experts
            tensor = tensors.get(names.get(id(array), ""))
            if tensor is not None and tensor.nbytes == array.nbytes:
                places = [(tensor.path, tensor.begin + e * size) for e in range(switch.n_experts)]
            else:
                numbered = _numbered(checkpoint) if numbered is None else numbered
                places = _places(switch, name, array, size, numbered.get(switch.layer_index, {}))
            parts.append(Part(name, size, tuple(places)))
        if ordinal == 0:
            _compare(switch, parts, names)
        found.append(tuple(parts))
    return found


def expert_parameters(switch: Switch) -> list[tuple[str, mx.array]]:
    """The parameters of an expert module that have one slice per expert."""
    return [
        (name, array)
        for name, array in tree_flatten(switch.module.parameters())
        if array.shape[:1] == (switch.n_experts,)
    ]


def _numbered(
    checkpoint: Checkpoint,
) -> dict[int, dict[tuple[str, str], dict[int, ExpertPart]]]:
    """Experts stored one by one: layer -> (projection, parameter) -> expert -> part."""
    found: dict[int, dict[tuple[str, str], dict[int, ExpertPart]]] = {}
    for part in classify(checkpoint).experts:
        if part.expert is not None:
            key = part.projection, part.parameter
            found.setdefault(part.layer, {}).setdefault(key, {})[part.expert] = part
    return found


def _places(
    switch: Switch,
    name: str,
    array: mx.array,
    size: int,
    numbered: dict[tuple[str, str], dict[int, ExpertPart]],
) -> list[tuple[Path, int]]:
    projection, _, parameter = name.rpartition(".")
    for stored_as in _STORED_AS.get(projection, (projection,)):
        experts = numbered.get((stored_as, parameter), {})
        fits = all(part.bytes_per_expert == size for part in experts.values())
        if sorted(experts) == list(range(switch.n_experts)) and fits and _stacks_only(array):
            return [(experts[e].path, experts[e].begin) for e in range(switch.n_experts)]
    raise MoetapError(
        f"{switch.path}.{name}: mlx-lm computes it from the stored tensors instead of taking them "
        "as they are, so its experts cannot be read one by one; convert the model with "
        "mlx_lm.convert, or capture it resident"
    )


def _stacks_only(array: mx.array) -> bool:
    graph = io.StringIO()
    mx.export_to_dot(graph, array)
    return set(re.findall(r'label ="(\w+)"', graph.getvalue())) <= _STACKING


def _compare(switch: Switch, parts: list[Part], names: Mapping[int, str]) -> None:
    """Compare what was located among experts stored one by one with what mlx-lm makes of it."""
    arrays = dict(expert_parameters(switch))
    smallest: dict[str, Part] = {}
    for part in sorted(parts, key=lambda part: -part.nbytes):
        if id(arrays[part.name]) not in names:
            smallest[part.name.rpartition(".")[0]] = part
    for part in smallest.values():
        array = arrays[part.name]
        mx.eval(array)
        made = np.frombuffer(array, np.uint8).reshape(switch.n_experts, part.nbytes)
        for expert, (path, begin) in enumerate(part.places):
            fd = os.open(path, os.O_RDONLY)
            try:
                stored = os.pread(fd, part.nbytes, begin)
            finally:
                os.close(fd)
            if stored != made[expert].tobytes():
                raise MoetapError(
                    f"{switch.path}.{part.name}: expert {expert} is not what {path.name} stores; "
                    "please report the model type, and capture it resident"
                )
