"""The experts of a layer in two tensors, as a trainer holds them, instead of three for each expert.

A published checkpoint has a gate, an up and a down projection for each expert. Transformers 5 holds
them as `experts.gate_up_proj` (experts x twice the width x hidden size) and `experts.down_proj`
(experts x hidden size x width), in a block that it always calls `mlp`, and so a trainer's
`named_parameters` yield them.

Rule kept here: experts that are not all there, or not all alike, stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from rollsync.pure.refit.buckets import TensorSpec

_ONE_EXPERT: Final = re.compile(r"^(.+\.experts)\.(\d{1,9})\.(\w+)\.weight$")
_ROLES: Final = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}
_PUBLISHED_BLOCK: Final = ".block_sparse_moe."


def fuse_experts(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The tensors of a trainer's module, given those of the model's checkpoint.

    Args:
        specs: In module order, in which an expert block's tensors lie together.
    """
    blocks: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        found = _ONE_EXPERT.match(spec.name)
        if found is not None and found[3] in _ROLES:
            blocks.setdefault(found[1], []).append(spec)
    fused = {block: _fused(block, own) for block, own in blocks.items()}
    return tuple(_replaced(specs, fused))


def _replaced(
    specs: Iterable[TensorSpec], fused: dict[str, tuple[TensorSpec, ...]]
) -> Iterable[TensorSpec]:
    done: set[str] = set()
    for spec in specs:
        found = _ONE_EXPERT.match(spec.name)
        if found is None or not fused.get(found[1]):
            yield msgspec.structs.replace(spec, name=_in_module(spec.name))
        elif found[1] not in done:
            done.add(found[1])
            yield from fused[found[1]]


def _fused(block: str, specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The two tensors of a block; none when they cannot be made."""
    roles: dict[str, dict[int, TensorSpec]] = {}
    for spec in specs:
        found = _ONE_EXPERT.match(spec.name)
        if found is not None:
            roles.setdefault(_ROLES[found[3]], {})[int(found[2])] = spec
    count = 1 + max(max(each) for each in roles.values())
    kinds = {role: {(s.shape, s.dtype) for s in each.values()} for role, each in roles.items()}
    if len(roles) != 3 or any(len(each) != count for each in roles.values()):
        return ()
    if any(len(kind) != 1 for kind in kinds.values()) or kinds["gate"] != kinds["up"]:
        return ()
    gate, down = roles["gate"][0], roles["down"][0]
    if len(gate.shape) != 2 or len(down.shape) != 2:
        return ()
    width, hidden = gate.shape
    name = _in_module(block)
    return (
        TensorSpec(f"{name}.gate_up_proj", (count, 2 * width, hidden), gate.dtype),
        TensorSpec(f"{name}.down_proj", (count, *down.shape), down.dtype),
    )


def _in_module(name: str) -> str:
    return name.replace(_PUBLISHED_BLOCK, ".mlp.")
