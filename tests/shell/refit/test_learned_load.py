"""A rank learns what its loader reads, is sent that alone, and holds what a whole load leaves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from rollsync.pure.refit import TensorSpec
from rollsync.pure.refit.layout import Box, Part, plan_parts
from rollsync.shell.refit.boxes import inside
from rollsync.shell.refit.errors import WeightMismatch
from rollsync.shell.refit.learned_load import LearnedLoad, Reception
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
        self.into.weight = torch.nn.Parameter(torch.zeros(len(owned) or 4, 4, 3))

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


def knows_nothing(model: Rank | Experts, *specs: TensorSpec) -> LearnedLoad:
    """Of a model that another rank shares."""
    known = LearnedLoad(lambda: model, is_shared=True)
    known.declare(specs)
    return known


def learned(model: Rank | Experts, *specs: TensorSpec) -> LearnedLoad:
    """After a whole load."""
    known = knows_nothing(model, *specs or SPECS)
    recorder = staged(known).recorder
    assert recorder is not None
    load(model, recorder, {each.name: torch.randn(each.shape) for each in specs or SPECS})
    known.learn(recorder)
    return known


def staged(known: LearnedLoad) -> Reception:
    """How a stream is received that comes in batches."""
    return known.reception(directly=False)


def load_parts(
    model: Rank | Experts, known: LearnedLoad, weights: Weights, specs: Sequence[TensorSpec] = SPECS
) -> None:
    reception = staged(known)
    parts = list(sent(weights, reception.layout or (), specs))
    for put_together in reception.intake(in_parts=True).loads(parts):
        load(model, reception.recorder, dict(put_together))
    if reception.recorder is not None:
        known.learn(reception.recorder)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_load_of_parts_leaves_what_a_whole_one_does(rank: int) -> None:
    model, other = Rank(rank), Rank(rank)
    known = learned(model)
    assert staged(known).layout == (
        Part("q", Box((2 * rank, 0), (2, 6))),
        Part("o", Box((0, 3 * rank), (4, 3))),
        Part("tied", Box((0, 3 * rank), (4, 3))),
        Part("norm", Box((0,), (6,))),
    )
    for sync in range(3):
        weights = stream()
        load_parts(model, known, weights)
        load(other, None, weights)
        for name, parameter in other.named_parameters():
            assert torch.equal(parameter, dict(model.named_parameters())[name]), (sync, name)
        assert staged(known).recorder is None


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("owned", "first"),
    [((), [(0, 4)]), ((2, 3), [(2, 2)]), ((0, 2), [(0, 1), (2, 1)])],
    ids=["slices", "neighbours", "in-turns"],
)
def test_a_rank_learns_its_parts_of_a_tensor_that_holds_all_experts(
    owned: tuple[int, ...], first: list[tuple[int, int]], turned: bool
) -> None:
    """Each part has the experts that the rank owns, or its rows, or columns, of each half."""
    spec = TensorSpec("experts", (4, 3, 8) if turned else (4, 8, 3), "float32")
    model, other = Experts(owned, turned=turned), Experts(owned, turned=turned)
    known = learned(model, spec)
    # What takes experts by their numbers takes them whole.
    rows = [(2, 2), (6, 2)] if not owned else [(0, 8)] if turned else [(0, 4)]
    extents = [(a, b) for a in first for b in rows]
    assert staged(known).layout == tuple(
        Part("experts", Box((e, 0, r), (n, 3, c)) if turned else Box((e, r, 0), (n, c, 3)))
        for (e, n), (r, c) in extents
    )
    for _ in range(2):
        weights = {"experts": torch.randn(spec.shape)}
        load_parts(model, known, weights, [spec])
        load(other, None, weights)
        assert torch.equal(model.get_parameter("into.weight"), other.get_parameter("into.weight"))
    assert staged(known).recorder is None


def test_a_loader_that_reads_something_else_in_parts_is_found_out() -> None:
    model = Rank(0)
    known = learned(model)
    model.reads_all_of_q = True
    with pytest.raises(WeightMismatch, match="'q'"):
        load_parts(model, known, stream())
    known.forget()
    assert staged(known).layout is None
    assert staged(known).recorder is not None


def test_other_declarations_are_learned_anew_and_none_teaches_nothing() -> None:
    known = learned(Rank(0))
    layout = staged(known).layout
    known.declare(SPECS)
    assert staged(known).layout == layout
    known.declare(SPECS[:1])
    assert staged(known).layout is None
    assert staged(known).recorder is not None
    known.declare(())
    assert staged(known).recorder is None


def test_a_rank_that_keeps_everything_is_watched_once() -> None:
    known = learned(Rank(0), SPECS[2])
    assert staged(known).layout is None
    assert staged(known).recorder is None


def test_what_a_loader_pads_is_padded_again_when_it_is_read_directly() -> None:
    """An engine that slept may have lost it."""
    model = torch.nn.Linear(2, 5, bias=False)
    known = LearnedLoad(lambda: model, is_shared=False)
    recorder = known.reception(directly=True).recorder
    assert recorder is not None
    batch = [("t", torch.ones(3, 2))]
    with torch.no_grad(), recorder.loading(batch):
        model.weight[:3].copy_(batch[0][1])
        model.weight[3:].zero_()
    known.learn(recorder)
    model.weight.data.fill_(7)
    known.reception(directly=True).intake(in_parts=False)
    assert model.weight.tolist() == [[7, 7]] * 3 + [[0, 0]] * 2


def test_a_model_that_one_rank_has_is_watched_for_direct_reads_only() -> None:
    known = LearnedLoad(lambda: Rank(0), is_shared=False)
    known.declare(SPECS)
    assert staged(known).recorder is None
    assert known.reception(directly=True).recorder is not None


def test_what_came_past_the_loader_is_watched_when_its_parts_first_come() -> None:
    model = Rank(0)
    known = learned(model)
    layout = staged(known).layout or ()
    weights: Weights = {}
    for names, is_known in ((("o", "norm"), False), (("o", "norm"), False), (("q",), True)):
        reception = known.reception(directly=True)
        assert (reception.destinations is not None, reception.layout) == (True, layout)
        assert reception.recorder is not None
        intake = reception.intake(in_parts=True)
        weights = stream()
        parts = [part for part in sent(weights, layout) if part[0].partition("[")[0] in names]
        for put_together in intake.loads(parts):
            load(model, reception.recorder, dict(put_together))
        intake.check_complete({"q", "o", "norm"} - set(names))
        known.learn(reception.recorder)
        assert (staged(known).recorder is None) == is_known
    rows = model.get_parameter("rows.weight")
    assert torch.equal(rows, weights["q"][:2])
