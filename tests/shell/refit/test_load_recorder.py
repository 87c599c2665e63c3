"""What is learned from loaders that copy, cut, pad, convert, process and hide."""

from __future__ import annotations

import contextlib
import ctypes
import io
import threading
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from rollsync.pure.refit.layout import Box, whole
from rollsync.pure.refit.load_plan import LoadPlan, Region
from rollsync.shell.refit.boxes import bytes_of
from rollsync.shell.refit.load_recorder import LoadRecorder, serving_tensors
from rollsync.shell.refit.torch_update import TorchModelUpdate
from rollsync.shell.refit.weights import checkpoint_weights
from tests.shell.refit.tiny_models import make_model

Weights = list[tuple[str, torch.Tensor]]
Loader = Callable[[torch.nn.Module, str, torch.Tensor], None]


class Fused(torch.nn.Module):
    """Two projections in one parameter, an output of which a rank has half, a padded table."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.Module()
        self.attention.weight = torch.nn.Parameter(torch.zeros(8, 6))
        self.output = torch.nn.Module()
        self.output.weight = torch.nn.Parameter(torch.zeros(4, 3))
        self.table = torch.nn.Module()
        self.table.weight = torch.nn.Parameter(torch.zeros(5, 2))


def stream() -> Weights:
    shapes = {"q": (4, 6), "k": (4, 6), "o": (4, 6), "t": (3, 2)}
    return [(name, torch.randn(shape)) for name, shape in shapes.items()]


@torch.no_grad()
def plain(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """What loaders of tensor-parallel engines do."""
    parameters = dict(model.named_parameters())
    if name in ("q", "k"):
        row = 0 if name == "q" else 4
        parameters["attention.weight"].data.narrow(0, row, 4).copy_(tensor)
    elif name == "o":
        parameters["output.weight"].copy_(tensor.narrow(1, 3, 3))
    else:
        parameters["table.weight"].data[:3].copy_(tensor)
        parameters["table.weight"].data[3:].fill_(0)


def record(
    model: torch.nn.Module, weights: Weights, loader: Loader, *, batches: int = 2
) -> LoadPlan:
    """The plan after a load in that many batches, each gone when the next comes."""
    recorder = LoadRecorder(serving_tensors(model))
    for first in range(0, len(weights), -(-len(weights) // batches)):
        batch = weights[first : first + -(-len(weights) // batches)]
        with recorder.loading(batch):
            for name, tensor in batch:
                loader(model, name, tensor)
    with recorder.loading(()):
        pass
    serving = {name: tensor for name, (_, tensor) in serving_tensors(model).items()}
    return recorder.plan(serving.get)


def replay(
    plan: LoadPlan, weights: Iterable[tuple[str, torch.Tensor]], model: torch.nn.Module
) -> None:
    """Does the plan's copies and zeros, and nothing else."""
    parameters = {name: tensor for name, (_, tensor) in serving_tensors(model).items()}
    for name, region in plan.zeros:
        bytes_of(parameters[name], region).zero_()
    for name, tensor in weights:
        for copy in plan.direct[name].copies:
            source = bytes_of(tensor.contiguous(), copy.source).reshape(-1)
            bytes_of(parameters[copy.parameter], copy.target).view(-1).copy_(source)


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(serving_tensors(one).values(), serving_tensors(other).values(), strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for (_, a), (_, b) in pairs)


def test_a_plan_of_plain_copies_does_what_the_loader_does() -> None:
    plan = record(Fused(), stream(), plain)
    assert set(plan.direct) == {"q", "k", "o", "t"}
    assert plan.layers == {"attention", "output", "table"}
    assert plan.tensors["o"].copies[0].source == Region(12, 12, 4, 24)
    weights, loaded, replayed = stream(), Fused(), Fused()
    for name, tensor in weights:
        plain(loaded, name, tensor)
    for parameter in replayed.parameters():
        parameter.data.fill_(1)
    replay(plan, weights, replayed)
    assert same(loaded, replayed)


@pytest.mark.parametrize("tied", [False, True])
def test_the_torch_engine_loads_by_plain_copies(tied: bool) -> None:
    model, other = make_model(tied=tied), make_model(tied=tied, seed=1)
    recorder = LoadRecorder(serving_tensors(model))
    update = TorchModelUpdate(model, recorder)
    weights = list(checkpoint_weights(make_model(tied=tied, seed=2)))
    update.start()
    update.load(weights[:9])
    update.load(weights[9:])
    update.finish()
    plan = recorder.plan(dict(model.named_parameters()).get)
    assert set(plan.direct) == {name for name, _ in weights}
    replay(plan, weights, other)
    assert same(model, other)


def converted(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    plain(model, name, tensor.double() if name == "q" else tensor)


def transposed(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    plain(model, name, tensor.t().contiguous().t() if name == "q" else tensor)


def scaled(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    plain(model, name, tensor)
    if name == "k":
        parameter = dict(model.named_parameters())["attention.weight"]
        parameter.data.mul_(2)


def half(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    if name != "k":
        plain(model, name, tensor)


def replaced(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    plain(model, name, tensor)
    if name == "k":
        parameter = dict(model.named_parameters())["attention.weight"]
        parameter.data = parameter.data.view(8, 6).clone()


def packed(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    plain(model, name, tensor)
    if name == "k":
        weight = dict(model.named_parameters())["attention.weight"]
        model.packed = weight.detach().t().contiguous()


def kept(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    plain(model, name, tensor)
    if name == "q":
        model.kept = torch.empty(4, 6)
        model.kept.copy_(tensor)


def overlapping(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    plain(model, name, tensor)
    if name == "k":
        dict(model.named_parameters())["attention.weight"].data[2:6].copy_(tensor)


def behind_the_back(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    plain(model, name, tensor)
    if name == "k":
        with torch._C.DisableTorchFunction():
            ctypes.memset(dict(model.named_parameters())["attention.weight"].data_ptr(), 1, 4)


def written_by_address(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    plain(model, name, tensor)
    if name == "k":
        ctypes.memset(dict(model.named_parameters())["attention.weight"].data_ptr(), 1, 4)


def as_array(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    plain(model, name, torch.tensor(np.asarray(tensor)) if name == "q" else tensor)


def pickled(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    if name == "q":
        saved = io.BytesIO()
        torch.save(tensor, saved)
        saved.seek(0)
        tensor = torch.load(saved)
    plain(model, name, tensor)


def given_away(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    plain(model, name, torch.tensor(tensor.numpy()) if name == "q" else tensor)


def emptied(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    if name == "q":
        tensor[:1].zero_()
    plain(model, name, tensor)


def overwritten(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    if name == "q":
        tensor[:1].copy_(torch.ones(6))
    plain(model, name, tensor)


@pytest.mark.parametrize(
    ("loader", "says"),
    [
        (converted, "uses it"),
        (transposed, "uses it"),
        (scaled, "aten.mul_"),
        (replaced, "uses it"),
        (packed, "aten.clone"),
        (kept, "somewhere else"),
        (written_by_address, "Tensor.data_ptr uses it"),
        (as_array, "Tensor.__array__ uses it"),
        (pickled, "Tensor.untyped_storage uses it"),
        (given_away, "Tensor.numpy uses it"),
        (emptied, "changed before it is loaded"),
        (overwritten, "changed before it is loaded"),
    ],
)
def test_whatever_is_no_plain_copy_stays_with_the_loader(loader: Loader, says: str) -> None:
    plan = record(Fused(), stream(), loader)
    assert plan.layers == {"output", "table"}
    assert "q" not in plan.direct
    assert says in plan.tensors["q"].staged_because
    assert {"o", "t"} <= set(plan.direct)


def follows(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """An untied copy of a tied weight."""
    plain(model, name, tensor)
    if name == "t":
        model.get_buffer("twin.weight").copy_(model.get_parameter("table.weight"))


def follows_in_part(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """What follows has its own weight too, and comes with a tensor that is not needed for it."""
    plain(model, name, tensor)
    if name == "t":
        model.get_buffer("twin.weight")[:2].copy_(model.get_parameter("attention.weight")[:2, :2])
        model.get_buffer("twin.weight")[2:].copy_(tensor)


def counts(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    plain(model, name, tensor)
    if name == "t":
        model.get_buffer("twin.weight").add_(1)


def sets(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    plain(model, name, tensor)
    if name == "t":
        model.get_buffer("twin.weight").fill_(1)


def computes(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    plain(model, name, tensor)
    if name == "t":
        model.get_buffer("twin.weight").copy_(
            model.get_parameter("attention.weight")[0, 0] * torch.ones(5, 2)
        )


def of_the_tensor(part: torch.Tensor, tensor: torch.Tensor) -> None:
    part.fill_(tensor[0, 0])


FILLS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], object], bool]] = {
    "zero_": (lambda part, _: part.zero_(), True),
    "an integer": (lambda part, _: part.fill_(0), True),
    "an assignment": (lambda part, _: part.copy_(part).__setitem__(slice(None), 0.0), True),
    "minus zero": (lambda part, _: part.fill_(-0.0), False),
    "one": (lambda part, _: part.fill_(1), False),
    "of the tensor": (of_the_tensor, False),
    "minus a view": (lambda part, _: torch._neg_view(part).zero_(), False),
}


@pytest.mark.parametrize("how", FILLS)
def test_padding_is_zeros_and_nothing_else(how: str) -> None:
    fill, is_direct = FILLS[how]

    def load(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
        into = model.get_parameter("table.weight").data
        into[:3].copy_(tensor)
        fill(into[3:], tensor)

    model = torch.nn.Module()
    model.table = Fused().table
    plan = record(model, [("t", torch.zeros(3, 2))], load)
    assert ("t" in plan.direct) == is_direct
    assert plan.zeros == ((("table.weight", Region(24, 16)),) if is_direct else ())


@pytest.mark.parametrize("batches", [1, 6])
@pytest.mark.parametrize("loader", [follows, follows_in_part, counts, sets, computes])
def test_what_a_loader_does_of_itself_it_is_given_all_tensors_for(
    loader: Loader, batches: int
) -> None:
    """Nobody can say which of those that came before has led to it."""
    model = Fused()
    model.twin = torch.nn.Module()
    model.twin.register_buffer("weight", torch.zeros(5, 2))

    def load(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
        if name not in ("unread", "later"):
            loader(model, name, tensor)

    weights = [("unread", torch.ones(2)), *stream(), ("later", torch.ones(2))]
    plan = record(model, weights, load, batches=batches)
    # Of what is changed but not written anew, nobody knows what else was done to it.
    is_explained = batches == 6 and loader is not counts
    assert set(plan.direct) == ({"later"} if is_explained else set())
    assert plan.tensors["unread"].reads == (Box((0,), (2,)),)


def in_a_thread(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    if name != "k":
        plain(model, name, tensor)
        return
    thread = threading.Thread(target=plain, args=(model, name, tensor))
    thread.start()
    thread.join()


def past_the_modes(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    with _disable_current_modes() if name == "k" else contextlib.nullcontext():
        plain(model, name, tensor)


def moved_by_address(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    if name != "k":
        plain(model, name, tensor)
        return
    with torch._C.DisableTorchFunction():
        into = model.get_parameter("attention.weight").data_ptr() + tensor.nbytes
        ctypes.memmove(into, tensor.data_ptr(), tensor.nbytes)


def to_a_buffer(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    plain(model, name, tensor)
    if name == "k":
        with _disable_current_modes():
            model.get_buffer("output.seen").add_(1)


def for_a_buffer(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    plain(model, name, tensor)
    if name == "k":
        model.get_submodule("output").seen = torch.ones(2)


@pytest.mark.parametrize(
    ("loader", "says"),
    [
        (half, "not all that attention.weight holds was seen"),
        (in_a_thread, "not all that attention.weight holds was seen"),
        (past_the_modes, "not all that attention.weight holds was seen"),
        (moved_by_address, "not all that attention.weight holds was seen"),
        (to_a_buffer, "not all that output.seen holds was seen"),
        (for_a_buffer, "not all that output.seen holds was seen"),
        (overlapping, "attention.weight does not hold what was copied"),
        (behind_the_back, "attention.weight does not hold what was copied"),
    ],
)
def test_where_something_was_loaded_unseen_all_tensors_are_loaded_whole(
    loader: Loader, says: str
) -> None:
    model = Fused()
    model.output.register_buffer("seen", torch.ones(2))
    model.output.register_buffer("other", torch.ones(2))
    plan = record(model, stream(), loader)
    assert (plan.direct, plan.layers, plan.zeros) == ({}, frozenset(), ())
    for each in plan.tensors.values():
        assert says in each.staged_because
        assert each.reads == (whole(each.spec),)


def turned(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Columns as rows, through memory of their own."""
    model.kept = tensor[:, 2:4].t().contiguous()


def reduced(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    model.kept = torch.tensor(tensor[1:3].double().abs().max().item())


def taken(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    model.kept = tensor[:, 2:][torch.tensor([3, 1])]


def selected(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    model.kept = tensor.index_select(1, torch.tensor([1, 0, 1]))


def masked(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    model.kept = tensor[torch.tensor([True, False, False, True])]


def as_bytes(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    model.kept = tensor[1].view(torch.uint8).clone()


def listed(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    model.kept = torch.tensor(tensor[2].tolist())


def every_second(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    model.kept = tensor[::2].clone()


@pytest.mark.parametrize(
    ("loader", "read"),
    [
        (turned, [Box((0, 2), (4, 2))]),
        (reduced, [Box((1, 0), (2, 6))]),
        (taken, [Box((1, 2), (1, 4)), Box((3, 2), (1, 4))]),
        (selected, [Box((0, 0), (4, 1)), Box((0, 1), (4, 1))]),
        (masked, [Box((0, 0), (4, 6))]),
        (as_bytes, [Box((0, 0), (4, 6))]),
        (listed, [Box((2, 0), (1, 6))]),
        (every_second, [Box((0, 0), (4, 6))]),
    ],
)
def test_what_is_read_is_known_whatever_is_done_with_it(loader: Loader, read: list[Box]) -> None:
    plan = record(torch.nn.Module(), [("q", torch.randn(4, 6))], loader)
    assert list(plan.tensors["q"].reads) == read
    assert not plan.tensors["q"].is_direct


def test_a_parameter_of_another_order_is_seen_to_be_loaded() -> None:
    """As of an engine whose kernels want it so."""
    model = Fused()
    model.output.weight = torch.nn.Parameter(torch.zeros(3, 4).t())
    memory = torch.zeros(4, 12)
    model.table.weight = torch.nn.Parameter(memory[1, :10].view(5, 2))
    plan = record(model, stream(), plain)
    assert not any("was seen" in each.staged_because for each in plan.tensors.values())
    assert plan.tensors["o"].reads == (Box((0, 3), (4, 3)),)


def test_a_conversion_by_the_copy_itself_is_seen() -> None:
    weights = [(name, tensor.double()) for name, tensor in stream()]
    plan = record(Fused(), weights, plain)
    assert plan.direct == {}
    assert plan.tensors["o"].reads == (Box((0, 3), (4, 3)),)
    assert "converted" in plan.tensors["q"].staged_because


def test_a_name_that_the_loader_ignores_needs_nothing() -> None:
    def loader(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
        if name != "rotary":
            plain(model, name, tensor)

    plan = record(Fused(), [*stream(), ("rotary", torch.ones(3))], loader)
    assert plan.tensors["rotary"].is_direct
    assert plan.tensors["rotary"].copies == ()


def test_tensors_without_bytes_and_of_another_order_are_loaded() -> None:
    def loader(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
        if name in ("q", "k", "o", "t"):
            plain(model, name, tensor)

    weights = [("empty", torch.empty(0, 3)), *stream()]
    weights[1] = ("q", torch.randn(6, 4).t())
    plan = record(Fused(), weights, loader)
    assert plan.tensors["empty"].staged_because == "it has no bytes"
    assert "order" in plan.tensors["q"].staged_because
    assert set(plan.direct) == {"o", "t"}


def test_parameters_that_share_memory_are_not_written_past_the_loader() -> None:
    model = Fused()
    memory = torch.zeros(24)
    model.output.weight = torch.nn.Parameter(memory[:12].view(4, 3))
    model.attention.bias = torch.nn.Parameter(memory[12:])

    def load(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
        plain(model, name, tensor)
        model.get_parameter("attention.bias").data.zero_()

    plan = record(model, stream(), load)
    assert "o" not in plan.direct
    assert "shares memory" in plan.tensors["o"].staged_because
