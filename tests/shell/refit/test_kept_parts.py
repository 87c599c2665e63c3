"""A rank learns what its loader reads, is sent that alone, and holds what a whole load leaves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from rollsync.pure.refit import TensorSpec
from rollsync.pure.refit.layout import Box, Part, plan_parts, whole
from rollsync.shell.refit import kept_parts
from rollsync.shell.refit.boxes import inside
from rollsync.shell.refit.errors import WeightMismatch
from rollsync.shell.refit.kept_parts import KeptParts, PartAssembly
from rollsync.shell.refit.load_recorder import LoadRecorder

Weights = dict[str, torch.Tensor]

SPECS = (
    TensorSpec("q", (4, 6), "float32"),
    TensorSpec("o", (4, 6), "float32", ("tied",)),
    TensorSpec("norm", (6,), "float32"),
    TensorSpec("other", (3, 3), "float32"),
)


class Rank(torch.nn.Module):
    """Rows of one tensor, columns of another, all of a third, and nothing of a fourth."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.reads_all_of_q = False
        for name, shape in (("rows", (2, 6)), ("columns", (4, 3)), ("norm", (6,))):
            self.add_module(name, torch.nn.Module())
            self.get_submodule(name).weight = torch.nn.Parameter(torch.zeros(shape))

    @torch.no_grad()
    def load(self, name: str, tensor: torch.Tensor) -> None:
        parameters = dict(self.named_parameters())
        if name == "q":
            rank = 1 - self.rank if self.reads_all_of_q else self.rank
            parameters["rows.weight"].copy_(tensor.narrow(0, 2 * rank, 2))
        elif name == "o":
            parameters["columns.weight"].copy_(tensor.narrow(1, 3 * self.rank, 3))
        elif name == "norm":
            parameters["norm.weight"].copy_(tensor)


class Experts(torch.nn.Module):
    """Some experts of a tensor that holds all, or a slice of each, as vLLM's loaders take them."""

    def __init__(self, owned: Sequence[int], *, turned: bool) -> None:
        super().__init__()
        self.owned, self.turned = owned, turned
        self.into = torch.nn.Module()
        self.into.weight = torch.nn.Parameter(torch.zeros(max(len(owned), 4), 4, 3))

    @torch.no_grad()
    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Takes a tensor of 4 experts x 8 outputs x 3 inputs, or `turned`, 4 x 3 x 8."""
        if name != "experts":
            return
        every = tensor.transpose(-1, -2) if self.turned else tensor
        into = self.get_parameter("into.weight")
        if not self.owned:
            for half, chunk in enumerate(every.chunk(2, dim=1)):
                into[:, 2 * half : 2 * half + 2].copy_(chunk.narrow(1, 2, 2))
        elif self.turned:
            taken = every[torch.tensor(self.owned)]
            into[: len(self.owned)].copy_(taken[:, :4].half())
        else:
            for number, one in enumerate(every.unbind()):
                if number in self.owned:
                    into[self.owned.index(number)].copy_(one[:4])


def stream() -> Weights:
    return {spec.name: torch.randn(spec.shape) for spec in SPECS}


def load(model: Rank | Experts, recorder: LoadRecorder | None, weights: Weights) -> None:
    batch = list(weights.items())
    if recorder is None:
        for item in batch:
            model.load(*item)
        return
    with recorder.loading(batch):
        for item in batch:
            model.load(*item)


def sent(
    weights: Weights, layout: tuple[Part, ...], specs: Sequence[TensorSpec] = SPECS
) -> Iterator[tuple[str, torch.Tensor]]:
    """What an engine hands on of a stream in parts."""
    yield "version", torch.tensor(1)
    for part in plan_parts(specs, layout, rank=0).unwrap():
        tensor = inside(weights[part.source], part.box).clone()
        yield part.spec.name, tensor
        for alias in part.spec.aliases:
            yield alias, tensor


def learned(model: Rank | Experts) -> KeptParts:
    """After a whole load."""
    kept = KeptParts(lambda: model)
    kept.declare(SPECS)
    recorder = kept.recorder()
    assert recorder is not None
    load(model, recorder, stream())
    kept.learn(recorder)
    return kept


def load_parts(model: Rank | Experts, kept: KeptParts, weights: Weights) -> None:
    recorder = kept.recorder()
    assembly = kept.assembly()
    for put_together in assembly.loads(list(sent(weights, kept.layout or ()))):
        load(model, recorder, dict(put_together))
    if recorder is not None:
        kept.learn(recorder)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_load_of_parts_leaves_what_a_whole_one_does(rank: int) -> None:
    model, other = Rank(rank), Rank(rank)
    kept = learned(model)
    assert kept.layout == (
        Part("q", Box((2 * rank, 0), (2, 6))),
        Part("o", Box((0, 3 * rank), (4, 3))),
        Part("tied", Box((0, 3 * rank), (4, 3))),
        Part("norm", Box((0,), (6,))),
    )
    for sync in range(3):
        weights = stream()
        load_parts(model, kept, weights)
        load(other, None, weights)
        for name, parameter in other.named_parameters():
            assert torch.equal(parameter, dict(model.named_parameters())[name]), (sync, name)
        assert kept.recorder() is None


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("owned", "first"),
    [((), [(0, 4)]), ((2, 3), [(2, 2)]), ((0, 2), [(0, 1), (2, 1)])],
    ids=["slices", "neighbours", "in-turns"],
)
def test_parts_of_a_tensor_that_holds_all_experts(
    owned: tuple[int, ...], first: list[tuple[int, int]], turned: bool
) -> None:
    """Each part has the experts that the rank owns, or its rows, or columns, of each half."""
    spec = TensorSpec("experts", (4, 3, 8) if turned else (4, 8, 3), "float32")
    model, other = Experts(owned, turned=turned), Experts(owned, turned=turned)
    kept = KeptParts(lambda: model)
    kept.declare([spec])
    recorder = kept.recorder()
    assert recorder is not None
    load(model, recorder, {"experts": torch.randn(spec.shape)})
    kept.learn(recorder)
    # What takes experts by their numbers takes them whole.
    rows = [(2, 2), (6, 2)] if not owned else [(0, 8)] if turned else [(0, 4)]
    extents = [(a, b) for a in first for b in rows]
    assert kept.layout == tuple(
        Part("experts", Box((e, 0, r), (n, 3, c)) if turned else Box((e, r, 0), (n, c, 3)))
        for (e, n), (r, c) in extents
    )
    for _ in range(2):
        weights = {"experts": torch.randn(spec.shape)}
        parts = list(sent(weights, kept.layout, [spec]))
        watching = kept.recorder()
        for put_together in kept.assembly().loads(parts):
            load(model, watching, dict(put_together))
        if watching is not None:
            kept.learn(watching)
        load(other, None, weights)
        assert torch.equal(model.get_parameter("into.weight"), other.get_parameter("into.weight"))
    assert kept.recorder() is None


def test_a_loader_that_reads_something_else_in_parts_is_found_out() -> None:
    model = Rank(0)
    kept = learned(model)
    model.reads_all_of_q = True
    with pytest.raises(WeightMismatch, match="'q'"):
        load_parts(model, kept, stream())
    kept.forget()
    assert kept.layout is None
    assert kept.recorder() is not None


def test_other_declarations_are_learned_anew_and_none_teaches_nothing() -> None:
    kept = learned(Rank(0))
    layout = kept.layout
    kept.declare(SPECS)
    assert kept.layout == layout
    kept.declare(SPECS[:1])
    assert kept.layout is None
    assert kept.recorder() is not None
    kept.declare(())
    assert kept.recorder() is None


def test_a_rank_that_keeps_everything_is_watched_once() -> None:
    model = Rank(0)
    kept = KeptParts(lambda: model)
    kept.declare([SPECS[2]])
    recorder = kept.recorder()
    assert recorder is not None
    load(model, recorder, {"norm": torch.ones(6)})
    kept.learn(recorder)
    assert kept.layout is None
    assert kept.recorder() is None


def test_parts_are_put_together_over_batches_and_loaded_in_portions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kept_parts, "SMALLEST_LOAD_BYTES", 96)
    layout = [
        Part("q", Box((0, 0), (1, 6))),
        Part("q", Box((3, 0), (1, 6))),
        Part("o", whole(SPECS[1])),
        Part("norm", Box((0,), (6,))),
    ]
    assembly, weights = PartAssembly(SPECS, layout), stream()
    assert set(assembly.specs) == {"q", "o", "norm"}
    first, *rest = [*sent(weights, tuple(layout))][1:]
    assert list(assembly.loads([first])) == []
    loads = list(assembly.loads(rest))
    assert [[name for name, _ in each] for each in loads] == [["q"], ["o"], ["norm"]]
    q = loads[0][0][1]
    assert torch.equal(q[[0, 3]], weights["q"][[0, 3]])
