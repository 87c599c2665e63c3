"""Parts of tensors are put together as they come, and handed on in portions."""

from __future__ import annotations

import pytest
import torch

from rollsync.pure.refit import TensorSpec
from rollsync.pure.refit.layout import Box, Part, plan_parts, whole
from rollsync.shell.refit import part_assembly
from rollsync.shell.refit.boxes import inside
from rollsync.shell.refit.part_assembly import PartAssembly

SPECS = (
    TensorSpec("q", (4, 6), "float32"),
    TensorSpec("o", (4, 6), "float32", ("tied",)),
    TensorSpec("norm", (6,), "float32"),
    TensorSpec("other", (3, 3), "float32"),
)


def test_parts_are_put_together_over_batches_and_loaded_in_portions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(part_assembly, "SMALLEST_LOAD_BYTES", 96)
    layout = [
        Part("q", Box((0, 0), (1, 6))),
        Part("q", Box((3, 0), (1, 6))),
        Part("o", whole(SPECS[1])),
        Part("norm", Box((0,), (6,))),
    ]
    assembly = PartAssembly(SPECS, layout)
    weights = {spec.name: torch.randn(spec.shape) for spec in SPECS}
    assert set(assembly.specs) == {"q", "o", "norm"}
    first, *rest = [
        (part.spec.name, inside(weights[part.source], part.box).clone())
        for part in plan_parts(SPECS, layout, rank=0).unwrap()
    ]
    assert list(assembly.loads([first])) == []
    loads = list(assembly.loads(rest))
    assert [[name for name, _ in each] for each in loads] == [["q"], ["o"], ["norm"]]
    q = loads[0][0][1]
    assert torch.equal(q[[0, 3]], weights["q"][[0, 3]])
